"""Saves the open window on SIGTERM, which schedulers send some time before they kill a process."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from instrument import threads
from instrument.interrupts import replace_handler
from instrument.log import logger

if TYPE_CHECKING:
    from instrument.record.step_loop import StepLoop


class Preemption:
    """Delays SIGTERM while a window is open, saves the window, then passes the signal on.

    The window is saved at the end of the current step, but at the latest after half of `grace_s`.
    Without an open window, the signal goes directly to the handler that was set before.

    Attributes:
        noticed: whether a SIGTERM is being delayed.
    """

    def __init__(self, loop: StepLoop) -> None:
        self.noticed = False
        self._loop = loop
        self._grace_s: float | None = None
        self._previous: Any = None
        self._installed = False
        self._process = 0
        self._timer: threading.Timer | None = None

    def install(self, grace_s: float | None) -> None:
        """Handle SIGTERM from now on.

        Does nothing if `grace_s` is None, if this is not the main thread, or if C code has set the
        current handler, because Python cannot restore such a handler.
        """
        self.noticed, self._grace_s = False, grace_s
        current = signal.getsignal(signal.SIGTERM)
        if current != self._handle:  # another thread could not uninstall it after the last run
            self._previous = current
        if self._grace_s is not None and _on_main_thread() and self._previous is not None:
            self._installed, self._process = True, os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Restore the previous handler, unless the program has set another handler meanwhile.

        Only the main thread can restore a handler. If another thread calls this method, our handler
        stays installed and passes every signal on.
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

        `frame` is the frame that the signal interrupted. None means that the signal was delayed;
        the previous handler then gets the current frame.
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
    return threading.current_thread() is threading.main_thread()
