"""The tables of operators, kernels, collectives and copies, as columns with their documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instrument.analysis.table import Schema, Table, heading, is_text, known_columns, unit_of
from instrument.analysis.views import VIEWS, Views
from instrument.report.notebook import without_ranges

# The most rows of a table, so that a page stays small.
_MOST_ROWS = 1000
_OPERATORS = (
    "name", "calls", "self_cpu_ns", "share", "cpu_ns", "cpu_ns_per_call", "self_device_ns",
    "device_share", "device_ns", "device_ns_per_call", "self_cpu_bytes", "self_device_bytes",
    "flops", "kind",
)  # fmt: skip
# The views on the page, with their titles and the columns that may sort them: the first one that is
# known does. Without such a column, the view's own order stays.
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
    """Return the tables that have rows; None if there are none.

    The table of operators has no ranges, steps and waits for data. The keys of each table:

    - `name`, `title`: the name of the view, and its title.
    - `left_out`: how many rows are left out, since a page has at most 1000 of them.
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

    `columns` describes the columns; a column that it lacks has no `doc`.

    The keys: `columns`, for each column its `name`, `title`, `unit` (see
    `instrument.analysis.table.unit_of`), `doc` and `is_text`; and `cells`, the list of the cells of
    each column, by name. An unknown cell is null.
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
    return {
        "name": name,
        "title": heading(name),
        "unit": unit_of(name),
        "doc": doc,
        "is_text": is_text(cells),
    }
