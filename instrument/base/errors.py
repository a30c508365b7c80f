"""The exceptions of `instrument`.

InstrumentError
├── ConfigError      an option is wrong (also a ValueError)
├── CaptureError     a window cannot be recorded, or a capture cannot be written or opened
├── GraphError       torch cannot turn a model into an FX graph
├── TraceError       a trace file cannot be read
└── MissingPackage   an optional package is not installed (also an ImportError)

TraceWarning         a trace file is cut short (a UserWarning)

Every message is one sentence: what is wrong, the value given, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.util import find_spec

from instrument.base.printable import printable

# Some libraries put whole files into the message of an exception.
_LONGEST_REASON = 2_000
_MOST_NAMES = 30


class InstrumentError(Exception):
    """Base of all errors of `instrument`. An error's text is one line of printable characters."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(InstrumentError, ValueError):
    """An option or an argument is wrong. Sessions check their options before the first step."""


class CaptureError(InstrumentError):
    """A window cannot be recorded, or a capture cannot be written or opened."""


class GraphError(InstrumentError):
    """torch cannot turn a model into an FX graph, or the graph does not fit a call of the model."""


class TraceError(InstrumentError):
    """A trace file is missing, empty, cut short, or not a trace."""


class TraceWarning(UserWarning):
    """A trace file is cut short; what comes before the cut is used."""


class MissingPackage(InstrumentError, ImportError):  # noqa: N818 - named after the cause
    """An optional package is not installed; the message shows the `pip install` command.

    Args:
        what: the feature that needs the package.
        package: the name of that package.
        extra: the extra of torch-instrument that installs the package; None if no extra does.
    """

    def __init__(self, what: str, package: str, extra: str | None) -> None:
        command = f"'torch-instrument[{extra}]'" if extra else package
        super().__init__(f"{what} needs the package {package}: pip install {command}.")


def reason_of(error: BaseException) -> str:
    """Return an exception's message as a line without full stop; the type's name if it is empty."""
    try:
        text = str(error)
    except Exception:  # its __str__ fails
        text = ""
    text = printable(text.strip().rstrip(".")[:_LONGEST_REASON])
    if isinstance(error, MemoryError):
        return f"not enough memory ({text})" if text else "not enough memory"
    return text or type(error).__name__


def to_trace(error: BaseException) -> BaseException | None:
    """The error if its traceback says more than its message; None if the machine is the cause."""
    return None if isinstance(error, (InstrumentError, OSError, MemoryError)) else error


def need_package(what: str, package: str, extra: str | None) -> None:
    """Raise MissingPackage if `package` is not installed. This check does not load the package."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # not even the package above it
        found = None
    # wandb creates a folder `wandb` in the current folder. Python takes this folder for a package.
    # Unlike an installed package, such a package has no file.
    if found is None or found.origin is None:
        raise MissingPackage(what, package, extra)


def suggestion(given: object, known: Iterable[str], prefix: str = "", quote: str = "") -> str:
    """Return `; did you mean NAME?` with the most similar known name; "" if no name is similar."""
    near = difflib.get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {quote}{prefix}{near[0]}{quote}?" if near else ""


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the end of an error message on an unknown name: a similar name, or the first names."""
    names = list(known)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    some = f"; choose from {', '.join(map(repr, names[:_MOST_NAMES]))}{more}." if names else "."
    return suggestion(given, names, quote="'") or some
