"""A table of named columns: sorting, filtering, and conversion to text, HTML and data frames."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from instrument.errors import MissingPackage
from instrument.printable import is_terminal, printable, printable_lines
from instrument.templates import render
from instrument.units import count, counted, duration, rate, size

if TYPE_CHECKING:
    from typing import Self

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
# Columns that hold points in time; other columns in nanoseconds hold durations.
POINTS = frozenset({"start_ns", "end_ns", "time_ns", "peak_ns", "since_ns"})
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
# Where a formula for a spreadsheet could begin. Some split cells at semicolons, skip blanks, and
# read full-width signs.
_FORMULA = re.compile(r"(^|;)(?=\s*[=+\-@＝＋－＠])")
# How many rows of a table an interpreter or a notebook shows.
_SHOWN_ROWS = 20


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


class Table:
    """Rows with named columns: the type of every view of a capture.

    A cell whose value is not known is None, never 0. Iterating and indexing give rows as named
    tuples. `sort`, `head`, `where` and `select` return new tables and leave this one unchanged.

    `begin_ns` is the start of the recording on the trace's own clock. The cells of the columns in
    `POINTS` are times on the same clock. Printed tables show the time since `begin_ns` instead.

    Cost: the table holds only its columns, as lists; rows are built when they are read.

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

    def __init__(self, columns: Mapping[str, Sequence[Any]], *, begin_ns: int = 0) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The columns of a table must be equally long, not {lengths}.")
        self._columns = {name: list(column) for name, column in columns.items()}
        self._begin_ns = begin_ns

    @classmethod
    def of(cls, columns: Schema, cells: Mapping[str, Sequence[Any]], *, begin_ns: int = 0) -> Table:
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

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self._columns)

    def column(self, name: str) -> list[Any]:
        """Return the values of a column.

        `name` is the column's name, or torch's name for it, such as `self_cpu_time_total`.

        Raises:
            KeyError: the table has no such column. The message lists the columns of the table.
        """
        found = TORCH_NAMES.get(name, name)
        if found not in self._columns:
            raise KeyError(f"The table has no column {name!r}; it has {', '.join(self._columns)}.")
        return self._columns[found]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    def __iter__(self) -> Iterator[Any]:
        return map(_row(self.columns), *self._columns.values()) if self._columns else iter(())

    def __getitem__(self, index: int) -> Any:
        return _row(self.columns)(*(column[index] for column in self._columns.values()))

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
        known.sort(key=lambda i: values[i], reverse=descending)
        return self._take(known + unknown)

    def head(self, rows: int) -> Table:
        """Return the first `rows` rows; -1 means all rows, as in torch's `row_limit`."""
        return self._take(range(len(self) if rows == ALL else min(rows, len(self))))

    def where(self, test: Callable[[Any], bool] | None = None, /, **equal: Any) -> Table:
        """Return the rows that pass `test(row)` and all conditions on columns.

        A condition is a value that the cell must equal, or a function of the cell. A function is
        not called for unknown cells, and rows with such cells are left out. So
        `where(flops=lambda n: n > 1e9)` needs no check for None. `where(flops=None)` finds the rows
        with unknown cells.
        """
        wanted = [(self.column(name), value) for name, value in equal.items()]
        return self._take(
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
        return self._with({TORCH_NAMES.get(name, name): self.column(name) for name in columns})

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas data frame with nullable dtypes.

        Integers stay integers, and unknown cells are `<NA>`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        package = _package("pandas", "Table.to_pandas()", "pandas")
        names = {name: dtypes[0] if dtypes else object for name, dtypes in self._dtypes()}
        return package.DataFrame(
            {name: package.array(self._columns[name], dtype=dtype) for name, dtype in names.items()}
        )

    def to_polars(self) -> polars.DataFrame:
        """Return a polars data frame; unknown cells are null.

        Raises:
            MissingPackage: polars is not installed.
        """
        package = _package("polars", "Table.to_polars()", "polars")
        schema = {
            name: getattr(package, dtypes[1]) if dtypes else package.Object
            for name, dtypes in self._dtypes()
        }
        frame: polars.DataFrame = package.DataFrame(self._columns, schema=schema)
        return frame

    def to_arrow(self) -> pyarrow.Table:
        """Return an Arrow table; unknown cells are null.

        Raises:
            MissingPackage: pyarrow is not installed.
        """
        package = _package("pyarrow", "Table.to_arrow()", "parquet")
        types = {
            name: getattr(package, dtypes[2])() if dtypes else None
            for name, dtypes in self._dtypes()
        }
        return package.table(
            {name: package.array(self._columns[name], type=kind) for name, kind in types.items()}
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dict for each row. Its keys are the names of the columns."""
        return [row._asdict() for row in self]

    def to_csv(self) -> str:
        """Return the table as CSV with a header; an unknown cell is empty.

        Numbers are not rounded: times are in nanoseconds. Text comes from the trace, which may be
        from somebody else. So text that a spreadsheet could take for a formula gets an apostrophe
        before it: text that begins with =, +, - or @ after any blanks, also after a semicolon, at
        which some spreadsheets split. Characters that do not print are escaped. The other formats
        keep text unchanged.
        """
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_csv_cell(value) for value in row] for row in self)
        return text.getvalue()

    def _dtypes(self) -> Iterator[tuple[str, tuple[str, str, str] | None]]:
        """Each column's types in pandas, polars and pyarrow; None for cells of mixed types."""
        return ((name, _DTYPES.get(_kind(name, values))) for name, values in self._columns.items())

    def _take(self, indices: Iterable[int]) -> Table:
        chosen = list(indices)
        return self._with(
            {name: [column[i] for i in chosen] for name, column in self._columns.items()}
        )

    def _with(self, columns: Mapping[str, Sequence[Any]]) -> Table:
        return Table(columns, begin_ns=self._begin_ns)

    def since_begin(self) -> Table:
        """Return the table with each point in time as the time since the recording began."""
        if not self._begin_ns:
            return self
        columns = dict(self._columns)
        for name in POINTS.intersection(columns):
            columns[name] = [None if at is None else at - self._begin_ns for at in columns[name]]
        return Table(columns)

    def __str__(self) -> str:
        """The table as text with all rows; on a terminal, only with the columns that fit."""
        return _fitted(self, name_width=60)

    def __repr__(self) -> str:
        known, notes = _abridged(self)
        return "\n".join([_fitted(known, name_width=40), *notes])

    def _repr_html_(self) -> str:
        """The first rows as HTML, for a notebook. Tooltips show exact values, bars show shares."""
        known, notes = _abridged(self)
        return render(
            "report/templates/table.html",
            table=known.since_begin(),
            notes=notes,
            side={
                name: "left" if is_text(known.column(name)) else "right" for name in known.columns
            },
            heading=heading,
            cell_text=cell_text,
            exact_text=_exact_text,
            is_share=lambda name: unit_of(name) == "share",
        )

    __html__ = _repr_html_  # for templates that contain a table


class GroupableTable(Table):
    """A table that can still be grouped after `sort`, `head`, `where` and `select`.

    `keys` holds a key for each row, such as an operator's name. A grouping makes a new table, whose
    rows have keys too. A row of the new table is kept only if a row of this table has the same key.
    For example, if `where` has left only the row of aten::mm, the new table has only rows of
    aten::mm.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any]],
        keys: Iterable[Hashable],
        *,
        begin_ns: int = 0,
    ) -> None:
        super().__init__(columns, begin_ns=begin_ns)
        self._keys = list(keys)
        self._sorted_by: tuple[str, bool | None] | None = None

    def sort(self, by: str, *, descending: bool | None = None) -> Self:
        """Return the rows ordered by one column, with unknown cells last. See `Table.sort`."""
        made = cast("Self", super().sort(by, descending=descending))
        made._sorted_by = TORCH_NAMES.get(by, by), descending
        return made

    def _regrouped(self, columns: Mapping[str, Sequence[Any]], keys: Sequence[Hashable]) -> Table:
        """Make the table of another grouping, whose rows have the given columns and keys.

        Rows whose key is not in this table are left out. If this table is sorted, the new table is
        sorted by the same column.
        """
        table, kept = Table(columns, begin_ns=self._begin_ns), set(self._keys)
        if not kept.issuperset(keys):
            table = table._take(row for row, key in enumerate(keys) if key in kept)
        if self._sorted_by is None or self._sorted_by[0] not in table.columns:
            return table
        by, descending = self._sorted_by
        return table.sort(by, descending=descending)

    def _take(self, indices: Iterable[int]) -> Table:
        chosen = list(indices)
        made = cast("Self", super()._take(chosen))
        made._keys = [self._keys[row] for row in chosen]
        return made

    def _with(self, columns: Mapping[str, Sequence[Any]]) -> Table:
        made = object.__new__(type(self))
        own = {name: list(column) for name, column in columns.items()}
        vars(made).update(vars(self) | {"_columns": own})
        return made


@lru_cache
def _row(columns: tuple[str, ...]) -> Callable[..., Any]:
    """The class for the rows of a table with these columns.

    The classes are cached, because making a class often takes longer than making all rows.
    """
    return namedtuple("Row", columns)


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


def _abridged(table: Table) -> tuple[Table, list[str]]:
    """The first rows, with only the `known_columns`, and notes on what is left out."""
    known = known_columns(table)
    unknown = [name for name in table.columns if name not in known]
    more, notes = len(table) - _SHOWN_ROWS, []
    if more > 0:
        notes.append(f"… and {more} more rows")
    if unknown:
        notes.append(f"Columns without values: {', '.join(unknown)}.")
    return table.head(_SHOWN_ROWS).select(known), notes


def _fitted(table: Table, name_width: int) -> str:
    """The table as text. On a terminal, columns that do not fit are left out, with a note.

    The first column always stays. Of the others, numbers have priority over text, which is wider.
    Columns without values have the lowest priority.
    """
    if not is_terminal(sys.stdout):
        return to_text(table, name_width=name_width)
    left, known = shutil.get_terminal_size().columns, set(known_columns(table))
    others = sorted(
        table.columns[1:], key=lambda name: (name not in known, is_text(table.column(name)))
    )
    shown: set[str] = set()
    relative = table.since_begin()
    for name in (*table.columns[:1], *others):
        cells = (cell_text(name, value, name_width) for value in relative.column(name))
        width = max(len(heading(name)), *map(len, cells))
        if width <= left or not shown:
            shown.add(name)
            left -= width + 2
    text = to_text(
        table.select([name for name in table.columns if name in shown]), name_width=name_width
    )
    if len(shown) == len(table.columns):
        return text
    more = counted(len(table.columns) - len(shown), "more column")
    return f"{text}\n{more}: `.columns` names all, `.select([…])` chooses some."


def _exact_text(column: str, value: Any) -> str:
    """The text of a cell without rounding, with its unit, for a tooltip."""
    if not isinstance(value, int | float):
        return printable(str(value))
    return f"{value:,} {unit_of(column)}".removesuffix("share").rstrip()


def to_text(
    table: Table, *, name_width: int = 60, texts: Mapping[str, Callable[[Any], str]] | None = None
) -> str:
    """Return the table as aligned plain text, with times, bytes and counts in readable units.

    Text longer than `name_width` characters is shortened in the middle. An unknown cell is "-".
    `texts` maps the name of a column to a function that returns the text of a cell. All other
    columns have the text of `cell_text`.
    """
    table = table.since_begin()
    header = [heading(name) for name in table.columns]
    body = [
        [cell_text(name, value, name_width, texts) for name, value in zip(table.columns, row)]
        for row in table
    ]
    left = [is_text(table.column(name)) for name in table.columns]
    widths = [max(map(len, column)) for column in zip(header, *body)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left)
        )
        return "  ".join(padded).rstrip()

    return printable_lines(line(header), "  ".join("-" * w for w in widths), *map(line, body))


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
