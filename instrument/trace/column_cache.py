"""The columns of a trace kept in a file beside it, so that it is taken apart once.

`trace.json.gz.columns` may be deleted at any time. It is made for traces that take longer to read than a person
notices, holds for as long as the trace keeps its size and its time of change, and is replaced by another version of
this package. Numbers are stored in the fewest bytes that hold a whole column.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.files import open_regular, replacing
from instrument.trace import reader
from instrument.trace.capture_json import own_version
from instrument.trace.events import Codes, Events, Flags, Floats, Ints, Memory

FORMAT = 2
KEPT_FROM_EVENTS = 100_000
_DTYPES: list[tuple[Any, type[np.generic]]] = [
    (Ints, np.int64),
    (Codes, np.int32),
    (Flags, np.bool_),
    (Floats, np.float32),
]
_WIDTHS = ("int8", "int16", "int32", "int64")
_SAVED = (*_WIDTHS, "float32")


def _columns_of(kind: type[Any]) -> dict[str, type[np.generic]]:
    """The fields of a dataclass that are columns, and what each consists of."""
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
# What the columns of indices lead into; those of the second kind hold -1 where there is nothing.
_INDICES = {"category": "categories", "name": "names", "thread": "threads"}
_INDICES_OR_NONE = dict.fromkeys(("shapes", "concrete", "types", "call_stack", "group"), "texts")
_INDICES_OR_NONE |= dict.fromkeys(("grid", "block"), "grids")


def _made_by() -> list[str]:
    """What makes a file stale once it differs: the package's version, the format and the columns."""
    return [own_version(), str(FORMAT), *_EVENTS, *_MEMORY, *(name for name, _ in _OTHERS)]


class _Head(msgspec.Struct):
    made_by: list[str]
    trace: tuple[int, int]
    checksum: int
    columns: list[tuple[str, int]]
    others: _Others  # type: ignore[valid-type]


def path_of(trace: Path) -> Path:
    """Where the columns of a trace are kept."""
    return trace.with_name(f"{trace.name}.columns")


def read(trace: Path) -> Events:
    """The events of a trace file: its kept columns where they are current, else read, and kept from 100,000 on.

    Nothing is written into a folder that is read-only; where keeping fails for another reason it is left undone.

    Raises:
        TraceError: as `chrome.read`.
    """
    try:
        state = _state(trace)
        kept = _load(path_of(trace), state)
    except (
        OSError,
        ValueError,
        RecursionError,
        msgspec.DecodeError,
    ):  # none, another's, or damaged: read the trace
        kept = None
    if kept is not None:
        return kept
    events = reader.read(trace)
    if len(events) >= KEPT_FROM_EVENTS and _writable(trace.parent):
        with suppress(OSError):
            _save(path_of(trace), events, state)
    return events


def _state(trace: Path) -> tuple[int, int]:
    found = trace.stat()
    return found.st_size, found.st_mtime_ns


def _writable(folder: Path) -> bool:
    """Whether its mode allows writing; root may always, but a folder marked read-only is meant so."""
    return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def _load(path: Path, state: tuple[int, int]) -> Events | None:
    with open_regular(path) as file:
        head_bytes = int.from_bytes(file.read(8), "little")
        if head_bytes > os.fstat(file.fileno()).st_size:
            return None
        head = msgspec.json.decode(file.read(head_bytes), type=_Head)
        if (
            head.made_by != _made_by()
            or head.trace != state
            or len(head.columns) != len(_EVENTS) + len(_MEMORY)
        ):
            return None
        data = file.read()
    if zlib.crc32(data) != head.checksum:
        return None
    names = [*(("", name) for name in _EVENTS), *(("memory", name) for name in _MEMORY)]
    found: dict[str, dict[str, Any]] = {"": {}, "memory": {}}
    at = 0
    for (owner, name), (width, count) in zip(names, head.columns):
        column = np.frombuffer(data, np.dtype(_SAVED[_SAVED.index(width)]), count, at)
        at += column.nbytes
        found[owner][name] = column.astype((_MEMORY if owner else _EVENTS)[name])
    events = Events(
        memory=Memory(**found["memory"]), **found[""], **msgspec.structs.asdict(head.others)
    )
    return events if _is_sound(events) else None


def _is_sound(events: Events) -> bool:
    """Whether it is what reading a trace gives: columns of one length, and no index that leads out of its list."""
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


def _save(path: Path, events: Events, state: tuple[int, int]) -> None:
    """Write beside the target and put it in its place at the end."""
    owners = [*((events, name) for name in _EVENTS), *((events.memory, name) for name in _MEMORY)]
    columns = [_narrow(getattr(owner, name)) for owner, name in owners]
    checksum = 0
    for column in columns:
        checksum = zlib.crc32(column.data, checksum)
    head = msgspec.json.encode(
        _Head(
            _made_by(),
            state,
            checksum,
            [(column.dtype.name, len(column)) for column in columns],
            _Others(**{name: getattr(events, name) for name, _ in _OTHERS}),
        )
    )
    with replacing(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for column in columns:
            file.write(column.data)


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in the fewest bytes."""
    if column.dtype == np.bool_:
        return column.view(np.int8)
    if column.dtype == np.float32:
        return column
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    return column.astype(
        next(w for w in _WIDTHS if np.iinfo(w).min <= low and high <= np.iinfo(w).max)
    )
