"""Reading a Chrome/Kineto trace file into columns.

The floor is inflating the file and scanning its JSON once: some 250 bytes an event as torch 2.13 writes them without
shapes, at 0.33 GB/s with typed structs. Reading takes 1.3 (warm) to 1.8 times as long as that bare decoding, and
at its peak 170 bytes an event beside the interpreter, about 90 of which are the columns. Only events with a duration
and memory instants become columns; flows and metadata are skipped while scanning.

Times are decimal microseconds in the file and integer
nanoseconds here, without loss: below 2**43 µs a float holds a nanosecond (its half step is 0.488 ns), above that
the decimal text is read a second time.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from instrument.capture.columns import Interned, append, as_ns, fields_of, ints, joined
from instrument.capture.events import DEVICE, PYTHON, Codes, Events, Ints, Memory, Thread, flags, is_runtime
from instrument.capture.inflate import chunks
from instrument.capture.pieces import Pieces, cut_short
from instrument.errors import TraceError
from instrument.names import from_trace

FLOAT_HOLDS_NS_BELOW = 2**43


class Args(Struct, gc=False, frozen=True, rename={
    "external_id": "External id", "old_external_id": "external id", "sequence": "Sequence number",
    "forward_thread": "Fwd thread id", "shapes": "Input Dims", "concrete": "Concrete Inputs",
    "types": "Input type", "call_stack": "Call stack", "address": "Addr",
    "python_id": "Python id", "python_parent": "Python parent id",
    "size_bytes": "Bytes", "device_type": "Device Type", "device_index": "Device Id",
    "allocated_bytes": "Total Allocated", "reserved_bytes": "Total Reserved",
    "moved_bytes": "bytes", "blocks_per_sm": "blocks per SM", "occupancy": "est. achieved occupancy %",
}):  # fmt: skip
    """Those arguments of an event that become columns."""

    external_id: int | None = 0
    old_external_id: int | None = 0
    correlation: int | None = 0
    sequence: int | None = -1
    forward_thread: int | None = 0
    finished: bool = True
    shapes: Raw = Raw()
    concrete: Raw = Raw()
    types: Raw = Raw()
    call_stack: Raw = Raw()
    python_id: int | None = -1
    python_parent: int | None = -1
    size_bytes: int | None = None
    device_type: int | None = 0
    device_index: int | None = -1
    allocated_bytes: int | None = 0
    reserved_bytes: int | None = 0
    moved_bytes: int | str | None = None  # text in ROCm's calls
    grid: Raw = Raw()
    block: Raw = Raw()
    blocks_per_sm: float | None = None
    occupancy: float | None = None
    address: int | None = 0


_NO_ARGS = Args()


class _Timed(Struct, gc=False):
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: int | float = 0
    args: Args = _NO_ARGS


class Complete(_Timed, tag_field="ph", tag="X"):
    """An event with a duration."""

    cat: str = ""
    dur: int | float = 0


class Instant(_Timed, tag_field="ph", tag="i"):
    """An event without one; memory is written as these."""


class Begin(_Timed, tag_field="ph", tag="B"):
    """The start of an event whose end is an event of its own."""

    cat: str = ""


class End(_Timed, tag_field="ph", tag="E"):
    """The end of the event that began last on its thread."""


_KEPT: dict[str, type[_Timed]] = {"X": Complete, "i": Instant, "B": Begin, "E": End}

_TIMED = frozenset(_KEPT.values())

# Every other phase of the format: counted, not kept. A struct without fields skips the event's text.
_SKIPPED = tuple(
    msgspec.defstruct(f"Skipped{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)
    for phase in "ICbneSTpFstfPNODMVvRc()"
)


def _list_of(kinds: Iterable[type]) -> Any:
    union: Any = None
    for kind in (*kinds, *_SKIPPED):
        union = kind if union is None else union | kind
    return list[union]


EVENT_LIST = _list_of(_KEPT.values())
_EVENTS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(EVENT_LIST)
# The times of the same events as they are written.
_EXACT: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(
    _list_of(
        msgspec.defstruct(f"Exact{kind.__name__}", [("ts", Decimal, Decimal(0))], tag_field="ph", tag=phase, gc=False)
        for phase, kind in _KEPT.items()
    )
)


def read(path: Path) -> Events:
    """The events of a trace file, plain or gzip, in the object form or as a bare list.

    A file that ends too early is read up to its last whole event, and the events say so (`cut_short`), if at least
    one event with a duration stands before the cut.

    Raises:
        TraceError: the file is missing, empty, cut short before any event, not JSON, or JSON but not a trace; its
            gzip data is damaged or a bomb; a time in it is no 64-bit number of nanoseconds.
    """
    pieces = Pieces(chunks(path), path, _decode, _coerced)
    columns = _Columns()
    with _collector_off():
        try:
            for piece in pieces:
                columns.add(piece)
            if pieces.cut_short and not columns.spans:
                raise cut_short(path, gzip=pieces.gzip_cut_short)
            return columns.finish(base_ns=pieces.base_ns, cut_short=pieces.cut_short)
        except OverflowError as error:
            raise TraceError(f"The trace file {path} has {error}; record it again.") from None


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the collector from walking a million young objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _decode(text: bytes) -> list[Any]:
    """The events of a JSON list; a time that a float does not hold to the nanosecond is left decimal."""
    events = _EVENTS.decode(text)
    if not _floats_hold(events):
        for event, exact in zip(events, _EXACT.decode(text)):
            if isinstance(event, _Timed):
                event.ts = exact.ts
    return events


def _floats_hold(events: list[Any]) -> bool:
    """Whether no time is both written with a point and too large."""
    times = [event.ts for event in events if type(event) in _TIMED]
    largest = max(times, default=0)
    return largest < FLOAT_HOLDS_NS_BELOW or all(
        type(time) is int or abs(time) < FLOAT_HOLDS_NS_BELOW for time in times
    )


def _coerced(event: dict[str, Any], text: str) -> Any:
    """One event in the types wanted; a field that cannot be understood takes its default."""
    kind = _KEPT.get(str(event.get("ph")))
    if kind is None:
        return None
    args = event.get("args")
    plain = {
        field.name: _fit(event.get(field.encode_name), field.type)
        for field in msgspec.structs.fields(kind)
        if field.name != "args"
    }
    plain = {name: value for name, value in plain.items() if value is not None}
    if abs(plain.get("ts", 0)) >= FLOAT_HOLDS_NS_BELOW and isinstance(event["ts"], float):
        plain["ts"] = json.loads(text, strict=False, parse_float=Decimal)["ts"]
    if "args" in kind.__struct_fields__:
        plain["args"] = _coerced_args(args) if isinstance(args, dict) else _NO_ARGS
    return kind(**plain)


def _coerced_args(args: dict[str, Any]) -> Args:
    known: dict[str, Any] = {}
    for field in msgspec.structs.fields(Args):
        if field.encode_name not in args:
            continue
        given = args[field.encode_name]
        value = Raw(json.dumps(given).encode()) if field.type is Raw else _fit(given, field.type)
        if value is not None:
            known[field.name] = value
    return Args(**known)


def _fit(value: Any, kind: Any) -> Any:
    if isinstance(value, str):  # half a surrogate pair is a character to JSON and to nothing else
        value = value.encode("utf-8", "replace").decode()
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return None


_DEVICE_ARGS = ("moved_bytes", "grid", "block", "blocks_per_sm", "occupancy")


class _Columns:
    """Columns that grow by a piece of events at a time."""

    def __init__(self) -> None:
        self.spans = 0
        self.recorded = 0
        self._categories, self._names, self._threads = Interned(), Interned(), Interned()
        self._texts, self._grids = Interned({b"": 0}), Interned({b"": 0})
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self._memory_parts: dict[str, list[NDArray[Any]]] = {}
        self._halves: list[Begin | End] = []

    def add(self, events: list[Any]) -> None:
        """Take what is needed of decoded events."""
        self.recorded += len(events)
        self._add_spans([event for event in events if type(event) is Complete])
        others = [event for event in events if type(event) is not Complete]
        instants = [e for e in others if type(e) is Instant and e.args.size_bytes is not None]
        if instants:
            append(self._memory_parts, self._memory(instants))
        self._halves += [event for event in others if type(event) in (Begin, End)]

    def _add_spans(self, spans: list[Complete]) -> None:
        if spans:
            self.spans += len(spans)
            append(self._parts, self._spans(spans))

    def _spans(self, spans: list[Complete]) -> dict[str, NDArray[Any]]:
        count, event = len(spans), fields_of(Complete, spans)
        arg = fields_of(Args, event["args"])
        start = as_ns(event["ts"])
        external = ints(arg["external_id"], 0)
        category = self._categories.codes(event["cat"], count)
        return {
            "category": category,
            "name": self._names.codes(event["name"], count),
            "thread": self._threads.codes(zip(event["pid"], event["tid"]), count),
            "start_ns": start,
            "end_ns": start + np.maximum(as_ns(event["dur"]), 0),
            "external_id": np.where(external != 0, external, ints(arg["old_external_id"], 0)),
            "correlation": ints(arg["correlation"], 0),
            "sequence": ints(arg["sequence"], -1),
            "forward_thread": ints(arg["forward_thread"], 0),
            "finished": ints(arg["finished"], 1).astype(np.bool_),
            "shapes": self._codes_of_texts(arg["shapes"]),
            "concrete": self._codes_of_texts(arg["concrete"]),
            "types": self._codes_of_texts(arg["types"]),
            "call_stack": self._call_stacks(arg["call_stack"]),
            "python_id": ints(arg["python_id"], -1),
            "python_parent": ints(arg["python_parent"], -1),
            **self._device_columns(category, arg),
        }

    def _device_columns(self, category: Codes, arg: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """What only kernels, copies and the calls that launch them have; a pass over all events would be felt."""
        there = np.flatnonzero(flags(lambda c: c in DEVICE or is_runtime(c), tuple(self._categories))[category])
        few = {name: [arg[name][k] for k in there.tolist()] for name in _DEVICE_ARGS}
        sizes = [int(n) if (n := str(size)).isdecimal() else -1 for size in few["moved_bytes"]]
        values: dict[str, tuple[NDArray[Any], float]] = {
            "moved_bytes": (np.array(sizes, np.int64), -1),
            "grid": (self._codes_of_texts(few["grid"], self._grids), -1),
            "block": (self._codes_of_texts(few["block"], self._grids), -1),
            "blocks_per_sm": (np.array(few["blocks_per_sm"], np.float32), np.nan),
            "occupancy": (np.array(few["occupancy"], np.float32), np.nan),
        }
        return {name: _placed(there, found, other, len(category)) for name, (found, other) in values.items()}

    def _memory(self, instants: list[Instant]) -> dict[str, NDArray[Any]]:
        event = fields_of(Instant, instants)
        arg = fields_of(Args, event["args"])
        return {
            "thread": self._threads.codes(zip(event["pid"], event["tid"]), len(instants)),
            "time_ns": as_ns(event["ts"]),
            "size_bytes": ints(arg["size_bytes"], 0),
            "device_type": ints(arg["device_type"], 0).astype(np.int32),
            "device_index": ints(arg["device_index"], -1).astype(np.int32),
            "allocated_bytes": ints(arg["allocated_bytes"], 0),
            "reserved_bytes": ints(arg["reserved_bytes"], 0),
            "address": ints(arg["address"], 0),
        }

    def _call_stacks(self, raws: Sequence[Raw]) -> Codes:
        """Where Python frames are events of their own, the operators' texts of them say nothing more."""
        has_frames = not PYTHON.isdisjoint(self._categories)
        return np.full(len(raws), -1, np.int32) if has_frames else self._codes_of_texts(raws)

    def _codes_of_texts(self, raws: Sequence[Raw], texts: Interned | None = None) -> Codes:
        """JSON texts interned; -1 where there is none."""
        if raws and raws.count(raws[0]) == len(raws) and not bytes(raws[0]):
            return np.full(len(raws), -1, np.int32)
        return (self._texts if texts is None else texts).codes(map(bytes, raws), len(raws)) - np.int32(1)

    def finish(self, *, base_ns: int, cut_short: bool) -> Events:
        """All of it; the builder is empty afterwards, so that no column is in memory twice."""
        self._add_spans(_paired(self._halves))
        plain = Interned()
        threads = plain.codes(((_number(p), _number(t)) for p, t in self._threads), len(self._threads))
        columns = joined(self._parts, self._spans([]))
        memory = joined(self._memory_parts, self._memory([]))
        if not PYTHON.isdisjoint(self._categories):  # known only now of the first pieces
            columns["call_stack"][:] = -1
        return Events(
            categories=tuple(self._categories),
            names=tuple(map(from_trace, self._names)),
            threads=tuple(plain),
            texts=tuple(self._texts)[1:],
            grids=tuple(self._grids)[1:],
            memory=Memory(**memory | {"thread": threads[memory["thread"]]}),
            recorded=self.recorded,
            base_ns=base_ns,
            cut_short=cut_short,
            **columns | {"thread": threads[columns["thread"]]},
        )


