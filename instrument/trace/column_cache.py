"""Cache the columns of traces in the user's cache folder, so that each trace is parsed once.

The cache holds traces of at least 100,000 events, with one entry for each path. An entry is used
only by the version of this package that wrote the entry, and only while the trace keeps its size,
modification time and inode. The folder of a trace is not changed. Each column is stored in the
narrowest integer type that holds its values. If all values of a column are equal, one value is
stored.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument import __version__, cache
from instrument.trace import reader
from instrument.trace.columns import is_repeated, repeated
from instrument.trace.events import Codes, Events, Flags, Floats, Ints, Memory

FORMAT = 6
KEPT_FROM_EVENTS = 100_000
_DTYPES: list[tuple[Any, type[np.generic]]] = [
    (Ints, np.int64),
    (Codes, np.int32),
    (Flags, np.bool_),
    (Floats, np.float32),
]
_WIDTHS = ("int8", "int16", "int32", "int64")
_SAVED = (*_WIDTHS, "float32")
_ALIGNMENT = 64  # of each column in memory, in bytes


def _columns_of(kind: type[Any]) -> dict[str, type[np.generic]]:
    """The fields of a dataclass that are columns, and the type of their elements."""
    return {
        name: dtype
        for name, hint in get_type_hints(kind).items()
        for alias, dtype in _DTYPES
        if hint == alias
    }


_EVENTS, _MEMORY = _columns_of(Events), _columns_of(Memory)
_OTHERS = [
    (f.name, get_type_hints(Events)[f.name])
    for f in fields(Events)
    if f.name not in {*_EVENTS, "memory"}
]
_Others = msgspec.defstruct("_Others", _OTHERS)
# Columns of indices, and the list that each column indexes. The columns of `_INDICES_OR_NONE` can
# hold -1, which means no value.
_INDICES = {"category": "categories", "name": "names", "thread": "threads"}
_INDICES_OR_NONE = dict.fromkeys(("shapes", "concrete", "types", "call_stack"), "texts")
_INDICES_OR_NONE |= {"grid": "grids", "block": "grids", "detail": "details"}


def _made_by() -> list[str]:
    """The version of the code that writes cache entries: package version, format and columns.

    A cache entry that another version wrote is not used.
    """
    return [__version__, str(FORMAT), *_EVENTS, *_MEMORY, *(name for name, _ in _OTHERS)]


class _Head(msgspec.Struct):
    made_by: list[str]
    trace: tuple[int, int, int]
    checksum: int
    rows: tuple[int, int]  # the numbers of events and of memory events
    columns: list[tuple[str, int]]  # for each column, its type and how many values are stored
    others: _Others  # type: ignore[valid-type]


def entry_of(trace: Path) -> str:
    """The name of the cache entry for the trace at a path."""
    return cache.COLUMNS + hashlib.sha256(os.fsencode(os.path.realpath(trace))).hexdigest()[:32]


def read(trace: Path, final_path: Path | None = None) -> Events:
    """Read the events of a trace file, from the cache if it has a valid entry.

    Otherwise the file is parsed, and traces of at least 100,000 events are added to the cache. A
    cache that cannot be written is ignored.

    Args:
        trace: the file.
        final_path: the later path of the trace, if its folder will be renamed. The cache entry is
            stored for this path.

    Raises:
        TraceError: see `reader.read`.
    """
    try:
        entry, state = entry_of(final_path or trace), _state(trace)
        cached = _load(entry, state)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError):
        cached = None  # no entry, a damaged entry, or an entry of another user
    if cached is not None:
        return cached
    events = reader.read(trace)
    if len(events) >= KEPT_FROM_EVENTS:
        with suppress(OSError):
            _save(entry, events, state)
    return events


def _state(trace: Path) -> tuple[int, int, int]:
    found = trace.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _load(entry: str, state: tuple[int, int, int]) -> Events | None:
    with cache.open_entry(entry) as file:
        size = os.fstat(file.fileno()).st_size - 8
        head_bytes = int.from_bytes(file.read(8), "little")
        if head_bytes > size:
            return None
        head = msgspec.json.decode(file.read(head_bytes), type=_Head)
        if (
            head.made_by != _made_by()
            or head.trace != state
            or len(head.columns) != len(_EVENTS) + len(_MEMORY)
        ):
            return None
        dtypes = [np.dtype(_SAVED[_SAVED.index(width)]) for width, _ in head.columns]
        counts = [count for _, count in head.columns]
        sizes = [dtype.itemsize * count for dtype, count in zip(dtypes, counts)]
        if min(counts) < 0 or sum(sizes) != size - head_bytes:
            return None
        checksum = zlib.crc32(repr(head.rows).encode())
        columns = _allocated([*_EVENTS.values(), *_MEMORY.values()], counts)
        for column, dtype, count in zip(columns, dtypes, counts):
            stored = column if column.dtype == dtype else np.empty(count, dtype)
            file.readinto(stored.data)  # a short read gives another checksum
            checksum = zlib.crc32(stored.data, checksum)
            if stored is not column:
                column[:] = stored
    if checksum != head.checksum:
        return None
    rows = [head.rows[0]] * len(_EVENTS) + [head.rows[1]] * len(_MEMORY)
    columns = [
        repeated(column, count) if len(column) == 1 else column
        for column, count in zip(columns, rows)
    ]
    found: dict[str, Any] = dict(zip(_EVENTS, columns)) | msgspec.structs.asdict(head.others)
    memory = Memory(**dict(zip(_MEMORY, columns[len(_EVENTS) :])))
    events = Events(memory=memory, **found)
    return events if _is_sound(events) else None


def _allocated(dtypes: Sequence[Any], counts: Sequence[int]) -> list[NDArray[Any]]:
    """Arrays of the given types and lengths, with undefined values.

    All arrays share one allocation. NumPy lets the system use huge pages for a large allocation,
    which makes the first use of the memory faster.
    """
    sizes = [np.dtype(dtype).itemsize * count for dtype, count in zip(dtypes, counts)]
    ends = np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()
    memory = np.empty(ends[-1], np.uint8)
    return [
        memory[begin : begin + size].view(dtype)
        for begin, size, dtype in zip([0, *ends], sizes, dtypes)
    ]


def _is_sound(events: Events) -> bool:
    """Whether the columns have equal lengths, and all indices lie within their lists."""
    memory = events.memory
    lengths = (
        {len(getattr(events, name)) for name in _EVENTS},
        {len(getattr(memory, name)) for name in _MEMORY},
    )
    indices = [(getattr(events, name), 0, values) for name, values in _INDICES.items()]
    indices += [(getattr(events, name), -1, values) for name, values in _INDICES_OR_NONE.items()]
    return all(len(each) == 1 for each in lengths) and all(
        least <= column.min(initial=least) and column.max(initial=-1) < len(getattr(events, values))
        for column, least, values in [*indices, (memory.thread, 0, "threads")]
    )


def _save(entry: str, events: Events, state: tuple[int, int, int]) -> None:
    owners = [*((events, name) for name in _EVENTS), *((events.memory, name) for name in _MEMORY)]
    columns = [getattr(owner, name) for owner, name in owners]
    columns = [_narrow(column[:1] if is_repeated(column) else column) for column in columns]
    rows = len(events), len(events.memory)
    checksum = zlib.crc32(repr(rows).encode())
    for column in columns:
        checksum = zlib.crc32(column.data, checksum)
    head = msgspec.json.encode(
        _Head(
            _made_by(),
            state,
            checksum,
            rows,
            [(column.dtype.name, len(column)) for column in columns],
            _Others(**{name: getattr(events, name) for name, _ in _OTHERS}),
        )
    )
    with cache.adding(entry) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for column in columns:
            file.write(column.data)


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in the narrowest integer type that holds them."""
    if column.dtype == np.bool_:
        return column.view(np.int8)
    if column.dtype == np.float32:
        return column
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    return column.astype(
        next(w for w in _WIDTHS if np.iinfo(w).min <= low and high <= np.iinfo(w).max)
    )
