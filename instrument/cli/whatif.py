"""`instrument whatif`: simulate the steps of a capture with faster or removed parts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

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

    _Parser: TypeAlias = Callable[[str], Edit]

HELP = "compute how long a step would take with faster or removed parts"

_PART = "(range|operator|layer|kernel):(.+)"
_NUMBER = r"(\d+(?:\.\d*)?(?:e-?\d+)?|\.\d+)"


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
        add(option, metavar=metavar, dest="edits", action="append", type=parse, help=text, **more)

    edit(
        "--scale",
        "KIND:GLOB=FACTOR",
        _parser(
            f"{_PART}={_NUMBER}",
            "KIND:GLOB=FACTOR, such as range:attention=0.5",
            lambda kind, glob, factor: lambda steps: steps.scale(**{kind: glob}, by=float(factor)),
        ),
        "let the matching parts take FACTOR times as long, such as range:attention=0.5; KIND is "
        "range, operator, layer or kernel",
    )
    edit(
        "--remove",
        "KIND:GLOB",
        _parser(
            _PART,
            "KIND:GLOB, such as kernel:*conv*",
            lambda kind, glob: lambda steps: steps.remove(**{kind: glob}),
        ),
        "remove the matching parts and the waits in these parts",
    )
    edit(
        "--overlap-copies",
        "GLOB",
        lambda glob: lambda steps: steps.overlap(copy=glob),
        "let the matching copies run at the same time as computation; without GLOB, all copies",
        nargs="?",
        const="*",
    )
    edit(
        "--asynchronous",
        "GLOB",
        lambda glob: lambda steps: steps.asynchronous(sync=glob),
        "let the matching calls return without waiting for the device; without GLOB, all calls",
        nargs="?",
        const="*",
    )
    edit(
        "--graph-launch",
        "GLOB",
        lambda glob: lambda steps: steps.graph_launch(range=glob),
        "launch each call of the matching ranges as one CUDA graph",
    )
    edit(
        "--workers",
        "N",
        _parser(
            r"([1-9]\d{0,8})",
            "a whole number of at least 1",
            lambda count: lambda steps: steps.workers(int(count)),
        ),
        "load the data in N worker processes",
    )
    edit(
        "--bandwidth",
        "FACTOR",
        _parser(
            f"(?=.*[1-9]){_NUMBER}",
            "a number greater than 0",
            lambda factor: lambda steps: steps.bandwidth(float(factor)),
        ),
        "multiply the bandwidth between ranks",
    )
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

    capture = scoped(newest_capture(arguments.path), arguments)
    name, scenario = capture.name, combined(capture, arguments.edits)
    if arguments.json:
        return Written(text.as_json(name, scenario, rows=arguments.rows or ALL))
    if arguments.csv:
        csv = text.as_csv(scenario, rows=arguments.rows or ALL, only_path=arguments.critical_path)
        return Written(csv.rstrip("\n"))
    rows = arguments.rows or ROWS
    return text.parts(name, scenario, rows=rows, only_path=arguments.critical_path)


def _parser(pattern: str, form: str, edit: Callable[..., Edit]) -> _Parser:
    """Return a function that makes an edit of a text of this form, from the groups of `pattern`."""

    def parse(text: str) -> Edit:
        found = re.fullmatch(pattern, text)
        if found is None:
            raise argparse.ArgumentTypeError(f"must be {form}, not {text!r}")
        return edit(*found.groups())

    return parse