def _placed(where: Ints, values: NDArray[Any], elsewhere: float, count: int) -> NDArray[Any]:
    column = np.full(count, elsewhere, values.dtype)
    column[where] = values
    return column


def _number(value: int | str) -> int | str:
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value


def _paired(halves: list[Begin | End]) -> list[Complete]:
    """Events from their beginnings and ends: an end closes what began last on its thread.

    One that never ends is unfinished and lasts until the last time that its thread shows; an end without a beginning
    is left out.
    """
    found: list[Complete] = []
    threads: dict[Thread, list[Begin | End]] = {}
    for half in halves:
        threads.setdefault((_number(half.pid), _number(half.tid)), []).append(half)
    for members in threads.values():
        members.sort(key=lambda half: half.ts)
        open_ones: list[Begin] = []
        for half in members:
            if type(half) is Begin:
                open_ones.append(half)
            elif open_ones:
                found.append(_between(open_ones.pop(), half.ts))
        for begin in open_ones:
            found.append(_between(begin, members[-1].ts, finished=False))
    return found


def _between(begin: Begin, end: float, *, finished: bool = True) -> Complete:
    args = begin.args if finished else msgspec.structs.replace(begin.args, finished=False)
    lasts = float(Decimal(str(end)) - Decimal(str(begin.ts)))
    return Complete(name=begin.name, pid=begin.pid, tid=begin.tid, ts=begin.ts, args=args, cat=begin.cat, dur=lasts)
