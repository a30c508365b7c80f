"""Signals in the training process, from Ctrl-C to the SIGTERM of a scheduler.

What a signal handler of the program raises must reach the program, through every `except` in
between, but must not leave a window half begun or half ended.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

from instrument.base import threads
from instrument.base.log import logger

P = ParamSpec("P")
T = TypeVar("T")

# The module in C: `signal` converts each handler to an enum, which takes 5 µs.
_signal: Any = import_module("_signal")
# Python says neither which handler C code has set, nor which flags `signal.siginterrupt` has set.
# The C struct `sigaction` has both, and begins with the address of the handler.
_sigaction: Any = getattr(ctypes.CDLL(None), "sigaction", None) if os.name == "posix" else None
_LARGEST_STRUCT = 512  # 152 bytes on Linux, 16 on macOS
_NO_HANDLER = (None, int(signal.SIG_DFL), int(signal.SIG_IGN))
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


class Interrupts:
    """Stands in for the program's signal handlers, and calls them at once or later.

    Stands in for all handlers in Python, and for the default action of SIGTERM and Ctrl-C. Only the
    main thread handles signals, so on another thread this class does nothing.

    Attributes:
        delayed: whether signals that arrive now are handled later.
        raised: what a handler has raised at once; None if no handler has raised.
    """

    def __init__(self) -> None:
        self.delayed = True
        self.raised: BaseException | None = None
        self._arrived: dict[int, None] = {}
        self._process = os.getpid()
        self._handlers: dict[int, Any] = {}

    def install(self) -> None:
        """Take the place of the handlers."""
        if not _on_main_thread():
            return
        # a loop over all numbers, because `signal.valid_signals` takes longer than all the rest
        for number in range(1, _signal.NSIG):
            handler = _signal.getsignal(number)
            ends_process = number in (_signal.SIGTERM, _signal.SIGINT)
            if callable(handler) or (ends_process and handler == _signal.SIG_DFL):
                self._handlers[number] = handler
                set_handler(number, self._take)

    def remove(self) -> None:
        """Restore the handlers, except where the program has set another handler meanwhile."""
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._take:
                set_handler(number, handler)

    def let_through(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `act`; until it returns, signals are handled at once."""
        try:
            self.delayed = False
            self.call_arrived()
            return act(*args, **kwargs)
        finally:
            self.delayed = True  # Python handles no signal between the end of `act` and this line

    def call_arrived(self) -> None:
        """Call the handlers of the signals that were delayed."""
        if not self._arrived:
            return
        arrived, self._arrived = self._arrived, {}
        with ExitStack() as calling:  # a handler may raise, and the others must still be called
            for number in arrived:
                calling.callback(self._handle, number, None)

    def _take(self, number: int, frame: Any) -> None:
        # A forked child saves no window, so its signals are not delayed.
        if self.delayed and os.getpid() == self._process:
            self._arrived[number] = None
            return
        try:
            self._handle(number, frame)
        except BaseException as error:
            self.raised = error
            raise

    def _handle(self, number: int, frame: Any) -> None:
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame or sys._getframe())
        else:
            _signal.signal(number, handler)
            _signal.raise_signal(number)


def replace_handler(number: int, handler: Any, other: Any) -> None:
    """Set the handler `other` if `handler` is set, also while `Interrupts` stand in for it."""
    current = _signal.getsignal(number)
    while isinstance(interrupts := getattr(current, "__self__", None), Interrupts):
        current = interrupts._handlers[number]
        if current == handler:
            interrupts._handlers[number] = other
            return
    if current == handler:
        set_handler(number, other)


