"""`profiled` marks code that you own, so that its calls become named ranges; ranges and moments where no block fits."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from threading import get_ident
from types import MethodType
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from instrument.annotate import backends, module_calls
from instrument.annotate.wrapper import Name, in_range, is_plain
from instrument.errors import ConfigError
from instrument.range_names import MOMENT, to_trace

T = TypeVar("T")


class Range:
    """A named range: a decorator and a context manager. Made by `profiled("name")`.

    One object may be entered again while it is open, and from several threads. As a context manager it must not be held
    over an `await` or a `yield`: what others do meanwhile would count as its own.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._label = to_trace(name)
        # per thread, innermost last: what closes a range, and its handle; None for an entry that was not recorded
        self._open: dict[int, list[tuple[Callable[[Any], None], Any] | None]] = {}

    def __call__(self, target: T) -> T:
        """Mark `target` with this name; see `profiled`."""
        marked: T = put_in_range(target, self.name)
        return marked

    def __enter__(self) -> Range:
        # Dynamo traces through `with`; asked first, so that it never guards on the flag.
        if is_dynamo_compiling():
            backends.swallow(self.name)
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
            self._open.pop(thread, None)  # another thread may have abandoned them
        if opened is not None:
            opened[0](opened[1])

    def close_all(self) -> None:
        """Close what this thread has left open."""
        while get_ident() in self._open:
            self.__exit__()

    def __reduce__(self) -> tuple[type[Range], tuple[str]]:
        return Range, (self.name,)  # a copy is open nowhere

    def __repr__(self) -> str:
        return f"profiled({self.name!r})"


class Marked:
    """A callable object with its calls in a range; in every other way it is the object itself."""

    def __init__(self, target: Any, name: Name) -> None:
        self.__wrapped__ = target
        self._name = name
        self._ranged = in_range(target, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object, in a range."""
        return self._ranged(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        binds = instance is not None and hasattr(type(self.__wrapped__), "__get__")
        return MethodType(self, instance) if binds else self

    @property  # type: ignore[misc] # mypy: read-only over read-write
    def __class__(self) -> type:
        """That of the object, so that `isinstance` holds."""
        return type(self.__wrapped__)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, Name]]:
        return Marked, (self.__wrapped__, self._name)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


@overload
def profiled(target: str, /) -> Range: ...
@overload
def profiled(target: T, /, *, name: Name | None = None) -> T: ...
@overload
def profiled(*, name: Name | None = None) -> Callable[[T], T]: ...


def profiled(target: Any = None, /, *, name: Name | None = None) -> Any:
    """Mark code, so that every window shows its calls as a named range.

    `@profiled` uses the qualified name, `@profiled("attention_block")` the name given, and `with profiled("loss"):`
    marks a block. What can be marked: functions, coroutines and generators (a range for each slice between two
    suspensions), methods with `classmethod` or `staticmethod` on either side, properties, callable objects,
    `functools.partial`, `nn.Module` classes and instances (each `forward`), `torch.autograd.Function` classes
    (`forward` and `backward`), and classes with a `__call__`. An instance of `nn.Module` is marked in place: an
    attribute holds the name as plain text, so that copies keep it and a process without this package can load it.

    A name may be a format over the parameters, as in `@profiled("layer{self.index}")`, or, as `name=`, a function of
    the arguments; both are evaluated only while a window records or timings run, and cost what they cost.

    Signature, docstring, pickling and identity under `inspect` are those of the object marked. While nothing records, a
    call costs one check of a flag; while a window records, about 3 µs, and with timings of the whole run 0.5 µs. With
    `INSTRUMENT_DISABLE=1` in the environment when this is imported, the very object comes back. A range that
    `torch.compile` traces into a compiled region is not timed: the compiled code does not know where the Python code
    stood. The capture lists it.

    Raises:
        ConfigError: the object cannot be marked, or the name is empty.
    """
    if target == "" or name == "":
        raise ConfigError(
            "profiled was given an empty name: give the range a name, or none at all."
        )
    if isinstance(target, str):
        return Range(target)
    if target is None:
        return functools.partial(put_in_range, name=name)
    return put_in_range(target, name)


class _Pushed(threading.local):
    """The ranges that this thread has pushed and not popped, innermost last."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []


_pushed = _Pushed()


def range_push(name: str) -> int:
    """Open a range on this thread that `range_pop` closes, where no block fits; gives its depth, from 0.

    As `torch.cuda.nvtx.range_push`. What was pushed before a window begins is not in it. While nothing records, a call
    costs 0.5 µs; what torch.compile traces through is left out, as with `profiled`.
    """
    if is_dynamo_compiling():
        backends.swallow(name)
        return -1
    _pushed.ranges.append(Range(name).__enter__())
    return len(_pushed.ranges) - 1


def range_pop() -> int:
    """Close the range that this thread pushed last; gives its depth, or -1 where there is none, as NVTX does."""
    if is_dynamo_compiling() or not _pushed.ranges:
        return -1
    _pushed.ranges.pop().__exit__()
    return len(_pushed.ranges)


def mark(message: str) -> None:
    """Note a moment: in the trace, in `Capture.moments`, and for NVTX and ITT where `profiler.emit` names them.

    In the trace it is a slice of next to no length, called `message (mark)`: Kineto takes no moments from its users.
    While nothing records, a call costs 0.2 µs; what torch.compile traces through is left out.
    """
    if is_dynamo_compiling() or backends.disabled:
        return
    if backends.armed:
        backends.mark(message)
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        opens, closes, _ = backends.torch_backend
        closes(opens(to_trace(message + MOMENT)))


def put_in_range(target: Any, name: Name | None) -> Any:
    """Put the calls of a callable, a class or a descriptor in a range; see `profiled`."""
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
            f"profiled cannot mark {_called(target)}: TorchScript runs it outside Python; mark its caller."
        )
    if isinstance(target, type):
        return _mark_class(target, name or target.__qualname__)
    if isinstance(target, nn.Module):
        return _mark_instance(target, name or type(target).__qualname__)
    if not callable(target):
        raise ConfigError(
            f"profiled cannot mark {target!r}: it marks callables, classes and methods."
        )
    return (in_range if is_plain(target) else Marked)(target, name or _called(target))


def _mark_class(cls: type, name: Name) -> type:
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


def _mark_autograd_function(cls: type, name: Name) -> None:
    """Its own methods alone: torch refuses a class that defines both `backward` and `vjp`."""
    for method in ("forward", "backward", "vjp"):
        if getattr(cls, method) is not getattr(torch.autograd.Function, method):
            part = "backward" if method == "vjp" else method
            _mark_member(cls, method, name if callable(name) else f"{name}.{part}")


def _mark_member(cls: type, member: str, name: Name) -> None:
    given = inspect.getattr_static(cls, member)  # a staticmethod as such
    try:
        type.__setattr__(cls, member, put_in_range(given, name))
    except TypeError:
        raise ConfigError(
            f"profiled cannot mark the class {cls.__qualname__}: it is built in and cannot be changed; mark its caller."
        ) from None


def _mark_instance(module: nn.Module, name: Name) -> nn.Module:
    if callable(name):
        raise ConfigError(
            "profiled takes no function as the name of a module instance: give it a text."
        )
    module_calls.mark(module, name)
    return module


def _called(target: Any) -> str:
    while isinstance(target, functools.partial):
        target = target.func
    return str(getattr(target, "__qualname__", None) or type(target).__qualname__)
