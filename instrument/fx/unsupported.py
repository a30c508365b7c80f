"""Check before a run whether a graph can represent a model and its inputs."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_FIXED = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    Enum,
)
_COPIED = (dict, OrderedDict, defaultdict, list, tuple, torch.Size)


def unsupported(model: nn.Module, inputs: Any) -> str | None:
    """Why a graph cannot represent a call with these inputs; None if no reason is found.

    The text is the end of a sentence whose subject is the model.
    """
    other = next(_other_types(inputs), None)
    if other is not None:
        return (
            f"takes a {other}, and a graph cannot read its content: "
            "pass tensors, numbers, dicts or lists"
        )
    if isinstance(model, torch.jit.ScriptModule):
        return "is TorchScript, which has its own graph"
    if any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers())):
        return "has lazy parameters, which the first call creates: call the model once first"
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            where = f" in {name}" if name else ""
            return f"has code compiled by torch.compile{where}, which a graph would leave out"
    return None


def _other_types(value: Any) -> Iterator[str]:
    """The names of the unsupported types in a value."""
    if isinstance(value, (Tensor, *_FIXED)):
        return
    if type(value) in _COPIED or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _other_types(each)
    else:
        yield type(value).__name__
