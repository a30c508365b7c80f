"""Read a Chrome/Kineto trace file into columns.

A C extension fills the columns from the text (`scanner`). If it is not installed, or does not
understand the text, the text is decoded as JSON (`schema`). Events with a duration and memory
events become columns. All other events are only counted.

Cost: with the C extension, a third of the time that msgspec takes to decode the same text into
typed objects, without it twice that time. Peak memory is 1.3 times the size of the columns, which
take 40 to 120 bytes for each event.

Times are decimal microseconds in the file and integer nanoseconds in the columns, without loss:
below 2**43 µs a float is exact to the nanosecond; larger times are read a second time as decimals.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from instrument.base.errors import TraceError
from instrument.base.range_names import shown
from instrument.read.trace.capture_json import MOST_RANKS
from instrument.read.trace.columns import (
    BEYOND_NS,
    Interned,
    append,
    as_ns,
    fields_of,
    ints,
    joined,
    repeated,
    taken,
)
from instrument.read.trace.events import (
    DEVICE,
    PYTHON,
    Codes,
    Details,
    Device,
    Events,
    Flags,
    Ints,
    MemoryEvents,
    ProcessGroup,
    Thread,
    category_of,
    flags,
    is_known,
    is_runtime,
)
from instrument.read.trace.gzip_stream import Source
from instrument.read.trace.json_stream import Pieces, cut_short
from instrument.read.trace.scanner import Scanned, Scanner, cpus
from instrument.read.trace.schema import (
    Args,
    Complete,
    Counter,
    Instant,
    coerced,
    decode,
)


def read(path: Path) -> Events:
    """Read the events of a trace file, plain or gzip, whose JSON is an object or a list of events.

    A truncated file is read up to its last complete event (`Events.cut_short`). For events with
    impossible times, see `Events.negative_durations` and `Events.left_out`.

    Raises:
        TraceError: the file is missing, empty, not JSON, JSON but not a trace, or truncated before
            the end of its first event with a duration. Or its gzip data is damaged or expands too
            much. Or its durations add up to more than 146 years.
    """
    with (
        collector_off(),
        closing(Source(path)) as source,
        closing(_Columns(cpus() - source.threads)) as columns,
    ):
        scanner = columns.scanner
        pieces = Pieces(source, path, decode, coerced, scanner.begin, scanner.ahead)
        try:
            for piece in pieces:
                columns.add(piece)
            columns.add_scanned()
            if pieces.cut_short and not columns.spans:
                raise cut_short(path, gzip=source.cut_short)
            return columns.finish(
                base_ns=pieces.base_ns,
                cut_short=pieces.cut_short,
                unreadable=pieces.unreadable,
                devices=tuple(map(_device, pieces.devices)),
                versions=pieces.versions,
                process_groups=_process_groups(pieces.distributed),
                **_of_rank(pieces.distributed),
            )
        except OverflowError as error:
            raise TraceError(f"The trace file {path} has {error}; record it again.") from None


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable Python's garbage collection, which would traverse a million objects many times."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# The event on the CPU that holds the arguments of a collective.
_COLLECTIVE_ON_CPU = "record_param_comms"
_SYNCHRONISATIONS = frozenset({"cuda_sync", "cuda_event"})
_MINUTE_NS, _DAY_NS = 60 * 10**9, 86_400 * 10**9
# The part of a stream's time that may overlap. In sound traces of GPUs and MTIA, up to 0.6 % does;
# kernels that start before the end of the one before (programmatic dependent launch) overlap more.
_MOST_OVERLAP = 0.25
# The limit of a duration: 104 days.
_LONGEST_NS = 2**53
_DETAILS = attrgetter(*Details._fields)
_NO_DETAILS = Details()
_OPERATOR, _KERNEL = "cpu_op", "kernel"
# The process of all events in a file that torch's `EventList.export_chrome_trace` has written.
_PROCESS_OF_EVENTS = "CPU functions"
_NONE = np.array(-1, np.int32)  # the code of a missing text


class _Columns:
    """The columns of the events read so far; `add` appends the events of one piece of the file."""

    def __init__(self, cpus: int = 1) -> None:
        self.spans = 0
        self.recorded = self.counters = 0
        self._categories, self._names, self._threads = Interned(), Interned(), Interned()
        self._texts, self._grids = Interned({b"": 0}), Interned({b"": 0})
        self._details = Interned({_NO_DETAILS: 0})
        self._parts: dict[str, list[NDArray[Any]]] = {}
        self._memory_parts: dict[str, list[NDArray[Any]]] = {}
        self._no_duration = 0
        self.scanner = Scanner(self.of_spans, self._memory, cpus)

    def close(self) -> None:
        self.scanner.close()

    def add(self, piece: list[Any] | Scanned) -> None:
        if isinstance(piece, Scanned):
            self.recorded += piece.recorded
            self.counters += piece.counters
            if piece.is_full:
                self.add_scanned()
            return
        self.add_scanned()
        self.recorded += len(piece)
        spans = [event for event in piece if type(event) is Complete]
        if spans:
            self.spans += len(spans)
            self._no_duration += sum(span.dur is None for span in spans)
            append(self._parts, self.of_spans(spans))
        instants = [e for e in piece if type(e) is Instant and e.args.size_bytes is not None]
        if instants:
            append(self._memory_parts, self._memory(instants))
        self.counters += sum(type(event) is Counter for event in piece)

    def add_scanned(self) -> None:
        scanned = self.scanner.take()
        if scanned is None:
            return
        self.spans += len(scanned.spans["name"])
        texts = {name: self._texts_at(name, *found) for name, found in scanned.texts.items()}
        append(self._parts, scanned.spans | texts)
        append(self._memory_parts, scanned.memory)

    def _texts_at(self, name: str, codes: Codes, distinct: list[bytes]) -> Codes:
        if not distinct or (name == "call_stack" and self._has_frames()):
            return repeated(_NONE, len(codes))
        known = self._texts.codes(distinct, len(distinct)) - np.int32(1)
        return taken(np.append(known, np.int32(-1)), codes)

    def of_spans(self, spans: list[Complete]) -> dict[str, NDArray[Any]]:
        count, event = len(spans), fields_of(Complete, spans)
        arg = fields_of(Args, event["args"])
        start = as_ns(event["ts"])
        external = ints(arg["external_id"], 0)
        names = _with_directions(event["cat"], event["name"], arg["direction"])
        name = self._names.codes(names, count)
        return {
            "category": self._categories.codes(event["cat"], count),
            "name": name,
            "thread": self._threads.codes(zip(event["pid"], event["tid"]), count),
            "start_ns": start,
            "end_ns": start
            + np.clip(as_ns([dur or 0 for dur in event["dur"]]), -_LONGEST_NS, _LONGEST_NS),
            "external_id": np.where(external != 0, external, ints(arg["old_external_id"], 0)),
            "correlation": ints(arg["correlation"], 0),
            "sequence": ints(arg["sequence"], -1),
            "forward_thread": ints(arg["forward_thread"], 0),
            "finished": ints(arg["finished"], 1).astype(np.bool_),
            "shapes": self._codes_of_texts(arg["shapes"]),
            "concrete": self._codes_of_texts(arg["concrete"]),
            "types": self._codes_of_texts(arg["types"]),
            "call_stack": repeated(_NONE, count)
            if self._has_frames()
            else self._codes_of_texts(arg["call_stack"]),
            "python_id": ints(arg["python_id"], -1),
            "python_parent": ints(arg["python_parent"], -1),
            **self._device_columns(event["cat"], arg),
            "detail": self._codes_of_details(
                event["cat"], name, event["args"], arg["launched_kernel"]
            ),
        }

    def _device_columns(
        self, categories: Sequence[str], arg: dict[str, Any]
    ) -> dict[str, NDArray[Any]]:
        """The columns in which only device events and runtime calls have values."""
        on_device = flags(_is_of_device, categories)
        moved_bytes = map(_whole, arg["moved_bytes"], arg["size"])
        return {
            "moved_bytes": np.where(
                on_device, np.fromiter(moved_bytes, np.int64, len(on_device)), -1
            ),
            "grid": self._codes_of_texts(arg["grid"], self._grids),
            "block": self._codes_of_texts(arg["block"], self._grids),
            "blocks_per_sm": _floats(arg["blocks_per_sm"]),
            "occupancy": _floats(arg["occupancy"]),
        }

    def _codes_of_details(
        self, categories: Sequence[str], name: Codes, args: Sequence[Args], kernels: Sequence[Any]
    ) -> Codes:
        """The details of each event, as an index into `Events.details`; -1 for none."""
        can_have = flags(_has_details, categories)
        can_have |= name == self._names.get(_COLLECTIVE_ON_CPU, -1)
        if kernels.count(None) < len(kernels):
            can_have |= flags(is_runtime, categories) & flags(lambda k: k is not None, kernels)
        at = np.flatnonzero(can_have)
        column = np.full(len(categories), -1, np.int32)
        column[at] = self._details.codes((_details(args[k]) for k in at.tolist()), len(at)) - 1
        return column

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

    def _has_frames(self) -> bool:
        return any(category in self._categories for category in PYTHON)

    def _codes_of_texts(self, raws: Sequence[Raw], texts: Interned | None = None) -> Codes:
        """The JSON text of each event, as an index into the distinct texts; -1 if empty."""
        if raws and raws.count(raws[0]) == len(raws) and not bytes(raws[0]):
            return repeated(_NONE, len(raws))
        return (self._texts if texts is None else texts).codes(
            map(bytes, raws), len(raws)
        ) - np.int32(1)

    def finish(self, **about: Any) -> Events:
        """Join the pieces of all columns into `Events`, and free them one by one.

        `about` holds further attributes of `Events`.
        """
        plain = Interned()
        pairs = ((_number(process), _number(thread)) for process, thread in self._threads)
        threads = plain.codes(pairs, len(self._threads))
        columns = joined(self._parts, self.of_spans([]))
        memory = joined(self._memory_parts, self._memory([]))
        found = len(columns["name"]) + len(memory["time_ns"])
        columns["category"], no_category = _known_categories(
            columns["category"],
            columns["name"],
            columns["thread"],
            tuple(self._names),
            tuple(self._threads),
            self._categories,
        )
        is_unknown = flags(lambda each: bool(each) and not is_known(each), tuple(self._categories))
        unknown_category = int(is_unknown[columns["category"]].sum())
        columns, negative = _with_real_times(columns)
        _end_with_callers(columns)
        on_device = flags(DEVICE.__contains__, tuple(self._categories))
        overlapping = _end_before_next(columns, on_device)
        memory = _where(_is_within(memory["time_ns"], BEYOND_NS), memory)
        # If the trace has Python frames, no call stacks are kept. Call stacks that were read before
        # the first Python frame are removed here.
        if self._has_frames():
            columns["call_stack"] = repeated(_NONE, len(columns["name"]))
        for rows in (columns, memory):
            rows["thread"] = taken(threads, rows["thread"])
        return Events(
            categories=tuple(self._categories),
            names=tuple(map(shown, self._names)),
            threads=tuple(plain),
            texts=tuple(self._texts)[1:],
            grids=tuple(self._grids)[1:],
            details=tuple(self._details)[1:],
            memory=MemoryEvents(**memory),
            recorded=self.recorded,
            counters=self.counters,
            left_out=found - len(columns["name"]) - len(memory["time_ns"]),
            negative_durations=negative,
            no_category=no_category,
            unknown_category=unknown_category,
            no_duration=self._no_duration,
            overlapping=overlapping,
            **(columns | about),
        )


def _known_categories(
    category: Codes,
    name: Codes,
    thread: Codes,
    names: Sequence[str],
    threads: Sequence[Thread],
    categories: Interned,
) -> tuple[Codes, int]:
    """Give events without a category one by their name, else one by their thread.

    Returns the categories, and the number of events that still have none.
    """
    missing = categories.get("", -1)
    at = np.flatnonzero(category == missing)
    if not len(at):
        return category, 0
    used = np.unique(name[at])
    of_name = np.full(len(names), missing, np.int32)
    of_name[used] = categories.codes((category_of(names[k]) for k in used.tolist()), len(used))
    found = of_name[name[at]]
    of_thread = np.full(len(threads), missing, np.int32)
    for k, (process, _) in enumerate(threads):
        if process == _PROCESS_OF_EVENTS:
            of_thread[k] = categories[_OPERATOR]
    for each in (_OPERATOR, _KERNEL):
        if (code := categories.get(each, -1)) >= 0:
            of_thread[thread[at[found == code]]] = code
    category = category.copy()
    category[at] = np.where(found == missing, of_thread[thread[at]], found)
    return category, int((category[at] == missing).sum())


def _with_directions(
    categories: Sequence[str], names: Sequence[str], directions: Sequence[str | None]
) -> Sequence[str]:
    """The names; an MTIA copy's name ends with its direction: "dma_request HOST_TO_DEVICE"."""
    if directions.count(None) == len(directions):
        return names
    return [
        f"{name} {direction}" if direction is not None and category in DEVICE else name
        for category, name, direction in zip(categories, names, directions)
    ]


