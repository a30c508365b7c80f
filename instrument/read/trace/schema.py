"""The events of a trace file as msgspec structs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

FLOAT_HOLDS_NS_BELOW = 2**43
BAD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Args(Struct, gc=False, frozen=True, rename={
    "external_id": "External id", "old_external_id": "external id", "sequence": "Sequence number",
    "forward_thread": "Fwd thread id", "shapes": "Input Dims", "concrete": "Concrete Inputs",
    "types": "Input type", "call_stack": "Call stack", "address": "Addr",
    "python_id": "Python id", "python_parent": "Python parent id",
    "size_bytes": "Bytes", "device_type": "Device Type", "device_index": "Device Id",
    "allocated_bytes": "Total Allocated", "reserved_bytes": "Total Reserved",
    "moved_bytes": "bytes", "blocks_per_sm": "blocks per SM",
    "occupancy": "est. achieved occupancy %",
    "collective": "Collective name", "element_type": "dtype",
    "input_elements": "In msg nelems", "output_elements": "Out msg nelems",
    "ranks": "Process Group Ranks", "group_size": "Group size",
    "process_group": "Process Group Name", "group_description": "Process Group Description",
    "collective_number": "Seq", "source_rank": "Src Rank", "destination_rank": "Dst Rank",
    "graph": "graph id", "graph_node": "graph node id", "sync_kind": "cuda_sync_kind",
    "waits_for_correlation": "wait_on_cuda_event_record_corr_id",
    "waits_for_stream": "wait_on_stream", "waits_for_event": "wait_on_cuda_event_id",
    "launched_kernel": "kernel", "annotation_name": "name", "annotation_text": "str",
}):  # fmt: skip
    """Those arguments of an event that become columns."""

    external_id: int | None = 0
    old_external_id: int | None = 0  # torch 1.9 writes this on kernels and runtime calls
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
    moved_bytes: int | str | None = None  # text in calls of ROCm
    size: int | None = None  # MTIA's name for the bytes of a copy
    direction: str | None = None
    grid: Raw = Raw()
    block: Raw = Raw()
    blocks_per_sm: float | None = None
    occupancy: float | None = None
    address: int | None = 0
    # The fields from here on have the same names as those of `events.Details`.
    collective: str | None = None
    element_type: str | None = None
    input_elements: int | None = None
    output_elements: int | None = None
    ranks: Any = None  # a list, or its text
    group_size: int | None = None
    process_group: str | None = None
    group_description: str | None = None
    collective_number: int | None = None
    source_rank: int | None = None
    destination_rank: int | None = None
    graph: int | None = None
    graph_node: int | None = None
    sync_kind: str | None = None
    waits_for_stream: int | None = None
    waits_for_event: int | None = None
    waits_for_correlation: int | None = None
    launched_kernel: Any = None
    annotation: Any = None
    # Other keys under which versions of torch write the annotation of a CUDA graph's node.
    annotation_name: Any = None
    annotation_text: Any = None


NO_ARGS = Args()


class _Timed(Struct, gc=False):
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: int | float = 0
    args: Args = NO_ARGS


class Complete(_Timed, tag_field="ph", tag="X"):
    """An event with a duration."""

    cat: str = ""
    dur: int | float | None = None


class Instant(_Timed, tag_field="ph", tag="i"):
    """An event without a duration, such as an allocation."""


class Counter(Struct, tag_field="ph", tag="C", gc=False):
    """A value at a point in time. Counter events are only counted."""


_KEPT: dict[str, type[_Timed]] = {"X": Complete, "i": Instant}

# Events with any other `ph` are counted and not kept. A struct without fields skips their text.
_SKIPPED = tuple(
    msgspec.defstruct(f"Skipped{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)
    for phase in "BEIbneSTpFstfPNODMVvRc()"
)


def _list_of(kinds: Iterable[type]) -> Any:
    union: Any = None
    for kind in (*kinds, Counter, *_SKIPPED):
        union = kind if union is None else union | kind
    return list[union]


EVENT_LIST = _list_of(_KEPT.values())
_EVENTS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(EVENT_LIST)
# Decodes only the times of these events, as exact decimals.
_EXACT: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(
    _list_of(
        msgspec.defstruct(
            f"Exact{kind.__name__}",
            [("ts", Decimal, Decimal(0))],
            tag_field="ph",
            tag=phase,
            gc=False,
        )
        for phase, kind in _KEPT.items()
    )
)


def decode(text: bytes) -> list[Any]:
    """Decode a list of events; times are `Decimal` if a float would not be exact to the ns."""
    events = _EVENTS.decode(text)
    if any(isinstance(event, _Timed) and not _is_exact(event.ts) for event in events):
        for event, exact in zip(events, _EXACT.decode(text)):
            if isinstance(event, _Timed):
                event.ts = exact.ts
    return events


def _is_exact(time: float) -> bool:
    return type(time) is int or abs(time) < FLOAT_HOLDS_NS_BELOW


_fields = cache(msgspec.structs.fields)  # reads all annotations, which takes a millisecond


def coerced(event: dict[str, Any], text: str) -> Any:
    """Convert one event to a struct; None for an event of a type (`ph`) that is not read.

    A field whose value has the wrong type gets its default.
    """
    kind = _KEPT.get(str(event.get("ph")))
    if kind is None:
        return Counter() if event.get("ph") == "C" else None
    plain = _fitting(kind, event)
    if not _is_exact(plain.get("ts", 0)) and isinstance(event["ts"], float):
        plain["ts"] = json.loads(text, strict=False, parse_float=Decimal)["ts"]
    args = event.get("args")
    return kind(**plain, args=Args(**_fitting(Args, args)) if isinstance(args, dict) else NO_ARGS)


def _fitting(kind: type[Struct], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the given values that fit the fields of a struct, except for `args`."""
    found = {}
    for field in _fields(kind):
        if field.encode_name not in given or field.name == "args":
            continue
        value = given[field.encode_name]
        is_raw = field.type is Raw
        value = Raw(json.dumps(value).encode()) if is_raw else _fit(value, field.type)
        if value is not None:
            found[field.name] = value
    return found


def _fit(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return None
