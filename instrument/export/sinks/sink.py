"""`Sink`, the base class of sinks; a sink writes output from each capture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from instrument.base.errors import ConfigError
from instrument.base.options import Options

if TYPE_CHECKING:
    from instrument.read.capture import Capture


class Sink(Options):
    """Base class of sinks. A sink writes output from each capture; its options are its fields.

    A config names your own sink by `_target_`. A session takes any object with a method `write`.
    The options of a subclass of `Sink` are checked before the first step.

    Raises:
        ConfigError: the sink is built with an unknown option or an invalid value.
    """

    sink_name: ClassVar[str] = ""
    """The sink's name in error messages; by default its class name without a trailing "Sink"."""

    last: ClassVar[bool] = False
    """Whether this sink runs after all others, because it changes files that other sinks read."""

    def __init__(self, **options: Any) -> None:
        if type(self).write is Sink.write:
            raise ConfigError(
                f"The sink {type(self).__name__} must define write(self, capture, folder)."
            )
        super().__init__(**options)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "sink_name" not in vars(cls):
            cls.sink_name = cls.__name__.removesuffix("Sink") or cls.__name__

    @classmethod
    def display_name(cls) -> str:
        """The name of the sink in messages, such as "The table sink"."""
        return f"The {cls.sink_name} sink"

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the options of ProfilerConfig that must be true for this sink to work."""
        return ()

    def write(self, capture: Capture, folder: Path) -> None:
        """Write this sink's output for `capture` into `folder`, the capture's own folder.

        After all sinks have run, the folder is renamed to `capture.place`. If this method raises,
        training and the other sinks go on, and the error is logged once per run.
        """

    def close(self, timeout_s: float | None = None) -> None:
        """Close files and connections after the last window, in the process that calls `write`.

        `timeout_s` is the longest time that this method may wait; None lets the sink decide. The
        time is limited if the run ended early, because other ranks may wait for the end of this
        process. If this method raises, the caller logs the error.
        """
