"""SIGTERM, by which schedulers announce that they will kill a process soon, and Ctrl-C: neither may cost a window."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from loguru import logger

from instrument import threads


class Preemption:
    """Holds SIGTERM back while a window is open: until the next step's end, or half of `grace_s`, then passes it on.

    `is_recording` tells whether there is something to save, and `save` saves it, on the main thread. Outside windows
    the signal goes straight to whoever handled it before.

    Attributes:
        noticed: whether a SIGTERM is held back.
    """

    def __init__(self, grace_s: float | None, is_recording: Callable[[], bool], save: Callable[[], None]) -> None:
        self.noticed = False
        self._grace_s, self._is_recording, self._save = grace_s, is_recording, save
        self._before: Any = None
        self._installed = False
        self._process = 0
        self._held = 0  # how many blocks of `held` run, one in another
        self._interrupted = False  # by Ctrl-C within them
        self._timer: threading.Timer | None = None

    def install(self) -> None:
        """Begin to watch; only the main thread can."""
        self.noticed = False
        if self._grace_s is not None and _on_main_thread():
            self._installed, self._process = True, os.getpid()
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def uninstall(self) -> None:
        """Leave the signal as it was found, unless somebody else handles it by now.

        On another thread than the main one ours stays, and passes on whatever comes.
        """
        self._forget_timer()
        if self._installed and _on_main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
        self._installed = False

    def save(self) -> None:
        """Have what is open saved, and let the signal go on."""
        self._save()
        if self.noticed:  # nothing was to be saved
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

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let neither signal end the block half-way, as torch cannot stop or save twice; they count behind it."""
        handler = signal.getsignal(signal.SIGINT)
        holds = not self._held and _on_main_thread() and handler is not None
        self._held += 1
        if holds:
            signal.signal(signal.SIGINT, self._note_interrupt)
        try:
            yield
        finally:
            self._held -= 1
            if holds:
                signal.signal(signal.SIGINT, handler)
            if not self._held and self.noticed and not self._is_recording():
                self.pass_on()
            if holds and self._interrupted:
                self._interrupted = False
                signal.raise_signal(signal.SIGINT)

    def _note_interrupt(self, *_: Any) -> None:
        self._interrupted = True

    def _handle(self, *_: Any) -> None:
        if os.getpid() != self._process:  # a forked child, which records nothing
            self.pass_on()
        elif self._held:
            self.noticed = True
        elif not self._is_recording():
            self.pass_on()
        elif self.noticed:  # asked a second time, by the timer or by somebody impatient
            self.save()
        else:
            self.noticed = True
            half = (self._grace_s or 0) / 2
            self._timer = threading.Timer(half, os.kill, (os.getpid(), signal.SIGTERM))
            self._timer.daemon = True
            with suppress(Exception):  # this may have interrupted a handler of the log, which takes no second message
                threads.start(self._timer, "the open window is saved at the end of this step, however long that takes")
                logger.warning("SIGTERM: the open window is saved at the end of this step, or in {:g} s.", half)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextmanager
def ctrl_c_passes() -> Iterator[None]:
    """Raise KeyboardInterrupt behind the block if the user pressed Ctrl-C in it and the block took that for a failure.

    So that a sink which raises KeyboardInterrupt by itself ends no training, and Ctrl-C while a sink runs still does.
    """
    handler, pressed = signal.getsignal(signal.SIGINT), False
    if not callable(handler) or not _on_main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            pressed = True
            raise

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
