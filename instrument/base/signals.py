"""Signals in the training process, from Ctrl-C to the SIGTERM of a scheduler.

What a signal handler of the program raises must reach the program, but must not leave a window half
begun or half ended. So a window begins, and ends, with all handlers put off; and while sinks run,
what a handler raises is remembered.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# The module in C: `signal` converts each handler to an enum, which takes 5 µs.
_signal: Any = import_module("_signal")
# Python says neither which handler C code has set, nor which flags `signal.siginterrupt` has set.
# The C struct `sigaction` has both, and begins with the address of the handler.
_sigaction: Any = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None
_LARGEST_STRUCT = 512  # 152 bytes on Linux, 16 on macOS
_NO_HANDLER = (None, int(signal.SIG_DFL), int(signal.SIG_IGN))
_BY_DEFAULT = (int(signal.SIGTERM), int(signal.SIGINT))
# that of Python's own handler in C, which has the handlers in Python called
_python_address: int | None = None


def _action(number: int) -> tuple[Any, int | None]:
    """What C knows of a signal: the struct `sigaction`, and the address of the handler."""
    action = ctypes.create_string_buffer(_LARGEST_STRUCT)
    if _sigaction is None or _sigaction(number, None, action) != 0:
        return action, None
    return action, ctypes.c_size_t.from_buffer(action).value


def set_handler(number: int, handler: Any) -> bool:
    """Like `signal.signal`, but flags, and a handler that C code has set, stay as they are.

    Returns whether there is such a handler of C code, which may call the one in Python or not.
    """
    global _python_address
    before, address = _action(number)
    _signal.signal(number, int(handler) if isinstance(handler, int) else handler)
    if _python_address is None and callable(handler):
        _python_address = _action(number)[1]
    is_set = address not in _NO_HANDLER
    by_other = is_set and address != _python_address
    if by_other or (is_set and callable(handler)):
        _sigaction(number, before, None)
    return by_other


def on_main_thread() -> bool:
    """Whether this is the main thread, the only one that sets handlers, and calls them."""
    return threading.get_ident() == threading.main_thread().ident


class _StandIn:
    """Stands in for the handlers in Python, and for the default action of SIGTERM and Ctrl-C."""

    def __init__(self) -> None:
        self.arrived: dict[int, None] = {}
        self.raised: BaseException | None = None
        # by signal: the handler in Python, and what C knows
        self.before: dict[int, tuple[Any, Any, int | None]] = {}

    @contextmanager
    def in_place(self, take: Callable[[int, Any], None]) -> Iterator[None]:
        """Have `take` called in place of the handlers, until the block ends."""
        global _python_address
        try:
            # a loop over all numbers, because `signal.valid_signals` takes longer than all the rest
            for number in range(1, _signal.NSIG):
                handler = _signal.getsignal(number)
                if callable(handler) or (number in _BY_DEFAULT and handler == signal.SIG_DFL):
                    self.before[number] = (handler, *_action(number))
                    _signal.signal(number, take)
            if _python_address is None and self.before:
                _python_address = _action(next(iter(self.before)))[1]
            yield
        finally:
            try:
                self._restore(take)
            except BaseException:  # raised by a handler that was restored before others
                self._restore(take)
                raise

    def _restore(self, take: Callable[[int, Any], None]) -> None:
        """Restore handlers and flags, except where the program has set another handler."""
        for number, (handler, action, address) in self.before.items():
            if _signal.getsignal(number) == take:
                _signal.signal(number, handler)
                if address is not None:
                    _sigaction(number, action, None)

    def put_off(self, number: int, _: object) -> None:
        """Remember that a signal has arrived."""
        self.arrived[number] = None

    def handle(self, number: int, frame: Any = None) -> None:
        """Do what the signal does without this object."""
        handler, action, address = self.before[number]
        if callable(handler) and address in (None, _python_address):
            handler(number, frame or sys._getframe())  # an event loop has been woken already
            return
        _signal.signal(number, handler)
        if address is not None:
            _sigaction(number, action, None)
        _signal.raise_signal(number)

    def handle_arrived(self, calling: ExitStack) -> None:
        """Have `calling` handle each signal that has arrived."""
        for number in self.arrived:
            calling.callback(self.handle, number)

    def note(self, number: int, frame: Any) -> None:
        """Handle a signal, and remember what its handler raises."""
        try:
            self.handle(number, frame)
        except BaseException as error:
            self.raised = error
            raise


def replace_handler(number: int, handler: Any, other: Any) -> None:
    """Set the handler `other` if `handler` is set, also while a `_StandIn` takes its place."""
    current = _signal.getsignal(number)
    while isinstance(stand_in := getattr(current, "__self__", None), _StandIn):
        current, action, address = stand_in.before[number]
        if current == handler:
            if not callable(other):
                other, address = int(other), None
            stand_in.before[number] = other, action, address
            return
    if current == handler:
        set_handler(number, other)


# whether a block of `uninterrupted` runs
_putting_off = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Handle signals after the block: those with a handler in Python, SIGTERM and Ctrl-C.

    Otherwise a handler's exception could interrupt torch while its profiler starts or stops, and
    torch cannot stop or save a window a second time. So no exception that is raised in the block
    comes from a handler. Only the main thread handles signals, so on others this does nothing, nor
    within another such block. Cost: 10 µs.
    """
    global _putting_off
    if _putting_off or not on_main_thread():
        yield
        return
    stand_in = _StandIn()
    with ExitStack() as calling:  # a handler may raise, and the others must still be called
        calling.callback(stand_in.handle_arrived, calling)
        with stand_in.in_place(stand_in.put_off):
            _putting_off = True
            try:
                yield
            finally:
                _putting_off = False


def interruptibly(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `act`, and raise what a signal handler of the program raises, even if `act` catches it.

    Use this for code that calls sinks and catches what they raise. So Ctrl-C ends training even
    while a sink is running, but a KeyboardInterrupt that a sink raises by itself does not.
    """
    if not on_main_thread():
        return act(*args, **kwargs)
    stand_in = _StandIn()
    try:
        with stand_in.in_place(stand_in.note):
            result = act(*args, **kwargs)
        if stand_in.raised is not None:
            raise stand_in.raised
        return result
    finally:
        stand_in.raised = None  # otherwise its traceback would keep frames alive


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal handler in Python raised `error`, as its traceback shows.

    Not if the handler has deleted its arguments.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(_is_handler(frame, caller) for caller, frame in pairwise(frames))


def _is_handler(frame: FrameType, caller: FrameType) -> bool:
    """Whether a function was called as handlers are: with a signal and the interrupted frame."""
    names, rest, _, values = inspect.getargvalues(frame)
    more = values.get(rest or "")
    given = [*map(values.get, names), *(more if isinstance(more, tuple) else ())]
    return any(isinstance(first, int) and second is caller for first, second in pairwise(given))