def _with_real_times(columns: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], int]:
    """Keep the events with possible times; count those that end before they begin.

    Raises:
        OverflowError: the sum of the durations is out of range.
    """
    columns = _where(_is_within(columns["start_ns"], BEYOND_NS), columns)
    columns = _where(_is_within(columns["end_ns"] - columns["start_ns"], _LONGEST_NS), columns)
    columns = _where(_is_near(columns["start_ns"]), columns)
    length = columns["end_ns"] - columns["start_ns"]
    negative = np.flatnonzero(length < 0)
    if len(negative):
        columns |= {name: columns[name].copy() for name in ("end_ns", "finished")}
        columns["end_ns"][negative] = columns["start_ns"][negative]
        columns["finished"][negative] = False
        length[negative] = 0
    total_ns = float(length.sum(dtype=np.float64))
    if total_ns >= BEYOND_NS:
        raise OverflowError(f"durations that add up to {total_ns / 1e9 / 86_400 / 365:.3g} years")
    return columns, len(negative)


def _is_near(start_ns: Ints) -> Flags | None:
    """A mask without the events far from most events; None if there are none.

    A driver that loses the times of a kernel writes 0. A file's times may also begin at 0.
    """
    if not len(start_ns) or int(start_ns.max()) - int(start_ns.min()) < _MINUTE_NS:
        return None
    median_ns, at_0 = int(np.median(start_ns)), start_ns == 0
    is_lost = np.abs(start_ns - median_ns) > _DAY_NS
    if median_ns and np.abs(start_ns[~at_0]).min() > _MINUTE_NS:
        is_lost |= at_0
    return ~is_lost if is_lost.any() else None


