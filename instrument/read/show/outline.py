"""The ranges and operators that a table shows, and rows that sum all others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from instrument.base.range_names import OPTIMIZER_STEP, RECOMPUTED
from instrument.base.units import counted
from instrument.read.views.table import Table, sum_of_known

# The kinds of rows in the operator table that are no operators: ranges, steps, moments (from
# `instrument.mark`) and waits for data.
_NO_OPERATORS = ("range", "step", "mark", "loader")
# Columns that can be summed over ranges or operators, because each nanosecond counts only once.
OWN_COLUMNS = ("self_cpu_ns", "self_total_ns", "self_device_ns", "share", "device_share")
_LONGEST_PATH = 44
# The row around a row of the folded tree, the row's name, and its class.
_Key: TypeAlias = tuple[int, str, "str | None"]
# So many siblings that differ only in a number are one row; and columns that cannot be added.
_ALIKE, _NUMBER = 4, re.compile(r"(?<![^.])\d+(?![^.])")
_NO_SUMS = ("min_ns", "median_ns", "p95_ns", "max_ns", "flops_per_second", "device_busy_ns")


def folded(ranges: Table) -> Table:
    """Return the tree of ranges with one row for siblings that differ only in a number.

    Such siblings have one class, and there are at least `_ALIKE` of them: `layers.*` (12×). Ranges
    with the same name inside them are one row too. A row has the sums of its ranges; what cannot be
    added, such as a median, is unknown.
    """
    rows, above, last_at = [*ranges], list[int](), [-1]
    inner = list[str]()  # each name without that of the module around it
    for at, row in enumerate(rows):
        above.append(last_at[row.depth])
        last_at[row.depth + 1 :] = [at]
        around = f"{rows[above[at]].name}." if above[at] >= 0 else ""
        inner.append(row.name.removeprefix(around[:-1]) if row.name.startswith(around) else "")
    stars = [_NUMBER.sub("*", own or row.name) for own, row in zip(inner, rows)]
    alike = Counter((up, star, row.module_type) for up, star, row in zip(above, stars, rows))
    keys, names = list[_Key](), list[str]()
    groups, number = dict[_Key, list[int]](), dict[_Key, int]()
    for at, (up, row) in enumerate(zip(above, rows)):
        is_alike = alike[up, stars[at], row.module_type] >= _ALIKE
        own = stars[at] if is_alike else inner[at] or row.name
        names.append(names[up] + own if inner[at] and up >= 0 else own)
        keys.append((number[keys[up]] if up >= 0 else -1, names[at], row.module_type))
        number.setdefault(keys[at], len(number))
        groups.setdefault(keys[at], []).append(at)
    if len(groups) == len(rows):
        return ranges
    columns: dict[str, list[Any]] = {name: [] for name in ranges.columns}
    path_of = {-1: ""}
    inside = dict[int, list[_Key]]()
    for key in groups:
        inside.setdefault(key[0], []).append(key)
    waiting = inside[-1][::-1]
    while waiting:  # the order of a tree: a fold may have brought later ranges together
        key = waiting.pop()
        waiting += inside.get(number[key], [])[::-1]
        members = [rows[at] for at in groups[key]]
        path_of[number[key]] = f"{path_of[key[0]]}/{key[1]}".removeprefix("/")
        for name, cells in columns.items():
            values = [getattr(member, name) for member in members]
            is_sum = isinstance(values[0], int | float) and name not in _NO_SUMS
            cells.append(sum_of_known(values) if is_sum else values[0])
            if len(members) > 1 and name in _NO_SUMS:
                cells[-1] = None
        columns["path"][-1], columns["depth"][-1] = path_of[number[key]], members[0].depth
        columns["name"][-1] = key[1]
    return Table(columns)


def outline(ranges: Table, rest: Sequence[Mapping[str, Any]]) -> Table:
    """Return ranges as a tree, with names indented by depth, and the rows of `ranges_rest`.

    `ranges_rest` is the time outside of all ranges. So the shares of all rows add up to 1.
    """
    columns = {name: ranges.column(name) for name in ranges.columns}
    columns["name"] = [
        "  " * row.depth + with_type(row.name, row.module_type) + _with_closure(row)
        for row in ranges
    ]
    return _extended(columns, rest)


def leading_ranges(ranges: Table, rest: Sequence[Mapping[str, Any]], sort: str, rows: int) -> Table:
    """Return the ranges with the largest values of a column, and rows that sum all the rest.

    The names are the inner ends of paths. One row sums the ranges that are left out; the last rows
    are those of `ranges_rest`. So the shares of all rows add up to 1.
    """
    ordered = ranges.sort(sort)
    shown, more = ordered.head(rows), [*rest]
    if left_out := [ordered[at] for at in range(len(shown), len(ordered))]:
        more.insert(0, _summed(f"({counted(len(left_out), 'other range')})", left_out))
    columns = {name: shown.column(name) for name in shown.columns}
    columns["name"] = [
        with_type(_inner_end(row.path), row.module_type) + _with_closure(row) for row in shown
    ]
    return _extended(columns, more)


def _inner_end(path: str) -> str:
    """Return the innermost names of a path, as many as fit into `_LONGEST_PATH`, at least one."""
    if len(path) <= _LONGEST_PATH:
        return path
    fitting = path[-_LONGEST_PATH:].partition("/")[2] or path.rpartition("/")[2]
    return f"…/{fitting}" if "/" in path else path


def leading(operators: Table, sort: str, rows: int) -> Table:
    """Return the operators with the largest values of a column, and rows that sum all the rest.

    One row sums the operators that are left out. Another row sums the time outside of operators:
    the self time of ranges, steps, moments (from `instrument.mark`) and waits for data. So the
    shares of all rows add up to 1.
    """
    ordered = without_ranges(operators).sort(sort)
    shown, outside = ordered.head(rows), operators.where(f"kind in {_NO_OPERATORS}")
    left_out = [ordered[at] for at in range(len(shown), len(ordered))]
    more = []
    if left_out:
        more.append(_summed(f"({counted(len(left_out), 'other operator')})", left_out))
    if any(outside.column("self_cpu_ns")) or any(outside.column("self_device_ns")):
        more.append(_summed("(in no operator)", outside))
    return _extended({name: shown.column(name) for name in shown.columns}, more)


def _with_closure(row: Any) -> str:
    """Mark an `Optimizer.step` that also runs forward and backward, as Lightning's does."""
    if not row.name.startswith(OPTIMIZER_STEP) or (row.optimizer_ns or 0) >= row.cpu_ns:
        return ""
    return " (with closure)"


