"""`Table`: a polars frame with units, printed as text or HTML; the type of every view."""

from __future__ import annotations

import csv
import re
import shutil
import textwrap
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from io import StringIO
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, get_args

import polars as pl

from instrument.base.errors import MissingPackage
from instrument.base.printable import printable
from instrument.base.prose import PROSE_WIDTH
from instrument.read.facts.expressions import rows_where
from instrument.read.facts.schema import POINTS, Grouping, Schema, names_of, unit_of

if TYPE_CHECKING:
    import pandas
    import pyarrow

# As a number of rows, -1 means all rows, as in torch's `row_limit`.
ALL = -1
# How many rows of a table an interpreter or a notebook shows.
_SHOWN_ROWS = 20
# The prefixes of device columns in torch's own tables.
DEVICE_KINDS = ("cuda", "xpu", "mtia", "hpu", "privateuse1", "device")
# Column names of torch's own tables, accepted as sort keys.
TORCH_NAMES = {
    "key": "name",
    "count": "calls",
    "cpu_time_total": "cpu_ns",
    "self_cpu_time_total": "self_cpu_ns",
    "cpu_memory_usage": "cpu_bytes",
    "self_cpu_memory_usage": "self_cpu_bytes",
    **{f"{kind}_time_total": "device_ns" for kind in DEVICE_KINDS},
    **{f"self_{kind}_time_total": "self_device_ns" for kind in DEVICE_KINDS},
    **{f"{kind}_memory_usage": "device_bytes" for kind in DEVICE_KINDS},
    **{f"self_{kind}_memory_usage": "self_device_bytes" for kind in DEVICE_KINDS},
}
# Where a formula for a spreadsheet could begin. Some split cells at semicolons, skip blanks, and
# read full-width signs.
_FORMULA = re.compile(r"(^|;)(?=\s*[=+\-@＝＋－＠])")
_OF_PANDAS = {
    pl.Boolean: "boolean", pl.Int64: "Int64", pl.Float64: "Float64", pl.String: "string",
}  # fmt: skip
_NARROW = frozenset({pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64})


