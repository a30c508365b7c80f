"""The parts of a text: paragraphs, and tables with the rules for making them narrower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from instrument.read.views.table import Table

# If a user gives this word instead of column names, all columns that hold a value are shown.
EVERY_COLUMN = "all"
# The width of plain text in characters. Some tables are still wider.
TEXT_WIDTH = 140


@dataclass(frozen=True)
class Section:
    """A table with its title, and the rules for making it narrower.

    Attributes:
        table: the rows. The table may have more columns than are shown.
        columns: the columns to show, in order.
        title: the line above the table; may be empty.
        chosen: whether the reader chose these columns by name; if so, no column is left out.
        missable: the columns to leave out first, in this order, if the table is too wide.
        key: the column by which the rows are sorted, or None; it is never left out.
        below: for each row, the lines to show below it; empty if no row has lines below it.
        sentences: whether the lines in `below` are sentences, which are wrapped. Other lines, such
            as the frames of a stack, are shortened.
        is_tree: whether the names form a tree: each is indented by two blanks per level of `depth`.
        text_width: the maximum number of characters in a line of plain text; None means no limit.
        narrowest: the least width of the column of names, in characters.
        texts: for columns with their own format, the function that formats a cell.
        of_cost: whether large shares are drawn in warm colours, because they are shares of a cost,
            such as the time of a step.
        rest: the number of rows at the end that sum what no row shows; they have no warm colours.
        all_columns: the option that shows all columns, even if the table is too wide. If it is
            empty, no line names the columns that are left out.
        has_header: whether the names of the columns are above the rows.
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
    narrowest: int = 28
    texts: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)
    of_cost: bool = False
    rest: int = 0
    all_columns: str = "--columns all"
    has_header: bool = True


#: A part of a text: one line, a paragraph of several lines, or a table. A line break within a line
#: is escaped when the text is written, so that a name cannot forge a line.
Part: TypeAlias = "str | list[str] | Section"


def lines_of(part: str | list[str]) -> list[str]:
    """Return the lines of a paragraph."""
    return [part] if isinstance(part, str) else part


def shown_of(shown: int, rows: int) -> str:
    """Return how many rows of a table are shown, for its title; "" if all rows are shown."""
    return "" if shown >= rows else f", {shown} of {rows}"


def is_every_column(columns: Sequence[str] | None) -> bool:
    """Whether the reader asked for all columns that hold a value (`--columns all`)."""
    return columns is not None and [*columns] == [EVERY_COLUMN]
