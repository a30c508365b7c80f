"""`instrument whatif`: simulate the steps of a capture with faster or removed parts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from instrument.base.errors import ConfigError
from instrument.cli.arguments import (
    CAPTURE,
    ROWS,
    ROWS_HELP,
    add_formats,
    add_steps,
    path_or_url,
    row_count,
    scoped,
)
from instrument.cli.output import Parts, Written
from instrument.cli.paths import newest_capture

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit
# Makes an edit of an option and its value.
_Parser: TypeAlias = "Callable[[str, str], Edit]"

HELP = "compute how long a step would take with faster or removed parts"

_KINDS = ("range", "operator", "kernel")
# The option --workers refuses numbers of this many digits or more.
_DIGITS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Simulate the steps of a capture. Without options, print the causal profile: for each "
        "range, operator and kernel, how much shorter a step would be if this part were faster. "
        "Options such as --scale are edits. Several edits are applied one after the other, in "
        "their order on the command line. With edits, print the new step, its critical path and "
        "its causal profile. With --critical-path, print only this table.\n\n"
        "A GLOB is a pattern for names, in which * stands for any text and ? for one character."
    )
    parser.set_defaults(edits=[])
    add = parser.add_argument
    add("path", metavar="PATH", type=path_or_url, help=CAPTURE)

    def edit(option: str, metavar: str, parse: _Parser, text: str, **more: Any) -> None:
        def later(value: str) -> partial[Edit]:
            return partial(parse, option, value)

        add(option, metavar=metavar, dest="edits", action="append", type=later, help=text, **more)

    edit(
        "--scale",
        "KIND:GLOB=FACTOR",
        _scale,
        "let the matching parts take FACTOR times as long, such as range:attention=0.5; KIND is "
        "range, operator or kernel",
    )
    edit(
        "--remove",
        "KIND:GLOB",
        _remove,
        "remove the matching parts and the waits in these parts",
    )
    edit(
        "--overlap-copies",
        "GLOB",
        lambda _, glob: lambda scenario: scenario.overlap(copy=glob),
        "let the matching copies run at the same time as computation; without GLOB, all copies",
        nargs="?",
        const="*",
    )
    edit(
        "--asynchronous",
        "GLOB",
        lambda _, glob: lambda scenario: scenario.asynchronous(sync=glob),
        "let the matching calls return without waiting for the device; without GLOB, all calls",
        nargs="?",
        const="*",
    )
    edit(
        "--graph-launch",
        "GLOB",
        lambda _, glob: lambda scenario: scenario.graph_launch(range=glob),
        "launch each call of the matching ranges as one CUDA graph",
    )
    edit("--workers", "N", _workers, "load the data in N worker processes")
    edit("--bandwidth", "FACTOR", _bandwidth, "multiply the bandwidth between ranks")
    add(
        "--critical-path",
        action="store_true",
        help="print the work and the waits that determine how long a step takes",
    )
    add("--rows", metavar="N", type=row_count, help=ROWS_HELP)
    add_steps(parser)
    add_formats(
        parser,
        json="print JSON, with times in nanoseconds",
        csv="print the causal profile as CSV, or with --critical-path the critical path",
    )


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the simulated step and its tables, as text, JSON or CSV."""
    from instrument.read.show import whatif as text
    from instrument.read.simulate.scenario import combined
    from instrument.read.views.table import ALL

    edits = [parse() for parse in arguments.edits]
    capture = scoped(newest_capture(arguments.path), arguments)
    name, scenario = capture.name, combined(capture, edits)
    if arguments.json:
        return Written(text.as_json(name, scenario, rows=arguments.rows or ALL))
    if arguments.csv:
        csv = text.as_csv(scenario, rows=arguments.rows or ALL, only_path=arguments.critical_path)
        return Written(csv.rstrip("\n"))
    rows = arguments.rows or ROWS
    return text.parts(name, scenario, rows=rows, only_path=arguments.critical_path)


def _scale(option: str, value: str) -> Edit:
    kind, glob = _kind_and_glob(value.rpartition("=")[0])
    factor = _number(value.rpartition("=")[2])
    if kind not in _KINDS or not glob or factor is None or factor < 0:
        raise ConfigError(
            f"{option} is {value!r}; give KIND:GLOB=FACTOR, such as range:attention=0.5, where "
            "KIND is range, operator or kernel and FACTOR is at least 0."
        )
    chosen: dict[str, Any] = {kind: glob}
    return lambda scenario: scenario.scale(**chosen, by=factor)


def _remove(option: str, value: str) -> Edit:
    kind, glob = _kind_and_glob(value)
    if kind not in _KINDS or not glob:
        raise ConfigError(
            f"{option} is {value!r}; give KIND:GLOB, such as kernel:*conv*, where KIND is range, "
            "operator or kernel."
        )
    return lambda scenario: scenario.remove(**{kind: glob})


def _workers(option: str, value: str) -> Edit:
    count = int(value) if value.isascii() and value.isdigit() and len(value) < _DIGITS else 0
    if count < 1:
        raise ConfigError(f"{option} is {value!r}; give a whole number of at least 1, such as 4.")
    return lambda scenario: scenario.workers(count)


def _bandwidth(option: str, value: str) -> Edit:
    factor = _number(value)
    if not factor or factor < 0:
        raise ConfigError(f"{option} is {value!r}; give a number greater than 0, such as 2.")
    return lambda scenario: scenario.bandwidth(factor)


def _kind_and_glob(text: str) -> tuple[str, str]:
    kind, _, glob = text.partition(":")
    return kind, glob


def _number(text: str) -> float | None:
    """Parse a finite number; return None for any other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
