"""`Calls`: a session driven by the calls of functions, with no loop around it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from loguru import logger
from torch import nn
from torch.compiler import is_dynamo_compiling

from instrument.annotate import profiled
from instrument.errors import ConfigError, InstrumentError
from instrument.phases import Phases


class Calls:
    """Takes each call of some functions for a step of a session, which starts with the first of them.

    A session that was started so is stopped when its plan holds no further window; of a window without end, when the
    first call in it is over. The steps are the calls of the thread that made the first, as torch wants it; others just
    run, and so do calls within a call, or beside a coroutine or generator that is not through.

    Attributes:
        over: whether nothing is left to record, so that calls are left alone.
    """

    def __init__(
        self,
        phases: Phases,
        start: Callable[[], object],
        step: Callable[[], None],
        stop: Callable[[], None],
        running: Callable[[], bool],
    ) -> None:
        self.over = False
        self._phases = phases
        self._start, self._step, self._stop, self._running = start, step, stop, running
        self._first = Lock()  # held from the first call on
        self._thread: int | None = None
        self._inside = False
        self._owns = False  # the session's start and stop

    def of(self, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """The function with its calls counted, each in a range of this name, or its own.

        Raises:
            ConfigError: it is no function, or an asynchronous generator.
        """
        if not callable(function) or inspect.isclass(function) or isinstance(function, nn.Module):
            raise ConfigError(
                f"session.record was given a {type(function).__name__}, but it takes a function or method: "
                "of a module give model.__call__."
            )
        if inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"session.record was given {function.__name__}, an asynchronous generator, whose steps it cannot tell: "
                "loop over it, and call session.step() after each item."
            )
        return functools.wraps(function)(self._counted(function, profiled(function, name=name)))

    def _counted(self, function: Callable[..., Any], ranged: Callable[..., Any]) -> Callable[..., Any]:
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            if self.over:
                return await function(*args, **kwargs)
            with self._one():
                return await ranged(*args, **kwargs)

        def generator(*args: Any, **kwargs: Any) -> Any:
            if self.over:
                return (yield from function(*args, **kwargs))
            with self._one():
                return (yield from ranged(*args, **kwargs))

        def plain(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or self.over:
                return function(*args, **kwargs)
            with self._one():
                return ranged(*args, **kwargs)

        if inspect.iscoroutinefunction(function):
            return coroutine
        return generator if inspect.isgeneratorfunction(function) else plain

    @contextmanager
    def _one(self) -> Iterator[None]:
        if not self._counts():
            yield
            return
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._end()

    def _counts(self) -> bool:
        """Whether the call that begins is a step."""
        if not self.over and self._first.acquire(blocking=False):
            self._thread = get_ident()
            self._begin()
        return not (self.over or self._inside) and self._thread == get_ident()

    def _begin(self) -> None:
        if self._running():
            return
        try:
            self._start()
        except InstrumentError as error:
            logger.error("session.record cannot start the session, so the calls just run: {}", error)
        self._owns = self._running()
        self.over = not self._owns

    def _end(self) -> None:
        whole = self._owns and self._phases.in_endless_window()
        if not whole and self._running():
            self._step()
        if self._owns and (whole or self._phases.nothing_ahead()):
            self.over = True
            self._stop()