class Table:
    """Rows with named columns: the type of every view of a capture.

    A cell whose value is not known is None, never 0. Iterating and indexing give rows as named
    tuples. `sort`, `head`, `where` and `select` return new tables and leave this one unchanged.

    `begin_ns` is the start of the recording on the trace's own clock. The cells of the columns in
    `POINTS` are times on the same clock. Printed tables show the time since `begin_ns` instead.

    Attributes:
        frame: the rows as a polars data frame, for all that a table has no method for.

    Examples:
        >>> table = Table(
        ...     {
        ...         "name": ["aten::relu", "aten::mm"],
        ...         "calls": [2, 1],
        ...         "self_cpu_ns": [5_000, 2_500_000],
        ...     }
        ... )
        >>> table.sort("self_cpu_ns")
        name        calls  self CPU
        ----------  -----  --------
        aten::mm        1  2.500 ms
        aten::relu      2  5.000 µs
        >>> [row.name for row in table.where(calls=2)]
        ['aten::relu']
        >>> table.where("self_cpu_ns > 1000000")[0].self_cpu_ns
        2500000
    """

    def __init__(self, columns: Mapping[str, Any] | pl.DataFrame, *, begin_ns: int = 0) -> None:
        """Make a table of a frame, or of columns: lists, numpy arrays or polars series.

        Raises:
            ValueError: the columns are not equally long.
        """
        self._begin_ns = begin_ns
        self._chosen = False  # whether `select` chose the columns
        if isinstance(columns, pl.DataFrame):
            self.frame = columns
            return
        lengths = {name: len(cells) for name, cells in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The columns of a table must be equally long, not {lengths}.")
        self.frame = pl.DataFrame([_series(name, cells) for name, cells in columns.items()])

    @classmethod
    def of(
        cls, columns: Schema, cells: Mapping[str, Any] | pl.DataFrame, *, begin_ns: int = 0
    ) -> Table:
        """Make the table of a view from its cells, in the order of the schema.

        Raises:
            ValueError: the names of the cells differ from the names in the schema.
        """
        names, given = names_of(columns), list(getattr(cells, "columns", cells))
        if set(names) != set(given):
            raise ValueError(
                f"There are cells for {sorted(given)}, but the view has the columns {names}."
            )
        if isinstance(cells, pl.DataFrame):
            return cls(cells.select(names), begin_ns=begin_ns)
        return cls({name: cells[name] for name in names}, begin_ns=begin_ns)

    @classmethod
    def of_rows(cls, columns: Schema, rows: Sequence[Sequence[Any]], *, begin_ns: int = 0) -> Table:
        """Make the table of a view from its rows, with their cells in the order of the schema."""
        cells = {name: [row[k] for row in rows] for k, name in enumerate(names_of(columns))}
        return cls(cells, begin_ns=begin_ns)

    @classmethod
    def of_dicts(
        cls, columns: Schema, rows: Sequence[Mapping[str, Any]], *, begin_ns: int = 0
    ) -> Table:
        """Make the table of a view from its rows as mappings; missing cells are unknown."""
        cells = {name: [row.get(name) for row in rows] for name in names_of(columns)}
        return cls(cells, begin_ns=begin_ns)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self.frame.columns)

    def column(self, name: str) -> list[Any]:
        """Return the values of a column.

        `name` is the column's name, or torch's name for it, such as `self_cpu_time_total`.

        Raises:
            KeyError: the table has no such column. The message lists the columns of the table.
        """
        return self.frame[self._named(name)].to_list()

    def __len__(self) -> int:
        return self.frame.height

    def __iter__(self) -> Iterator[Any]:
        return map(_row(self.columns)._make, self.frame.iter_rows())

    def __getitem__(self, index: int) -> Any:
        return _row(self.columns)._make(self.frame.row(index))

    def sort(self, by: str, *, descending: bool | None = None) -> Table:
        """Return the rows ordered by one column, with unknown cells last.

        Numbers go from high to low and text from A to Z, unless `descending` is given. Rows with
        equal cells keep their order.
        """
        by = self._named(by)
        if descending is None:
            descending = self.frame.schema[by] != pl.String
        frame = self.frame.sort(by, descending=descending, nulls_last=True, maintain_order=True)
        return self._with(frame)

    def head(self, rows: int) -> Table:
        """Return the first `rows` rows; -1 means all rows, as in torch's `row_limit`."""
        return self if rows == ALL else self._with(self.frame.head(rows))

    def where(self, condition: str | None = None, /, **equal: Any) -> Table:
        """Return the rows for which a condition in SQL holds, and whose cells equal the given ones.

        A condition is not true for an unknown cell: `where("flops > 1e9")` needs no check for it.
        `where(flops=None)` finds the rows with unknown cells.

        Raises:
            ConfigError: the condition is not an expression of SQL over the table's columns.
            KeyError: the table lacks one of the columns.
        """
        tests = [pl.col(self._named(name)).eq_missing(value) for name, value in equal.items()]
        frame = self.frame
        if condition is not None:
            frame = frame.filter(rows_where(condition, frame))
        return self._with(frame.filter(*tests))

    def select(self, columns: Sequence[str]) -> Table:
        """Return the rows with only these columns, in this order.

        Raises:
            KeyError: the table lacks one of the columns.
            TypeError: `columns` is one text instead of a list of names.
        """
        if isinstance(columns, str):
            raise TypeError(f"select() needs a list of names: write select([{columns!r}]).")
        selected = self._with(self.frame.select([self._named(name) for name in columns]))
        selected._chosen = True
        return selected

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas data frame with nullable dtypes: integers stay integers."""
        package = _package("pandas", "Table.to_pandas()", "pandas")
        return package.DataFrame(
            {
                name: package.array(
                    self.column(name), dtype=_OF_PANDAS.get(dtype.base_type(), object)
                )
                for name, dtype in self.frame.schema.items()
            }
        )

    def to_arrow(self) -> pyarrow.Table:
        """Return an Arrow table; unknown cells are null."""
        _package("pyarrow", "Table.to_arrow()", "arrow")
        return self.frame.to_arrow(compat_level=pl.CompatLevel.oldest())

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict for each row. Its keys are the names of the columns."""
        return self.frame.to_dicts()

    def to_csv(self) -> str:
        """Return the table as CSV with a header; an unknown cell is empty.

        Numbers are not rounded. An apostrophe is put before text, perhaps from a stranger, that a
        spreadsheet could take for a formula: text that begins with =, +, - or @, also after blanks
        or a semicolon. Characters that do not print are escaped. Other formats keep text unchanged.
        """
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_csv_cell(value) for value in row] for row in self.frame.iter_rows())
        return text.getvalue()

    def since_begin(self) -> Table:
        """Return the table with each point in time as the time since the recording began."""
        points = POINTS.intersection(self.columns) if self._begin_ns else ()
        return Table(self.frame.with_columns(pl.col(name) - self._begin_ns for name in points))

    def __str__(self) -> str:
        """The table as text with all rows, as wide as the terminal, or 80 characters without one.

        Columns that do not fit are left out, and named below; those of `select` follow below.
        """
        from instrument.read.views import layout  # a program may read tables and print none
        from instrument.read.views.section import Section
        from instrument.read.views.table_text import is_text

        texts = [name for name in self.columns if is_text(self.column(name))]
        group = next((name for name in self.columns[:2] if name in get_args(Grouping)), None)
        section = Section(
            self, self.columns, "", self._chosen, texts, group, all_columns=".select([…])"
        )
        return layout.text(section, shutil.get_terminal_size().columns)

    def __repr__(self) -> str:
        shown, notes = self._abridged()
        width = max(shutil.get_terminal_size().columns, PROSE_WIDTH)
        return "\n".join([str(shown), *(textwrap.fill(note, width) for note in notes)])

    def _repr_html_(self) -> str:
        """The first rows as HTML, for a notebook."""
        from instrument.read.views.table_text import to_html

        shown, notes = self._abridged()
        return to_html(shown.since_begin(), notes)

    __html__ = _repr_html_  # for templates that contain a table

    def _abridged(self) -> tuple[Table, list[str]]:
        """The first rows of the columns with values, and notes on what is left out."""
        known = known_columns(self)
        more = len(self) - _SHOWN_ROWS
        notes = [f"… and {more} more rows"] if more > 0 else []
        if unknown := [name for name in self.columns if name not in known]:
            notes.append(f"Columns without values: {', '.join(unknown)}.")
        return self._with(self.frame.select(known)).head(_SHOWN_ROWS), notes

    def _with(self, frame: pl.DataFrame) -> Table:
        table = Table(frame, begin_ns=self._begin_ns)
        table._chosen = self._chosen
        return table

    def _named(self, name: str) -> str:
        found = TORCH_NAMES.get(name, name)
        if found not in self.frame.columns:
            raise KeyError(f"The table has no column {name!r}; it has {', '.join(self.columns)}.")
        return found


