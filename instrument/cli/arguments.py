"""Types, defaults and help texts that several commands use for their arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instrument.read.capture import Capture

# The default number of rows of each table.
ROWS = 15
# The help of `--rows` where machine-readable output holds all rows by default.
ROWS_HELP = f"rows of each table to show; -1 shows all (default: {ROWS}; all with --json or --csv)"
# The help of an argument that names captures.
CAPTURE = "a capture, a Chrome trace, a folder that holds captures, or a URL"
CAPTURES = "a capture, a Chrome trace, a folder that holds captures or else traces, or a URL"


def add_formats(parser: argparse.ArgumentParser, **texts: str) -> None:
    """Add options such as --json, of which only one can be given; `texts` are their helps."""
    group = parser.add_mutually_exclusive_group()
    for name, text in texts.items():
        group.add_argument(f"--{name}", action="store_true", help=text)


def add_step_kind(parser: argparse.ArgumentParser) -> None:
    """Add the option that says what ends a step of a script."""
    kinds = ("optimizer", "backward", "forward")
    text = f"what ends a step: {', '.join(kinds)}"
    parser.add_argument("--step", metavar="KIND", choices=kinds, help=text)


def add_ignore(parser: argparse.ArgumentParser) -> None:
    """Add the option --ignore, for codes of findings."""
    parser.add_argument(
        "--ignore",
        metavar="CODE",
        action="append",
        default=[],
        help="leave out findings of this code, such as first-step; may be given several times, "
        "and adds to those that [tool.instrument.diagnose] in pyproject.toml names",
    )


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add the option that restricts a command to some steps."""
    parser.add_argument(
        "--step",
        metavar="N[-M]",
        help="only this step, or the steps N to M of the capture; all of them count",
    )


def add_scope(parser: argparse.ArgumentParser) -> None:
    """Add the options that restrict a command to a part of a trace."""
    add_steps(parser)
    inside = "only events in the ranges whose path fits this glob, such as 'forward/*'"
    parser.add_argument("--range", metavar="GLOB", dest="within", help=inside)
    parser.add_argument("--stream", metavar="N", help="only device work on this stream")
    condition = "only events for which this holds, in SQL over the columns of docs/tables.md, such "
    condition += "as 'device_ns > 1000000'"
    parser.add_argument("--where", metavar="WHERE", help=condition)


def chosen_steps(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """Return the first and the last step that `--step` names; None if it is not given."""
    from instrument.read.facts.scope import parsed_steps

    return None if arguments.step is None else parsed_steps(arguments.step)


def scoped(capture: Capture, arguments: argparse.Namespace) -> Capture:
    """Return the capture restricted to what the options of `add_steps` or `add_scope` name."""
    steps = chosen_steps(arguments)
    given = {name: getattr(arguments, name, None) for name in ("within", "stream", "where")}
    if steps is None and all(value is None for value in given.values()):
        return capture
    return capture.during(steps=steps, range=given.pop("within"), **given)


def path_or_url(text: str) -> Path | str:
    """Return the text as a path, or unchanged if it is a URL."""
    return text if "://" in text else Path(text)


def positive(text: str, wanted: str = "1 or more") -> int:
    """Return an integer of 1 or more; `wanted` describes the valid values in the error."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be {wanted}, not {text}")
    return number


def row_count(text: str) -> int:
    """Return a number of rows; -1 means all rows, as in torch's `row_limit`."""
    return sys.maxsize if text == "-1" else positive(text, "1 or more, or -1 for all")


def column_names(text: str) -> list[str]:
    """Return the names in a list such as `calls,cpu_ns`."""
    return [name.strip() for name in text.split(",") if name.strip()]
