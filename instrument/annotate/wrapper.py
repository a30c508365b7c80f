"""Wraps a function so that its calls are in a range.

A plain function gets a wrapper with the function's signature, compiled from source. A call through
this wrapper takes a third of the time of a call through `*args, **kwargs`, and tools that inspect
the wrapper see the signature. The wrapper uses the globals of the module `backends`. So the flag
`armed`, which each call checks, is a global variable of the wrapper.
"""

from __future__ import annotations

import functools
import inspect
import re
import string
from collections.abc import Callable, Generator, Iterable
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
    coroutine,
)
from typing import Any

from torch.compiler import is_dynamo_compiling

from instrument.annotate import backends
from instrument.base.errors import ConfigError, did_you_mean
from instrument.base.range_names import RESUMED, to_trace

# is_dynamo_compiling() comes first: Dynamo knows its result, so Dynamo never reads `armed`. If
# Dynamo read `armed`, Dynamo would compile again whenever `armed` changes.
_PLAIN = """
def make(function_, name_, label_, slices_):
    def ranged({parameters}):
        if is_dynamo_compiling():
            note_compiled(name_)
            return function_({arguments})
        if not armed:
            return function_({arguments})
        opens_, closes_, mark_ = backend
        handle_ = opens_({label})
        try:
            return function_({arguments})
        finally:
            closes_(handle_)
    return ranged
"""
_GENERATOR = """
def make(function_, name_, label_, slices_):
    def ranged({parameters}):
        if is_dynamo_compiling():
            note_compiled(name_)
            return (yield from function_({arguments}))
        run_ = slices_(lambda: {label}, name_)
        return (yield from run_.drive(function_({arguments})))
    return ranged
"""
_COROUTINE = """
def make(function_, name_, label_, slices_):
    async def ranged({parameters}):
        run_ = slices_(lambda: {label}, name_)
        return await run_.awaitable(function_({arguments}))
    return ranged
"""
_ASYNC_GENERATOR = """
def make(function_, name_, label_, slices_):
    async def ranged({parameters}):
        run_ = slices_(lambda: {label}, name_)
        inner_ = function_({arguments})
        resume_, value_ = inner_.asend, None
        while True:
            try:
                item_ = await run_.awaitable(resume_(value_).__await__())
            except StopAsyncIteration:
                return
            try:
                value_ = yield item_
                resume_ = inner_.asend
            except GeneratorExit:
                await inner_.aclose()
                raise
            except BaseException as error_:
                resume_, value_ = inner_.athrow, error_
    return ranged
"""
_VARIADIC = ("*args, **kwargs", "*args, **kwargs", "{}")
# Names used in the wrappers; a function with such a parameter gets a variadic wrapper.
_TAKEN = frozenset([
    "function_", "name_", "label_", "slices_", "handle_", "opens_", "closes_", "mark_", "run_",
    "error_", "inner_", "resume_", "value_", "item_", "is_dynamo_compiling", "note_compiled",
    "armed", "backend", "format_label", "bind_and_format_label", "BaseException",
    "GeneratorExit", "StopAsyncIteration",
])  # fmt: skip
_FILE = "<profiled>"
# the end of the parameter in a field of a format, such as `self.index` or `rest[0]`
_FIRST = re.compile(r"[.\[]")


def in_range(function: Callable[..., Any], name: str) -> Any:
    """Wrap a function so that each of its calls is in a range; see `profiled`.

    `name` may be a format string with the parameters (`"layer{self.index}"`), which is evaluated
    only when a range opens.
    """
    exact = _signature_source(function.__code__) if isinstance(function, FunctionType) else None
    parameters, arguments, values = exact or _VARIADIC
    label, fields = "label_", fields_of(name)
    if fields:
        _refuse_unknown(function, name, fields)
        label = f"format_label(name_, {values})"
        # A parameter of a wrapped function is not one of the wrapper's.
        if exact is None or not all(f"'{field}': " in values for field in fields):
            exact, (parameters, arguments, values) = None, _VARIADIC
            label = "bind_and_format_label(function_, name_, args, kwargs)"
    make = _wrapper_factory(_template(function), parameters, arguments, label)
    wrapper = make(function, name, to_trace(name), _CallSlices)
    if exact and isinstance(function, FunctionType):
        wrapper.__defaults__ = function.__defaults__
        wrapper.__kwdefaults__ = function.__kwdefaults__
    if _is_generator_coroutine(function):
        wrapper = coroutine(wrapper)
    return functools.update_wrapper(wrapper, function)


def is_ranged(function: Any) -> bool:
    """Whether `in_range` made this function."""
    return getattr(getattr(function, "__code__", None), "co_filename", None) == _FILE