@lru_cache
def _row(columns: tuple[str, ...]) -> Any:
    """The class for the rows of a table with these columns; the cell of `pass` is `pass_`.

    The classes are cached, because making a class often takes longer than making all rows.
    """
    names = [f"{name}_" if iskeyword(name) else name for name in columns]
    return namedtuple("Row", names, rename=True)


def _series(name: str, cells: Any) -> pl.Series:
    """A column of the type of its cells; if all are unknown, the unit in its name may give one."""
    series = cells.alias(name) if isinstance(cells, pl.Series) else _of_cells(name, cells)
    if series.dtype == pl.Null:
        unit = unit_of(name)
        return series.cast(pl.Float64 if unit == "share" else pl.Int64) if unit else series
    # Numbers that do not fit, which only a damaged or hostile trace has, are unknown.
    return series.cast(pl.Int64, strict=False) if series.dtype in _NARROW else series


def _of_cells(name: str, cells: Any) -> pl.Series:
    kinds = {*map(type, cells)} - {type(None)} if isinstance(cells, list) else set()
    if str in kinds and len(kinds) > 1:  # such as streams with numbers and streams with names
        cells = [None if cell is None else str(cell) for cell in cells]
    return pl.Series(name, cells, strict=False)


def _csv_cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return _FORMULA.sub(r"\1'", printable(str(value)))


def _package(name: str, what: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise MissingPackage(what, name, extra) from None


def sum_of_known(cells: Iterable[Any]) -> Any:
    """Return the sum of the known cells; None if no cell is known."""
    known = [cell for cell in cells if cell is not None]
    return sum(known) if known else None


def known_sum(values: pl.Expr, where: pl.Expr | None = None) -> pl.Expr:
    """The sum of the known values, of the rows for which `where` holds; null if none is known."""
    chosen = values if where is None else values.filter(where)
    return pl.when(values.count() > 0).then(chosen.sum())


def shares(parts: pl.Series, whole: int) -> pl.Series:
    """Each part as a fraction of the whole; null for an unknown part, and if the whole is 0."""
    # polars multiplies by the reciprocal of the whole, which is not the nearest fraction.
    found = [None if part is None or not whole else part / whole for part in parts.to_list()]
    return pl.Series(found, dtype=pl.Float64)


def known_columns(table: Table, names: Iterable[str] | None = None) -> list[str]:
    """Return the names of the columns that hold a value, or all names if there are no rows.

    If `names` is given, only columns with these names are returned.
    """
    frame = table.frame
    return [
        name
        for name in (table.columns if names is None else names)
        if name in frame.columns and (not len(frame) or frame[name].null_count() < len(frame))
    ]
