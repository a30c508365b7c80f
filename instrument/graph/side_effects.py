"""Undo the side effects of a forward pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instrument.base.errors import GraphError


@contextmanager
def unchanged(model: nn.Module, inputs: Any, *, seed: int | None = None) -> Iterator[None]:
    """After the block, restore what a forward pass changes; `seed` seeds random numbers in it.

    These are restored: buffers, tensors among the inputs, attributes of modules, and the random
    number generators of torch, NumPy and Python. These are not restored: parameters, and the
    content of lists and dicts that an attribute holds.

    Cost: a copy of each buffer and input.

    Raises:
        GraphError: a tensor cannot be copied or restored. All other tensors are restored.
    """
    tensors = written_tensors(model, inputs)
    try:
        saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    except Exception as error:
        raise GraphError(
            f"A tensor of {type(model).__name__} cannot be copied: {error!r}."
        ) from error
    dicts = [vars(module) for module in model.modules()]
    # `_buffers` of TorchScript is not a dict.
    dicts += [each["_buffers"] for each in dicts if isinstance(each.get("_buffers"), dict)]
    attributes = [(each, dict(each)) for each in dicts]
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
            for name in current.keys() - before.keys():
                del current[name]
            current.update(before)
        _restore(saved)


def _restore(saved: list[tuple[Tensor, Tensor]]) -> None:
    errors = []
    for tensor, copy in saved:
        try:
            if not _same(tensor, copy):  # a write would make autograd refuse saved tensors
                tensor.detach().copy_(copy)
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
    of some kernels, such as those of BatchNorm. Sparse and meta tensors, which cannot be compared,
    count as equal.
    """
    try:
        return bool(
            torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all()
        )
    except (RuntimeError, NotImplementedError):
        return True


def written_tensors(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors that a forward pass can write to: the buffers, and the input tensors."""
    return [*model.buffers(), *tensors_of(inputs)]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, also within the containers that pytree knows."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
