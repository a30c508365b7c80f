"""What a forward changes in a model besides its result, put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@contextmanager
def unchanged(model: nn.Module, inputs: Any) -> Iterator[None]:
    """Put back, after the block, the buffers of the model, tensors among the inputs, and the generators' state.

    BatchNorm's running statistics and dropout's draws are as if nothing had run. Not put back: what a forward does to
    Python attributes. Cost: a copy of every buffer and input.
    """
    buffers = [(each, name, each._buffers[name]) for each in model.modules() for name in each._buffers]
    tensors = [tensor for *_, tensor in buffers if tensor is not None]
    tensors += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for owner, name, tensor in buffers:
            owner._buffers[name] = tensor
        for tensor, copy in copies:
            if not torch.equal(tensor, copy):  # written to where need be alone: autograd counts writes, kernels may not
                tensor.detach().copy_(copy)
