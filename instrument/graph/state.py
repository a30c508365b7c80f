"""What a forward changes besides giving its result, put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@contextmanager
def unchanged(model: nn.Module, inputs: Any, *, seed: int | None = None) -> Iterator[None]:
    """Put back, after the block, the model's buffers, tensors among the inputs, and the generators of torch and Python.

    BatchNorm's running statistics and dropout's draws are then as if nothing had run. What a forward does to Python
    attributes stays. With `seed`, the generators begin the block there. Cost: a copy of each buffer and input.
    """
    buffers = [(each, name, each._buffers[name]) for each in model.modules() for name in each._buffers]
    tensors = [tensor for *_, tensor in buffers if tensor is not None]
    tensors += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    devices = {tensor.get_device() for tensor in (*tensors, *model.parameters()) if tensor.is_cuda}
    pythons = random.getstate()
    try:
        with torch.random.fork_rng(devices):
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
            yield
    finally:
        random.setstate(pythons)
        for owner, name, tensor in buffers:
            owner._buffers[name] = tensor
        for tensor, copy in copies:
            if not torch.equal(tensor, copy):  # else left alone: autograd counts writes, and some kernels do not tell
                tensor.detach().copy_(copy)
