"""A small table: named columns, rows with attributes, sorting, filtering and plain text."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# What users of torch's own tables type as a sort key.
TORCH_NAMES = {
    "key": "name",
    "count": "calls",
    "cpu_time_total": "host_ns",
    "self_cpu_time_total": "self_host_ns",
    "cuda_time_total": "device_ns",
    "self_cuda_time_total": "self_device_ns",
    "device_time_total": "device_ns",
    "self_device_time_total": "self_device_ns",
    "cpu_memory_usage": "host_bytes",
    "self_cpu_memory_usage": "self_host_bytes",
    "cuda_memory_usage": "device_bytes",
    "self_cuda_memory_usage": "self_device_bytes",
    "device_memory_usage": "device_bytes",
    "self_device_memory_usage": "self_device_bytes",
}


class Table:
    """Rows with named columns; what every view of a capture hands out.

    Columns are parallel lists. A cell that is not known is None, never 0. Iterating, indexing and `where` give
    rows as named tuples; `sort`, `head` and `where` give new tables and leave this one as it is.

    Cost: rows are built when asked for; the table itself holds only the columns.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"The columns of a table must be equally long, not {lengths}.")
        self._columns = {name: list(column) for name, column in columns.items()}
        self._row: Callable[..., Any] = namedtuple("Row", self._columns)  # type: ignore[misc]

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
        """The first `rows` rows."""
        return self._take(range(min(rows, len(self))))

    def where(self, test: Callable[[Any], bool] | None = None, /, **equal: Any) -> Table:
        """The rows for which `test(row)` holds and whose cells equal those given by name."""
        wanted = [(self.column(name), value) for name, value in equal.items()]
        return self._take(
            i
            for i in range(len(self))
            if all(column[i] == value for column, value in wanted) and (test is None or test(self[i]))
        )

    def select(self, columns: Sequence[str]) -> Table:
        """The same rows with only these columns, in this order."""
        return Table({TORCH_NAMES.get(name, name): self.column(name) for name in columns})

    def _take(self, indices: Any) -> Table:
        chosen = list(indices)
        return Table({name: [column[i] for i in chosen] for name, column in self._columns.items()})

    def __str__(self) -> str:
        return to_text(self)

    def __repr__(self) -> str:
        shown = to_text(self.head(20))
        more = len(self) - 20
        return shown if more <= 0 else f"{shown}\n… and {more} more rows"


def to_text(table: Table, *, name_width: int = 60) -> str:
    """The table as aligned plain text, a line a row, times, bytes and counts in readable units.

    Text longer than `name_width` characters keeps its head and tail. An unknown cell is shown as "-".
    """
    header = [_heading(name) for name in table.columns]
    body = [[cell_text(name, value, name_width) for name, value in zip(table.columns, row)] for row in table]
    left = [_is_text(table.column(name)) for name in table.columns]
    widths = [max(map(len, column)) for column in zip(header, *body)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(cells, widths, left))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, body)])


def _is_text(values: Sequence[Any]) -> bool:
    first = next((value for value in values if value is not None), None)
    return not isinstance(first, int | float)


def _heading(name: str) -> str:
    name = name.removesuffix("_ns").replace("_ns_", "_")  # the cell carries the unit
    return name.replace("_bytes", " memory").replace("_", " ")


def cell_text(column: str, value: Any, width: int = 60) -> str:
    """One cell as text, in the unit that its column's name tells; "-" for an unknown one."""
    if value is None:
        return "-"
    if column.endswith("_ns") or "_ns_" in column:
        return duration(value)
    if column.endswith(("bytes", "bytes_per_second")):
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    if column.endswith(("flops", "flops_per_second")):
        return _scaled(value, 1000, ("", "K", "M", "G", "T", "P"))
    if column == "share":
        return f"{value:.1%}"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= width else f"{text[: width - 16]}…{text[-15:]}"


def duration(ns: float) -> str:
    """A time in nanoseconds as text with three decimals in the unit that suits it."""
    for limit, divisor, unit in ((1_000, 1, "ns"), (1_000_000, 1e3, "µs"), (1_000_000_000, 1e6, "ms")):
        if abs(ns) < limit:
            return f"{ns / divisor:.3f} {unit}" if divisor > 1 else f"{ns:.0f} ns"
    return f"{ns / 1e9:.3f} s"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    return f"{value:.2f} {units[power]}" if power else f"{value} {units[0]}".rstrip()