@contextmanager
def uninterrupted() -> Iterator[Interrupts]:
    """Delay SIGTERM, Ctrl-C and all signals with a handler in Python until the block ends.

    Otherwise a signal could interrupt torch while it stops or saves a window, and torch cannot stop
    or save a window a second time. Cost: 20 µs.
    """
    interrupts = Interrupts()
    try:
        interrupts.install()
        yield interrupts
    finally:
        try:
            interrupts.delayed = False
            interrupts.remove()
        except BaseException:  # raised by a handler that was restored before others
            interrupts.remove()
            raise
        finally:
            interrupts.raised = None  # otherwise its traceback would keep all frames alive
            interrupts.call_arrived()


def interruptibly(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `act`, and raise what a signal handler of the program raises, even if `act` catches it.

    Use this for code that catches exceptions, such as `run_sink`. So Ctrl-C ends training even
    while a sink is running, but a KeyboardInterrupt that a sink raises by itself does not.
    """
    with uninterrupted() as interrupts:
        result = interrupts.let_through(act, *args, **kwargs)
        if interrupts.raised is not None:
            raise interrupts.raised
    return result


class Windows(Protocol):
    """What a preemption needs of a run: whether a window is open, and how to save it."""

    @property
    def recording(self) -> bool:
        """Whether a window is being recorded."""

    def save_window(self) -> object:
        """Save the open window, if any."""


class Preemption:
    """Delays SIGTERM while a window is open, saves the window, then passes the signal on.

    The window is saved at the end of the current step, but at the latest after half of `grace_s`.
    Without an open window, the signal goes directly to the handler that was set before.

    Attributes:
        noticed: whether a SIGTERM is being delayed.
    """

    def __init__(self, loop: Windows) -> None:
        self.noticed = False
        self._loop = loop
        self._grace_s: float | None = None
        self._previous: Any = None
        self._installed = False
        self._process = 0
        self._timer: threading.Timer | None = None

    def install(self, grace_s: float | None) -> None:
        """Handle SIGTERM from now on, unless `grace_s` is None or this is not the main thread.

        A handler that C code has set stays, and handles SIGTERM.
        """
        self.noticed, self._grace_s = False, grace_s
        current = signal.getsignal(signal.SIGTERM)
        if current != self._handle:  # another thread could not uninstall it after the last run
            self._previous = current
        if self._grace_s is not None and _on_main_thread() and self._previous is not None:
            self._installed, self._process = True, os.getpid()
            set_handler(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Restore the previous handler, unless the program has set another handler meanwhile.

        On another thread than the main thread, our handler stays, and passes every signal on.
        """
        self._cancel_timer()
        if self._installed and _on_main_thread():
            replace_handler(signal.SIGTERM, self._handle, self._previous)
        self._installed = False

    def save(self) -> None:
        """Save the open window, and pass the signal on."""
        self._loop.save_window()
        if self.noticed:
            self.pass_on()

    def pass_on(self, frame: FrameType | None = None) -> None:
        """Do what SIGTERM would have done without this handler.

        `frame` is the frame that the signal interrupted; None means the current frame, after a
        delay.
        """
        self._cancel_timer()
        self.noticed = False
        # Handlers run on the main thread, so another thread sends the signal again. This time no
        # window is open, so the signal is passed on.
        if not _on_main_thread():
            os.kill(os.getpid(), signal.SIGTERM)
        elif callable(self._previous):
            self._previous(signal.SIGTERM, frame or inspect.currentframe())
        elif self._previous != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        in_child = os.getpid() != self._process
        if in_child or not self._loop.recording:
            self.pass_on(frame)
        elif self.noticed:  # the second signal, from the timer or a user
            self.save()
        else:
            self.noticed = True
            half = (self._grace_s or 0) / 2
            self._timer = threading.Timer(half, os.kill, (os.getpid(), signal.SIGTERM))
            self._timer.daemon = True
            # the signal may have interrupted a log handler, which then cannot take this message
            with suppress(Exception):
                threads.start(
                    self._timer,
                    "the open window is saved at the end of this step, however long that takes",
                )
                logger.warning(
                    "SIGTERM arrived: the open window is saved at the end of this step, or in "
                    "{:g} s if the step takes longer.",
                    half,
                )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
