"""Find and undo the side effects of a forward pass."""

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
    """A tensor and its saved value.

    `version` is None for inference tensors, because they have no version counter.
    """

    tensor: Tensor
    copy: Tensor
    version: int | None

    def restore(self) -> None:
        if version_of(self.tensor) != self.version or not _same(self.tensor, self.copy):
            self.tensor.detach().copy_(self.copy)


@contextmanager
def unchanged(model: nn.Module, inputs: Any, *, seed: int | None = None) -> Iterator[None]:
    """After the block, restore what a forward pass changes.

    These are restored: buffers, tensors among the inputs, attributes of modules, and the random
    number generators of torch, NumPy and Python. So the running statistics of BatchNorm and the
    random numbers of dropout are the same as without the block. These are not restored:
    parameters, and the content of lists and dicts that an attribute holds.

    Args:
        model: the model whose buffers and attributes are restored.
        inputs: the inputs whose tensors are restored.
        seed: the seed of the generators in the block; None does not seed them.

    Cost: a copy of each buffer and input.

    Raises:
        GraphError: a tensor cannot be copied or restored. All tensors that can be restored are
            restored.
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
    """The tensors that a forward pass can write to: the buffers, and the input tensors."""
    return [*model.buffers(), *tensors_of(inputs)]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, also within the containers that pytree knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Any]:
    """The value and the length of each attribute of each module.

    A key is the position of the module and the name of the attribute. The length is None for values
    other than lists, dicts and sets, and for private attributes such as torch's `_buffers`.
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
    """The attributes that changed after `attributes_of` returned `before`.

    For an attribute that is now a number, a string, a flag or None, the result holds the new value.
    For any other attribute, it holds the new length, as in `attributes_of`. For a deleted
    attribute, it holds "deleted".
    """
    after = attributes_of(model)
    found: dict[tuple[int, str], Any] = dict.fromkeys(before.keys() - after.keys(), "deleted")
    for key, (value, size) in after.items():
        # The default `found` differs from the value of every attribute.
        was, size_was = before.get(key, (found, None))
        if size != size_was or (value is not was and not (_is_plain(value) and value == was)):
            found[key] = value if _is_plain(value) else size
    return found


def plain_attributes(model: nn.Module) -> tuple[Any, ...]:
    """The attributes that are numbers, strings, flags or None: code can branch on them."""
    return tuple(
        (name, type(value), value)
        for module in model.modules()
        for name, value in vars(module).items()
        if _is_plain(value)
    )


def version_of(tensor: Tensor) -> int | None:
    """The number of writes that torch has counted for a tensor; None for an inference tensor.

    Some kernels, such as those of BatchNorm, do not count their writes.
    """
    return None if tensor.is_inference() else tensor._version


def _attributes(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of a dict and its copy, for the attributes and for the buffers of each module."""
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
            f"The model changed {len(errors)} tensors that could not be restored; the first error "
            f"was {errors[0]!r}."
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values; NaN equals NaN.

    The values are compared because torch's count of writes to a tensor does not include the writes
    of some kernels, such as those of BatchNorm.
    """
    try:
        return bool(
            torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all()
        )
    except (RuntimeError, NotImplementedError):
        # Sparse and meta tensors cannot be compared, but torch counts all writes to them.
        return True


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)
