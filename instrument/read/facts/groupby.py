"""Group rows, and compute the sum, minimum and quantiles of each group in exact integers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import polars as pl

from instrument.read.trace.columns import Interned, is_repeated
from instrument.read.trace.events import Codes, Flags, Ints


def intern(values: Iterable[Hashable]) -> tuple[Ints, list[Any]]:
    """Number the distinct values in the order in which they first occur.

    Returns:
        The number of each value, and the distinct values in the order of their numbers.
    """
    every, numbers = list(values), Interned()
    return numbers.codes(every, len(every)).astype(np.int64), list(numbers)


def computed(
    rows: pl.DataFrame, compute: Callable[..., Any], keys: list[str], found: dict[str, Any]
) -> pl.DataFrame:
    """Add columns to rows, which `compute` finds once for each distinct combination of `keys`.

    `found` holds the names and types of the columns.
    """
    combinations = rows.select(keys).unique()
    cells = pl.DataFrame([compute(*row) for row in combinations.iter_rows()], found, orient="row")
    return rows.join(combinations.hstack(cells), on=keys, how="left", maintain_order="left")


def groupby(keys: Ints | Codes) -> tuple[Ints, Groups]:
    """Group rows by an integer; return the sorted key of each group, and the groups.

    Cost: linear time if all keys are between 0 and four times the number of rows; otherwise a sort.
    """
    if keys.min(initial=0) < 0 or keys.max(initial=0) > 4 * len(keys):
        distinct, of = np.unique(keys, return_inverse=True)
        return distinct.astype(np.int64), Groups(of, len(distinct))
    sizes = np.bincount(keys)
    distinct = np.flatnonzero(sizes)
    groups = Groups((np.cumsum(sizes > 0) - 1)[keys], len(distinct))
    vars(groups)["size"] = sizes[distinct]  # otherwise, the rows would be counted again
    return distinct, groups


def group_rows(*columns: Ints | Codes | Flags) -> Groups:
    """Group rows by several columns of integers; groups are sorted by the first, then the next.

    Cost: two sorts for each column.
    """
    groups = groupby(columns[0].astype(np.int64))[1]
    for column in columns[1:]:
        other = groupby(column.astype(np.int64))[1]
        groups = groupby(groups.of * other.count + other.of)[1]
    return groups


def groupby_rows(*columns: Ints | Codes) -> tuple[Ints, Groups]:
    """Group rows as `group_rows` does; the first result has the values of each group.

    It has a row for each of `columns`, and a column for each group.
    """
    groups = group_rows(*columns)
    row = np.zeros(groups.count, np.int64)
    row[groups.of] = np.arange(len(groups.of))  # any row of the group
    return np.stack([column[row].astype(np.int64) for column in columns]), groups


def distinct(values: Ints | Codes) -> Ints:
    """The distinct values, in increasing order.

    Cost: a sort, in linear time if `values` consists of a few sorted parts. Since NumPy 2.3,
    `np.unique` uses a hash table, which takes more than ten times as long for a million different
    values.
    """
    ordered = np.sort(values[:1] if is_repeated(values) else values, kind="stable")
    changes = ordered[1:] != ordered[:-1]
    found: Ints = ordered[np.append(True, changes)[: len(ordered)]]
    return found


def isin(values: Ints, wanted: Ints) -> Flags:
    """A mask of the values that are in `wanted`.

    Cost: that of `distinct` for `wanted`, and a binary search for each value; `np.isin` calls
    `np.unique`.
    """
    ordered = distinct(wanted)
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    at = np.searchsorted(ordered, values)
    found: Flags = ordered.take(at, mode="clip") == values
    return found


class TimesOfGroups:
    """Times in groups, such as the starts of the events of each thread: finds times by search.

    Attributes:
        order: the rows, sorted by group, then by time.
    """

    def __init__(self, group: Ints | Codes, time_ns: Ints) -> None:
        self.order = np.lexsort((time_ns, group))
        self._group = group[self.order].astype(np.int64)
        self._times = distinct(time_ns)
        self._keys = self._key(self._group, time_ns[self.order])

    def _key(self, group: Ints, time_ns: Ints, side: Literal["left", "right"] = "left") -> Ints:
        return group * (len(self._times) + 1) + np.searchsorted(self._times, time_ns, side)

    def place(
        self, group: Ints | Codes, time_ns: Ints, side: Literal["left", "right"] = "left"
    ) -> Ints:
        """For each given group and time, the index in `order` at which the time would be inserted.

        With "left", it is before the group's rows of this time, with "right" after them.
        """
        return np.searchsorted(self._keys, self._key(group.astype(np.int64), time_ns, side))

    def before(
        self, group: Ints | Codes, time_ns: Ints, side: Literal["left", "right"] = "left"
    ) -> Ints:
        """For each given group and time, the group's last row before the time; -1 for none.

        With "right", the row can be at the time.
        """
        return self._row(group, self.place(group, time_ns, side) - 1)

    def since(self, group: Ints | Codes, time_ns: Ints) -> Ints:
        """For each given group and time, the group's first row at or after it; -1 for none."""
        return self._row(group, self.place(group, time_ns))

    def _row(self, group: Ints | Codes, place: Ints) -> Ints:
        inside = (place >= 0) & (place < len(self.order))
        place = np.where(inside, place, -1)
        found: Ints = np.append(self.order, -1)[place]
        return np.where(inside & (np.append(self._group, -1)[place] == group), found, -1)


