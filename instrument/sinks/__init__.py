"""Sinks write output from captures: the base class `Sink`, and a file for each built-in sink.

Your own sink is a class with `write(capture, folder)`, named in the config by `_target_`. The
session accepts any object with that method; a subclass of `Sink` has options that are checked
before the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from instrument.capture import Capture
from instrument.config.options import Options
from instrument.errors import ConfigError

__all__ = ["Sink"]


class Sink(Options):
    """Writes output from each capture; its fields are its options.

    Raises:
        ConfigError: when built with an option that does not exist or has a value that cannot work.
    """

    sink_name: ClassVar[str] = ""
    """The sink's name in error messages; by default its class name without a trailing "Sink"."""

    last: ClassVar[bool] = False
    """Whether it runs after the sinks without `last`, because it changes files that they read."""

    def __init__(self, **options: Any) -> None:
        if type(self).write is Sink.write:
            raise ConfigError(
                f"The sink {type(self).__name__} must define write(self, capture, folder)."
            )
        super().__init__(**options)

    inline: ClassVar[bool] = False
    """Whether it must run in the training process (on a thread), not in the worker process."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "sink_name" not in vars(cls):
            cls.sink_name = cls.__name__.removesuffix("Sink") or cls.__name__

    @classmethod
    def display_name(cls) -> str:
        """The name in error messages."""
        return f"The {cls.sink_name} sink"

    @property
    def needs(self) -> tuple[str, ...]:
        """The boolean fields of ProfilerConfig that must be true for this sink with its options."""
        return ()

    def write(self, capture: Capture, folder: Path) -> None:
        """Write this sink's output for `capture` into `folder`, the capture's own folder.

        The folder gets its final name, `capture.place`, once all sinks have run. The caller logs an
        exception once; the other sinks and training go on.
        """

    def busy_with(self, folder: Path) -> bool:  # noqa: ARG002
        """Whether it still needs a capture's files after `write`; retention keeps them so long."""
        return False

    def notice(self) -> None:
        """Read state that only the training thread can read; training waits for it.

        Called on that thread when a run starts and when a window ends, for sinks that are `inline`
        or run with `profiler.export=inline`.
        """

    def close(self, timeout_s: float | None = None) -> None:
        """Close what stayed open between windows; called where `write` is, after the last window.

        The caller logs an exception.

        Args:
            timeout_s: the longest time that it may wait. It is given if training failed, as other
                ranks may then wait for this process to end. None: its own options decide.
        """
