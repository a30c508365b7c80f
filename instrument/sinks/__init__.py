"""The base class `Sink` of sinks, which write output from captures; a file for each built-in one.

Your own sink is a class with `write(capture, folder)`, which the config names by `_target_`. The
session accepts any object with that method. The options of a subclass of `Sink` are checked before
the first step.
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
        ConfigError: the sink is built with an unknown option or an invalid value.
    """

    sink_name: ClassVar[str] = ""
    """The sink's name in error messages; by default its class name without a trailing "Sink"."""

    last: ClassVar[bool] = False
    """Whether this sink runs after those without `last`, because it changes files that they read."""

    def __init__(self, **options: Any) -> None:
        if type(self).write is Sink.write:
            raise ConfigError(
                f"The sink {type(self).__name__} must define write(self, capture, folder)."
            )
        super().__init__(**options)

    inline: ClassVar[bool] = False
    """Whether this sink must run in the training process, on a thread, not in the worker process."""

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
        """The names of the options of ProfilerConfig that must be true for this sink to work."""
        return ()

    def write(self, capture: Capture, folder: Path) -> None:
        """Write this sink's output for `capture` into `folder`, the capture's own folder.

        After all sinks have run, the folder is renamed to `capture.place`. If this method raises,
        the error is logged once per run; training and the other sinks go on.
        """

    def busy_with(self, folder: Path) -> bool:  # noqa: ARG002
        """Whether this sink still needs a capture's files after `write`; they stay until False."""
        return False

    def notice(self) -> None:
        """Read state that only the training thread can read; training waits for it.

        Called on the training thread when a run starts and when a window ends. It is called only
        for sinks that are `inline`, and for all sinks with `profiler.export=inline`.
        """

    def close(self, timeout_s: float | None = None) -> None:
        """Close files and connections after the last window, in the process that calls `write`.

        The caller logs an exception.

        Args:
            timeout_s: the longest time that this method may wait, given if training failed, because
                other ranks may then be waiting for this process to end. None means that the
                sink decides.
        """
