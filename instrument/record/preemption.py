"""Delays SIGTERM while a window is open, saves the window, then passes the signal on."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from instrument.base import threads
from instrument.base.log import logger
from instrument.base.signals import on_main_thread, replace_handler, set_handler

if TYPE_CHECKING:
    from instrument.record.step_loop import StepLoop


class Preemption:
    """Handles SIGTERM for one run.

    The open window is saved at the end of the current step, but at the latest after half of
    `grace_s`. Without an open window, the signal goes directly to the handler that was set before.

    Attributes:
        noticed: whether a SIGTERM is being delayed.
    """

    def __init__(self, loop: StepLoop) -> None:
        self.noticed = False
        self._loop = loop
        self._grace_s = 0.0
        self._previous: Any = None
        self._installed = False
        self._process = 0
        self._timer: threading.Timer | None = None

    def install(self, grace_s: float | None) -> None:
        """Handle SIGTERM from now on, unless `grace_s` is None or this is not the main thread.

        A handler that C code has set stays, and handles SIGTERM.
        """
        self.noticed, self._grace_s = False, grace_s or 0.0
        current = signal.getsignal(signal.SIGTERM)
        if current != self._handle:  # another thread could not uninstall it after the last run
            self._previous = current
        if grace_s is not None and on_main_thread() and self._previous is not None:
            self._installed, self._process = True, os.getpid()
            set_handler(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Restore the previous handler, unless the program has set another handler meanwhile.

        On another thread than the main thread, our handler stays, and passes every signal on.
        """
        self._cancel_timer()
        if self._installed and on_main_thread():
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
        if not on_main_thread():
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
            half = self._grace_s / 2
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
