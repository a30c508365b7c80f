"""Opens ranges around calls of modules: wraps `nn.Module.__call__` while ranges are recorded.

Module hooks are not used, for four reasons:

- A copy or a saved file of a module contains the module's hooks.
- TorchScript does not accept hooks.
- torch does not use its inference fast path for modules with hooks.
- Dynamo recompiles a module if the module's hooks change.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from operator import is_
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from instrument.annotate import backends
from instrument.base.range_names import to_trace

# The key in the `__dict__` of a marked module. The value is plain text, so copies of the module
# keep the value, and a process without this package can load the module.
_MARK = "_profiled_as"

# Python 3.13 stops caching the attributes of a class that was changed 1,000 times. From then on,
# each call of a module takes 0.6 µs longer. So after 800 changes the wrapper stays, which costs
# 0.2 µs per call.
_MOST_CHANGES = 800
_has_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
_KNOWN = frozenset((torch.Tensor, type(None), bool, int, float, str))


@dataclass(eq=False)
class ModuleRange:
    """The range of a module, or of all modules that were marked with the same name."""

    name: str
    type: str | None = None  # the name of the module's class; None if marked with `profiled`
    calls: int = 0  # how often the range has opened
    eval_calls: int = 0  # how often the range has opened in eval mode
    label: str = field(init=False)
    is_model: bool = False  # whether `inputs` are kept
    inputs: list[Any] = field(default_factory=list)  # of the last call, and the tensors' versions
    repeated: int = 0  # how often the inputs were those of the call before
    differentiates: bool = False  # whether an input required gradients, or is of an unknown kind

    def __post_init__(self) -> None:
        self.label = to_trace(self.name)

    def take(self, inputs: tuple[Any, ...]) -> None:
        """Take notice of the inputs of a call; 1 µs, and 2 µs for a model."""
        if self.differentiates and not self.is_model:
            return
        if _has_function_mode() or not _KNOWN.issuperset(map(type, inputs)):
            # a mode of the program must not see that attributes are read
            self.differentiates, self.inputs = True, []
            return
        tensors = [each for each in inputs if type(each) is torch.Tensor]
        for each in tensors:
            if each.requires_grad:
                self.differentiates = True
        if self.is_model:
            now = [ref(each) if type(each) is torch.Tensor else each for each in inputs]
            now += [each._version for each in tensors if not each.is_inference()]
            # not ==, which compares the tensors
            is_same = len(now) == len(self.inputs) and all(map(is_, now, self.inputs))
            self.repeated += is_same and bool(tensors)
            self.inputs = now


# The keys are ids of modules. The ids stay valid, because the caller of `attach` keeps the modules
# alive.
_attached: dict[int, ModuleRange] = {}
_marked: WeakSet[nn.Module] = WeakSet()
_ranges_by_mark: dict[str, ModuleRange] = {}  # copies of a module share its mark
_torch_call: Callable[..., Any] = nn.Module.__call__
_wrapper: Callable[..., Any] | None = None  # the wrapper in use
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_listener: Callable[[nn.Module], object] | None = None
_heard: list[type[nn.Module]] = []  # the classes whose `__call__` is `_call_and_tell`
_changes = 0
#: The names of the threads on which ranges of modules have opened, by their identifiers; "" for a
#: thread on which torch's profiler was on, as on those of autograd.
called_on: dict[int, str] = {}


def mark(module: nn.Module, name: str) -> None:
    """Give a module and its later copies a range; a second call replaces the range's name."""
    vars(module)[_MARK] = name
    _marked.add(module)
    _follow_arming()
    _ranges_by_mark.setdefault(name, ModuleRange(name))
    _refresh()


def marks() -> list[ModuleRange]:
    """The ranges of the marked modules that are still alive, one for each name."""
    names = [vars(module)[_MARK] for module in _marked if _MARK in vars(module)]
    return [_ranges_by_mark[name] for name in dict.fromkeys(names)]


def attached(module: nn.Module) -> ModuleRange | None:
    """The range that `attach` gave a module; None if it gave the module no range."""
    return _attached.get(id(module))


def attach(module: nn.Module, name: str) -> ModuleRange:
    """Give a module a range until `detach`; the caller must keep the module alive until then."""
    kind = type(getattr(module, "_orig_mod", module)).__name__
    given = _attached[id(module)] = ModuleRange(name, kind)
    _follow_arming()
    _refresh()
    return given


def detach(modules: Iterable[nn.Module]) -> None:
    """Remove the ranges that `attach` gave these modules."""
    for module in modules:
        _attached.pop(id(module), None)
    _refresh()


def _follow_arming() -> None:
    if _refresh not in backends.on_arming:
        backends.on_arming.append(_refresh)


def listen(
    listener: Callable[[nn.Module], object] | None, classes: Iterable[type[nn.Module]] = ()
) -> None:
    """Call `listener` with each module that was called by no other module, after its range.

    With `classes`, modules of all other classes may be left out, and their calls cost nothing. None
    ends this.
    """
    global _listener
    _listener = listener
    while _heard:
        kind = _heard.pop()
        if vars(kind).get("__call__") is _call_and_tell:
            del kind.__call__
    if listener is not None and all(each.__call__ is nn.Module.__call__ for each in classes):
        _heard.extend(classes)
        for kind in _heard:
            kind.__call__ = _call_and_tell  # type: ignore[method-assign]
    _put_wrappers(_wrapper is not None)


