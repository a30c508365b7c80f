"""`profiled`, `range_push` and `mark`: mark code, so that the trace shows it under a name."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from instrument.annotate import backends, module_calls
from instrument.annotate.wrapper import fields_of, in_range, is_plain
from instrument.base.errors import ConfigError
from instrument.base.range_names import MOMENT, to_trace, whole

T = TypeVar("T")


class Range:
    """A named range, used as a decorator or as a context manager; `profiled("name")` makes it.

    `with` blocks of the same object may be nested, and may run in several threads. Do not put an
    `await` or a `yield` into such a block: the range would include other code that runs meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._label = to_trace(name)
        # The open ranges of each thread, innermost last. An entry holds the function that closes
        # the range, and the range's handle. An entry is None if nothing was recording when the
        # range began.
        self._open: dict[int, list[tuple[Callable[[Any], None], Any] | None]] = {}

    def __call__(self, target: T) -> T:
        """Mark `target` with this name; see `profiled`."""
        marked: T = put_in_range(target, self.name)
        return marked

    def __enter__(self) -> Range:
        # Checked first, because Dynamo traces this function and must not guard on `armed`.
        if is_dynamo_compiling():
            backends.note_compiled(self.name)
            return self
        if not (backends.armed or self._open):
            return self
        opened = None
        if backends.armed:
            opens, closes, _ = backends.backend
            opened = closes, opens(self._label)
        self._open.setdefault(get_ident(), []).append(opened)
        return self

    def __exit__(self, *exception: object) -> None:
        if is_dynamo_compiling() or not self._open:
            return
        thread = get_ident()
        mine = self._open.get(thread)
        if not mine:
            return
        opened = mine.pop()
        if not mine:
            self._open.pop(thread, None)
        if opened is not None:
            opened[0](opened[1])

    def close_all(self) -> None:
        """Close all ranges of this object that are open on this thread."""
        while get_ident() in self._open:
            self.__exit__()

    def __reduce__(self) -> tuple[type[Range], tuple[str]]:
        return Range, (self.name,)  # a copy has no open entries

    def __repr__(self) -> str:
        return f"profiled({self.name!r})"