def _summed(name: str, rows: Iterable[Any]) -> dict[str, Any]:
    """Return a row that sums the columns `OWN_COLUMNS` of `rows`; other cells stay unknown."""
    rows = [*rows]
    sums = {own: sum_of_known(getattr(row, own, None) for row in rows) for own in OWN_COLUMNS}
    return {"name": name, **sums}


def _extended(columns: Mapping[str, list[Any]], more: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with the rows of `more` at its end; cells that `more` lacks are unknown."""
    return Table(
        {name: [*cells, *(row.get(name) for row in more)] for name, cells in columns.items()}
    )


def with_largest_shares(ranges: Table, rows: int) -> list[int]:
    """Return the positions of the ranges with the largest shares, and of all their ancestors.

    At most `rows` positions are returned, in the order of the tree. Cost: sorts the ranges once.
    """
    if len(ranges) <= rows:
        return [*range(len(ranges))]
    share = ranges.column(share_of(ranges))
    above, last_at = [], [-1]  # the parent of each position; the last position at each depth
    for position, depth in enumerate(ranges.column("depth")):
        above.append(last_at[depth])
        last_at[depth + 1 :] = [position]
    by_share = sorted(range(len(ranges)), key=lambda position: -(share[position] or 0))
    kept = {-1}
    for position in by_share:
        new: list[int] = []
        while position not in kept and len(kept) + len(new) <= rows:
            new.append(position)
            position = above[position]
        if position in kept:
            kept.update(new)
    return sorted(kept - {-1})


def with_type(name: str, module_type: str | None) -> str:
    """Return a range's name or path with the class of its module, such as "layers.0: Linear"."""
    plain = name.removesuffix(RECOMPUTED)
    # The range of the whole model has the name of the model's class.
    own = plain.rpartition("/")[2].rpartition(".")[2]
    return name if module_type in (None, own) else f"{plain}: {module_type}{name[len(plain) :]}"


def without_ranges(operators: Table) -> Table:
    """Return the operator table without the rows that are no operators, such as ranges."""
    return operators.where(f"kind not in {_NO_OPERATORS}")


def share_of(ranges: Table) -> str:
    """Return the column of the ranges' shares: of device time if recorded, else of CPU time."""
    return "device_share" if any(ranges.column("device_share")) else "share"


def costliest_by(operators: Table) -> str:
    """Return the column that sorts operators: self device time if recorded, else self CPU time."""
    return "self_device_ns" if any(operators.column("self_device_ns")) else "self_cpu_ns"
