"""Tables as text and HTML. A table is given as its columns: lists of cells by name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from instrument.analysis.schema import unit_of
from instrument.printable import is_terminal, printable, printable_lines
from instrument.templates import render
from instrument.units import count, counted, duration, rate, size

Columns = Mapping[str, Sequence[Any]]

# Columns whose text is never shortened.
_SENTENCES = frozenset({"why"})
# How a cell is shown in each unit.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "ns": duration,
    "bytes": size,
    "bytes/s": rate,
    "flops": count,
    "flops/s": count,
    "share": "{:.1%}".format,
}
# How many rows of a table an interpreter or a notebook shows.
_SHOWN_ROWS = 20


def with_values(columns: Columns) -> list[str]:
    """Return the names of the columns that hold a value, or all names if there are no rows."""
    return [
        name
        for name, cells in columns.items()
        if not len(cells) or any(cell is not None for cell in cells)
    ]


def abridged(columns: Columns) -> tuple[Columns, list[str]]:
    """Return the first rows of the columns with values, and notes on what is left out."""
    known = with_values(columns)
    unknown = [name for name in columns if name not in known]
    more = len(next(iter(columns.values()), ())) - _SHOWN_ROWS
    notes = [f"… and {more} more rows"] if more > 0 else []
    if unknown:
        notes.append(f"Columns without values: {', '.join(unknown)}.")
    return {name: columns[name][:_SHOWN_ROWS] for name in known}, notes


def to_html(columns: Columns) -> str:
    """Return the first rows as HTML. Tooltips show exact values, bars show shares."""
    shown, notes = abridged(columns)
    return render(
        "report/templates/table.html",
        columns=shown,
        rows=[*zip(*shown.values())],
        notes=notes,
        side={name: "left" if is_text(cells) else "right" for name, cells in shown.items()},
        heading=heading,
        cell_text=cell_text,
        exact_text=_exact_text,
        is_share=lambda name: unit_of(name) == "share",
    )


def fitted(columns: Columns, name_width: int) -> str:
    """Return the table as text. On a terminal, columns that do not fit are left out, with a note.

    The first column always stays. Of the others, numbers have priority over text, which is wider.
    Columns without values have the lowest priority.
    """
    if not is_terminal(sys.stdout):
        return to_text(columns, name_width=name_width)
    left, known, names = shutil.get_terminal_size().columns, with_values(columns), [*columns]
    others = sorted(names[1:], key=lambda name: (name not in known, is_text(columns[name])))
    shown: set[str] = set()
    for name in (*names[:1], *others):
        cells = (cell_text(name, value, name_width) for value in columns[name])
        width = max(len(heading(name)), *map(len, cells))
        if width <= left or not shown:
            shown.add(name)
            left -= width + 2
    chosen = {name: cells for name, cells in columns.items() if name in shown}
    text = to_text(chosen, name_width=name_width)
    if len(shown) == len(columns):
        return text
    more = counted(len(columns) - len(shown), "more column")
    return f"{text}\n{more}: `.columns` names all, `.select([…])` chooses some."


def to_text(
    columns: Columns,
    *,
    name_width: int = 60,
    texts: Mapping[str, Callable[[Any], str]] | None = None,
) -> str:
    """Return a table as aligned plain text, with times, bytes and counts in readable units.

    Text longer than `name_width` characters is shortened in the middle. An unknown cell is "-".
    `texts` maps the name of a column to a function that returns the text of a cell. All other
    columns have the text of `cell_text`.
    """
    padded = []
    for name, cells in columns.items():
        body = [cell_text(name, cell, name_width, texts) for cell in cells]
        width = max(map(len, [heading(name), *body]))
        pad = str.ljust if is_text(cells) else str.rjust
        padded.append([pad(text, width) for text in (heading(name), "-" * width, *body)])
    lines = ["  ".join(row).rstrip() for row in zip(*padded)] or ["", ""]
    return printable_lines(*lines)


def is_text(values: Sequence[Any]) -> bool:
    """Whether a column holds text, and not numbers. Text is aligned left, numbers right."""
    first = next((value for value in values if value is not None), None)
    return not isinstance(first, int | float)


def heading(name: str) -> str:
    """Return a column's title: its name in words, without the unit, because cells show the unit."""
    if name == "peak_ns":
        return "peak at"
    name = name.removesuffix("_ns").replace("_ns_", "_")  # the cell carries the unit
    for ending, word in (("_bytes_per_second", " bandwidth"), ("_message_bytes", " message")):
        name = name.replace(ending, word)
    words = name.replace("_bytes", " memory").replace("_", " ").split(" ")
    return " ".join("CPU" if word == "cpu" else word for word in words)


def cell_text(
    column: str,
    value: Any,
    width: int = 60,
    texts: Mapping[str, Callable[[Any], str]] | None = None,
) -> str:
    """Return a cell as one line of text, with its unit.

    An unknown cell is "-". Text longer than `width` characters is shortened in the middle, unless
    the column holds sentences. `texts` has the same meaning as in `to_text`.
    """
    if value is None:
        return "-"
    if as_text := (texts or {}).get(column) or _TEXTS.get(unit_of(column)):
        return as_text(value)
    text = f"{value:.3g}" if isinstance(value, float) else printable(str(value))
    return (
        text if column in _SENTENCES or len(text) <= width else f"{text[: width - 16]}…{text[-15:]}"
    )


def _exact_text(column: str, value: Any) -> str:
    """The text of a cell without rounding, with its unit, for a tooltip."""
    if not isinstance(value, int | float):
        return printable(str(value))
    return f"{value:,} {unit_of(column)}".removesuffix("share").rstrip()