def _end_before_next(columns: dict[str, NDArray[Any]], on_device: Flags) -> int:
    """Let the events of each stream on which much time overlaps end where the next one begins.

    A stream runs one piece of work after the other, so such ends are wrong, as in some traces of
    ROCm. Events that one call launched, a CUDA graph, may overlap. The last event of the stream
    takes at most as long as the longest other one. Returns the number of events that end earlier.
    """
    device = np.flatnonzero(on_device[columns["category"]])
    start_ns, end_ns = columns["start_ns"][device], columns["end_ns"][device]
    thread = columns["thread"][device]
    order = np.lexsort((start_ns, thread))
    device, start_ns, end_ns, thread = (each[order] for each in (device, start_ns, end_ns, thread))
    call = columns["correlation"][device]
    has_next = np.append(thread[1:] == thread[:-1], False) if len(device) else np.zeros(0, np.bool_)
    limit_ns = np.where(has_next, np.roll(start_ns, -1), end_ns)
    limit_ns[(call != 0) & (call == np.roll(call, -1)) & has_next] = BEYOND_NS
    overlap_ns = np.maximum(end_ns - limit_ns, 0)
    if not overlap_ns.any():
        return 0
    streams = thread.max() + 1
    total_ns = np.bincount(thread, end_ns - start_ns, streams)
    is_wrong = (np.bincount(thread, overlap_ns, streams) > _MOST_OVERLAP * total_ns)[thread]
    longest_ns = np.zeros(streams, np.int64)
    np.maximum.at(longest_ns, thread[has_next], (np.minimum(end_ns, limit_ns) - start_ns)[has_next])
    limit_ns = np.where(has_next, limit_ns, start_ns + longest_ns[thread])
    late = is_wrong & (end_ns > limit_ns)
    columns["end_ns"] = columns["end_ns"].copy()
    columns["end_ns"][device[late]] = limit_ns[late]
    return int(late.sum())


