"""`instrument sql`: answer a question in SQL about the events and segments of a capture."""

from __future__ import annotations

import argparse

from instrument.cli.arguments import (
    CAPTURE,
    ROWS,
    ROWS_HELP,
    add_formats,
    add_scope,
    path_or_url,
    row_count,
    scoped,
)
from instrument.cli.output import Parts, Written
from instrument.read.views.json_text import json_text

HELP = "answer a question in SQL about the events and segments of a capture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Print the answer to a query in SQL over two tables: events (each event, with what it "
        "caused) and segments (each step split by range and kind of time). docs/tables.md lists "
        "their columns. Nothing else can be read."
    )
    add = parser.add_argument
    example = "select name, sum(own_ns) as own_ns from events group by name order by own_ns desc"
    add("query", metavar="QUERY", help=f"such as '{example}'")
    add("path", metavar="PATH", type=path_or_url, help=CAPTURE)
    add("--rows", metavar="N", type=row_count, help=ROWS_HELP)
    add_scope(parser)
    add_formats(parser, json="print the rows as JSON", csv="print the rows as CSV")


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the answer as a table, JSON or CSV."""
    from instrument.cli.paths import newest_capture
    from instrument.read.views.section import Section, shown_of

    table = scoped(newest_capture(arguments.path), arguments).sql(arguments.query)
    if arguments.json:
        rows = table.head(arguments.rows or -1).to_dicts()
        return Written(json_text({"rows": rows}))
    if arguments.csv:
        return Written(table.head(arguments.rows or -1).to_csv().rstrip("\n"))
    shown = table.head(arguments.rows or ROWS)
    title = f"Answer{shown_of(len(shown), len(table))}"
    return [Section(shown, shown.columns, title, all_columns="")]
