"""Finding and undoing what a forward pass changes besides returning its result."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instrument.errors import GraphError


class _Saved(NamedTuple):
    """A tensor and its saved value; `version` is None for inference tensors, which have none."""

    tensor: Tensor
    copy: Tensor
    version: int | None

    def restore(self) -> None:
        if version_of(self.tensor) != self.version or not _same(self.tensor, self.copy):
            self.tensor.detach().copy_(self.copy)


@contextmanager
def unchanged(model: nn.Module, inputs: Any, *, seed: int | None = None) -> Iterator[None]:
    """Restore after the block what a forward pass changes.

    That is buffers, tensors among the inputs, attributes of modules, and random number generators:
    those of torch, NumPy and Python. So running statistics of BatchNorm and random numbers of
    dropout are afterwards as if nothing had run. Changes inside lists and dicts that an attribute
    holds, and writes to parameters, stay.

    Args:
        model: whose buffers and attributes are restored.
        inputs: whose tensors are restored.
        seed: of the generators in the block; None lets them continue.

    Cost: a copy of each buffer and input.

    Raises:
        GraphError: a tensor cannot be copied or restored; all others are restored.
    """
    tensors = [*written_tensors(model, inputs)]
    try:
        saved = [_Saved(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in tensors]
    except Exception as error:
        raise GraphError(
            f"A tensor of {type(model).__name__} cannot be copied: {error!r}."
        ) from error
    attributes = _attributes(model)
    devices = {tensor.get_device() for tensor in (*tensors, *model.parameters()) if tensor.is_cuda}
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        for current, before in attributes:
            _restore_dict(current, before)
        _restore(saved)


def written_tensors(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors that a forward pass can write to: buffers and tensors among the inputs."""
    return [*model.buffers(), *tensors_of(inputs)]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, also within the containers that pytree knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Each attribute of each module, by position and name, and its length if it is a container.

    The dicts of torch itself, such as `_buffers`, count without a length.
    """
    return {
        (position, name): (
            value,
            len(value) if isinstance(value, (list, dict, set)) and name[0] != "_" else None,
        )
        for position, module in enumerate(model.modules())
        for name, value in vars(module).items()
    }


def changed(model: nn.Module, before: dict[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
    """The attributes that changed since `before`, a result of `attributes_of`.

    The new value stands for a plain value, the length for another.
    """
    after = attributes_of(model)
    found: dict[tuple[int, str], Any] = dict.fromkeys(before.keys() - after.keys(), "deleted")
    for key, (value, size) in after.items():
        was, size_was = before.get(key, (found, None))  # an object that no attribute is
        if size != size_was or (value is not was and not (_is_plain(value) and value == was)):
            found[key] = value if _is_plain(value) else size
    return found


def plain_attributes(model: nn.Module) -> tuple[Any, ...]:
    """The attributes that are numbers, strings or flags: code can branch on them."""
    return tuple(
        (name, type(value), value)
        for module in model.modules()
        for name, value in vars(module).items()
        if _is_plain(value)
    )


def version_of(tensor: Tensor) -> int | None:
    """How often kernels wrote to a tensor, as far as they count; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def _attributes(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The dicts of the attributes and of the buffers of each module, each with a copy."""
    dicts = [vars(module) for module in model.modules()]
    # `_buffers` of TorchScript is not a dict.
    dicts += [each["_buffers"] for each in dicts if isinstance(each.get("_buffers"), dict)]
    return [(each, dict(each)) for each in dicts]


def _restore_dict(current: dict[str, Any], before: dict[str, Any]) -> None:
    for name in current.keys() - before.keys():
        del current[name]
    for name, value in before.items():
        if name not in current or current[name] is not value:
            current[name] = value


def _restore(saved: list[_Saved]) -> None:
    errors = []
    for each in saved:
        try:
            each.restore()
        except Exception as error:
            errors.append(error)
    if errors:
        raise GraphError(
            f"{len(errors)} tensors that the model writes to could not be restored: {errors[0]!r}."
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals NaN.

    It is needed because some kernels, such as BatchNorm's, do not count their writes.
    """
    try:
        return bool(
            torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all()
        )
    except (RuntimeError, NotImplementedError):  # sparse and meta tensors, which count writes
        return True


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)
