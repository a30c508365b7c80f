"""Read the events of a piece of a trace with the compiled module `_scanner`, where it is installed.

The module is written in C and built during the installation if there is a C compiler. Without the
module, each piece is decoded as JSON (`schema`). The result is the same, but it takes about four
times as long.

Most events of a trace differ only in their numbers and long texts. So `_scanner` divides each event
into three parts: its numbers, its long texts, and its kind. The kind is the JSON text of all other
values that become columns. A trace has few kinds, and each kind is decoded only once. The columns
of an event come from its kind, its own numbers and its own long texts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.trace.columns import compact, taken
from instrument.trace.events import Codes
from instrument.trace.schema import BAD, Begin, End, decode

compiled: ModuleType | None
try:
    from instrument.trace import _scanner as compiled
except ImportError:  # built only where there is a compiler
    compiled = None

Columns = dict[str, NDArray[Any]]

# The columns of the rows that `_scanner` returns. A text is an index, or -1 if the text is missing.
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
_SPAN = np.dtype(
    [(name, np.int64) for name in _NUMBERS]
    + [(name, np.int32) for name in ("kind", *TEXTS, "unused")]
)
_MEMORY = np.dtype([(name, np.int64) for name in (*_MEMORY_NUMBERS, "kind")])
# If there are more kinds than this, or their texts have more bytes, the kinds found so far are
# forgotten. Otherwise a trace in which nothing repeats would fill the memory.
_MOST_KINDS, _MOST_BYTES = 1 << 16, 1 << 26


class Scanned(NamedTuple):
    """The events of a piece.

    `texts` holds two items for each column of `TEXTS`: the index of each event's text, and the list
    of distinct texts. The index is -1 if the event has no such text.
    """

    recorded: int
    spans: Columns
    texts: dict[str, tuple[Codes, list[bytes]]]
    memory: Columns
    halves: list[Begin | End]


class Kinds:
    """The kinds of events found so far in a trace, and their columns.

    `columns_of` converts decoded events to columns.
    """

    def __init__(self, columns_of: Callable[[list[Any]], Columns]) -> None:
        self._columns_of = columns_of
        self._columns: Columns = columns_of([])
        self._positions: dict[bytes, int] = {}
        self._bytes = 0

    def decoded(self, kinds: list[bytes]) -> list[Any]:
        """Decode the new kinds among `kinds`; raises the errors of msgspec.

        If very many kinds are known, all known kinds are forgotten first.
        """
        if len(self._positions) > _MOST_KINDS or self._bytes > _MOST_BYTES:
            self._columns, self._positions, self._bytes = self._columns_of([]), {}, 0
        new = [kind for kind in kinds if kind not in self._positions]
        return decode(b"[%b]" % b",".join(new)) if new else []

    def add(self, kinds: list[bytes], new: list[Any]) -> Codes:
        """Add the new kinds; return an index into the columns for each of `kinds`.

        `new` is what `decoded` returned for `kinds`.
        """
        if new:
            columns = self._columns_of(new)
            self._columns = {
                name: compact(np.append(column, columns[name]))
                for name, column in self._columns.items()
            }
            self._bytes += sum(map(len, kinds))
        positions = self._positions
        return np.array([positions.setdefault(kind, len(positions)) for kind in kinds], np.int32)

    def columns_at(self, kind: Codes, rows: NDArray[Any]) -> Columns:
        """Return the columns of events.

        `rows` holds the columns in which events of one kind differ. The other columns are made from
        `kind`, the index of each event's kind.
        """
        own = set(rows.dtype.names or ())
        return {
            name: rows[name].astype(column.dtype) if name in own else taken(column, kind)
            for name, column in self._columns.items()
        }


class Scanner:
    """Scans the pieces of one trace, in order."""

    def __init__(
        self, spans_of: Callable[[list[Any]], Columns], memory_of: Callable[[list[Any]], Columns]
    ) -> None:
        self._kinds, self._memory_kinds = Kinds(spans_of), Kinds(memory_of)
        # These kinds have no columns. They are decoded only to check their JSON.
        self._other_kinds = Kinds(lambda _: {})

    def scan(self, text: bytes, begin: int, end: int) -> Scanned | None:
        """Read the events between two positions of a text.

        Returns None if the text must be decoded as JSON: the compiled module is missing or does not
        understand the text, or a kind cannot be decoded.
        """
        found = compiled.scan(text, begin, end) if compiled else None
        if found is None:
            return None
        recorded, spans, kinds, memory, memory_kinds, other_kinds, halves, texts = found
        rows, memory_rows = np.frombuffer(spans, _SPAN), np.frombuffer(memory, _MEMORY)
        known = (self._kinds, self._memory_kinds, self._other_kinds)
        try:
            new = [*map(Kinds.decoded, known, (kinds, memory_kinds, other_kinds))]
            decoded_halves = decode(b"[%b]" % halves[:-1])
        except BAD:
            return None
        kind = self._kinds.add(kinds, new[0])[rows["kind"]]
        memory_kind = self._memory_kinds.add(memory_kinds, new[1])[memory_rows["kind"]]
        self._other_kinds.add(other_kinds, new[2])
        return Scanned(
            recorded,
            self._kinds.columns_at(kind, rows),
            {name: (rows[name], distinct) for name, distinct in zip(TEXTS, texts)},
            self._memory_kinds.columns_at(memory_kind, memory_rows),
            decoded_halves,
        )
