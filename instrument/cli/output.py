"""Print the result of a command on stdout, fitted to the terminal, and remarks on stderr.

Commands print only through this module: nothing that they print can forge a line.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from instrument.base.errors import ConfigError, TraceWarning
from instrument.base.printable import is_terminal, printable_lines

if TYPE_CHECKING:
    from instrument.read.views.section import Part

# The result of a command that shows tables: text and tables, in the order of printing.
Parts: TypeAlias = "Sequence[Part]"


class Written(str):
    """A text of several lines whose names are already escaped: JSON, CSV, Markdown, plain text.

    Any other text that a command prints is one line, in which line breaks are escaped.
    """

    __slots__ = ()


class Result(NamedTuple):
    """What a command shows, and its exit status."""

    shown: str | Parts
    status: int = 0


def show_result(result: str | Parts) -> None:
    """Print the result of a command: a line, a `Written`, or tables drawn to fit the terminal.

    If stdout is a file, a pipe or a terminal without control sequences (TERM=dumb), tables are
    printed as plain text of at most 140 columns.

    Raises:
        ConfigError: the process has no stdout.
    """
    if sys.stdout is None:  # the shell closed it: `>&-`
        raise ConfigError("The result cannot be printed, because stdout is closed.")
    with suppress(AttributeError, ValueError):  # stdout may be another kind of object
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if isinstance(result, str):
        lines = result.split("\n") if isinstance(result, Written) else [result]
        print(printable_lines(*lines), flush=True)
    elif is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb":
        from instrument.read.show.terminal import draw

        print(draw(result), end="", flush=True)
    else:
        from instrument.read.views.layout import plain

        print(plain(result), flush=True)


def say(*lines: str) -> None:
    """Print lines on stderr, if there are any, with control characters escaped.

    Nothing is printed if stderr is closed, or if nobody reads it.
    """
    if lines and sys.stderr is not None:  # print() would take stdout instead
        with suppress(OSError, ValueError):
            print(printable_lines(*lines), file=sys.stderr)


@contextmanager
def saying_warnings() -> Iterator[None]:
    """Within the block, print each warning about a trace as one line on stderr."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any) -> None:
            if issubclass(category, TraceWarning):
                say(str(message))
            else:
                usual(message, category, *where)

        warnings.simplefilter("default", TraceWarning)
        warnings.showwarning = show  # type: ignore[assignment] # `where` goes on unchanged
        yield


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """If the block cannot write `target`, raise an error that says so in one sentence.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror or error}): name a file in an existing "
            "folder that you may write to."
        ) from None
