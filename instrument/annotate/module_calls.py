"""Puts ranges around calls of modules, and nothing on the modules themselves.

While ranges are wanted, `nn.Module.__call__` is wrapped. Hooks would be copied and saved with their module, TorchScript
refuses them, they switch torch's inference fast path off, and Dynamo compiles once more where a module has others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from instrument.annotate import backends
from instrument.range_names import to_trace

# In the `__dict__` of a marked module: plain text, which copies take along and any process can load.
_MARK = "_profiled_as"

# Python 3.13 stops caching the attributes of a class that was changed 1,000 times, which costs each call of a module
# 0.6 µs for good. A wrapper that stays costs 0.2 µs.
_MOST_CHANGES = 800


@dataclass(eq=False)
class ModuleRange:
    """The range of one module, and the number of its calls; `type` is the module's class, None for a mark."""

    name: str
    type: str | None = None
    calls: int = 0
    label: str = field(init=False)

    def __post_init__(self) -> None:
        self.label = to_trace(self.name)


_attached: dict[
    int, ModuleRange
] = {}  # by the module's id: whoever attaches a range keeps its module alive
_marked: WeakSet[nn.Module] = WeakSet()
_of_marks: dict[str, ModuleRange] = {}  # by the mark, which copies of a module share
_torchs_call: Callable[..., Any] = nn.Module.__call__
_wrapper: Callable[..., Any] | None = None  # the one in use
_changes = 0


def mark(module: nn.Module, name: str) -> None:
    """Give a module and its later copies a range of this name, in place of an earlier one."""
    vars(module)[_MARK] = name
    _marked.add(module)
    _follow_arming()
    _of_marks.setdefault(name, ModuleRange(name))
    _refresh()


def marks() -> list[ModuleRange]:
    """The ranges of the marked modules that are still there, each once."""
    return [
        *dict.fromkeys(
            _of_marks[vars(module)[_MARK]] for module in _marked if _MARK in vars(module)
        )
    ]


def attached(module: nn.Module) -> ModuleRange | None:
    """The range that a module has from `attach`."""
    return _attached.get(id(module))


def attach(module: nn.Module, name: str) -> ModuleRange:
    """Give a module a range, until it is detached; the caller keeps the module alive until then."""
    kind = type(getattr(module, "_orig_mod", module)).__name__
    made = _attached[id(module)] = ModuleRange(name, kind)
    _follow_arming()
    _refresh()
    return made


def detach(modules: Iterable[nn.Module]) -> None:
    """Take the ranges of these modules away again."""
    for module in modules:
        _attached.pop(id(module), None)
    _refresh()


def _follow_arming() -> None:
    """From the first module with a range on, wrap and unwrap whenever annotations are armed or disarmed."""
    if _refresh not in backends.on_arming:
        backends.on_arming.append(_refresh)


def _refresh() -> None:
    """Wrap `nn.Module.__call__` where a range is wanted, and unwrap it where none is."""
    global _wrapper, _changes
    wanted = backends.armed and bool(_attached or _of_marks)
    if wanted and _wrapper is None:
        _wrapper = _in_ranges(_without_ours(nn.Module.__call__))
        _set_call(_wrapper)
    elif not wanted and _wrapper is not None and _changes < _MOST_CHANGES:
        _wrapper = None  # where another tool has wrapped ours, that one just calls on
        _set_call(_without_ours(nn.Module.__call__))


def _set_call(call: Callable[..., Any]) -> None:
    global _changes
    if nn.Module.__call__ is not call:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        _changes += 1


def _without_ours(call: Any) -> Callable[..., Any]:
    """What lies in wrappers of ours, also in one that another tool has put back."""
    while getattr(call, "__code__", None) is _torchs_in_ranges.__code__:
        call = call.__wrapped__
    return call  # type: ignore[no-any-return]


@contextmanager
def unwrapped() -> Iterator[None]:
    """Take the wrapper away for the block.

    The first profiler of a process that records stacks notes for good whose code the calls of modules are.
    """
    before: Callable[..., Any] = nn.Module.__call__
    _set_call(_without_ours(before))
    try:
        yield
    finally:
        _set_call(before)


def _in_ranges(call: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `nn.Module.__call__`; where one lies around another, the newest alone opens ranges."""

    def ranged(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Dynamo inlines this; asked first, so that it guards on nothing that changes, as `call` would be.
        if is_dynamo_compiling():
            return _torchs_call(self, *args, **kwargs)
        own, marked_as = _attached.get(id(self)), self.__dict__.get(_MARK)
        if (own is None and marked_as is None) or not backends.armed or _wrapper is not ranged:
            return call(self, *args, **kwargs)
        opens, closes, _ = backends.backend
        opened = []
        for each in (own, None if marked_as is None else _of_marks.get(marked_as)):
            if each is not None:
                each.calls += 1
                opened.append(opens(each.label))
        try:
            return call(self, *args, **kwargs)
        finally:
            while opened:
                closes(opened.pop())

    ranged.__wrapped__ = call  # type: ignore[attr-defined]
    return ranged


def _skip(function: Callable[..., Any]) -> None:
    """Have Dynamo leave a function's own frame alone, and compile what it calls, as with torch's `__call__`.

    Otherwise the calls of modules behind a graph break would be compiled anew with the wrapper in them. What
    `torch.compiler.disable(recursive=False)` does, without loading Dynamo, which takes two seconds.
    """
    dynamo: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    code = function.__code__
    if hasattr(dynamo, "set_code_exec_strategy"):
        action = dynamo._FrameAction
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif hasattr(dynamo, "skip_code"):  # before torch 2.7
        dynamo.skip_code(code)


_torchs_in_ranges = _in_ranges(_torchs_call)
_skip(_torchs_in_ranges)  # and all others, which share its code
