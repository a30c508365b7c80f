"""A table as a person is to see it, before it is drawn as plain text or on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instrument.analysis.table import Table

# In place of the names of columns: all of which something is known.
EVERY_COLUMN = "all"
# Characters in a line of plain text, where the table can be made narrower.
TEXT_WIDTH = 140


@dataclass(frozen=True)
class Section:
    """A table with its title, and what may give way where there is no room for all of it.

    Attributes:
        table: the rows; more columns than are shown.
        columns: the columns to show, in order.
        title: what stands above; may be empty.
        chosen: the reader asked for these columns by name, so that none is left out.
        missable: columns that plain text leaves out where it is too wide, the least missed first.
        key: the column that the rows are sorted by, if any.
        below: for each row the lines that stand below it; empty where no row has any.
        is_tree: each name is indented by two blanks for each level of the column `depth`.
        text_width: characters in a line of plain text; None: any number.
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
    """Whether a reader asks for all columns of which something is known."""
    return columns is not None and [*columns] == [EVERY_COLUMN]
