"""Read the events of a piece of a trace's text with the C extension `_scanner`, if it is installed.

Without it, each piece is decoded as JSON (`schema`), with the same result in about six times as
long. `_scanner` divides each event into its numbers, its long texts, and its kind: the JSON text of
all other values that become columns. A trace has few kinds, and each is decoded only once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.read.trace.columns import append, joined, repeated, taken
from instrument.read.trace.events import Codes
from instrument.read.trace.schema import BAD, Begin, Counter, End, decode

compiled: ModuleType | None
try:
    from instrument.read.trace import _scanner as compiled
except ImportError:  # built only where there is a compiler
    compiled = None

Columns = dict[str, NDArray[Any]]

# The columns that `_scanner` returns, in its order: 64-bit numbers, then 32-bit codes. The code of
# a missing text is -1.
_NUMBERS = (
    "start_ns",
    "end_ns",
    "external_id",
    "correlation",
    "sequence",
    "forward_thread",
    "python_id",
    "python_parent",
)
TEXTS = ("shapes", "concrete", "types", "call_stack")
_MEMORY_NUMBERS = (
    "time_ns",
    "size_bytes",
    "device_type",
    "device_index",
    "allocated_bytes",
    "reserved_bytes",
    "address",
)
_SPAN = dict.fromkeys(_NUMBERS, np.int64) | dict.fromkeys((*TEXTS, "kind"), np.int32)
_MEMORY = dict.fromkeys(_MEMORY_NUMBERS, np.int64) | {"kind": np.int32}
# `_scanner` holds the kinds and long texts of the events that it has read. If they take more bytes
# than this, the events become columns, and `_scanner` forgets them. Otherwise a trace in which
# nothing repeats would fill the memory.
_MOST_BYTES = 1 << 25


class Scanned(NamedTuple):
    """What `Scanner.scan` returns for a piece of a trace's text.

    Attributes:
        recorded: the number of all events in the piece.
        others: the events that `take` does not return: the starts and ends of events whose start
            and end are two entries of the file, and counter events.
        is_full: whether `Scanner.take` must be called before the next piece is scanned.
    """

    recorded: int
    others: list[Begin | End | Counter]
    is_full: bool


class Taken(NamedTuple):
    """The events that were scanned so far, as columns.

    `texts` holds for each column of `TEXTS` the index of each event's text, or -1, and the distinct
    texts.
    """

    spans: Columns
    texts: dict[str, tuple[Codes, list[bytes]]]
    memory: Columns


class Kinds:
    """The kinds that were added since the last call of `columns_at`, as columns."""

    def __init__(self, columns_of: Callable[[list[Any]], Columns]) -> None:
        self._columns_of = columns_of
        self._parts: dict[str, list[NDArray[Any]]] = {}

    def add(self, new: list[Any]) -> None:
        """Add kinds; `new` holds one decoded event of each."""
        if new:
            append(self._parts, self._columns_of(new))

    def columns_at(self, rows: Columns) -> Columns:
        """Return the columns of events, and forget all kinds that were added.

        `rows` holds the columns of each event's own values, and the index of its kind in `kind`.
        """
        return {
            name: rows[name].astype(column.dtype, copy=False)
            if name in rows
            else taken(column, rows["kind"])
            for name, column in joined(self._parts, self._columns_of([])).items()
        }


class Scanner:
    """Scans the text of one trace, piece by piece and in order."""

    def __init__(
        self, spans_of: Callable[[list[Any]], Columns], memory_of: Callable[[list[Any]], Columns]
    ) -> None:
        self._compiled = compiled.Scanner() if compiled else None
        self._kinds, self._memory_kinds = Kinds(spans_of), Kinds(memory_of)

    def scan(self, text: bytes, begin: int, end: int) -> Scanned | None:
        """Read the events between two positions of a text.

        Returns None if the text must be decoded as JSON: the C extension is missing or does not
        understand it, or `decode` rejects a part of it.
        """
        if self._compiled is None or (found := self._compiled.scan(text, begin, end)) is None:
            return None
        try:
            # The events of the third list have no columns; they are decoded to check their JSON.
            kinds, memory_kinds, _, others = (decode(b"[%b]" % events) for events in found[1:])
        except BAD:
            return None
        self._kinds.add(kinds)
        self._memory_kinds.add(memory_kinds)
        return Scanned(found[0], others, self._compiled.keep() > _MOST_BYTES)

    def take(self) -> Taken | None:
        """Remove and return all events that were scanned since the last call.

        Returns None if the C extension is missing.
        """
        if self._compiled is None:
            return None
        spans, memory, texts = self._compiled.take()
        rows, memory_rows = _rows(_SPAN, *spans), _rows(_MEMORY, *memory)
        return Taken(
            self._kinds.columns_at(rows),
            {name: (rows[name], distinct) for name, distinct in zip(TEXTS, texts)},
            self._memory_kinds.columns_at(memory_rows),
        )


def _rows(dtypes: dict[str, Any], count: int, columns: list[bytearray]) -> Columns:
    found = {}
    for (name, dtype), column in zip(dtypes.items(), columns):
        values = np.frombuffer(column, dtype)
        found[name] = values if len(values) == count else repeated(values, count)
    return found
