"""A table of named columns: sorting, filtering, and conversion to text, HTML and data frames."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.base.errors import MissingPackage
from instrument.base.printable import is_terminal, printable
from instrument.read.views.schema import POINTS, Schema, names_of, unit_of

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

# As a number of rows, -1 means all rows, as in torch's `row_limit`.
ALL = -1
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

# The nullable types of pandas, polars and pyarrow for each type of cell.
_DTYPES = {
    bool: ("boolean", "Boolean", "bool_"),
    int: ("Int64", "Int64", "int64"),
    float: ("Float64", "Float64", "float64"),
    str: ("string", "String", "string"),
}
_NUMBERS = (bool, int, float)
# Where a formula for a spreadsheet could begin. Some split cells at semicolons, skip blanks, and
# read full-width signs.
_FORMULA = re.compile(r"(^|;)(?=\s*[=+\-@＝＋－＠])")


class Cells(NamedTuple):
    """The cells of a column.

    Attributes:
        values: the values. At unknown cells, numbers have any value, and objects are None.
        known: a mask of the known cells; None if all are known, or if the values are objects.
    """

    values: NDArray[Any]
    known: NDArray[np.bool_] | None = None


class Table:
    """Rows with named columns: the type of every view of a capture.

    A cell whose value is not known is None, never 0. Iterating and indexing give rows as named
    tuples. `sort`, `head`, `where` and `select` return new tables and leave this one unchanged.

    `begin_ns` is the start of the recording on the trace's own clock. The cells of the columns in
    `POINTS` are times on the same clock. Printed tables show the time since `begin_ns` instead.

    A column is given as a list, as a numpy array, or as `Cells`. Integers, floats and booleans are
    kept as numpy arrays with a mask. Text, mixed cells and integers of more than 64 bits are kept
    as arrays of objects.

    Cost: rows, and a column's list of cells, are made when they are read.

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
        >>> table.where(self_cpu_ns=lambda ns: ns > 1_000_000)[0].self_cpu_ns
        2500000
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any] | NDArray[Any] | Cells],
        *,
        begin_ns: int = 0,
    ) -> None:
        self._cells = {name: _as_cells(column) for name, column in columns.items()}
        lengths = {name: len(cells.values) for name, cells in self._cells.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The columns of a table must be equally long, not {lengths}.")
        self._lists: dict[str, list[Any]] = {}
        self._begin_ns = begin_ns

    @classmethod
    def of(
        cls,
        columns: Schema,
        cells: Mapping[str, Sequence[Any] | NDArray[Any] | Cells],
        *,
        begin_ns: int = 0,
    ) -> Table:
        """Make the table of a view from its cells, in the order of the schema.

        Raises:
            ValueError: the names of the cells differ from the names in the schema.
        """
        names = names_of(columns)
        if set(names) != set(cells):
            raise ValueError(
                f"There are cells for {sorted(cells)}, but the view has the columns {names}."
            )
        return Table({name: cells[name] for name in names}, begin_ns=begin_ns)

    @classmethod
    def of_rows(cls, columns: Schema, rows: Sequence[Sequence[Any]], *, begin_ns: int = 0) -> Table:
        """Make the table of a view from its rows, with their cells in the order of the schema."""
        cells = {name: [row[k] for row in rows] for k, name in enumerate(names_of(columns))}
        return Table(cells, begin_ns=begin_ns)

    @classmethod
    def of_dicts(
        cls, columns: Schema, rows: Sequence[Mapping[str, Any]], *, begin_ns: int = 0
    ) -> Table:
        """Make the table of a view from its rows as mappings; missing cells are unknown."""
        cells = {name: [row.get(name) for row in rows] for name in names_of(columns)}
        return Table(cells, begin_ns=begin_ns)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self._cells)

    def column(self, name: str) -> list[Any]:
        """Return the values of a column.

        `name` is the column's name, or torch's name for it, such as `self_cpu_time_total`.

        Raises:
            KeyError: the table has no such column. The message lists the columns of the table.
        """
        values, known = self.cells(name)
        name = TORCH_NAMES.get(name, name)
        if name not in self._lists:
            if known is not None:
                values = values.astype(object)
                values[~known] = None
            self._lists[name] = values.tolist()
        return self._lists[name]

    def cells(self, name: str) -> Cells:
        """Return the values of a column as numpy arrays; `name` and errors are as for `column`."""
        found = self._cells.get(TORCH_NAMES.get(name, name))
        if found is None:
            raise KeyError(f"The table has no column {name!r}; it has {', '.join(self._cells)}.")
        return found

    def __len__(self) -> int:
        return next((len(cells.values) for cells in self._cells.values()), 0)

    def __iter__(self) -> Iterator[Any]:
        return map(_row(self.columns), *self._by_name.values()) if self._cells else iter(())

    def __getitem__(self, index: int) -> Any:
        return _row(self.columns)(*(column[index] for column in self._by_name.values()))

    def sort(self, by: str, *, descending: bool | None = None) -> Table:
        """Return the rows ordered by one column, with unknown cells last.

        Numbers go from high to low and text from A to Z, unless `descending` is given. Rows with
        equal cells keep their order.
        """
        values = self.column(by)
        known = [i for i, value in enumerate(values) if value is not None]
        unknown = [i for i, value in enumerate(values) if value is None]
        if descending is None:
            descending = not (known and isinstance(values[known[0]], str))
        known.sort(key=values.__getitem__, reverse=descending)
        return self.take(known + unknown)

    def head(self, rows: int) -> Table:
        """Return the first `rows` rows; -1 means all rows, as in torch's `row_limit`."""
        return self.take(range(len(self) if rows == ALL else min(rows, len(self))))

    def take(self, rows: Iterable[int]) -> Table:
        """Return the rows at these positions, in this order."""
        at = np.fromiter(rows, np.int64)
        return Table(
            {
                name: Cells(values[at], None if known is None else known[at])
                for name, (values, known) in self._cells.items()
            },
            begin_ns=self._begin_ns,
        )

    def where(self, test: Callable[[Any], bool] | None = None, /, **equal: Any) -> Table:
        """Return the rows that pass `test(row)` and all conditions on columns.

        A condition is a value that the cell must equal, or a function of the cell. A function is
        not called for unknown cells, and rows with such cells are left out. So
        `where(flops=lambda n: n > 1e9)` needs no check for None. `where(flops=None)` finds the rows
        with unknown cells.
        """
        wanted = [(self.column(name), value) for name, value in equal.items()]
        return self.take(
            i
            for i in range(len(self))
            if all(_passes(column[i], value) for column, value in wanted)
            and (test is None or test(self[i]))
        )

    def select(self, columns: Sequence[str]) -> Table:
        """Return the rows with only these columns, in this order.

        Raises:
            KeyError: the table lacks one of the columns.
            TypeError: `columns` is one text instead of a list of names.
        """
        if isinstance(columns, str):
            raise TypeError(f"select() needs a list of names: write select([{columns!r}]).")
        chosen = {TORCH_NAMES.get(name, name): self.cells(name) for name in columns}
        return Table(chosen, begin_ns=self._begin_ns)

    def sums(self, by: str, columns: Sequence[str]) -> Table:
        """Return one row for each distinct value of the column `by`, with sums of other columns.

        The column `rows` is the number of rows with the value. Unknown cells do not count; a sum is
        None if all its cells are unknown. The row with the largest first sum comes first.

        Raises:
            KeyError: the table lacks one of the columns.
        """
        rows: dict[Any, list[int]] = {}
        for number, value in enumerate(self.column(by)):
            rows.setdefault(value, []).append(number)
        summed = {
            name: [sum_of_known(map(self.column(name).__getitem__, each)) for each in rows.values()]
            for name in columns
        }
        return Table({by: [*rows], "rows": [*map(len, rows.values())], **summed}).sort(columns[0])

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas data frame with nullable dtypes: integers stay integers."""
        package = _package("pandas", "Table.to_pandas()", "pandas")
        names = {name: dtypes[0] if dtypes else object for name, dtypes in self._dtypes()}
        return package.DataFrame(
            {name: package.array(self.column(name), dtype=dtype) for name, dtype in names.items()}
        )

    def to_polars(self) -> polars.DataFrame:
        """Return a polars data frame; unknown cells are null."""
        package = _package("polars", "Table.to_polars()", "polars")
        schema = {
            name: getattr(package, dtypes[1]) if dtypes else package.Object
            for name, dtypes in self._dtypes()
        }
        frame: polars.DataFrame = package.DataFrame(self._by_name, schema=schema)
        return frame

    def to_arrow(self) -> pyarrow.Table:
        """Return an Arrow table; unknown cells are null."""
        package = _package("pyarrow", "Table.to_arrow()", "parquet")
        types = {
            name: getattr(package, dtypes[2])() if dtypes else None
            for name, dtypes in self._dtypes()
        }
        return package.table(
            {name: package.array(self.column(name), type=kind) for name, kind in types.items()}
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict for each row. Its keys are the names of the columns."""
        return [dict(zip(self._cells, row)) for row in zip(*self._by_name.values())]

    def to_csv(self) -> str:
        """Return the table as CSV with a header; an unknown cell is empty.

        Numbers are not rounded. An apostrophe is put before text, perhaps from a stranger, that a
        spreadsheet could take for a formula: text that begins with =, +, - or @, also after blanks
        or a semicolon. Characters that do not print are escaped. Other formats keep text unchanged.
        """
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_csv_cell(value) for value in row] for row in self)
        return text.getvalue()

    def since_begin(self) -> Table:
        """Return the table with each point in time as the time since the recording began."""
        if not self._begin_ns:
            return self
        columns: dict[str, Cells | list[Any]] = dict(self._cells)
        for name in POINTS.intersection(columns):
            cells = self.column(name)
            columns[name] = [None if at is None else at - self._begin_ns for at in cells]
        return Table(columns)

    def __str__(self) -> str:
        """The table as text with all rows; on a terminal, only with the columns that fit."""
        from instrument.read.views import layout  # a program may read tables and print none
        from instrument.read.views.operator_keys import GROUPINGS
        from instrument.read.views.section import Section
        from instrument.read.views.table_text import is_text

        texts = [name for name in self.columns if is_text(self.column(name))]
        group = next((name for name in self.columns[:2] if name in GROUPINGS), None)
        section = Section(self, self.columns, missable=texts, key=group, all_columns=".select([…])")
        is_fitted = is_terminal(sys.stdout)
        width = shutil.get_terminal_size().columns if is_fitted else None
        return layout.text(section, layout.Medium(width, drops=is_fitted))

    def __repr__(self) -> str:
        from instrument.read.views.table_text import abridged

        shown, notes = abridged(self._by_name)
        return "\n".join([str(Table(shown, begin_ns=self._begin_ns)), *notes])

    def _repr_html_(self) -> str:
        """The first rows as HTML, for a notebook."""
        from instrument.read.views.table_text import to_html

        return to_html(self.since_begin()._by_name)

    __html__ = _repr_html_  # for templates that contain a table

    @cached_property
    def _by_name(self) -> dict[str, list[Any]]:
        return {name: self.column(name) for name in self._cells}

    def _dtypes(self) -> Iterator[tuple[str, tuple[str, str, str] | None]]:
        """Each column's types in pandas, polars and pyarrow; None for cells of mixed types."""
        return ((name, _DTYPES.get(_kind(name, cells))) for name, cells in self._by_name.items())


