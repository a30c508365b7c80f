"""`RecordedCalls` makes each call of chosen functions a step of a session; no loop is needed."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.compiler import is_dynamo_compiling

from instrument.annotate.profiled import profiled
from instrument.base.errors import ConfigError, InstrumentError
from instrument.base.log import logger
from instrument.record.config.schedule import triggers_ask
from instrument.record.recorder import import_early

if TYPE_CHECKING:
    from instrument.record.session import Session

# The sessions with a recorded call that is running in this thread or asynchronous task.
_enclosing: ContextVar[tuple[RecordedCalls, ...]] = ContextVar("_enclosing", default=())


class _CountedCall(NamedTuple):
    step: int  # in which the call began
    first: bool  # whether it is the first call of the session's wrapped functions


class RecordedCalls:
    """Makes each call of the wrapped functions a step of a session, as `Session.record` says.

    A window without a planned end ends with the first call.

    Attributes:
        over: whether the session has nothing left to record; calls are then no longer counted.
    """

    def __init__(self, session: Session) -> None:
        self.over = False
        self._session = session
        self._first = Lock()  # held from the first call on
        self._owns_session = False  # whether the first call started the session

    def restart(self) -> None:
        """Count calls again, as steps of a session that the program has started."""
        self.over = self._owns_session = False

    def wrap(self, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """Wrap a function so that each call is a step, and a range named `name` or as itself.

        Raises:
            ConfigError: `function` is a class, a module or an asynchronous generator, or cannot be
                called.
        """
        if not callable(function) or inspect.isclass(function) or isinstance(function, nn.Module):
            raise ConfigError(
                f"session.record was given a {type(function).__name__}, but it takes a function "
                "or method: for a module, pass model.__call__."
            )
        if inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"session.record was given {function.__name__}, an asynchronous generator, "
                "which it cannot record: call session.step() in the loop over its items."
            )
        return functools.wraps(function)(self._counted(function, profiled(function, name=name)))

    def _counted(
        self, function: Callable[..., Any], ranged: Callable[..., Any]
    ) -> Callable[..., Any]:
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            if self.over:
                return await function(*args, **kwargs)
            if not self._first.locked() and not self._session.running:
                await _in_thread(import_early)
            call, enclosing = self._begin_call(), _enclosing.get()
            _enclosing.set((*enclosing, self))
            try:
                return await ranged(*args, **kwargs)
            finally:
                _enclosing.set(enclosing)
                if self._ends_session(call):
                    self._session.stop(wait=False)
                    await _in_thread(self._session.wait)

        def generator(*args: Any, **kwargs: Any) -> Any:
            if self.over:
                return (yield from function(*args, **kwargs))
            call = self._begin_call()
            try:  # without `_enclosing`, because other code runs while the generator is suspended
                return (yield from ranged(*args, **kwargs))
            finally:
                self._end_call(call)

        def plain(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or self.over:
                return function(*args, **kwargs)
            with self._call():
                return ranged(*args, **kwargs)

        if inspect.iscoroutinefunction(function):
            return coroutine
        return generator if inspect.isgeneratorfunction(function) else plain

    @contextmanager
    def _call(self) -> Iterator[None]:
        call, enclosing = self._begin_call(), _enclosing.get()
        _enclosing.set((*enclosing, self))
        try:
            yield
        finally:
            _enclosing.set(enclosing)
            self._end_call(call)

    def _begin_call(self) -> _CountedCall | None:
        """Begin a call, and with the first one the session; None if the call is no step."""
        if self in _enclosing.get():
            return None
        first = not self.over and self._first.acquire(blocking=False)
        if first:
            self._start_session()
        session = self._session
        if self.over or not session.running:
            return None
        return _CountedCall(session.step_number, first)

    def _start_session(self) -> None:
        session = self._session
        if session.running:
            return
        try:
            session.start()
        except InstrumentError as error:
            logger.error(
                "session.record cannot start the session, so no call is recorded: {}", error
            )
        self._owns_session = session._loop.by_calls = session.running
        self.over = not self._owns_session

    def _end_call(self, call: _CountedCall | None) -> None:
        if self._ends_session(call):
            self._session.stop()

    def _ends_session(self, call: _CountedCall | None) -> bool:
        return call is not None and bool(self._session._loop.exclusively(self._end_step, call))

    def _end_step(self, call: _CountedCall) -> bool:
        """End a step at the end of a call; return whether the session must stop now."""
        session = self._session
        if self.over or not session.running:
            return False
        config, train = session.config, session._loop.train
        window = train.window
        if window is not None and window.first > train.step_number:
            window = None  # the window has not begun
        has_end = window is None or window.last is not None or window.seconds is not None
        endless = self._owns_session and not has_end
        if not endless and (window is None or window.first <= call.step):
            session.step()
        if endless:
            self.over = call.first
        elif self._owns_session:
            needs_steps = triggers_ask(config) or config.timings is not None
            self.over = train.window is None and not needs_steps
        return self.over


async def _in_thread(act: Callable[[], object]) -> None:
    """Call `act` on another thread, while the event loop goes on."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:  # that of another library, such as trio
        act()
        return
    await running.run_in_executor(None, act)
