"""A small table: named columns, rows with attributes, sorting, filtering, text, HTML and other libraries' frames."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from instrument.errors import MissingPackage
from instrument.printable import printable
from instrument.templates import render
from instrument.units import count, duration, size

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow
    from typing_extensions import Self

# In place of a number of rows, as in torch's `row_limit`.
ALL = -1
# What torch calls a device in the names of its tables' columns.
DEVICE_KINDS = ("cuda", "xpu", "mtia", "hpu", "privateuse1", "device")
# What users of those tables type as a sort key.
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

# A kind of cell, and what pandas, polars and pyarrow call the type that holds it and knows of missing ones.
_DTYPES = {
    bool: ("boolean", "Boolean", "bool_"),
    int: ("Int64", "Int64", "int64"),
    float: ("Float64", "Float64", "float64"),
    str: ("string", "String", "string"),
}
# Columns that hold points of time; the others with that unit hold durations.
POINTS = frozenset({"start_ns", "time_ns", "peak_ns", "since_ns"})
# How a cell is shown in each unit.
_TEXTS: dict[str, Callable[[Any], str]] = {
    "ns": duration,
    "bytes": size,
    "bytes/s": size,
    "flops": count,
    "flops/s": count,
    "share": "{:.1%}".format,
}
# How many rows an interpreter or a notebook shows of a table that is its last value.
_SHOWN_ROWS = 20


class Column(NamedTuple):
    """One column of a view. Its name tells its unit; see `unit_of`.

    Attributes:
        name: the column's name.
        doc: what a cell tells, and when it is None.
    """

    name: str
    doc: str


#: The columns of a view, in order.
Schema = tuple[Column, ...]


def schema(**docs: str) -> Schema:
    """The columns of a view, each by its name with what it tells."""
    return tuple(Column(name, doc) for name, doc in docs.items())


def names_of(columns: Schema) -> list[str]:
    """The names of a view's columns."""
    return [column.name for column in columns]


class Table:
    """Rows with named columns; what every view of a capture hands out.

    Columns are parallel lists. A cell that is not known is None, never 0. Iterating, indexing and `where` give
    rows as named tuples; `sort`, `head`, `where` and `select` give new tables and leave this one as it is.

    `begin_ns` is when the recording began, for columns in `POINTS`: their cells are on the trace's own clock, and are
    shown as the time since then.

    Cost: rows are built when asked for; the table itself holds only the columns.

    Examples:
        >>> table = Table({"name": ["aten::relu", "aten::mm"], "calls": [2, 1], "self_cpu_ns": [5_000, 2_500_000]})
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
        self._row: Callable[..., Any] = namedtuple("Row", self._columns)  # type: ignore[misc]

    @classmethod
    def of(cls, columns: Schema, cells: Mapping[str, Sequence[Any]], *, begin_ns: int = 0) -> Table:
        """The table of a view: the cells of its columns, in the order of the schema.

        Raises:
            ValueError: there are cells for other columns than those of the schema.
        """
        names = names_of(columns)
        if set(names) != set(cells):
            raise ValueError(
                f"The cells are of {sorted(cells)}, but the view's columns are {names}."
            )
        return Table({name: cells[name] for name in names}, begin_ns=begin_ns)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in vars(self).items() if name != "_row"
        }  # a class that no module holds

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _row=namedtuple("Row", state["_columns"]))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(self._columns)

    def column(self, name: str) -> list[Any]:
        """One column's values; torch's own names (`self_cpu_time_total`) are understood too.

        Raises:
            KeyError: the table has no such column; the message lists those it has.
        """
        found = TORCH_NAMES.get(name, name)
        if found not in self._columns:
            raise KeyError(f"The table has no column {name!r}; it has {', '.join(self._columns)}.")
        return self._columns[found]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    def __iter__(self) -> Iterator[Any]:
        return map(self._row, *self._columns.values()) if self._columns else iter(())

    def __getitem__(self, index: int) -> Any:
        return self._row(*(column[index] for column in self._columns.values()))

    def sort(self, by: str, *, descending: bool | None = None) -> Table:
        """The same rows ordered by one column; unknown cells come last.

        Numbers run downwards and text upwards unless `descending` says otherwise; equal cells keep their order.
        """
        values = self.column(by)
        known = [i for i, value in enumerate(values) if value is not None]
        unknown = [i for i, value in enumerate(values) if value is None]
        if descending is None:
            descending = not (known and isinstance(values[known[0]], str))
        known.sort(key=lambda i: values[i], reverse=descending)
        return self._take(known + unknown)

    def head(self, rows: int) -> Table:
        """The first `rows` rows; all of them for -1, as in torch's `row_limit`."""
        return self._take(range(len(self) if rows == ALL else min(rows, len(self))))

    def where(self, test: Callable[[Any], bool] | None = None, /, **equal: Any) -> Table:
        """The rows for which `test(row)` holds and whose cells are what is given by name: a value, or a test of it.

        An unknown cell passes no test: `where(flops=lambda n: n > 1e9)` needs no look for None; `where(flops=None)`
        finds the unknown ones.
        """
        wanted = [(self.column(name), value) for name, value in equal.items()]
        return self._take(
            i
            for i in range(len(self))
            if all(_passes(column[i], value) for column, value in wanted)
            and (test is None or test(self[i]))
        )

    def select(self, columns: Sequence[str]) -> Table:
        """The same rows with only these columns, in this order."""
        return self._with({TORCH_NAMES.get(name, name): self.column(name) for name in columns})

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas frame with nullable dtypes: integers stay integers, an unknown cell is `<NA>`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        package = _package("pandas", "Table.to_pandas()", "pandas")
        names = {name: dtypes[0] if dtypes else object for name, dtypes in self._dtypes()}
        return package.DataFrame(
            {name: package.array(self._columns[name], dtype=dtype) for name, dtype in names.items()}
        )

    def to_polars(self) -> polars.DataFrame:
        """The table as a polars frame; an unknown cell is null.

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
        """The table as an Arrow table; an unknown cell is null.

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

    def _dtypes(self) -> Iterator[tuple[str, tuple[str, str, str] | None]]:
        """Each column's types elsewhere; None where its cells are of no plain kind."""
        return ((name, _DTYPES.get(_kind(name, values))) for name, values in self._columns.items())

    def _take(self, indices: Iterable[int]) -> Table:
        chosen = list(indices)
        return self._with(
            {name: [column[i] for i in chosen] for name, column in self._columns.items()}
        )

    def _with(self, columns: Mapping[str, Sequence[Any]]) -> Table:
        return Table(columns, begin_ns=self._begin_ns)

    def since_begin(self) -> Table:
        """The same rows with points of time since the recording began."""
        if not self._begin_ns or not POINTS.intersection(self._columns):
            return self
        return Table(
            {name: self._since_begin(name, cells) for name, cells in self._columns.items()}
        )

    def _since_begin(self, name: str, cells: Sequence[Any]) -> Sequence[Any]:
        return (
            [None if at is None else at - self._begin_ns for at in cells]
            if name in POINTS
            else cells
        )

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        known, notes = _abridged(self)
        return "\n".join([to_text(known, name_width=40), *notes])

    def _repr_html_(self) -> str:
        """What a notebook shows: the first rows; a tooltip gives a cell's exact value, a bar behind it its share."""
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
    """A table whose rows can be grouped in another way after `sort`, `head`, `where` and `select`.

    `keys` identifies each row. The rows that another grouping makes of a row have the same key.
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
        """The same rows ordered by one column; unknown cells come last. See `Table.sort`."""
        made = cast("Self", super().sort(by, descending=descending))
        made._sorted_by = TORCH_NAMES.get(by, by), descending
        return made

    def _regrouped(self, columns: Mapping[str, Sequence[Any]], keys: Sequence[Hashable]) -> Table:
        """The rows of another grouping whose keys this table has, sorted as this table is."""
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
        made.__setstate__(vars(self) | {"_columns": own})
        return made


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
    """What all cells are; a column of which nothing is known goes by its name, so that tables of one view fit."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        unit = unit_of(column)
        return float if unit == "share" else int if unit else str
    return float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else object


