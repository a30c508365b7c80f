"""The parts of the page as JSON values: texts, facts, bars and tables, with numbers as text.

The scripts parts.js and table.js draw them. The `kind` of a part is `text`, `list`, `facts`,
`folded`, `choice` or `table`, as the functions below make them, or one of these:

- `bars`: `items` with `title`, `label` and `parts` (`name`, `ns`, `text`, `share`), which sum
  exactly to the time of the steps.
- `finding`: `code`, `title`, `share` (that the change saves), `saves`, `assumes`, `ends_run`,
  `terms` and `evidence`, a table or None.
- `memory`: the chart of a `device`: `time`, `reserved` (the bytes that the allocator reserved, or
  None), `series` (`name`, `bytes` and `is_grey`, whether it holds what belongs to no other series)
  and `steps`. `time`, `reserved` and `bytes` hold each value minus the value before it.

Beside the text of a cell stands the value that sorts the table. An unknown value is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from instrument.read.facts.schema import Schema, unit_of
from instrument.read.views.table import Table
from instrument.read.views.table_text import cell_text, heading, is_text

Part: TypeAlias = dict[str, Any]


def section(title: str, *parts: Part | None, heading: str | None = None) -> dict[str, Any]:
    """Return a section of the page; `heading` is its heading if that is not the title."""
    return {"title": title, "heading": heading or title, "parts": [each for each in parts if each]}


def text(words: str, style: str = "p", **more: Any) -> Part | None:
    """Return a paragraph or a heading (`style` is "h3" or "h4"); None without words."""
    return {"kind": "text", "style": style, "text": words, **more} if words else None


def listed(sentences: Iterable[str]) -> Part | None:
    """Return a list of sentences; None if there are none."""
    items = list(sentences)
    return {"kind": "list", "items": items} if items else None


def fact(label: str, value: str, note: str = "", **more: Any) -> dict[str, Any]:
    """Return a box with a label, a number and a note; `more` may hold a `tone` or a `chart`."""
    return {"label": label, "value": value, "note": note, **more}


def facts(boxes: Iterable[dict[str, Any]]) -> Part | None:
    """Return a row of boxes; None if there are none."""
    items = list(boxes)
    return {"kind": "facts", "items": items} if items else None


def folded(title: str, parts: Iterable[Part | None], **more: Any) -> Part | None:
    """Return parts below a title that unfolds them; None without parts.

    `more` may hold `note` (a text beside the title), `id` and `is_open`.
    """
    inside = [each for each in parts if each]
    return {"kind": "folded", "title": title, "parts": inside, **more} if inside else None


def choice(label: str, options: Mapping[str, Sequence[Part | None]], **more: Any) -> Part:
    """Return buttons, of which one is pressed; the parts of the pressed one are shown."""
    items = [
        {"title": title, "parts": [each for each in parts if each]}
        for title, parts in options.items()
    ]
    return {"kind": "choice", "label": label, "items": items, **more}


def step_chart(numbers: Sequence[int], duration_ns: Sequence[int]) -> dict[str, Any]:
    """Return a small chart with a column for each step."""
    return {"numbers": numbers, "ns": duration_ns}


def column(
    name: str,
    values: Sequence[Any],
    *,
    title: str | None = None,
    texts: Callable[[Any], str] | Sequence[str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a column of a table.

    Args:
        name: the name; its end gives the unit of the values.
        values: the values that sort the table.
        title: the header; None makes it from the name.
        texts: what the cells show, or a function of a value; None gives the text of `cell_text`.
        more: other keys, such as `doc`, `kind`, `notes` and `links`.
    """
    unit = unit_of(name)
    found = {
        "name": name,
        "title": heading(name) if title is None else title,
        "is_text": is_text(values) and not unit,  # a column with a unit may have no values
        "values": list(values),
        **more,
    }
    if callable(texts):
        found["texts"] = ["–" if value is None else texts(value) for value in values]
    elif texts is not None:
        found["texts"] = list(texts)
    elif not found["is_text"]:
        found["texts"] = ["–" if value is None else cell_text(name, value) for value in values]
    return found


def columns_of(table: Table, schema: Schema = (), **texts: Callable[[Any], str]) -> list[Any]:
    """Return the columns of a table, with times since the start of the recording.

    Args:
        table: the table.
        schema: the columns with their documentation.
        texts: for columns with their own format, the function that formats a cell.
    """
    docs = {each.name: each.doc for each in schema}
    relative = table.since_begin()
    return [
        column(name, relative.column(name), doc=docs.get(name), texts=texts.get(name))
        for name in relative.columns
    ]


def table(caption: str, columns: Iterable[dict[str, Any]], **more: Any) -> Part:
    """Return a table that can be sorted and filtered.

    `more` may hold `sort` (the name of the column that sorts the rows at first), `shown` (how many
    rows are shown at first), `has_filter` and `depths`, which make the rows a tree.
    """
    listed = list(columns)
    cells = {each["name"]: each.pop("values") for each in listed}
    return {"kind": "table", "caption": caption, "columns": listed, "cells": cells, **more}


def left_out(number: int, what: str = "more rows") -> Part | None:
    """Return a sentence on the rows that a table leaves out; None if it has all."""
    return text(f"{number} {what} are left out.", "soft") if number else None
