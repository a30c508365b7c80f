"""A table with its title: how it is made narrower, and its plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from instrument.analysis.table import Table
from instrument.printable import printable, printable_lines

# If a user gives this word instead of column names, all columns that hold a value are shown.
EVERY_COLUMN = "all"
# The width of plain text in characters. To keep this width, names are shortened and columns are
# left out. Some tables are still wider.
TEXT_WIDTH = 140
# The maximum width of sentences below a row, in characters.
SENTENCE_WIDTH = 74
_NARROWEST_NAME = 28


@dataclass(frozen=True)
class Section:
    """A table with its title, and the rules for making it narrower.

    Attributes:
        table: the rows. The table may have more columns than are shown.
        columns: the columns to show, in order.
        title: the line above the table; may be empty.
        chosen: whether the reader chose these columns by name; if so, no column is left out.
        missable: the columns to leave out first, in this order, if the table is too wide.
        key: the column by which the rows are sorted, or None.
        below: for each row, the lines to show below it; empty if no row has lines below it.
        sentences: whether the lines in `below` are sentences, which are wrapped. Other lines, such
            as the frames of a stack, are shortened.
        is_tree: whether the names form a tree: each is indented by two blanks per level of `depth`.
        text_width: the maximum number of characters in a line of plain text; None means no limit.
        texts: for columns with their own format, the function that formats a cell.
        of_cost: whether large shares are drawn in warm colours, because they are shares of a cost,
            such as the time of a step.
        all_columns: the command's option that shows all columns, even if the table is too wide.
    """

    table: Table
    columns: Sequence[str]
    title: str = ""
    chosen: bool = False
    missable: Sequence[str] = ()
    key: str | None = None
    below: Sequence[Sequence[str]] = ()
    sentences: bool = False
    is_tree: bool = False
    text_width: int | None = TEXT_WIDTH
    texts: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    of_cost: bool = False
    all_columns: str = "--columns all"


#: A part of a text: one line, a paragraph of several lines, or a table. A line break within a line
#: is escaped when the text is written, so that a name cannot forge a line.
Part: TypeAlias = "str | list[str] | Section"


def shown_of(shown: int, rows: int) -> str:
    """Return how many rows of a table are shown, for its title; "" if all rows are shown."""
    return "" if shown >= rows else f", {shown} of {rows}"


def is_every_column(columns: Sequence[str] | None) -> bool:
    """Whether the reader asked for all columns that hold a value (`--columns all`)."""
    return columns is not None and [*columns] == [EVERY_COLUMN]


def plain(parts: Iterable[Part]) -> str:
    """Return parts as plain text, with an empty line between them."""
    return "\n\n".join(
        printable_lines(*(_section_lines(part) if isinstance(part, Section) else lines_of(part)))
        for part in parts
    )


def lines_of(part: str | list[str]) -> list[str]:
    """Return the lines of a paragraph."""
    return [part] if isinstance(part, str) else part


def _section_lines(section: Section) -> list[str]:
    text, left_out = _fitted(section)
    lines = text.splitlines()
    if section.below:
        fit = _wrapped if section.sentences else _shortened
        rows = zip(lines[2:], section.below)
        lines = lines[:2]
        for row, below in rows:
            lines += [row, *(f"    {line}" for each in below for line in fit(each))]
    note = f"Too wide to show: {', '.join(left_out)}." if left_out else ""
    return [*filter(None, [section.title, *lines, note])]


def _wrapped(sentence: str) -> list[str]:
    return textwrap.wrap(printable(sentence), SENTENCE_WIDTH)


def _shortened(line: str) -> list[str]:
    return [textwrap.shorten(printable(line), TEXT_WIDTH - 20, placeholder=" …")]


def _fitted(section: Section) -> tuple[str, list[str]]:
    """Return the table as text, and the names of the columns that were left out to make it fit.

    The cells of the column `name` are shortened first. If that is not enough, columns of `missable`
    are left out, in their order. No other column is left out.
    """
    table, shown, most = section.table, [*section.columns], section.text_width
    if most is None:
        return table.select(shown).to_text(texts=section.texts), []
    left_out = []
    for name in section.missable:
        if name in shown and _width(_narrowest(section, shown)) > most:
            shown.remove(name)
            left_out.append(name)
    for width in range(60, _NARROWEST_NAME, -4):
        text = table.select(shown).to_text(name_width=width, texts=section.texts)
        if _width(text) <= most:
            return text, left_out
    return _narrowest(section, shown), left_out


def _narrowest(section: Section, shown: Sequence[str]) -> str:
    table = section.table.select(shown)
    return table.to_text(name_width=_NARROWEST_NAME, texts=section.texts)


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))
