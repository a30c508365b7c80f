"""`RecordedCalls`: a session driven by the calls of functions, with no loop around it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from loguru import logger
from torch import nn
from torch.compiler import is_dynamo_compiling

from instrument.annotate.profiled import profiled
from instrument.errors import ConfigError, InstrumentError

if TYPE_CHECKING:
    from instrument.record.session import Session

# The sessions whose recorded calls are around what runs now, in this thread or asynchronous task.
_around: ContextVar[tuple[RecordedCalls, ...]] = ContextVar("_around", default=())


class _Begun(NamedTuple):
    """A call that counts: the step in which it began, and whether it is the session's first."""

    step: int
    first: bool


class RecordedCalls:
    """Takes the end of each call of some functions for the end of a session's step.

    The first call starts the session. A session that was started so is stopped when its plan holds no further window;
    of a window without end, when that first call is over. Calls count from every thread and asynchronous task, so that
    a step goes from one call's end to the next one's, whichever thread that is on. Two kinds of calls just run: those
    within a call, and those that end in a window and began before it.

    Attributes:
        over: whether nothing is left to record, so that calls are left alone.
    """

    def __init__(self, session: Session) -> None:
        self.over = False
        self._session = session
        self._first = Lock()  # held from the first call on
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

    def _counted(
        self, function: Callable[..., Any], ranged: Callable[..., Any]
    ) -> Callable[..., Any]:
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            if self.over:
                return await function(*args, **kwargs)
            with self._one():
                return await ranged(*args, **kwargs)

        def generator(*args: Any, **kwargs: Any) -> Any:
            if self.over:
                return (yield from function(*args, **kwargs))
            begun = self._begun()
            try:  # without a note that it is around: other code runs wherever it is suspended
                return (yield from ranged(*args, **kwargs))
            finally:
                self._end(begun)

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
        begun, around = self._begun(), _around.get()
        _around.set((*around, self))
        try:
            yield
        finally:
            _around.set(around)
            self._end(begun)

    def _begun(self) -> _Begun | None:
        """Note that a call begins; None: it does not count."""
        if self in _around.get():
            return None
        first = not self.over and self._first.acquire(blocking=False)
        if first:
            self._begin()
        session = self._session
        return None if self.over or not session.running else _Begun(session.step_number, first)

    def _begin(self) -> None:
        session = self._session
        if session.running:
            return
        try:
            session.start()
        except InstrumentError as error:
            logger.error(
                "session.record cannot start the session, so the calls just run: {}", error
            )
        self._owns = session.loop.by_calls = session.running
        self.over = not self._owns

    def _end(self, begun: _Begun | None) -> None:
        if begun is not None and self._session.loop.in_turn(self._count, begun):
            self._session.stop()

    def _count(self, begun: _Begun) -> bool:
        """Take the end of a call for that of a step; gives whether it was the last and the session is to be stopped."""
        session, loop = self._session, self._session.loop
        if self.over or not session.running:
            return False
        whole = self._owns and loop.in_endless_window()
        if not whole and not loop.in_window_begun_after(begun.step):
            session.step()
        self.over = self._owns and (begun.first if whole else loop.nothing_ahead())
        return self.over
