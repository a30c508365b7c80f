"""`instrument ls`: list runs and captures, and what slows each of them most."""

from __future__ import annotations

import argparse
from pathlib import Path

from instrument.base.units import counted
from instrument.cli.arguments import ROWS, add_formats, path_or_url, row_count
from instrument.cli.output import Parts, Written
from instrument.read.views.json_text import json_text

HELP = "list runs and captures, and what slows each of them most"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "List the captures below a folder by run, the newest first. Each capture has a verdict: "
        "the title of the largest finding of `instrument diagnose`. For the verdicts, the command "
        "reads the traces. The parts of a window (profiler.max_stall_ms) have one row. Windows "
        "that are not exported yet are named, with the reason."
    )
    add = parser.add_argument
    of = "a folder that holds captures, a capture, a Chrome trace, or a URL (default: %(default)s)"
    add("path", metavar="PATH", type=path_or_url, nargs="?", default=Path(), help=of)
    add(
        "--rows",
        metavar="N",
        type=row_count,
        default=ROWS,
        help="list the N newest captures; -1 for all (default: %(default)s)",
    )
    add("--no-verdict", action="store_true", help="do not read the traces; list no verdicts")
    add_formats(parser, json="print the list as JSON", csv="print the list as CSV")


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the list of captures as text, JSON or CSV."""
    from instrument.base import queue
    from instrument.base.errors import CaptureError
    from instrument.read.show.capture_list import CAPTURES, capture_row, sections
    from instrument.read.views.find_captures import DEPTH, captures_at, windows
    from instrument.read.views.table import Table

    path = arguments.path
    queued = [] if isinstance(path, str) else queue.unfinished(path, DEPTH)
    try:
        found = captures_at(path)
    except CaptureError:
        if not queued:
            raise
        found = []
    newest = found[::-1][: arguments.rows]
    rows = [capture_row(*parts, verdict=not arguments.no_verdict) for parts in windows(newest)]
    if arguments.json:
        waiting = [
            {"run": str(each.parent), "name": queue.name_of(each), "why": queue.why(each)}
            for each in queued
        ]
        return Written(json_text({"captures": rows, "queued": waiting}))
    table = Table.of_dicts(CAPTURES, rows)
    if arguments.csv:
        return Written(table.to_csv().rstrip("\n"))
    left_out = len(found) - len(newest)
    are = "is" if left_out == 1 else "are"
    note = f"{counted(left_out, 'older capture')} {are} not listed; --rows -1 lists all."
    notes = [f"Not exported: {queue.name_of(each)}. {queue.why(each)}" for each in queued]
    if queued:
        notes.append(f"`instrument export {path}` exports what ended runs have left.")
    return [*sections(table), *([note] if left_out else []), *notes]
