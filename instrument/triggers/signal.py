"""A signal asks for a window."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

from loguru import logger
from pydantic import Field, field_validator

from instrument.errors import ConfigError, did_you_mean
from instrument.triggers import Ask, Request, Trigger, TriggerCallbacks


class Signal(Trigger):
    """Records the next window when the process gets a signal: `kill -USR2 PID`, `scancel --signal=USR2 JOB`.

    A handler that was there before is called as well, and put back when the session stops. Python lets only the main
    thread set one: started on another, it says so and does nothing.
    """

    name: str = "SIGUSR2"
    cooldown: int = Field(0, ge=0)
    max_windows: int | None = Field(20, ge=1)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in signal.Signals.__members__:
            raise ConfigError(
                f"The signal trigger knows no {name!r}{did_you_mean(name, signal.Signals.__members__)}"
            )
        return name

    def begin(self, folder: Path, ask: Ask) -> TriggerCallbacks | None:  # noqa: ARG002
        """Set the handler."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "The signal trigger does nothing: the session was started on a thread that is not the main."
            )
            return None
        number = signal.Signals[self.name]
        before = signal.getsignal(number)

        def handle(received: int, frame: Any) -> None:
            ask(Request(f"{self.name} was received"))
            if callable(before):
                before(received, frame)

        def put_back() -> None:
            on_main = threading.current_thread() is threading.main_thread()
            if (
                on_main and signal.getsignal(number) is handle
            ):  # otherwise somebody else's stands on ours
                signal.signal(number, before if before is not None else signal.SIG_DFL)

        signal.signal(number, handle)
        return TriggerCallbacks(end=put_back)
