"""What a table shows: the titles of columns, the texts of cells with units, and a table as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instrument.base.printable import printable
from instrument.base.prose import shortened
from instrument.base.units import count, duration, percent, rate, size
from instrument.read.facts.schema import unit_of
from instrument.read.views.templates import render

if TYPE_CHECKING:
    from instrument.read.views.table import Table

# Columns whose text is never shortened.
SENTENCES = frozenset({"why"})
# How a cell is shown in each unit.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "ns": duration,
    "bytes": size,
    "bytes/s": rate,
    "flops": count,
    "flops/s": count,
    "share": percent,
}
# The last words of columns that count, whose cells have commas: steps and ranks are numbers, too.
_COUNTS = ("calls", "allocations", "frees", "kept")
# Longer text, in characters, is shortened in HTML.
_WIDEST = 60


def to_html(shown: Table, notes: Sequence[str]) -> str:
    """Return a table as HTML, with notes below. Tooltips show exact values, bars show shares."""
    return render(
        "read/show/templates/table.html",
        columns=shown.columns,
        rows=[*shown.frame.iter_rows()],
        notes=notes,
        side={name: "left" if is_text(shown.column(name)) else "right" for name in shown.columns},
        heading=heading,
        cell_text=_short_text,
        exact_text=_exact_text,
        is_share=lambda name: unit_of(name) == "share",
    )


def is_text(values: Sequence[Any]) -> bool:
    """Whether a column holds text, and not numbers. Text is aligned left, numbers right."""
    first = next((value for value in values if value is not None), None)
    return not isinstance(first, int | float)


def heading(name: str) -> str:
    """Return a column's title: its name in words, without the unit, because cells show the unit."""
    if name == "peak_ns":
        return "peak at"
    if less := re.fullmatch(r"saving_(\d+)_ns", name):
        return f"{less[1]} % less"
    name = name.removesuffix("_ns").replace("_ns_", "_")  # the cell carries the unit
    for ending, word in (("_bytes_per_second", " bandwidth"), ("_message_bytes", " message")):
        name = name.replace(ending, word)
    words = name.replace("_bytes", " memory").replace("_", " ").split(" ")
    return " ".join("CPU" if word == "cpu" else word for word in words)


def cell_text(
    column: str, value: Any, texts: Mapping[str, Callable[[Any], str]] | None = None
) -> str:
    """Return a cell as one line of text, with its unit; an unknown cell is "-".

    `texts` maps the names of columns with their own format to a function that formats a cell.
    """
    if value is None:
        return "-"
    if as_text := (texts or {}).get(column):
        return as_text(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (with_unit := _TEXTS.get(unit_of(column))):
        return with_unit(value)
    if column.endswith(_COUNTS) and isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else printable(str(value))


def _short_text(column: str, value: Any) -> str:
    text = cell_text(column, value)
    return text if column in SENTENCES else shortened(text, _WIDEST)


def _exact_text(column: str, value: Any) -> str:
    """The text of a cell without rounding, with its unit, for a tooltip."""
    if not isinstance(value, int | float):
        return printable(str(value))
    return f"{value:,} {unit_of(column)}".removesuffix("share").rstrip()
