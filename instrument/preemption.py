"""SIGTERM, by which schedulers announce that they will kill a process soon: time to save an open window."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from loguru import logger


class Preemption:
    """Holds SIGTERM back while a window is open: until the next step's end, or half of `grace_s`, then passes it on.

    `is_recording` tells whether there is something to save, `save` saves it; it is called on the main thread, and never
    within itself. Outside windows the signal goes straight to whoever handled it before.
    """

    def __init__(self, grace_s: float | None, is_recording: Callable[[], bool], save: Callable[[], None]) -> None:
        self.noticed = False
        self._grace_s, self._is_recording, self._save = grace_s, is_recording, save
        self._before: Any = None
        self._installed = False
        self._timer: threading.Timer | None = None

    def install(self) -> None:
        """Begin to watch; only the main thread can."""
        if self._grace_s is None or threading.current_thread() is not threading.main_thread():
            return
        self.noticed, self._installed = False, True
        self._before = signal.signal(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Leave the signal as it was found, unless somebody else handles it by now.

        On another thread than the main one ours stays, and passes on whatever comes.
        """
        self._forget_timer()
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
        self._installed = False

    def pass_on(self) -> None:
        """Let the signal do what it would have done without us."""
        self._forget_timer()
        self.noticed = False
        if callable(self._before):
            self._before(signal.SIGTERM, None)
        elif self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, *_: Any) -> None:
        if not self._is_recording():
            self.pass_on()
        elif self.noticed:  # asked a second time, by the timer or by somebody impatient
            self._save()
        else:
            self.noticed = True
            half = (self._grace_s or 0) / 2
            logger.warning("SIGTERM: the open window is saved at the end of this step, or in {:g} s.", half)
            self._timer = threading.Timer(half, os.kill, (os.getpid(), signal.SIGTERM))
            self._timer.daemon = True
            self._timer.start()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
