"""What writes something from a finished window: the `Sink` base, one file for each sink that ships.

A sink of your own is one class with `write(capture, folder)`, named in the config by `_target_`. Deriving from
`Sink` adds options that are checked before the first step; the session accepts any object with that method.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from instrument.capture import Capture
from instrument.errors import ConfigError

__all__ = ["Sink"]


class Sink(BaseModel):
    """Writes something from one capture; its fields are its options.

    Raises:
        ConfigError: when built with an option that does not exist or has a value that cannot work.
    """

    model_config = ConfigDict(extra="forbid")

    sink_name: ClassVar[str] = ""
    """What error sentences call the sink; by default its class name without a trailing "Sink"."""

    last: ClassVar[bool] = False
    """Whether it runs after the sinks that do not say so; for one that changes what the others read."""

    def __init__(self, **options: Any) -> None:
        if type(self).write is Sink.write:
            raise ConfigError(f"The sink {type(self).__name__} must define write(self, capture, folder).")
        try:
            super().__init__(**{name: _plain(value) for name, value in options.items()})
        except ValidationError as error:
            raise ConfigError(_sentence(type(self), error)) from None

    inline: ClassVar[bool] = False
    """Whether it must run in the training process, on a thread there, and not in the one that exports beside it."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "sink_name" not in vars(cls):
            cls.sink_name = cls.__name__.removesuffix("Sink") or cls.__name__

    @property
    def needs(self) -> tuple[str, ...]:
        """The boolean fields of ProfilerConfig that must be true for this sink, with its present options."""
        return ()

    def write(self, capture: Capture, folder: Path) -> None:
        """Write this sink's output for `capture` into `folder`, the capture's own folder.

        The folder takes its final name, `capture.place`, when all sinks that run with this one are done.
        What it raises is logged once by the caller; it stops neither the other sinks nor the training.
        """


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest of those known, or all where none is near."""
    names = list(known)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; it knows {', '.join(map(repr, names))}." if names else "."


def _plain(value: Any) -> Any:
    """Lists and dicts in place of OmegaConf's own, which pydantic does not take for such."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _sentence(sink: type[Sink], error: ValidationError) -> str:
    """The first thing pydantic found wrong, told in one sentence; a name that does not exist goes first."""
    errors = sorted(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    first = errors[0]
    where = [str(part) for part in first["loc"]]
    option, given, kind = ".".join(where), first["input"], first["type"]
    if kind == "extra_forbidden":
        return f"The {sink.sink_name} sink has no option {option!r}{did_you_mean(option, sink.model_fields)}"
    if kind == "missing":
        return f"The {sink.sink_name} sink needs a value for its option {option!r}."
    if kind == "value_error":
        return str(first["ctx"]["error"])
    if kind == "literal_error":
        choices = map(str, get_args(sink.model_fields[where[0]].annotation))
        return f"The {sink.sink_name} sink's option {option!r} cannot be {given!r}{did_you_mean(given, choices)}"
    rule = first["msg"].removeprefix("Input ").rstrip(".")
    return f"The {sink.sink_name} sink's option {option!r} {rule}, not {given!r}."
