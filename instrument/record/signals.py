"""SIGTERM, by which schedulers announce that they will kill a process soon: it may not cost a window."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any, Protocol

from loguru import logger

from instrument import threads


class Saves(Protocol):
    """What has a window to save; see `StepLoop`."""

    @property
    def recording(self) -> bool:
        """Whether a window is open."""

    def save_window(self) -> None:
        """End the window that is open, and save it."""


class Preemption:
    """Holds SIGTERM back while a window is open: until the next step's end, or half of `grace_s`, then passes it on.

    The window is saved on the main thread first. Outside windows the signal goes straight to whoever handled it before.

    Attributes:
        noticed: whether a SIGTERM is held back.
    """

    def __init__(self, loop: Saves) -> None:
        self.noticed = False
        self._loop = loop
        self._grace_s: float | None = None
        self._before: Any = None
        self._installed = False
        self._process = 0
        self._timer: threading.Timer | None = None

    def install(self, grace_s: float | None) -> None:
        """Begin to watch, unless `grace_s` is None; only the main thread can."""
        self.noticed, self._grace_s = False, grace_s
        if self._grace_s is not None and _on_main_thread():
            self._installed, self._process = True, os.getpid()
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Leave the signal as it was found, unless somebody else handles it by now.

        On another thread than the main one ours stays, and passes on whatever comes.
        """
        self._forget_timer()
        if (
            self._installed
            and _on_main_thread()
            and signal.getsignal(signal.SIGTERM) == self._handle
        ):
            signal.signal(
                signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL
            )
        self._installed = False

    def save(self) -> None:
        """Have what is open saved, and let the signal go on."""
        self._loop.save_window()
        if self.noticed:
            self.pass_on()

    def pass_on(self) -> None:
        """Let the signal do what it would have done without us."""
        self._forget_timer()
        self.noticed = False
        if not _on_main_thread():  # whose handler, ours, will find nothing to save any more
            os.kill(os.getpid(), signal.SIGTERM)
        elif callable(self._before):
            self._before(signal.SIGTERM, None)
        elif self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, *_: Any) -> None:
        if (
            os.getpid() != self._process or not self._loop.recording
        ):  # a forked child, which records nothing
            self.pass_on()
        elif self.noticed:  # asked a second time, by the timer or by somebody impatient
            self.save()
        else:
            self.noticed = True
            half = (self._grace_s or 0) / 2
            self._timer = threading.Timer(half, os.kill, (os.getpid(), signal.SIGTERM))
            self._timer.daemon = True
            with suppress(
                Exception
            ):  # this may have interrupted a handler of the log, which takes no second message
                threads.start(
                    self._timer,
                    "the open window is saved at the end of this step, however long that takes",
                )
                logger.warning(
                    "SIGTERM: the open window is saved at the end of this step, or in {:g} s.", half
                )

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
