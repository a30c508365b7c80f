"""`instrument show`: print tables of a capture, of a trace, or of a timings file."""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from instrument.base.errors import ConfigError
from instrument.base.prose import wrapped
from instrument.cli.arguments import (
    CAPTURE,
    ROWS,
    ROWS_HELP,
    add_formats,
    add_ignore,
    add_scope,
    column_names,
    path_or_url,
    positive,
    row_count,
    scoped,
)
from instrument.cli.output import Parts, Written, say
from instrument.cli.paths import newest_capture, tell_others
from instrument.read.facts.schema import Grouping
from instrument.read.views.json_text import json_text
from instrument.read.views.views import VIEWS

HELP = "print the verdict, the range tree and the costliest operators, or another view"

# The view that each option prints.
OPTIONS = {view.option: name for name, view in VIEWS.items() if view.option}
_STACK_DEPTH = 5
GROUPINGS = ("name", *get_args(Grouping))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Print what slows a step and what to change, the range tree and the costliest operators "
        "of a capture; or only the views that the options name."
    )
    add = parser.add_argument
    add("path", metavar="PATH", type=path_or_url, help=CAPTURE)
    add(
        "--sort",
        metavar="KEY",
        help="column to sort by; torch's names work too (default: operators by self time)",
    )
    add("--rows", metavar="N", type=row_count, help=ROWS_HELP)
    add(
        "--by",
        choices=GROUPINGS,
        default="name",
        help="group operators by name and by this property; kernels too by layer",
    )
    add(
        "--stack-depth",
        metavar="N",
        type=positive,
        help=f"with --by stack: how many frames a stack has (default: {_STACK_DEPTH})",
    )
    add(
        "--columns",
        metavar="A,B",
        type=column_names,
        help="columns to show (default: the main columns); all: every column with values",
    )
    for option, name in OPTIONS.items():
        add(f"--{option}", dest="views", action="append_const", const=name, help=VIEWS[name].help)
    add(
        "--like",
        metavar="OTHER",
        type=path_or_url,
        help="a capture or trace of the same program whose layers are recorded, such as one "
        "without CUDA graphs: kernels in the same order have its layers",
    )
    add_scope(parser)
    timings = "show only the timings of a run with profiler.timings; PATH may be a timings file"
    add("--timings", action="store_true", help=timings)
    add_ignore(parser)
    add_formats(
        parser,
        json="print the views as JSON, with all columns and with times in nanoseconds",
        csv="print one view as CSV, with times in nanoseconds; a text that a spreadsheet would "
        "run as a formula gets an apostrophe before it",
    )


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the tables that the options ask for, as text, JSON or CSV."""
    from instrument.read.advise.settings import read_settings
    from instrument.read.show.remarks import incomplete
    from instrument.read.show.text import (
        as_csv,
        as_json,
        capture_parts,
        missing_part,
        sort_keys,
        view_part,
    )
    from instrument.read.show.verdict import first_parts
    from instrument.read.views.layers import layer_evidence
    from instrument.read.views.table import ALL

    timings = arguments.timings or str(arguments.path).endswith(".jsonl")
    is_part = arguments.within or arguments.stream or arguments.where
    chosen = arguments.views or (["operators"] if is_part else ["ranges", "operators"])
    grouped = ("operators", "kernels") if arguments.by == "layer" else ("operators",)
    if arguments.by != "name" and (timings or not {*grouped}.intersection(chosen)):
        raise ConfigError(
            f"--by {arguments.by} groups the table of {' and '.join(grouped)}, which is not shown: "
            "add --ops, or remove --by."
        )
    if arguments.stack_depth is not None and arguments.by != "stack":
        raise ConfigError(
            "--stack-depth is the number of frames by which --by stack groups: add --by stack, or "
            "remove --stack-depth."
        )
    if timings:
        return _timings(arguments)
    if arguments.csv and len({*chosen}) > 1:
        raise ConfigError(
            "--csv prints one table, but several were chosen: give one view, such as --ranges or "
            "--ops."
        )
    capture = newest_capture(arguments.path)
    capture.like = arguments.like and newest_capture(arguments.like)
    capture = scoped(capture, arguments)
    depth = arguments.stack_depth or _STACK_DEPTH
    grouping = {"by": arguments.by, "stack_depth": depth}
    options = {"rows": arguments.rows or sys.maxsize, "sort": arguments.sort, **grouping}
    if arguments.json:
        return Written(as_json(capture, chosen, **options))
    if arguments.csv:
        if missing := incomplete(capture, chosen):
            say(missing)
        table = as_csv(capture, chosen[0], columns=arguments.columns, **options)
        return Written(table.rstrip("\n"))
    rows = arguments.rows or ROWS
    own = {name: name in chosen for name in ("ranges", "operators")}
    settings = read_settings(arguments.ignore)
    first = first_parts(capture, settings) if all(own.values()) else []
    sort, sort_ranges = sort_keys(arguments.sort, **own) if any(own.values()) else (None, None)
    parts = capture_parts(
        capture,
        rows=rows,
        sort=sort,
        sort_ranges=sort_ranges,
        columns=arguments.columns if any(own.values()) else None,
        by=arguments.by,
        stack_depth=depth,
        **own,
    )
    others = [view for view in dict.fromkeys(chosen) if view not in ("ranges", "operators")]
    options = {"sort": arguments.sort, "columns": arguments.columns}
    for view in others:
        shown = ALL if view == "coverage" and arguments.rows is None else rows
        by_layer = view == "kernels" and arguments.by == "layer"
        found = capture.kernels_by_layer() if by_layer else getattr(capture, view)
        parts.append(view_part(view, found, rows=shown, **options))
        if view == "layers" and (known := layer_evidence(capture)) is not None:
            parts.append(wrapped(f"{known}"))
    return [*first, *parts, *missing_part(capture, chosen)]


def _timings(arguments: argparse.Namespace) -> str | Parts:
    from instrument.read.show.text import chosen_columns, view_part
    from instrument.read.views.find_captures import timings_at
    from instrument.read.views.timings_file import read_timings

    *others, newest = timings_at(arguments.path)
    tell_others(newest, others, "files of timings")
    table, heading = read_timings(newest)
    options = {"sort": arguments.sort, "columns": arguments.columns}
    part = view_part("timings", table, rows=arguments.rows or ROWS, **options)
    if arguments.json or arguments.csv:
        ordered = table.sort(arguments.sort) if arguments.sort else table
        shown = ordered.head(arguments.rows or len(table))
        if arguments.json:
            return Written(json_text({"timings": shown.to_dicts()}))
        csv = chosen_columns("timings", shown, arguments.columns).to_csv()
        return Written(csv.rstrip("\n"))
    return [heading, part]
