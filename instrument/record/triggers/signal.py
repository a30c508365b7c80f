"""A signal requests a window."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from instrument.base.errors import ConfigError, did_you_mean
from instrument.base.log import logger
from instrument.base.signals import on_main_thread, replace_handler, set_handler
from instrument.record.triggers.trigger import Request, RequestWindow, Trigger, TriggerCallbacks


class Signal(Trigger):
    """Records a window after a signal, sent by `kill -USR2 PID` or `scancel --signal=USR2 JOB`.

    The previous handler of the signal is called too, and is restored when the session stops. Only
    the main thread can set a handler. If the session is started on another thread, the trigger logs
    a warning and does nothing.
    """

    name: str = "SIGUSR2"
    """The name of the signal."""

    cooldown: int = Field(0, ge=0)
    max_windows: int | None = Field(20, ge=1)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in signal.Signals.__members__:
            hint = did_you_mean(name, signal.Signals.__members__)
            raise ConfigError(
                f"The signal trigger was given {name!r}, which is not a signal of this system{hint}"
            )
        return name

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks | None:  # noqa: ARG002
        """Set the signal's handler, which requests a window."""
        if not on_main_thread():
            logger.warning(
                "The signal trigger does nothing: the session was not started on the main thread."
            )
            return None
        number = signal.Signals[self.name]
        before = signal.getsignal(number)

        def handle(received: int, frame: Any) -> None:
            ask(Request(f"{self.name} was received"))
            if callable(before):
                before(received, frame)

        def restore() -> None:
            # A handler that the program has set meanwhile stays, because it may call `handle`.
            if on_main_thread():
                replace_handler(number, handle, signal.SIG_DFL if before is None else before)

        if set_handler(number, handle) and not callable(before):
            restore()
            logger.warning(
                "The signal trigger does nothing: code in C, such as faulthandler, handles {}.",
                self.name,
            )
            return None
        return TriggerCallbacks(end=restore)