@dataclass(frozen=True)
class Groups:
    """Rows in groups: `of` holds the group of each row, a number from 0 to `count` - 1.

    A row without a group has -1 in `of`. `sum` leaves such rows out; the other methods need a mask
    `where` that is False for them.
    """

    of: Ints
    count: int

    @cached_property
    def size(self) -> Ints:
        """The number of rows in each group."""
        return np.bincount(self.of, minlength=self.count)

    def number(self, where: Flags) -> Ints:
        """For each group, how many of its rows have True in the mask `where`."""
        if where.all():
            return self.size
        return np.bincount(self.of[np.flatnonzero(where)], minlength=self.count)

    def sum(self, values: Ints, where: Flags | None = None) -> Ints:
        """The sum of each group's values; only rows for which `where` is True count."""
        of = self.of
        if where is not None and not where.all():
            rows = np.flatnonzero(where)  # faster than two times the mask
            of, values = of[rows], values[rows]
        total = np.zeros(self.count + 1, np.int64)  # the last entry is for rows without a group
        np.add.at(total, of, values)  # not bincount: its sums are floats
        return total[:-1]

    def min(self, values: Ints) -> Ints:
        """The smallest value of each group; the largest 64-bit integer for an empty group."""
        least, filled = np.full(self.count, np.iinfo(np.int64).max), self.size > 0
        ordered = values[self.in_order.order]  # `minimum.at` takes ten times as long
        least[filled] = np.minimum.reduceat(ordered, self.in_order.start[filled])
        return least

    def cells(self, values: Ints | None, known: Flags | None = None) -> list[int | None]:
        """The value of each group as a cell of a table; None where `known` is False.

        All cells are None if `values` is None.
        """
        return [None] * self.count if values is None else cells(values, known)

    def sums(self, values: Ints | None, where: Flags | None = None) -> list[int | None]:
        """The sum of the values of each group as a cell of a table.

        All cells are None if `values` is None. With `where`, only these rows count, and the cell of
        a group without such a row is None.
        """
        total = None if values is None else self.sum(values, where)
        return self.cells(total, None if where is None else self.number(where) > 0)

    def renumbered(self, order: Ints) -> Groups:
        """The same groups with new numbers: group `order[k]` gets the number k."""
        number = np.empty(self.count, np.int64)
        number[order] = np.arange(self.count)
        return Groups(number[self.of], self.count)

    def sorted_by(self, *values: Ints) -> SortedGroups:
        """The rows of each group, sorted by the first array, then by the second, and so on."""
        bits, keys = self.count.bit_length() or 1, [*values[::-1]]
        # NumPy sorts integers of 16 bits in linear time.
        keys += [(self.of >> k).astype(np.uint16) for k in range(0, bits, 16)]
        return SortedGroups(np.lexsort(keys), np.cumsum(self.size) - self.size, self.size)

    @cached_property
    def in_order(self) -> SortedGroups:
        """The rows of each group, in increasing order."""
        return self.sorted_by()

    def rows(self) -> list[Ints]:
        """The rows of each group, in increasing order."""
        return self.in_order.rows()


@dataclass(frozen=True, slots=True)
class SortedGroups:
    """The rows of all groups: those of group k are `order[start[k] : start[k] + size[k]]`."""

    order: Ints
    start: Ints
    size: Ints

    def row(self, percent: int) -> Ints:
        """For each group, the row at a percentile; -1 for an empty group.

        Percentile 0 is the first row, 50 the median (the first of two middle rows), and 100 the
        last. Nothing is interpolated.
        """
        rank = np.maximum(-(-percent * self.size // 100), 1) - 1
        at = np.where(self.size > 0, self.start + rank, len(self.order))
        found: Ints = np.append(self.order, -1)[at]
        return found

    def rows(self) -> list[Ints]:
        """The rows of each group, in sorted order."""
        return np.split(self.order, self.start[1:])[: len(self.start)]

    def ordinals(self) -> Ints:
        """The index of each row within its sorted group."""
        found = np.zeros(len(self.order), np.int64)
        found[self.order] = np.arange(len(self.order)) - np.repeat(self.start, self.size)
        return found


def at(values: Ints, rows: Ints) -> list[int | None]:
    """The values at the given rows as cells of a table; the cell for row -1 is None."""
    return cells(np.append(values, 0)[rows], rows >= 0)


def cells(values: Ints, known: Flags | None = None) -> list[int | None]:
    """Integers as cells of a table; None where `known` is False."""
    found: list[int | None] = values.tolist()
    if known is None or known.all():
        return found
    return [cell if is_known else None for cell, is_known in zip(found, known.tolist())]


def differences(values: Ints | Sequence[int]) -> list[int]:
    """Each integer minus the integer before it; the first integer is kept.

    Slowly changing values then take less space in a compressed file.
    """
    found: list[int] = np.diff(np.asarray(values, np.int64), prepend=0).tolist()
    return found