def _end_with_callers(columns: dict[str, NDArray[Any]]) -> None:
    """If a Python frame ends after its caller, give it the caller's end and mark it unfinished.

    CPython 3.12.0 to 3.12.4 does not report the end of some calls of C functions, and torch lets
    them last until recording stops. A caller on another thread, such as the call of `backward`, may
    end earlier than its frame.
    """
    frames = np.flatnonzero(columns["python_id"] >= 0)
    if not len(frames):
        return
    ids, callers = columns["python_id"][frames], columns["python_parent"][frames]
    found = _positions(ids, callers)
    caller, thread = frames[found], columns["thread"]
    is_late = columns["end_ns"][frames] > columns["end_ns"][caller]
    is_late &= (ids[found] == callers) & (thread[frames] == thread[caller])
    is_late &= columns["start_ns"][frames] <= columns["end_ns"][caller]
    late = np.flatnonzero(is_late)
    if len(late):
        columns |= {name: columns[name].copy() for name in ("end_ns", "finished")}
        columns["end_ns"][frames[late]] = columns["end_ns"][caller[late]]
        columns["finished"][frames[late]] = False


def _positions(ids: Ints, wanted: Ints) -> Ints:
    """For each wanted id, the position of the first equal id; any position if there is none."""
    order = np.argsort(ids, kind="stable")
    return order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)]


