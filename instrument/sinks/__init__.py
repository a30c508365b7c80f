"""What writes something from a finished window: the `Sink` base, one file for each sink that ships.

A sink of your own is one class with `write(capture, folder)`, named in the config by `_target_`. Deriving from
`Sink` adds options that are checked before the first step; the session accepts any object with that method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from instrument.capture import Capture
from instrument.config.options import Options
from instrument.errors import ConfigError

__all__ = ["Sink"]


class Sink(Options):
    """Writes something from one capture; its fields are its options.

    Raises:
        ConfigError: when built with an option that does not exist or has a value that cannot work.
    """

    sink_name: ClassVar[str] = ""
    """What error sentences call the sink; by default its class name without a trailing "Sink"."""

    last: ClassVar[bool] = False
    """Whether it runs after the sinks that do not say so; for one that changes what the others read."""

    def __init__(self, **options: Any) -> None:
        if type(self).write is Sink.write:
            raise ConfigError(
                f"The sink {type(self).__name__} must define write(self, capture, folder)."
            )
        super().__init__(**options)

    inline: ClassVar[bool] = False
    """Whether it must run in the training process, on a thread there, and not in the one that exports beside it."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "sink_name" not in vars(cls):
            cls.sink_name = cls.__name__.removesuffix("Sink") or cls.__name__

    @classmethod
    def display_name(cls) -> str:
        """What error sentences call it."""
        return f"The {cls.sink_name} sink"

    @property
    def needs(self) -> tuple[str, ...]:
        """The boolean fields of ProfilerConfig that must be true for this sink, with its present options."""
        return ()

    def write(self, capture: Capture, folder: Path) -> None:
        """Write this sink's output for `capture` into `folder`, the capture's own folder.

        The folder takes its final name, `capture.place`, when all sinks that run with this one are done.
        What it raises is logged once by the caller; it stops neither the other sinks nor the training.
        """

    def busy_with(self, folder: Path) -> bool:  # noqa: ARG002
        """Whether it still needs the files of a capture whose `write` is over; until then none of them is removed."""
        return False

    def notice(self) -> None:
        """Look at what only the training thread can tell: called there when a run starts and whenever a window ends.

        Of a sink that is not `inline` it is called with `profiler.export=inline` alone. Training waits for it.
        """

    def close(self, timeout_s: float | None = None) -> None:
        """End what was kept open between windows; called where `write` was, once no more of them come.

        What it raises is logged.

        Args:
            timeout_s: how long it may wait at most, as training has failed and others may wait for this process to
                end; None: as long as its own options say.
        """