@lru_cache
def _row(columns: tuple[str, ...]) -> Callable[..., Any]:
    """The class for the rows of a table with these columns.

    The classes are cached, because making a class often takes longer than making all rows.
    """
    return namedtuple("Row", columns)


def _as_cells(column: Sequence[Any] | NDArray[Any] | Cells) -> Cells:
    if isinstance(column, Cells):
        return column
    if isinstance(column, np.ndarray):
        return Cells(column)
    kinds = {*map(type, column)}
    numbers = kinds - {type(None)}
    if len(numbers) == 1 and (kind := numbers.pop()) in _NUMBERS:
        try:
            if kind in kinds and len(kinds) == 1:
                return Cells(np.array(column, kind))
            known = np.array([cell is not None for cell in column])
            return Cells(np.array([0 if cell is None else cell for cell in column], kind), known)
        except OverflowError:  # more than 64 bits
            pass
    return Cells(np.fromiter(column, object, len(column)))


def _csv_cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return _FORMULA.sub(r"\1'", printable(str(value)))


def _passes(cell: Any, wanted: Any) -> bool:
    if callable(wanted):
        return cell is not None and bool(wanted(cell))
    return bool(cell == wanted)


def _package(name: str, what: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise MissingPackage(what, name, extra) from None


def _kind(column: str, values: Sequence[Any]) -> type:
    """The type of a column's cells; if all cells are unknown, the column's name decides."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        unit = unit_of(column)
        return float if unit == "share" else int if unit else str
    return float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else object


def sum_of_known(cells: Iterable[Any]) -> Any:
    """Return the sum of the known cells; None if no cell is known."""
    known = [cell for cell in cells if cell is not None]
    return sum(known) if known else None


def known_columns(table: Table, names: Iterable[str] | None = None) -> list[str]:
    """Return the names of the columns that hold a value, or all names if there are no rows.

    If `names` is given, only columns with these names are returned.
    """
    return [
        name
        for name in (table.columns if names is None else names)
        if name in table.columns
        and (not len(table) or any(cell is not None for cell in table.column(name)))
    ]