class AnnotatedCallable:
    """A callable object whose calls are in a range, with the attributes of the object.

    Raises:
        ConfigError: the object has other special methods, such as `kernel[grid]` needs.
    """

    def __init__(self, target: Any, name: str) -> None:
        special = {each for each in dir(type(target)) if each[:2] == each[-2:] == "__"}
        for method in sorted(special - _NEEDLESS - {*dir(AnnotatedCallable)}):
            if inspect.isroutine(getattr(type(target), method)):
                raise ConfigError(
                    f"profiled cannot mark {_name_of(target)}: the mark would hide its {method}. "
                    f"Write `with profiled({_name_of(target)!r}):` around its calls, or mark the "
                    "function in it."
                )
        functools.update_wrapper(self, target, updated=())
        self._name, self._ranged = name, in_range(target, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the object, in a range."""
        return self._ranged(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for them in classes, but `copy` does not
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return AnnotatedCallable, (self.__wrapped__, self._name)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


# Special methods that a marked object does not need: those that copy, compare and free an object.
_NEEDLESS = frozenset(["__class_getitem__", "__copy__", "__deepcopy__", "__setstate__", "__del__"])


@overload
def profiled(target: str, /) -> Range: ...
@overload
def profiled(*, name: str) -> Range: ...
@overload
def profiled(target: T, /, *, name: str | None = None) -> T: ...
@overload
def profiled(*, name: str | None = None) -> Callable[[T], T]: ...


def profiled(target: Any = None, /, *, name: str | None = None) -> Any:
    """Mark code, so that every recorded window shows its calls as a named range.

    `@profiled` uses the qualified name as the range's name. `@profiled("attention_block")` uses the
    given name. `with profiled("loss"):` or `with profiled(name="loss"):` marks a block. `profiled`
    can mark:

    - functions and methods. `@classmethod` or `@staticmethod` may stand above or below `@profiled`;
    - coroutines and generators, which get a range for each slice between two suspensions;
    - properties, `functools.partial`, classes with a `__call__`, and their objects, if these have
      no other special methods;
    - `nn.Module` classes and instances: each call of `forward` is a range;
    - `torch.autograd.Function` classes: each call of `forward` and of `backward` is a range.

    An instance of `nn.Module` is marked in place: an attribute holds the name as plain text. So
    copies keep the name, and a process without this package can load the module.

    A name may be a format string with the parameters of the marked function, as in
    `@profiled("layer{self.index}")` and `@profiled("{x.shape[0]} rows")`. It is evaluated only
    while a window is recorded or `profiler.timings` is on.

    The result has the signature and the docstring of the marked object; `pickle` and `inspect`
    treat the result like the marked object. A call costs one check of a flag while nothing records,
    about 3 µs while a window records, and 0.5 µs with `profiler.timings`. With
    `INSTRUMENT_DISABLE=1` in the environment at import, `profiled` returns the object itself. A
    range inside code that `torch.compile` compiles is not timed, because the compiled code does not
    open the range. The capture lists such ranges.

    Raises:
        ConfigError: the object cannot be marked, the name is empty, or its format has a field that
            is no parameter.
    """
    if target == "" or name == "":
        raise ConfigError("profiled was given an empty name: pass a name, or leave it out.")
    if target is None and isinstance(name, str):
        target = name
    if isinstance(target, str):
        return Range(target)
    if target is None:
        return functools.partial(put_in_range, name=name)
    return put_in_range(target, name)


class _PushedRanges(threading.local):
    def __init__(self) -> None:
        self.ranges: list[Range] = []  # of this thread, innermost last


_pushed = _PushedRanges()


def range_push(name: str) -> int:
    """Open a range on this thread, until `range_pop`; return the range's nesting depth, from 0.

    `range_push` works like `torch.cuda.nvtx.range_push`; use it where no `with` block fits. A
    window does not show ranges that were pushed before the window began. While nothing records, a
    call costs 0.5 µs. Inside compiled regions, no range opens and the returned depth is -1.
    """
    if is_dynamo_compiling():
        backends.note_compiled(name)
        return -1
    _pushed.ranges.append(Range(name).__enter__())
    return len(_pushed.ranges) - 1


def range_pop() -> int:
    """Close the range that this thread pushed last.

    Returns the nesting depth of this range; -1 if this thread has no open range.
    """
    if is_dynamo_compiling() or not _pushed.ranges:
        return -1
    _pushed.ranges.pop().__exit__()
    return len(_pushed.ranges)


def mark(message: str) -> None:
    """Record a moment: a point in time with a name.

    The trace and `Capture.moments` show the moment. The tools NVTX and ITT show the moment if
    `profiler.emit` contains them. In the trace, a moment is a very short range named
    `message (mark)`, because Kineto records no moments. While nothing records, a call costs
    0.2 µs. Inside compiled regions, a call does nothing.
    """
    if is_dynamo_compiling() or backends.disabled:
        return
    if backends.armed:
        backends.mark(whole(message))
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        opens, closes, _ = backends.torch_backend
        closes(opens(to_trace(message + MOMENT)))


def put_in_range(target: Any, name: str | None) -> Any:
    """Mark a callable, a class or a descriptor, so that each call is in a range; see `profiled`."""
    if backends.disabled:
        return target
    if isinstance(target, staticmethod | classmethod):
        return type(target)(put_in_range(target.__func__, name))
    if isinstance(target, property) and target.fget is not None:
        return property(put_in_range(target.fget, name), target.fset, target.fdel, target.__doc__)
    if isinstance(target, functools.cached_property):
        return functools.cached_property(put_in_range(target.func, name))
    if isinstance(target, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise ConfigError(
            f"profiled cannot mark {_name_of(target)}: TorchScript runs it outside Python; mark "
            "its caller."
        )
    if isinstance(target, type):
        return _mark_class(target, name or target.__qualname__)
    if isinstance(target, nn.Module):
        return _mark_instance(target, name or type(target).__qualname__)
    if not callable(target):
        raise ConfigError(f"profiled cannot mark {target!r}: give a callable, a class or a method.")
    name = name or _name_of(target)
    if isinstance(target, MethodType) and isinstance(target.__func__, FunctionType):
        # a method again, so that a copy of the object calls the method of the copy
        return MethodType(in_range(target.__func__, name), target.__self__)
    return (in_range if is_plain(target) else AnnotatedCallable)(target, name)


def _mark_class(cls: type, name: str) -> type:
    if issubclass(cls, torch.autograd.Function):
        _mark_autograd_function(cls, name)
    elif issubclass(cls, nn.Module) and cls.forward is not nn.Module.forward:
        _mark_member(cls, "forward", name)
    elif any("__call__" in vars(base) for base in cls.__mro__ if base not in (nn.Module, object)):
        _mark_member(cls, "__call__", name)
    else:
        lacks = (
            "has no forward"
            if issubclass(cls, nn.Module)
            else "is no nn.Module and has no __call__"
        )
        raise ConfigError(
            f"profiled cannot mark the class {cls.__qualname__}: it {lacks}; mark its methods."
        )
    return cls


def _mark_autograd_function(cls: type, name: str) -> None:
    # the class may define `vjp` instead of `backward`
    for method in ("forward", "backward", "vjp"):
        if getattr(cls, method) is not getattr(torch.autograd.Function, method):
            part = "backward" if method == "vjp" else method
            _mark_member(cls, method, f"{name}.{part}")


def _mark_member(cls: type, member: str, name: str) -> None:
    target = inspect.getattr_static(cls, member)  # keeps a staticmethod as it is
    try:
        type.__setattr__(cls, member, put_in_range(target, name))
    except TypeError:
        raise ConfigError(
            f"profiled cannot mark the class {cls.__qualname__}: it is built in and cannot be "
            "changed; mark its caller."
        ) from None


def _mark_instance(module: nn.Module, name: str) -> nn.Module:
    if fields_of(name):
        raise ConfigError(
            "profiled takes plain text as the name of a module instance, but it was given "
            f"{name!r}: mark the class, or write out the name."
        )
    module_calls.mark(module, name)
    return module


def _name_of(target: Any) -> str:
    while isinstance(target, functools.partial):
        target = target.func
    return str(getattr(target, "__qualname__", None) or type(target).__qualname__)