def _is_within(values: Ints, limit: int) -> Flags | None:
    """A mask of the values between `-limit` and `limit`; None if all are."""
    is_within = -limit < values.min(initial=0) and values.max(initial=0) < limit
    return None if is_within else np.abs(values) < limit


def _where(chosen: Flags | None, columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    if chosen is None:
        return columns
    at = np.flatnonzero(chosen)
    return {name: taken(column, at) for name, column in columns.items()}


def _of_rank(distributed: dict[str, Any]) -> dict[str, int | None]:
    found = {name: distributed.get(name) for name in ("rank", "world_size")}
    return {
        name: value if type(value) is int and 0 <= value <= MOST_RANKS else None
        for name, value in found.items()
    }


def _process_groups(distributed: dict[str, Any]) -> tuple[ProcessGroup, ...]:
    try:
        return msgspec.convert(distributed.get("pg_config") or (), tuple[ProcessGroup, ...])
    except msgspec.ValidationError:
        return ()


def _device(found: dict[str, Any]) -> Device:
    name = found.get("name")
    id, memory, multiprocessors = (
        value if type(value := found.get(key)) is int and 0 <= value < 2**63 else None
        for key in ("id", "totalGlobalMem", "numSms")
    )
    return Device(id, name if name and isinstance(name, str) else None, memory, multiprocessors)


@lru_cache(4096)
def _is_of_device(category: str) -> bool:
    return category in DEVICE or is_runtime(category)


@lru_cache(4096)
def _has_details(category: str) -> bool:
    return category in DEVICE or category in _SYNCHRONISATIONS


def _details(args: Args) -> Details:
    found: Details = Details(*_DETAILS(args))
    if found == _NO_DETAILS:
        return _NO_DETAILS
    is_text = found.ranks is None or isinstance(found.ranks, str)
    kernel = found.launched_kernel
    # torch 2.13 writes the annotation of a node under the key `str`.
    notes = (args.annotation_name, args.annotation_text, args.annotation)
    annotation = next((text for text in notes if isinstance(text, str) and text), None)
    # Kineto writes 0 for a kernel that no graph launched.
    return found._replace(
        ranks=found.ranks if is_text else json.dumps(found.ranks),
        graph=found.graph or None,
        graph_node=found.graph_node or None,
        launched_kernel=kernel if isinstance(kernel, str) else None,
        annotation=annotation if found.graph_node else None,
    )


def _floats(values: Sequence[float | None]) -> NDArray[np.float32]:
    """Convert numbers to a column, with NaN for None and for numbers too large for 32 bits."""
    with np.errstate(over="ignore"):
        found = np.array(values, np.float32)
    found[np.isinf(found)] = np.nan
    return found


def _whole(moved: int | str | None, size: int | None) -> int:
    """The bytes that a copy or memset moves; -1 if they are unknown."""
    if moved is None and size is None:
        return -1
    text = str(size if moved is None else moved)
    return int(text) if text.isdecimal() and len(text) < 19 else -1


def _number(value: int | str) -> int | str:
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