def known_columns(table: Table, names: Iterable[str] | None = None) -> list[str]:
    """The names of the columns that hold a value, of these or of all; all of a table without rows."""
    return [
        name
        for name in (table.columns if names is None else names)
        if name in table.columns
        and (not len(table) or any(cell is not None for cell in table.column(name)))
    ]


def _abridged(table: Table) -> tuple[Table, list[str]]:
    """The part that an interpreter shows: the first rows, the columns of which something is known; and what is not."""
    known = known_columns(table)
    unknown = [name for name in table.columns if name not in known]
    more, notes = len(table) - _SHOWN_ROWS, []
    if more > 0:
        notes.append(f"… and {more} more rows")
    if unknown:
        notes.append(f"Nothing is known of {', '.join(unknown)}.")
    return table.head(_SHOWN_ROWS).select(known), notes


def _exact_text(column: str, value: Any) -> str:
    """A cell as it is, with its unit, for a tooltip."""
    if not isinstance(value, int | float):
        return printable(str(value))
    return f"{value:,} {unit_of(column)}".removesuffix("share").rstrip()


def to_text(table: Table, *, name_width: int = 60) -> str:
    """The table as aligned plain text, a line a row, times, bytes and counts in readable units.

    Text longer than `name_width` characters keeps its head and tail. An unknown cell is shown as "-".
    """
    table = table.since_begin()
    header = [heading(name) for name in table.columns]
    body = [
        [cell_text(name, value, name_width) for name, value in zip(table.columns, row)]
        for row in table
    ]
    left = [is_text(table.column(name)) for name in table.columns]
    widths = [max(map(len, column)) for column in zip(header, *body)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, body)])


def is_text(values: Sequence[Any]) -> bool:
    """Whether a column is shown as text, at the left, and not as numbers."""
    first = next((value for value in values if value is not None), None)
    return not isinstance(first, int | float)


def heading(name: str) -> str:
    """What stands above a column: its name in words; a unit that its cells show is left out."""
    if name == "peak_ns":
        return "peak at"
    name = name.removesuffix("_ns").replace("_ns_", "_")  # the cell carries the unit
    words = name.replace("_bytes", " memory").replace("_", " ").split(" ")
    return " ".join("CPU" if word == "cpu" else word for word in words)


def unit_of(column: str) -> str:
    """The unit that a column's name tells: ns, bytes, flops, bytes/s, flops/s, share, or nothing."""
    if column.endswith(("share", "_covered")):
        return "share"
    if column.endswith("_ns") or "_ns_" in column:
        return "ns"
    for unit in ("bytes", "flops"):
        if column.endswith((unit, f"{unit}_per_second")):
            return unit if column.endswith(unit) else f"{unit}/s"
    return ""


def cell_text(column: str, value: Any, width: int = 60) -> str:
    """One cell as text in one line, in the unit that its column's name tells; "-" for an unknown one."""
    if value is None:
        return "-"
    if as_text := _TEXTS.get(unit_of(column)):
        return as_text(value)
    text = f"{value:.3g}" if isinstance(value, float) else printable(str(value))
    return text if len(text) <= width else f"{text[: width - 16]}…{text[-15:]}"
