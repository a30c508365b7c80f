"""The columns of a view, and what the end of a column's name says."""

from __future__ import annotations

from typing import Literal, NamedTuple

# Columns that hold points in time; other columns in nanoseconds hold durations.
POINTS = frozenset({"start_ns", "end_ns", "time_ns", "peak_ns", "since_ns"})
# The properties by which `operators_by` can group, together with the name.
Grouping = Literal[
    "input_shapes",
    "input_types",
    "stack",
    "overload",
    "thread",
    "step",
    "device",
    "range",
    "layer",
]


class Column(NamedTuple):
    """One column of a view. The end of the column's name gives the unit; see `unit_of`.

    Attributes:
        name: the column's name.
        doc: what a cell holds, and when it is None.
    """

    name: str
    doc: str


#: The columns of a view, in order.
Schema = tuple[Column, ...]


def schema(**docs: str) -> Schema:
    """Make the schema of a view from each column's name and description."""
    return tuple(Column(name, doc) for name, doc in docs.items())


def names_of(columns: Schema) -> list[str]:
    """Return the names of a view's columns."""
    return [column.name for column in columns]


def unit_of(column: str) -> str:
    """Return the unit of a column from the end of the column's name.

    The unit is "ns", "bytes", "flops", "bytes/s", "flops/s", "share" or "".
    """
    if column.endswith(("share", "_covered")) or column == "mfu":
        return "share"
    if column.endswith("_ns") or "_ns_" in column:
        return "ns"
    for unit in ("bytes", "flops"):
        if column.endswith((unit, f"{unit}_per_second")):
            return unit if column.endswith(unit) else f"{unit}/s"
    return ""
