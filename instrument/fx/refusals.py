"""Which calls no graph is captured for: told before the model is run once more than its owner runs it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

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
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unfit(model: nn.Module, inputs: Any) -> str | None:
    """Why no graph stands for such calls of the model; None where one may."""
    strange = next(_strange(inputs), None)
    if strange is not None:
        return f"takes a {strange}, of which a graph cannot tell what is in it: pass tensors, numbers, dicts, lists"
    if isinstance(model, torch.jit.ScriptModule):
        return "is TorchScript, which has a graph of its own"
    if any(is_lazy(tensor) for tensor in chain(model.parameters(), model.buffers())):
        return "has lazy parameters, which its first call makes: call it once before"
    return None


def unfit_in_training(model: nn.Module) -> str | None:
    """Why the model must not be run more often than its owner runs it; None where it may.

    Other ranks would wait for a collective that a further run calls, and hooks would see that run.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return f"trains on {dist.get_world_size()} ranks, where a run of its own could wait for the others for ever"
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel) or type(module).__module__.startswith("torch.distributed"):
            return f"is run by {type(module).__name__}"
        if any(True for _ in hooks(module)):
            return f"has hooks at {name or 'itself'}, which would see the runs that capturing takes"
    if any(getattr(of_all_modules, f"_global{kind}", None) for kind in _HOOKS):
        return "is seen by hooks of all modules"
    return compiled_part(model)


def unfit_now(model: nn.Module, inputs: Any) -> str | None:
    """Why this call cannot be another than the model's own; None where it can."""
    if saving_hooks() is not None:
        return "is called where saved tensors are packed (checkpointing, offloading)"
    tensors = (each for each in (*model.parameters(), *tree_leaves(inputs)) if isinstance(each, Tensor))
    if any(tensor._backward_hooks for tensor in tensors):
        return "has hooks at its tensors, which would see the runs that capturing takes"
    return None


def hooks(module: nn.Module) -> Iterator[Any]:
    """What is hooked to a module."""
    return chain.from_iterable(getattr(module, kind).values() for kind in _HOOKS)


def hook_count(module: nn.Module) -> int:
    """How many hooks a module has."""
    return sum(len(getattr(module, kind)) for kind in _HOOKS)


def compiled_part(model: nn.Module) -> str | None:
    """What of the model `torch.compile` has made, which no node can show; None for nothing."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"leaves out what torch.compile has made of {name or 'it'}"
    return None


def saving_hooks() -> Any:
    """The innermost pair of functions that packs what autograd saves now; None for none."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in every torch
    return top(False) if top is not None else None


def _strange(value: Any) -> Iterator[str]:
    """The types of what is neither a tensor nor a plain value, nor a container that is copied for each run."""
    if isinstance(value, (Tensor, *_FIXED)):
        return
    if type(value) in _COPIED or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strange(each)
    else:
        yield type(value).__name__
