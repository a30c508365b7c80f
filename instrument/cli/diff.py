"""`instrument diff`: what changed from one capture or run to another."""

from __future__ import annotations

import argparse

from instrument.cli.arguments import ROWS, path_or_url, row_count
from instrument.cli.output import Parts

HELP = "compare two captures or runs: what a step takes more or less, and where"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Compare two captures, runs or traces. The change of the mean step is split into parts, by "
        "range and by what the time is spent on: compute, exposed communication, copy, waiting for "
        "data, launch, other CPU, idle. The parts sum to the change. Below are the operators, "
        "kernels and counters that changed."
    )
    add = parser.add_argument
    of = "a capture, a Chrome trace, the folder of a run, or a URL"
    add("before", metavar="BEFORE", type=path_or_url, help=of)
    add("after", metavar="AFTER", type=path_or_url, help="the same, after the change")
    add(
        "--by",
        choices=("range", "operator", "kernel", "shape"),
        help="as text, show only this table below the parts of the step",
    )
    add(
        "--rows",
        metavar="N",
        type=row_count,
        default=ROWS,
        help="rows of each table to show; -1 for all (default: %(default)s)",
    )
    add(
        "--force",
        action="store_true",
        help="compare captures that are too unlike as well, such as those of different devices",
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument(
        "--json", action="store_true", help="print JSON, with all rows and times in nanoseconds"
    )
    formats.add_argument(
        "--markdown", action="store_true", help="print Markdown, for a comment on a pull request"
    )


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the comparison as text, JSON or Markdown.

    Raises:
        CaptureError: a side has no capture, or the sides are too unlike to be compared.
        TraceError: the only trace of a side cannot be read.
    """
    from instrument.compare.diff import diff
    from instrument.report import diff as report

    found = diff(arguments.before, arguments.after, force=arguments.force)
    if arguments.json:
        return report.as_json(found)
    if arguments.markdown:
        return report.as_markdown(found, rows=arguments.rows)
    return report.parts(found, rows=arguments.rows, by=arguments.by)
