"""The section *Tables*: the operators, kernels, collectives, copies and other views as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instrument.analysis.table import Schema, Table, heading, is_text, known_columns, unit_of
from instrument.analysis.views import VIEWS, Views
from instrument.report.notebook import without_ranges

# The maximum number of rows of a table; the limit keeps the page small.
_MOST_ROWS = 1000
_OPERATORS = (
    "name", "calls", "self_cpu_ns", "share", "cpu_ns", "cpu_ns_per_call", "self_device_ns",
    "device_share", "device_ns", "device_ns_per_call", "self_cpu_bytes", "self_device_bytes",
    "flops", "kind",
)  # fmt: skip
# For each view on the page: its title, and the columns by which the page may sort the view. The
# first of these columns that has a known value is used. Without such a column, the view is not
# sorted.
_TABLES = {
    "operators": ("Operators", ("self_device_ns", "self_cpu_ns")),
    "efficiency": ("Matrix products, convolutions and attention", ("device_ns",)),
    "kernels": ("Kernels", ("device_ns",)),
    "collectives": ("Collectives", ()),
    "copies": ("Copies and memsets", ("device_ns",)),
    "launches": ("Launches", ("launch_ns",)),
    "synchronisations": ("Waits for the device", ()),
    "cuda_graphs": ("CUDA graphs", ()),
    "streams": ("Streams", ()),
    "interruptions": ("Interruptions", ()),
}


def section(capture: Views) -> list[dict[str, Any]] | None:
    """Return the tables that have rows; None if no table has rows.

    The table of operators leaves out the rows that are no operators, such as ranges. The keys of a
    table:

    - `name`, `title`: the name and the title of the view.
    - `left_out`: the number of rows that are left out, because a table has at most 1000 rows.
    - `columns`, `cells`: see `as_columns`.
    """
    found = []
    for name, (title, sort_keys) in _TABLES.items():
        table = getattr(capture, name)
        if name == "operators":
            table = without_ranges(table).select(_OPERATORS)
        if not len(table):
            continue
        known = known_columns(table)
        by = next((key for key in sort_keys if key in known), None)
        ordered = table if by is None else table.sort(by)
        found.append(
            {
                "name": name,
                "title": title,
                "left_out": max(len(table) - _MOST_ROWS, 0),
                **as_columns(ordered.head(_MOST_ROWS).select(known), VIEWS[name].schema),
            }
        )
    return found or None


def as_columns(table: Table, columns: Schema = ()) -> dict[str, Any]:
    """Return a table as JSON values, with times since the start of the recording.

    The keys:

    - `columns`: for each column its `name`, `title`, `unit` (see
      `instrument.analysis.table.unit_of`), `doc` and `is_text`.
    - `cells`: for the name of each column, the list of its cells. An unknown cell is None.

    Args:
        table: the table.
        columns: the columns with their documentation. For other columns, `doc` is None.
    """
    docs = {column.name: column.doc for column in columns}
    relative = table.since_begin()
    return {
        "columns": [
            _column(name, relative.column(name), docs.get(name)) for name in relative.columns
        ],
        "cells": {name: relative.column(name) for name in relative.columns},
    }


def _column(name: str, cells: Sequence[Any], doc: str | None) -> dict[str, Any]:
    unit = unit_of(name)
    return {
        "name": name,
        "title": heading(name),
        "unit": unit,
        "doc": doc,
        "is_text": is_text(cells) and not unit,  # a column with a unit may have no values
    }