def _refresh() -> None:
    """Wrap `nn.Module.__call__` if ranges of modules can open; otherwise unwrap it."""
    needed = backends.armed and bool(_attached or _ranges_by_mark)
    if needed != (_wrapper is not None) and (needed or _changes < _MOST_CHANGES):
        _put_wrappers(needed)


def _put_wrappers(ranged: bool) -> None:
    # If another tool has wrapped our wrapper, the wrapper stays and only passes calls on.
    global _wrapper
    call = _unwrap(nn.Module.__call__)
    _wrapper = _wrap(call) if ranged else None
    call = _wrapper or call
    _set_call(call if _listener is None or _heard else _wrap_to_listen(call))


def _set_call(call: Callable[..., Any]) -> None:
    global _changes
    if nn.Module.__call__ is not call:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        _changes += 1


def _unwrap(call: Any) -> Callable[..., Any]:
    # all wrappers, because another tool may have put an old one back
    while getattr(call, "__code__", None) in _wrapper_codes:
        call = call.__wrapped__
    return call  # type: ignore[no-any-return]


@contextmanager
def unwrapped() -> Iterator[None]:
    """Restore torch's own `nn.Module.__call__` during the block.

    In stacks, torch recognises a call of a module by the code object of `nn.Module.__call__`. It
    looks up this code object only once, when the process first records stacks. The code object must
    then be torch's own, and not that of a wrapper.
    """
    before: Callable[..., Any] = nn.Module.__call__
    _set_call(_unwrap(before))
    try:
        yield
    finally:
        _set_call(before)


def _wrap(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `nn.Module.__call__`; if wrappers are nested, only the newest wrapper opens ranges."""

    def ranged(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Checked first, because Dynamo traces this function and must not guard on `call`.
        if is_dynamo_compiling():
            return _torch_call(self, *args, **kwargs)
        own, mark_name = _attached.get(id(self)), self.__dict__.get(_MARK)
        if (own is None and mark_name is None) or not backends.armed or _wrapper is not ranged:
            return call(self, *args, **kwargs)
        if threading.get_ident() not in called_on:
            name = "" if _profiler_enabled() else threading.current_thread().name
            called_on[threading.get_ident()] = name
        opens, closes, _ = backends.backend
        opened = []
        if own is not None:
            own.take((*args, *kwargs.values()))
        for each in (own, None if mark_name is None else _ranges_by_mark.get(mark_name)):
            if each is not None:
                each.calls += 1
                each.eval_calls += not self.__dict__.get("training", True)
                opened.append(opens(each.label))
        try:
            return call(self, *args, **kwargs)
        finally:
            while opened:
                closes(opened.pop())

    ranged.__wrapped__ = call  # type: ignore[attr-defined]
    return ranged


def wrap_function(owner: Any, name: str, wrap: Callable[..., Any]) -> Callable[[], None]:
    """Wrap a function of a module or class, which Dynamo then skips; the result unwraps it."""
    before = inspect.getattr_static(owner, name)
    is_static = isinstance(before, staticmethod)
    function = before.__func__ if is_static else before
    wrapped = wraps(function)(wrap(function))
    skip_in_dynamo(wrapped)
    after = staticmethod(wrapped) if is_static else wrapped
    setattr(owner, name, after)

    def unwrap() -> None:
        if inspect.getattr_static(owner, name) is after:  # nobody else has wrapped it
            setattr(owner, name, before)

    return unwrap


def skip_in_dynamo(function: Callable[..., Any], *, and_all_within: bool = False) -> None:
    """Make Dynamo skip `function` itself, but compile the functions that `function` calls.

    If `and_all_within` is true, Dynamo skips these functions too.

    Dynamo skips torch's own `nn.Module.__call__` in the same way. It would else compile our wrapper
    after a graph break, and the module call inside a second time. The public
    `torch.compiler.disable(recursive=False)` loads Dynamo, which takes two seconds.
    """
    dynamo: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    code = function.__code__
    if hasattr(dynamo, "set_code_exec_strategy"):
        action = dynamo._FrameAction
        within = action.SKIP if and_all_within else action.DEFAULT
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(action.SKIP, within))


class Depth(threading.local):
    """Whether this thread is in a call, so that a call inside it does not count."""

    inside = False


def after_outermost(
    call: Callable[..., Any], tell: Callable[[Any], object], depth: Depth
) -> Callable[..., Any]:
    """Wrap a method: call `tell` with its object after each call that is in no other such call."""

    def outer(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # as above
            compiled = _torch_call if isinstance(self, nn.Module) else call
            return compiled(self, *args, **kwargs)
        if depth.inside:
            return call(self, *args, **kwargs)
        depth.inside = True
        try:
            result = call(self, *args, **kwargs)
        finally:
            depth.inside = False
        tell(self)
        return result

    outer.__wrapped__ = call  # type: ignore[attr-defined]
    skip_in_dynamo(outer)
    return outer


_depth = Depth()


def _tell(module: nn.Module) -> None:
    if _listener is not None:  # it may have ended
        _listener(module)


def _wrap_to_listen(call: Callable[..., Any]) -> Callable[..., Any]:
    return after_outermost(call, _tell, _depth)


def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return nn.Module.__call__(self, *args, **kwargs)  # looked up now, because ranges replace it


_call_and_tell = _wrap_to_listen(_call)
# a class that is pickled by value names this function
_call_and_tell.__qualname__ = _call_and_tell.__name__ = "_call_and_tell"

# all wrappers of a kind share one code object
_wrapper_codes = [wrap(_torch_call).__code__ for wrap in (_wrap, _wrap_to_listen)]
for each in (_wrap(_torch_call), _call):
    skip_in_dynamo(each)
