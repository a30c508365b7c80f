"""What a forward changes besides giving its result, put back."""

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


class _Kept(NamedTuple):
    """A tensor as it was; inference tensors do not count how often they are written to."""

    tensor: Tensor
    copy: Tensor
    version: int | None

    def put_back(self) -> None:
        if version_of(self.tensor) != self.version or not _same(self.tensor, self.copy):
            self.tensor.detach().copy_(self.copy)


@contextmanager
def unchanged(model: nn.Module, inputs: Any, *, seed: int | None = None) -> Iterator[None]:
    """Put back, after the block, buffers, tensors among the inputs, modules' attributes, and generators.

    Those are torch's, NumPy's and Python's. BatchNorm's running statistics and dropout's draws are then as
    if nothing had run. What is inside a list or dict that an attribute holds, and what a forward writes into
    parameters, stays. With `seed`, the generators begin the block there. Cost: a copy of each buffer and input.

    Raises:
        GraphError: a tensor cannot be copied, or not be put back; all others are.
    """
    tensors = [*written_tensors(model, inputs)]
    try:
        kept = [_Kept(tensor, tensor.detach().clone(), version_of(tensor)) for tensor in tensors]
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
        for held, names in attributes:
            _put_names_back(held, names)
        _put_back(kept)


def written_tensors(model: nn.Module, inputs: Any) -> list[Tensor]:
    """What a forward can write to: buffers, and tensors among the inputs."""
    return [*model.buffers(), *tensors_of(inputs)]


def tensors_of(value: Any) -> list[Tensor]:
    """Those within containers that torch knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Each attribute of each module, with its length where it holds others; torch's own dicts are not looked into."""
    return {
        (place, name): (
            value,
            len(value) if isinstance(value, (list, dict, set)) and name[0] != "_" else None,
        )
        for place, module in enumerate(model.modules())
        for name, value in vars(module).items()
    }


def changed(model: nn.Module, before: dict[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
    """The attributes that are not as in `before`, which `attributes_of` gave: their values where plain, and lengths."""
    after = attributes_of(model)
    found: dict[tuple[int, str], Any] = dict.fromkeys(before.keys() - after.keys(), "deleted")
    for key, (value, size) in after.items():
        was, size_was = before.get(key, (found, None))  # which no attribute is
        if size != size_was or (value is not was and not (_is_plain(value) and value == was)):
            found[key] = value if _is_plain(value) else size
    return found


def plain_attributes(model: nn.Module) -> tuple[Any, ...]:
    """The numbers, strings and flags among the attributes, which code branches on."""
    return tuple(
        (name, type(value), value)
        for module in model.modules()
        for name, value in vars(module).items()
        if _is_plain(value)
    )


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to, as far as its kernels tell."""
    return None if tensor.is_inference() else tensor._version


def _attributes(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What holds the attributes and buffers of each module, with a copy."""
    held = [vars(module) for module in model.modules()]
    held += [
        names["_buffers"] for names in held if isinstance(names.get("_buffers"), dict)
    ]  # TorchScript has its own
    return [(each, dict(each)) for each in held]


def _put_names_back(held: dict[str, Any], names: dict[str, Any]) -> None:
    for name in held.keys() - names.keys():
        del held[name]
    for name, value in names.items():
        if name not in held or held[name] is not value:
            held[name] = value


def _put_back(kept: list[_Kept]) -> None:
    troubles = []
    for each in kept:
        try:
            each.put_back()
        except Exception as error:
            troubles.append(error)
    if troubles:
        raise GraphError(
            f"{len(troubles)} tensors that the model writes to could not be put back: {troubles[0]!r}."
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included: some kernels, as BatchNorm's, do not tell that they wrote."""
    try:
        return bool(
            torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all()
        )
    except (RuntimeError, NotImplementedError):  # sparse and meta tensors, whose kernels tell
        return True


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)
