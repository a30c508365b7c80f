"""What a test may leave on: found, told and taken away, so that a test that fails does not fail those after it."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from loguru import logger

from instrument.annotate import backends, module_calls, modules
from instrument.record import one_profiler, session
from instrument.record.facts import Collections

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


class Before:
    """How things stood before a test: the handlers of the log and of signals."""

    def __init__(self) -> None:
        # of a class; after hundreds of windows, as of the tests before, the wrapper stays in
        module_calls._changes = 0
        module_calls._refresh()
        self._handlers = _log_handlers()
        self._signals = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore(self) -> list[str]:
        """Turn off what the test left on, and tell what that was."""
        return [
            *_sessions_stopped(),
            *_profiler_stopped(),
            *_collections_uncounted(),
            *_annotations_disarmed(),
            *_threads_running(),
            *self._handlers_restored(),
        ]

    def _handlers_restored(self) -> Iterator[str]:
        for number, handler in self._signals.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
                yield f"another handler of {number.name}"
        added, removed = _log_handlers() - self._handlers, self._handlers - _log_handlers()
        for handler in added:
            logger.remove(handler)
            yield "a handler of the log"
        if removed:
            logger.add(sys.stderr)
            yield "a log without its handlers"
        logger.enable("instrument")


def _log_handlers() -> set[int]:
    core: Any = logger._core  # type: ignore[attr-defined]
    return set(core.handlers)


def _sessions_stopped() -> Iterator[str]:
    for running in list(session._sessions):
        with suppress(Exception):
            running.stop()
        session._sessions.discard(running)
        yield "a session that runs"
    for model in list(modules._instrumented):
        modules.forget(model)


def _profiler_stopped() -> Iterator[str]:
    busy: Any = one_profiler.current_owner()
    if busy is not None:
        with suppress(Exception):
            busy.stop()
        busy.prepared = False
        yield "a recorder that records"
    if torch._C._autograd._profiler_enabled():
        torch._C._autograd._disable_profiler()
        torch.autograd.profiler._run_on_profiler_stop()
        yield "a profiler that is on"


def _collections_uncounted() -> Iterator[str]:
    for callback in list(gc.callbacks):
        if isinstance(callback, Collections):
            gc.callbacks.remove(callback)
            yield "a callback of the garbage collector"


def _threads_running() -> Iterator[str]:
    """Threads of ours. Those that are told to end may take as long as a busy machine needs."""
    for thread in threading.enumerate():
        if thread.name.startswith("instrument-"):
            thread.join(60)
            if thread.is_alive():
                thread.name = f"left-{thread.name}"  # so that the tests after it do not wait for it
                yield f"the thread {thread.name}"


def _annotations_disarmed() -> Iterator[str]:
    if backends._arming:
        backends.disarm()
        yield "annotations that are armed"
