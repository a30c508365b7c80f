"""Reading a Chrome/Kineto trace file into columns.

The floor is inflating the file and scanning its JSON once. Only events with a duration and memory instants become
columns; flows and metadata are skipped while scanning. Times are decimal microseconds in the file and integer
nanoseconds here, without loss: below 2**43 µs a float holds a nanosecond (its half step is 0.488 ns), above that
the decimal text is read a second time.
"""

from __future__ import annotations

import gc
import gzip
import re
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from instrument.capture.events import PYTHON, Codes, Events, Ints, Memory, Thread
from instrument.errors import TraceError

FLOAT_HOLDS_NS_BELOW = 2**43
_FIRST = re.compile(rb"\s*\S")
_T = TypeVar("_T", bound=Hashable)


class Args(Struct, gc=False, frozen=True, rename={
    "external_id": "External id", "old_external_id": "external id", "sequence": "Sequence number",
    "forward_thread": "Fwd thread id", "shapes": "Input Dims", "concrete": "Concrete Inputs",
    "types": "Input type", "call_stack": "Call stack", "address": "Addr",
    "python_id": "Python id", "python_parent": "Python parent id",
    "size_bytes": "Bytes", "device_type": "Device Type", "device_index": "Device Id",
    "allocated_bytes": "Total Allocated", "reserved_bytes": "Total Reserved",
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
    address: int | None = 0


_NO_ARGS = Args()


class Complete(Struct, gc=False, tag_field="ph", tag="X"):
    """An event with a duration."""

    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: int | float = 0
    dur: int | float = 0
    args: Args = _NO_ARGS


class Instant(Struct, gc=False, tag_field="ph", tag="i"):
    """An event without one; memory is written as these."""

    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: int | float = 0
    args: Args = _NO_ARGS


_KEPT: dict[str, type[Complete] | type[Instant]] = {"X": Complete, "i": Instant}

# Every other phase of the format: counted, not kept. A struct without fields skips the event's text.
_SKIPPED = tuple(
    msgspec.defstruct(f"Skipped{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)
    for phase in "BEICbneSTpFstfPNODMVvRc()"
)


class ExactComplete(Struct, gc=False, tag_field="ph", tag="X"):
    """The times of an event as they are written."""

    ts: Decimal = Decimal(0)


class ExactInstant(Struct, gc=False, tag_field="ph", tag="i"):
    """The time of an instant as it is written."""

    ts: Decimal = Decimal(0)


class Document(Struct):
    """A trace file in its object form."""

    traceEvents: list[Any]  # noqa: N815 - the format's own name
    baseTimeNanoseconds: int = 0  # noqa: N815


def _decoders(kinds: Iterable[type]) -> tuple[msgspec.json.Decoder[Any], msgspec.json.Decoder[Any]]:
    """A decoder for the object form and one for the bare list, with these event types."""
    union: Any = None
    for kind in (*kinds, *_SKIPPED):
        union = kind if union is None else union | kind
    document = msgspec.defstruct("Document", [("traceEvents", list[union])], bases=(Document,), gc=False)
    return msgspec.json.Decoder(document), msgspec.json.Decoder(list[union])


_DECODERS = _decoders((Complete, Instant))
_EXACT_DECODERS = _decoders((ExactComplete, ExactInstant))


def read(path: Path) -> Events:
    """The events of a trace file, plain or gzip, in the object form or as a bare list.

    Cost: 1.5 to 4 µs an event, the more arguments the more, of which the bare decoding is about half; at the peak
    the plain text and 0.5 to 1 kB an event.

    Raises:
        TraceError: the file is missing, empty, cut short, not JSON, or JSON but not a trace.
    """
    data = load_bytes(path)
    with _collector_off():
        events, base_ns = _decode(data, path)
        spans = [event for event in events if type(event) is Complete]
        memory = [e for e in events if type(e) is Instant and e.args.size_bytes is not None]
        exact = _exact_times(data, events) if _needs_text(spans, memory) else None
        return _columns(spans, memory, exact, recorded=len(events), base_ns=base_ns)


def load_bytes(path: Path) -> bytes:
    """The plain text of a file, inflated where it is gzip by its first bytes, whatever it is called.

    Raises:
        TraceError: the file is missing, cannot be read, is empty, or its gzip data is cut short or damaged.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise TraceError(f"The trace file {path} does not exist; check the path.") from None
    except EOFError:
        raise TraceError(f"The trace file {path} is gzip cut short; copy or record it again.") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"The trace file {path} is damaged gzip ({error}); copy or record it again.") from None
    except OSError as error:
        raise TraceError(f"The trace file {path} cannot be read: {error.strerror or error}.") from None
    if not data or data.isspace():
        raise TraceError(f"The trace file {path} is empty; copy or record it again.")
    return data


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


def _decode(data: bytes, path: Path) -> tuple[list[Any], int]:
    is_list = _is_list(data)
    try:
        found = _DECODERS[is_list].decode(data)
    except msgspec.ValidationError:
        return _decode_loosely(data, path)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_json(error, path) from None
    return (found, 0) if is_list else (found.traceEvents, found.baseTimeNanoseconds)


def _is_list(data: bytes) -> bool:
    first = _FIRST.match(data)
    return first is not None and first[0][-1:] == b"["


def _bad_json(error: Exception, path: Path) -> TraceError:
    if "truncated" in str(error):
        return TraceError(f"The trace file {path} is cut short: its JSON does not end; copy or record it again.")
    return TraceError(f"The trace file {path} is not JSON ({error}); give a Chrome trace.")


def _decode_loosely(data: bytes, path: Path) -> tuple[list[Any], int]:
    """The same from a file whose fields have other types than torch writes; some ten times slower."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_json(error, path) from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"The file {path} is JSON, but not a trace: it has no list of traceEvents.")
    base = document.get("baseTimeNanoseconds") if isinstance(document, dict) else 0
    return [_coerced(event) for event in events], base if isinstance(base, int) else 0


def _coerced(event: dict[str, Any]) -> Any:
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
    return kind(**plain, args=_coerced_args(args) if isinstance(args, dict) else _NO_ARGS)


def _coerced_args(args: dict[str, Any]) -> Args:
    known: dict[str, Any] = {}
    for field in msgspec.structs.fields(Args):
        if field.encode_name not in args:
            continue
        given = args[field.encode_name]
        value = Raw(msgspec.json.encode(given)) if field.type is Raw else _fit(given, field.type)
        if value is not None:
            known[field.name] = value
    return Args(**known)


def _fit(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return None


def _needs_text(*groups: Sequence[Complete] | Sequence[Instant]) -> bool:
    """Whether some time is written with a point and too large for a float to hold its nanoseconds."""
    for group in groups:
        times = np.array([event.ts for event in group])
        if times.dtype.kind == "f" and times.size and times.max() >= FLOAT_HOLDS_NS_BELOW:
            return True
    return False


def _exact_times(data: bytes, events: list[Any]) -> tuple[Ints, Ints]:
    """The starts of events and of memory instants, in nanoseconds, from the decimal text.

    Where the file had to be coerced, its floats are all there is.
    """
    is_list = _is_list(data)
    try:
        found = _EXACT_DECODERS[is_list].decode(data)
    except msgspec.ValidationError:
        return _ns([e.ts for e in events if type(e) is Complete]), _ns(
            [e.ts for e in events if type(e) is Instant and e.args.size_bytes is not None]
        )
    exact = found if is_list else found.traceEvents
    pairs = list(zip(events, exact))
    spans = [round(e.ts * 1000) for k, e in pairs if type(k) is Complete]
    memory = [round(e.ts * 1000) for k, e in pairs if type(k) is Instant and k.args.size_bytes is not None]
    return _int64(spans), _int64(memory)


def _ns(microseconds: Sequence[int | float]) -> Ints:
    """Decimal microseconds as whole nanoseconds.

    The whole and the broken part are scaled apart: one product would round twice.
    """
    values = np.array(microseconds) if len(microseconds) else np.zeros(0, np.int64)
    if values.dtype.kind in "iu":
        return _int64(values) * 1000
    whole = np.floor(values)
    nanoseconds: Ints = whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)
    return nanoseconds


def _int64(values: Sequence[int] | NDArray[Any]) -> Ints:
    try:
        return np.array(values, np.int64)
    except OverflowError:  # an unsigned 64-bit number, such as -1 written without its sign
        return np.array([v & 0xFFFF_FFFF_FFFF_FFFF for v in values], np.uint64).view(np.int64)


def _codes(values: list[_T]) -> tuple[Codes, tuple[_T, ...]]:
    """Each value as the position of its first like, and the distinct values in that order."""
    index = {value: position for position, value in enumerate(dict.fromkeys(values))}
    return np.fromiter(map(index.__getitem__, values), np.int32, len(values)), tuple(index)


def _threads(pairs: list[Thread]) -> tuple[Codes, tuple[Thread, ...]]:
    """Threads interned; a number written as text is that number, as old traces mix the two."""
    codes, distinct = _codes(pairs)
    plain, threads = _codes([(_number(process), _number(thread)) for process, thread in distinct])
    return plain[codes], threads


def _pairs(events: Sequence[Complete | Instant]) -> list[Thread]:
    return [(event.pid, event.tid) for event in events]


def _number(value: int | str) -> int | str:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _text_codes(raws: list[list[Raw]]) -> tuple[list[Codes], tuple[bytes, ...]]:
    """Several columns of JSON text interned together; -1 where there is none."""
    codes, texts = _codes([b"", *map(bytes, chain.from_iterable(raws))])
    columns = np.split(codes[1:] - 1, len(raws)) if raws else []
    return [np.asarray(column, np.int32) for column in columns], texts[1:]


def _columns(
    spans: list[Complete],
    memory: list[Instant],
    exact: tuple[Ints, Ints] | None,
    *,
    recorded: int,
    base_ns: int,
) -> Events:
    args = [event.args for event in spans]
    start = exact[0] if exact else _ns([event.ts for event in spans])
    categories, category_names = _codes([event.cat for event in spans])
    names, distinct_names = _codes([event.name for event in spans])
    threads, distinct_threads = _threads(_pairs(spans) + _pairs(memory))
    # Where Python frames are events of their own, the operators' texts of them say nothing more.
    has_frames = not PYTHON.isdisjoint(category_names)
    call_stacks = [Raw()] * len(args) if has_frames else [a.call_stack for a in args]
    (shapes, concrete, types, call_stack), texts = _text_codes(
        [[a.shapes for a in args], [a.concrete for a in args], [a.types for a in args], call_stacks]
    )
    return Events(
        categories=category_names,
        names=distinct_names,
        threads=distinct_threads,
        texts=texts,
        category=categories,
        name=names,
        thread=threads[: len(spans)],
        start_ns=start,
        end_ns=start + np.maximum(_ns([event.dur for event in spans]), 0),
        external_id=_int64([a.external_id or a.old_external_id or 0 for a in args]),
        correlation=_int64([a.correlation or 0 for a in args]),
        sequence=_int64([-1 if a.sequence is None else a.sequence for a in args]),
        forward_thread=_int64([a.forward_thread or 0 for a in args]),
        finished=np.array([a.finished for a in args], np.bool_),
        shapes=shapes,
        concrete=concrete,
        types=types,
        call_stack=call_stack,
        python_id=_int64([-1 if a.python_id is None else a.python_id for a in args]),
        python_parent=_int64([-1 if a.python_parent is None else a.python_parent for a in args]),
        memory=_memory(memory, threads[len(spans) :], exact[1] if exact else None),
        recorded=recorded,
        base_ns=base_ns,
    )


def _memory(instants: list[Instant], thread: Codes, exact: Ints | None) -> Memory:
    args = [event.args for event in instants]
    return Memory(
        thread=thread,
        time_ns=_ns([event.ts for event in instants]) if exact is None else exact,
        size_bytes=_int64([a.size_bytes or 0 for a in args]),
        device_type=np.array([a.device_type or 0 for a in args], np.int32),
        device_index=np.array([-1 if a.device_index is None else a.device_index for a in args], np.int32),
        allocated_bytes=_int64([a.allocated_bytes or 0 for a in args]),
        reserved_bytes=_int64([a.reserved_bytes or 0 for a in args]),
        address=_int64([a.address or 0 for a in args]),
    )