def is_plain(target: Any) -> bool:
    """Whether `target` is a function or method, and not another callable object."""
    return isinstance(
        target,
        FunctionType
        | MethodType
        | BuiltinFunctionType
        | MethodDescriptorType
        | MethodWrapperType
        | WrapperDescriptorType,
    )


def _called(function: Any) -> Any:
    itself = is_plain(function) or isinstance(function, functools.partial)
    return function if itself else type(function).__call__


def _is_generator_coroutine(function: Any) -> bool:
    """Whether `types.coroutine` has made a generator function's results awaitable."""
    called = _called(function)
    while isinstance(called, functools.partial):
        called = called.func
    flags = getattr(getattr(called, "__code__", None), "co_flags", 0)
    return bool(flags & inspect.CO_ITERABLE_COROUTINE)


def _template(function: Any) -> str:
    called = _called(function)
    if inspect.iscoroutinefunction(called):
        return _COROUTINE
    if inspect.isasyncgenfunction(called):
        return _ASYNC_GENERATOR
    return _GENERATOR if inspect.isgeneratorfunction(called) else _PLAIN


@functools.lru_cache(maxsize=512)
def _wrapper_factory(
    source: str, parameters: str, arguments: str, label: str
) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    text = source.format(parameters=parameters, arguments=arguments, label=label)
    exec(compile(text, _FILE, "exec"), vars(backends), namespace)
    make: Callable[..., Any] = namespace["make"]
    return make


def _signature_source(code: CodeType) -> tuple[str, str, str] | None:
    """A wrapper's parameters, arguments and values as source code; None if that is impossible.

    Such as "x, *, y", "x, y=y" and "{'x': x, 'y': y}". The wrapper gets default values from the
    function.
    """
    positional = code.co_varnames[: code.co_argcount]
    keyword = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    rest = list(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    star = [rest.pop(0)] if code.co_flags & inspect.CO_VARARGS else []
    double = [rest.pop(0)] if code.co_flags & inspect.CO_VARKEYWORDS else []
    names = [*positional, *keyword, *star, *double]
    if not _TAKEN.isdisjoint(names) or not all(name.isidentifier() for name in names):
        return None
    parameters = list(positional)
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    if star or keyword:
        parameters.append(f"*{star[0]}" if star else "*")
    parameters += [*keyword, *(f"**{name}" for name in double)]
    passed = [
        *positional,
        *(f"*{n}" for n in star),
        *(f"{n}={n}" for n in keyword),
        *(f"**{n}" for n in double),
    ]
    values = "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
    return ", ".join(parameters), ", ".join(passed), values


def fields_of(name: str) -> list[str]:
    """The parameters that the format of a name uses; none if the name is no format."""
    try:
        parsed = [*string.Formatter().parse(name)]
    except ValueError:  # a name with a single brace is not a format
        return []
    found = [(field, spec or "") for _, field, spec, _ in parsed if field is not None]
    return [each for field, spec in found for each in (_FIRST.split(field)[0], *fields_of(spec))]


def _refuse_unknown(function: Any, name: str, fields: Iterable[str]) -> None:
    try:
        known = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # of some functions in C
        known = []
    own = getattr(function, "__qualname__", type(function).__qualname__)
    for field in fields:
        if field not in known:
            raise ConfigError(
                f"profiled was given the name {name!r}, but {own} has no parameter {field!r}"
                f"{did_you_mean(field, known)}"
            )


class _CallSlices:
    """Opens a range for each slice of one call; later ones are named `LABEL (resumed)`."""

    def __init__(self, label: Callable[[], str], name: str) -> None:
        self._label = label
        self._name = name
        self._suffix = ""

    def _open(self) -> tuple[Callable[[Any], None], Any] | None:
        if is_dynamo_compiling():  # first, as in `_PLAIN`
            backends.note_compiled(self._name)
            return None
        suffix, self._suffix = self._suffix, RESUMED
        if not backends.armed:
            return None
        opens, closes, _ = backends.backend
        return closes, opens(self._label() + suffix)

    def drive(self, inner: Any) -> Generator[Any, Any, Any]:
        """Run a coroutine, generator or awaitable, with a range from one suspension to the next."""
        resume, value = inner.send, None
        while True:
            opened = self._open()
            try:
                yielded = resume(value)
            except StopIteration as stop:
                return stop.value
            finally:
                if opened is not None:
                    opened[0](opened[1])
            try:
                value = yield yielded
                resume = inner.send
            # GeneratorExit is passed on too, so that the inner generator cleans up inside a range.
            except BaseException as error:
                resume, value = inner.throw, error

    @coroutine
    def awaitable(self, inner: Any) -> Generator[Any, Any, Any]:
        """Return an object for `await`, which runs `inner` in the same way as `drive`."""
        return (yield from self.drive(inner))
