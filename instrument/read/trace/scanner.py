"""Read the events of a trace's text with the C extension `_scanner`, if it is installed.

Without it, each piece of the text is decoded as JSON (`schema`), with the same result in about six
times as long. `_scanner` divides each event into its numbers, its long texts, and its kind: the
JSON text of all other values that become columns. A trace has few kinds, and each is decoded only
once. Two threads scan pieces at the same time if the process may use two CPUs; the pieces become
columns in the order of the file, so that the result does not depend on the threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.read.trace.columns import append, joined, repeated, taken
from instrument.read.trace.events import Codes
from instrument.read.trace.schema import BAD, decode

compiled: ModuleType | None
try:
    from instrument.read.trace import _scanner as compiled

    if not hasattr(compiled, "Columns"):  # built from an older source
        compiled = None
except ImportError:  # built only where there is a compiler
    compiled = None

Columns = dict[str, NDArray[Any]]

_MOST_THREADS = 2  # with more, the thread that reads the file would be the slowest
_LEAST_BYTES = 1 << 19  # a smaller piece is scanned at once
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
    """The events of a piece of a trace's text whose columns `Scanner.take` returns.

    `recorded` is the number of all events in the piece, `counters` that of counter events. If
    `is_full`, `Scanner.take` must be called before the next piece is scanned.
    """

    recorded: int
    counters: int
    is_full: bool


class Taken(NamedTuple):
    """The events that were scanned so far, as columns.

    `texts` holds for each column of `TEXTS` the index of each event's text, or -1, and the distinct
    texts.
    """

    spans: Columns
    texts: dict[str, tuple[Codes, list[bytes]]]
    memory: Columns


class Scanner:
    """Scans the pieces of one trace's text, on as many threads as there are CPUs, but at most two.

    Args:
        spans_of, memory_of: make columns of decoded events.
        cpus: how many CPUs the scanner may use.

    Attributes:
        ahead: how many pieces may be begun before the first one is awaited.
    """

    def __init__(
        self,
        spans_of: Callable[[list[Any]], Columns],
        memory_of: Callable[[list[Any]], Columns],
        cpus: int = 1,
    ) -> None:
        threads = min(_MOST_THREADS, cpus)
        self.ahead = threads + 1 if compiled and threads > 1 else 1
        self._columns = compiled.Columns() if compiled else None
        self._spans_of, self._memory_of = spans_of, memory_of
        # The pieces of the columns of kinds.
        self._kinds: dict[str, list[NDArray[Any]]] = {}
        self._memory_kinds: dict[str, list[NDArray[Any]]] = {}
        self._threads: ThreadPoolExecutor | None = None
        # Each scanner with the piece that it has begun to read last.
        self._scanners: deque[tuple[Any, Future[bool] | None]] = deque(
            (compiled.Scanner(), None) for _ in range(self.ahead) if compiled
        )

    def begin(self, text: bytes, begin: int, end: int) -> Callable[[], Scanned | None]:
        """Begin to read the events between two positions of a text; the result waits for them.

        It returns None if the text must be decoded as JSON: the C extension is missing or does not
        understand it, or `decode` rejects a part of it.
        """
        if self._columns is None:
            return lambda: None
        scanner, last = self._scanners.popleft()
        if last is not None:
            last.exception()  # a piece that nobody awaited
        try:
            if self.ahead > 1 and end - begin > _LEAST_BYTES:
                self._threads = self._threads or ThreadPoolExecutor(self.ahead - 1)
                future = self._threads.submit(scanner.scan, text, begin, end)
            else:
                future = _done(scanner.scan(text, begin, end))
        except RuntimeError:  # no thread can start while the interpreter shuts down
            future = _done(scanner.scan(text, begin, end))
        self._scanners.append((scanner, future))
        return lambda: self._added(scanner) if future.result() else None

    def _added(self, scanner: Any) -> Scanned | None:
        assert self._columns is not None
        if (found := self._columns.add(scanner)) is None:
            return None
        recorded, counters, *kinds = found
        try:
            # The events of the third list have no columns; they are decoded to check their JSON.
            spans, memory, _ = (decode(b"[%b]" % events) for events in kinds)
        except BAD:
            return None
        if spans:
            append(self._kinds, self._spans_of(spans))
        if memory:
            append(self._memory_kinds, self._memory_of(memory))
        return Scanned(recorded, counters, self._columns.keep(scanner) > _MOST_BYTES)

    def take(self) -> Taken | None:
        """Remove and return all events that were scanned since the last call.

        Returns None if the C extension is missing.
        """
        if self._columns is None:
            return None
        spans, memory, texts = self._columns.take()
        rows, memory_rows = _rows(_SPAN, *spans), _rows(_MEMORY, *memory)
        return Taken(
            _with_kinds(rows, joined(self._kinds, self._spans_of([]))),
            {name: (rows[name], distinct) for name, distinct in zip(TEXTS, texts)},
            _with_kinds(memory_rows, joined(self._memory_kinds, self._memory_of([]))),
        )

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _done(result: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(result)
    return future


def cpus() -> int:
    """How many threads may work: as many as there are CPUs, or as polars may use.

    The exporter, which runs beside training, sets POLARS_MAX_THREADS to 1.
    """
    allowed = os.environ.get("POLARS_MAX_THREADS", "")
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(most, int(allowed)) if allowed.isdecimal() else most


def _with_kinds(rows: Columns, kinds: Columns) -> Columns:
    """The columns of events, from their own values and the values of their kinds."""
    return {
        name: rows[name].astype(column.dtype, copy=False)
        if name in rows
        else taken(column, rows["kind"])
        for name, column in kinds.items()
    }


def _rows(dtypes: dict[str, Any], count: int, columns: list[bytearray]) -> Columns:
    found = {}
    for (name, dtype), column in zip(dtypes.items(), columns):
        values = np.frombuffer(column, dtype)
        found[name] = values if len(values) == count else repeated(values, count)
    return found
