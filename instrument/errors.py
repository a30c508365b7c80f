"""What can go wrong, as one small tree.

InstrumentError
├── ConfigError      an option is wrong (also a ValueError)
├── CaptureError     recording or delivering a window is not possible
├── GraphError       a model cannot be captured as a graph
├── TraceError       a trace file cannot be read
└── MissingPackage   an optional package is not installed (also an ImportError)

Every message is one sentence: what is wrong, the value given, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec

from instrument.printable import printable

# Some libraries put whole files into an exception.
_LONGEST_REASON = 2_000


class InstrumentError(Exception):
    """Base of every error that `instrument` raises on purpose; its text is one line that any terminal can show."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(InstrumentError, ValueError):
    """An option has a value that cannot work; raised when the object is built, before the first step."""


class CaptureError(InstrumentError):
    """A window cannot be recorded, or a capture folder cannot be delivered or opened."""


class GraphError(InstrumentError):
    """A model cannot be captured as a graph, or a captured graph does not fit a call of the model."""


class TraceError(InstrumentError):
    """A trace file is missing, empty, cut short, or not a trace."""


class MissingPackage(InstrumentError, ImportError):  # noqa: N818 - named by what it tells
    """An optional package is needed and not installed; `extra` is ours that brings it, None where none does."""

    def __init__(self, what: str, package: str, extra: str | None) -> None:
        command = f"'torch-instrument[{extra}]'" if extra else package
        super().__init__(f"{what} needs the package {package}: pip install {command}.")


def reason_of(error: BaseException) -> str:
    """What an exception says, to stand inside a sentence; its type where it says nothing, or cannot."""
    try:
        text = str(error)
    except Exception:  # of a class whose __str__ fails
        text = ""
    return text.strip().rstrip(".")[:_LONGEST_REASON] or type(error).__name__


def need_package(what: str, package: str, extra: str) -> None:
    """Make sure that an optional package is installed, without loading it.

    Raises:
        MissingPackage: it is not; `what` needs it and `extra` brings it.
    """
    found = find_spec(package)
    # A folder of that name in the current one, as trackers make them, is found too, as a package without a file.
    if found is None or found.origin is None:
        raise MissingPackage(what, package, extra)


def suggestion(given: object, known: Iterable[str], prefix: str = "", quote: str = "") -> str:
    """The end of a sentence about an unknown name; empty where none that is known is near."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {quote}{prefix}{near[0]}{quote}?" if near else ""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest of those known, or all where none is near."""
    names = list(known)
    everything = f"; it knows {', '.join(map(repr, names))}." if names else "."
    return suggestion(given, names, quote="'") or everything
