"""Build numpy columns from numbers, times and interned values (see `Interned`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from instrument.read.trace.events import Codes, Ints

# The limit of times in a trace: 146 years, or the year 2116 in Unix time. With this limit, the
# difference of two times fits into 64 bits.
BEYOND_US = 2**62 // 1000
BEYOND_NS = BEYOND_US * 1000


def as_ns(microseconds: Sequence[int | float | Decimal]) -> Ints:
    """Convert decimal microseconds to whole nanoseconds, limited to ±`BEYOND_NS`.

    The integer part and the fraction of a float are scaled separately, because `1000 * float` would
    be rounded twice.
    """
    values = np.array(microseconds) if len(microseconds) else np.zeros(0, np.int64)
    sizes = values.astype(np.float64)
    if not np.all(np.abs(sizes) <= BEYOND_US):
        limits = np.copysign(BEYOND_US, sizes).tolist()
        near = [
            value if abs(size) <= BEYOND_US else int(limit)
            for value, size, limit in zip(values.tolist(), sizes, limits)
        ]
        return as_ns(near)
    if values.dtype.kind == "O":
        return np.array([round(value * 1000) for value in values.tolist()], np.int64)
    if values.dtype.kind in "iu":
        return as_int64(values) * 1000
    whole = np.floor(values)
    fraction_ns = np.rint((values - whole) * 1000).astype(np.int64)
    nanoseconds: Ints = whole.astype(np.int64) * 1000 + fraction_ns
    return nanoseconds


def as_int64(values: Sequence[int] | NDArray[Any]) -> Ints:
    """Convert integers to a column. Only the lowest 64 bits of an integer are kept."""
    try:
        return np.array(values, np.int64)
    except OverflowError:  # unsigned integers, such as 2**64 - 1 for -1
        return np.array([v & 0xFFFF_FFFF_FFFF_FFFF for v in values], np.uint64).view(np.int64)


class Interned(dict[Any, int]):
    """A mapping from each distinct value to its code, from 0 in the order of first use."""

    def __missing__(self, value: Hashable) -> int:
        position = self[value] = len(self)
        return position

    def codes(self, values: Iterable[Hashable], count: int) -> Codes:
        """The code of each of `count` values; a new value gets the next code."""
        return np.fromiter(map(self.__getitem__, values), np.int32, count)


def fields_of(kind: type[Struct], values: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The values of each field of many structs of one type, by the name of the field."""
    columns = zip(*map(astuple, values)) if values else [()] * len(kind.__struct_fields__)
    return dict(zip(kind.__struct_fields__, columns))


def ints(values: Sequence[int | None], missing: int) -> Ints:
    """Convert numbers to a column, with `missing` for None.

    Most columns hold one value in all rows of a piece; then this takes a third of the time.
    """
    if len(values) > 1 and values.count(values[0]) == len(values):
        return np.repeat(ints(values[:1], missing), len(values))
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, OverflowError):
        return as_int64([missing if value is None else value for value in values])


def repeated(value: NDArray[Any], count: int) -> NDArray[Any]:
    """A read-only column of `count` equal values that stores the value only once."""
    column = np.ndarray(count, value.dtype, value, strides=(0,))  # faster than `broadcast_to`
    column.setflags(write=False)
    return column


def compact(column: NDArray[Any]) -> NDArray[Any]:
    """The same column, stored as by `repeated` if all its values are equal; NaN equals NaN."""
    if is_repeated(column):
        return column
    bits = column.view(f"i{column.itemsize}")
    if not len(bits) or bits[0] != bits[-1] or not (bits == bits[0]).all():
        return column
    return repeated(column[:1].copy(), len(column))


def is_repeated(column: NDArray[Any]) -> bool:
    """Whether a column was made by `repeated`."""
    return len(column) > 0 and column.strides == (0,)


def taken(values: NDArray[Any], codes: Codes | Ints) -> NDArray[Any]:
    """The column of the values at the given codes; equal values stay stored once (`repeated`)."""
    if is_repeated(codes):
        return repeated(values[codes[:1]], len(codes))
    if is_repeated(values):
        return repeated(values[:1], len(codes))
    return values[codes]


def append(parts: dict[str, list[NDArray[Any]]], columns: dict[str, NDArray[Any]]) -> None:
    """Append each column to the list of the same name in `parts`."""
    for name, column in columns.items():
        parts.setdefault(name, []).append(compact(column))


def joined(
    parts: dict[str, list[NDArray[Any]]], empty: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Join the pieces of each column and remove them from `parts`.

    A column without pieces is taken from `empty`. Equal values stay stored once (see `repeated`).
    """
    return {name: _joined(parts.pop(name, [column])) for name, column in empty.items()}


def _joined(pieces: list[NDArray[Any]]) -> NDArray[Any]:
    pieces = [piece for piece in pieces if len(piece)] or pieces[:1]
    if all(map(is_repeated, pieces)):
        values = compact(np.concatenate([piece[:1] for piece in pieces]))
        if is_repeated(values):
            return repeated(values[:1], sum(map(len, pieces)))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
