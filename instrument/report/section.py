"""A table with its title, before it is drawn as plain text or on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instrument.analysis.table import Table

# Given instead of column names: all columns that hold a value.
EVERY_COLUMN = "all"
# Characters in a line of plain text, where the table can be made narrower.
TEXT_WIDTH = 140


@dataclass(frozen=True)
class Section:
    """A table with its title, and how it may be narrowed.

    Attributes:
        table: the rows; it may have more columns than are shown.
        columns: the columns to show, in order.
        title: the line above the table; may be empty.
        chosen: the reader chose these columns by name, so none is left out.
        missable: columns that plain text leaves out if the table is too wide, in this order.
        key: the column by which the rows are sorted, if any.
        below: for each row the lines below it; empty where no row has any.
        is_tree: each name is indented by two blanks for each level of the column `depth`.
        text_width: characters in a line of plain text; None for any number.
    """

    table: Table
    columns: Sequence[str]
    title: str = ""
    chosen: bool = False
    missable: Sequence[str] = ()
    key: str | None = None
    below: Sequence[Sequence[str]] = ()
    is_tree: bool = False
    text_width: int | None = TEXT_WIDTH


def is_every_column(columns: Sequence[str] | None) -> bool:
    """Whether the reader asks for all columns that hold a value."""
    return columns is not None and [*columns] == [EVERY_COLUMN]
