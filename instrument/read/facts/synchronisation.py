"""Find which device work each synchronising call waits for.

The result is a list of edges. An edge leads from device work to the event that waits for it: a CPU
call such as `cudaStreamSynchronize`, or work on another stream after `cudaStreamWaitEvent`. An edge
is recorded if a `cuda_sync` event of the trace states what the call waits for; otherwise it is
inferred from times, where these show one cause. docs/explanation/joins.md has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from instrument.read.facts.groupby import TimesOfGroups, distinct
from instrument.read.facts.launches import Launches, find, ran_first
from instrument.read.trace.events import (
    COPIES,
    Events,
    Flags,
    Ints,
    Thread,
    flags,
    is_blocking_copy,
    is_runtime,
    is_synchronising,
)

KINDS = ("device", "stream", "event", "copy", "stream wait")
DEVICE, STREAM, EVENT, COPY, STREAM_WAIT = range(5)

_SYNC = frozenset({"cuda_sync"})
_KIND_OF_SYNC = {
    "Context Sync": DEVICE,
    "Stream Sync": STREAM,
    "Event Sync": EVENT,
    "Stream Wait Event": STREAM_WAIT,
}
_STREAM_CALL = re.compile(r"Stream|Queue", re.IGNORECASE)
_RECORD = re.compile(r"^(cuda|cu|hip)EventRecord")
_QUERY = re.compile(r"Query")
# From 2026 on, Kineto adds this number to the stream of "Stream Sync" events, to show them on a
# separate track.
_ROW_OF_SYNC = 1_000_000
# A wait may end at most this long after the awaited work. Measured on V100, A100, H100 and MI300X:
# calls return 2 to 20 µs after the work, and work on another stream starts 1 to 18 µs after it.
_NEAR_NS = 30_000
# If the trace states an edge, the clocks of CPU and device may differ by this much.
_SKEW_NS = 10_000
_MOST_TRIED = 64


@dataclass(frozen=True, slots=True)
class Synchronisations:
    """The waits of a trace, in the order of the file, and the device work that each waits for.

    `call` and `kind` have an entry for each wait, the other attributes for each edge.

    Attributes:
        call: the CPU call of each wait, as a position among the events; the `cuda_sync` event if
            the trace does not have the call.
        kind: the kind of each wait, as an index into `KINDS`.
        wait: the wait of each edge, as an index into `call`.
        earlier: the device event that has to end first, as a position among the events.
        later: the event that waits, as a position among the events: a device event if the wait's
            kind is "stream wait", else the call.
        recorded: whether the trace states the edge; otherwise the edge is inferred.
        waited_ns: how long `later` waited for the end of `earlier`; 0 if it ended before. A call
            waits from its start, a device event from when its launch has begun and its stream is
            free.
    """

    call: Ints
    kind: Ints
    wait: Ints
    earlier: Ints
    later: Ints
    recorded: Flags
    waited_ns: Ints


def synchronisations(events: Events, found: Launches) -> Synchronisations:
    """Find the waits of a trace, and what each of them waits for.

    Cost: some tens of array operations on the device events and waits.
    """
    work = _Work(events, found)
    waits = _Waits(events, found, work)
    edges = [
        _device_edges(work, waits),
        _stream_edges(work, waits),
        _event_edges(work, waits),
        _copy_edges(work, waits),
        _recorded_stream_waits(work, waits),
        _inferred_stream_waits(work, waits),
    ]
    wait, row, later_row, recorded = (np.concatenate(side) for side in zip(*edges))
    order = np.lexsort((row, wait))
    wait, row, later_row, recorded = (side[order] for side in (wait, row, later_row, recorded))
    on_device = later_row >= 0
    # A call waits from its start. A device event waits from the later of two times: its launch, and
    # the end of the work before it on its stream.
    launch_ns = work.queued_ns[later_row]
    before = work.latest.before(work.stream[later_row], launch_ns)
    free_ns = np.where(before >= 0, work.end_ns[before], launch_ns)
    start_ns = np.where(on_device, np.maximum(free_ns, launch_ns), waits.start_ns[wait])
    until_ns = np.where(
        on_device, work.end_ns[row], np.minimum(work.end_ns[row], waits.end_ns[wait])
    )
    return Synchronisations(
        call=waits.call,
        kind=waits.kind,
        wait=wait,
        earlier=work.device[row],
        later=np.where(on_device, work.device[later_row], waits.call[wait]),
        recorded=recorded,
        waited_ns=np.maximum(until_ns - start_ns, 0),
    )


# The edges of one kind: the wait; the row of the earlier work in `_Work`; the row of the later
# work, or -1 if the call itself waits; and whether the trace states the edge.
_Edges = tuple[Ints, Ints, Ints, Flags]


class _Latest:
    """Finds which work of a group (stream or device) ends last, of that queued before a time.

    The ends are compared, not the starts of the launching calls: if several threads launch on one
    stream, a call can start first although its work runs last.
    """

    def __init__(self, group: Ints, queued_ns: Ints, end_ns: Ints) -> None:
        order, by_end = np.lexsort((queued_ns, group)), np.lexsort((end_ns, group))
        rank = np.zeros(len(group), np.int64)
        rank[by_end] = np.arange(len(group))
        # The ranks of a group are above all ranks of the groups before.
        latest = by_end[np.maximum.accumulate(rank[order])] if len(order) else order
        self._latest = np.append(np.zeros_like(latest), -1)
        self._latest[order] = latest
        self._index = TimesOfGroups(group, queued_ns)

    def before(self, group: Ints, time_ns: Ints) -> Ints:
        """For each given group and time, the row of the work that ends last; -1 if none."""
        found: Ints = self._latest[self._index.before(group, time_ns)]
        return found


class _Work:
    """The device work of a trace as rows, and the streams and devices as numbers.

    `queued_ns` is the start of the call that launched the work. If this call is not in the trace,
    it is a time before the trace if `ran_first` holds, else the start of the work.
    """

    def __init__(self, events: Events, found: Launches) -> None:
        self.device, self.call = found.device, found.call
        self.is_launched = found.call >= 0
        launch = np.where(self.is_launched, found.call, found.device)
        self.start_ns, self.end_ns = events.start_ns[self.device], events.end_ns[self.device]
        self.stream = events.thread[self.device].astype(np.int64)
        self.queued_ns = np.where(
            ran_first(events, self.device, self.is_launched),
            events.begin_ns - 1,
            events.start_ns[launch],
        )
        self.thread = np.where(self.is_launched, events.thread[launch], -1)
        self.devices: dict[int | str, int] = {}
        self.streams: dict[Thread, int] = {}
        device_of = np.full(len(events.threads), -1)
        for code in distinct(self.stream).tolist():
            device, stream = events.threads[code]
            device_of[code] = self.devices.setdefault(device, len(self.devices))
            self.streams[device, stream] = code
        self.device_number = device_of[self.stream]
        self.latest = _Latest(self.stream, self.queued_ns, self.end_ns)
        self.by_thread = TimesOfGroups(self.thread, self.queued_ns)
        known = np.flatnonzero(self.is_launched)
        # If a call launched several device events on a stream, only the first of them has to wait.
        known = known[np.lexsort((self.start_ns[known], self.call[known], self.stream[known]))]
        changes = (np.diff(self.call[known]) != 0) | (np.diff(self.stream[known]) != 0)
        self.first = known[np.append(True, changes)[: len(known)]]
        self.by_launch = TimesOfGroups(self.stream[self.first], self.queued_ns[self.first])
        self.by_end = np.argsort(self.end_ns, kind="stable")

    def next_launched(self, stream: Ints, time_ns: Ints) -> Ints:
        """The row of the first work launched on each stream from a time on; -1 for none."""
        found: Ints = np.append(self.first, -1)[self.by_launch.since(stream, time_ns)]
        return found

    def last_ended(self, after_ns: Ints, until_ns: Ints, accepts: Callable[[Ints], Flags]) -> Ints:
        """For each span of time, the row of the last accepted work in it; -1 for none.

        `accepts` gets one row for each span, and returns a mask. Only the last `_MOST_TRIED` rows
        of a span are tried.
        """
        found = np.full(len(until_ns), -1)
        rows, ends = np.append(self.by_end, -1), np.append(self.end_ns[self.by_end], 0)
        place = np.searchsorted(ends[:-1], until_ns, "right") - 1
        for _ in range(_MOST_TRIED):
            is_open = (found < 0) & (place >= 0) & (ends[place] > after_ns)
            if not is_open.any():
                break
            row = rows[place]
            found = np.where(is_open & accepts(row), row, found)
            place = place - 1
        return found


class _Waits:
    """The waits of a trace. If a `cuda_sync` event describes a wait, the wait is "stated"."""

    def __init__(self, events: Events, found: Launches, work: _Work) -> None:
        is_call = events.among(is_runtime)
        kind_of_name = np.fromiter(map(_kind_of_call, events.names), np.int64, len(events.names))
        kind_of_event = np.where(is_call, kind_of_name[events.name], -1)
        sync, sync_kind = _cuda_syncs(events)
        of_sync = find(events.correlation, is_call, events.correlation[sync])
        queries = flags(lambda name: _QUERY.search(name) is not None, events.names)
        # An event synchronisation whose call is not in the trace is left out: it may be a query.
        kept = np.where(of_sync >= 0, ~queries[events.name[of_sync]], sync_kind != EVENT)
        sync, sync_kind, of_sync = sync[kept], sync_kind[kept], of_sync[kept]
        stated = np.where(of_sync >= 0, of_sync, sync)
        stated, first = np.unique(stated, return_index=True)
        sync, sync_kind = sync[first], sync_kind[first]
        blocking = _blocking_copies(events, found)
        is_wait = kind_of_event >= 0
        is_wait[stated] = False
        others = np.flatnonzero(is_wait)
        is_wait[stated] = True
        copies = found.call[blocking]
        copies = np.unique(copies[~is_wait[copies]])
        call = np.concatenate([stated, others, copies])
        kind = np.concatenate([sync_kind, kind_of_event[others], np.full(len(copies), COPY)])
        sync = np.concatenate([sync, np.full(len(others) + len(copies), -1)])
        order = np.argsort(call, kind="stable")
        self.call, self.kind, self.sync = call[order], kind[order], sync[order]
        self.is_stated = self.sync >= 0
        self.start_ns, self.end_ns = events.start_ns[self.call], events.end_ns[self.call]
        self.thread = events.thread[self.call].astype(np.int64)
        self.copy_rows = blocking
        self._read_details(events, work, is_call)
        self.record_ns = np.sort(
            events.start_ns[is_call & events.named(lambda name: _RECORD.search(name) is not None)]
        )

    def __len__(self) -> int:
        return len(self.call)

    def of_kind(self, kind: int, *, stated: bool) -> Ints:
        return np.flatnonzero((self.kind == kind) & (self.is_stated == stated))

    def _read_details(self, events: Events, work: _Work, is_call: Flags) -> None:
        """Read the device, stream and awaited work of the waits that have a `cuda_sync` event.

        A wait for a CUDA event waits for the work that was launched on the stream `source` before
        the call of `cudaEventRecord` at `since_ns`. If this call is not known, `since_ns` is the
        start of the wait, and `is_exact` is False. The number of a stream or device is -1 if it is
        not known.
        """
        threads, self.device = events.threads, np.full(len(self), -1)
        self.stream, self.source = self.device.copy(), self.device.copy()
        rows = np.flatnonzero(self.is_stated)
        thread, detail = events.thread[self.sync[rows]], events.detail[self.sync[rows]]
        distinct, of = np.unique(thread, return_inverse=True)
        own = [_place(threads[code], work) for code in distinct.tolist()]
        self.device[rows] = np.array([device for device, _ in own], np.int64)[of]
        self.stream[rows] = np.array([stream for _, stream in own], np.int64)[of]
        known = [events.details[code] if code >= 0 else None for code in detail.tolist()]
        device = [threads[code][0] for code in thread.tolist()]
        self.source[rows] = [
            -1 if each is None else work.streams.get((of_device, each.waits_for_stream), -1)
            for of_device, each in zip(device, known)
        ]
        wanted = [each.waits_for_correlation if each else None for each in known]
        wanted = [number if number and 0 < number < 2**62 else 0 for number in wanted]
        record = find(events.correlation, is_call, np.array(wanted, np.int64))
        self.since_ns, self.is_exact = self.start_ns.copy(), np.zeros(len(self), np.bool_)
        # Kineto can name a later record of the same CUDA event. Such a record is ignored.
        earlier = (record >= 0) & (events.start_ns[record] <= self.start_ns[rows])
        self.is_exact[rows] = earlier
        self.since_ns[rows] = np.where(earlier, events.start_ns[record], self.start_ns[rows])


def _kind_of_call(name: str) -> int:
    """The kind of the wait that a runtime call of this name is; -1 if it is none."""
    if "StreamWaitEvent" in name:
        return STREAM_WAIT
    if not is_synchronising(name):
        return -1
    return STREAM if _STREAM_CALL.search(name) else EVENT if "Event" in name else DEVICE


def _cuda_syncs(events: Events) -> tuple[Ints, Ints]:
    sync = np.flatnonzero(events.among(_SYNC))
    names, of = np.unique(events.name[sync], return_inverse=True)
    kinds = [_KIND_OF_SYNC.get(events.names[code], -1) for code in names.tolist()]
    kind = np.array(kinds, np.int64)[of]
    return sync[kind >= 0], kind[kind >= 0]


def _place(thread: Thread, work: _Work) -> tuple[int, int]:
    """The numbers of the device and stream of a `cuda_sync` event; -1 where no work ran."""
    device, stream = thread
    if isinstance(stream, int) and stream >= _ROW_OF_SYNC:
        stream -= _ROW_OF_SYNC
    return work.devices.get(device, -1), work.streams.get((device, stream), -1)


def _blocking_copies(events: Events, found: Launches) -> Ints:
    """The copies that block a call and end before this call returns, as rows of `_Work`."""
    pageable = events.named(lambda name: "Pageable" in name)[found.device]
    by_name = events.named(is_blocking_copy)[found.call]
    ended = events.end_ns[found.device] <= events.end_ns[found.call]
    chosen = events.among(COPIES)[found.device] & (found.call >= 0) & (pageable | by_name) & ended
    return np.flatnonzero(chosen)


def _device_edges(work: _Work, waits: _Waits) -> _Edges:
    chosen = np.flatnonzero(waits.kind == DEVICE)
    stated = waits.is_stated[chosen]
    device = np.where(stated, waits.device[chosen], 0 if len(work.devices) == 1 else -1)
    # For each row of `work`, the first synchronisation that waits for the row. If several rows of a
    # stream have the same first synchronisation, only the last of these rows gets an edge.
    first = TimesOfGroups(device, waits.start_ns[chosen]).since(
        work.device_number, work.queued_ns + 1
    )
    rows = np.flatnonzero(first >= 0)
    rows = rows[np.lexsort((work.end_ns[rows], work.stream[rows], first[rows]))]
    changes = (np.diff(first[rows]) != 0) | (np.diff(work.stream[rows]) != 0)
    rows = rows[np.append(changes, True)[: len(rows)]]
    of_device = _Latest(work.device_number, work.queued_ns, work.end_ns)
    latest = of_device.before(device, waits.start_ns[chosen])
    unknown = np.where(~stated & (device < 0), _ended_within(work, waits, chosen), -1)
    wait = np.concatenate([first[rows], np.arange(len(chosen)), np.arange(len(chosen))])
    row = np.concatenate([rows, latest, unknown])
    pairs = np.unique(np.stack([wait, row])[:, row >= 0], axis=1)
    return _forward(
        work, chosen[pairs[0]], pairs[1], waits.end_ns, waits.is_stated[chosen[pairs[0]]]
    )


def _stream_edges(work: _Work, waits: _Waits) -> _Edges:
    stated, guessed = (waits.of_kind(STREAM, stated=known) for known in (True, False))
    start_ns = waits.start_ns[guessed]

    def is_last(row: Ints) -> Flags:
        found: Flags = work.latest.before(work.stream[row], start_ns) == row
        return found

    ended = _ended_within(work, waits, guessed, is_last)
    launch = work.by_thread.before(waits.thread[guessed], start_ns)
    own = work.latest.before(np.append(work.stream, -1)[launch], start_ns)
    row = np.concatenate(
        [
            work.latest.before(waits.stream[stated], waits.start_ns[stated]),
            np.where(ended >= 0, ended, own),
        ]
    )
    wait = np.concatenate([stated, guessed])
    return _forward(work, wait, row, waits.end_ns, waits.is_stated[wait])


def _event_edges(work: _Work, waits: _Waits) -> _Edges:
    stated, guessed = (waits.of_kind(EVENT, stated=known) for known in (True, False))
    row = np.concatenate(
        [
            work.latest.before(waits.source[stated], waits.since_ns[stated]),
            _ended_within(work, waits, guessed),
        ]
    )
    wait = np.concatenate([stated, guessed])
    return _forward(work, wait, row, waits.end_ns, waits.is_exact[wait])


def _copy_edges(work: _Work, waits: _Waits) -> _Edges:
    row = waits.copy_rows
    wait = np.searchsorted(waits.call, work.call[row])
    is_copy = waits.kind[wait] == COPY
    wait, row = wait[is_copy], row[is_copy]
    return _forward(work, wait, row, waits.end_ns, np.zeros(len(wait), np.bool_))


def _recorded_stream_waits(work: _Work, waits: _Waits) -> _Edges:
    """Edges from the last work before a CUDA event to the next work of the waiting stream."""
    wait = waits.of_kind(STREAM_WAIT, stated=True)
    stream, source = waits.stream[wait], waits.source[wait]
    row = work.latest.before(source, waits.since_ns[wait])
    later = work.next_launched(stream, waits.start_ns[wait])
    known = (row >= 0) & (later >= 0) & (source != stream)
    wait, row, later = wait[known], row[known], later[known]
    until_ns = work.start_ns[later] + np.where(waits.is_exact[wait], _SKEW_NS, 0)
    forward = work.end_ns[row] <= until_ns
    return wait[forward], row[forward], later[forward], waits.is_exact[wait][forward]


def _inferred_stream_waits(work: _Work, waits: _Waits) -> _Edges:
    chosen = waits.of_kind(STREAM_WAIT, stated=False)
    if len(waits.of_kind(STREAM_WAIT, stated=True)):
        chosen = chosen[:0]
    later = work.first
    launch_ns, stream = work.queued_ns[later], work.stream[later]
    wait = TimesOfGroups(waits.thread[chosen], waits.start_ns[chosen]).before(
        work.thread[later], launch_ns
    )
    previous = work.by_launch.before(stream, launch_ns)
    is_new = (wait >= 0) & (
        (previous < 0)
        | (np.append(waits.start_ns[chosen], 0)[wait] > np.append(launch_ns, 0)[previous])
    )
    later, wait, launch_ns = later[is_new], chosen[wait[is_new]], launch_ns[is_new]
    stream, device = stream[is_new], work.device_number[later]
    limit_ns = waits.start_ns[wait]  # the awaited work was launched before the wait
    if len(waits.record_ns):
        record = np.searchsorted(waits.record_ns, limit_ns) - 1
        limit_ns = np.where(record >= 0, waits.record_ns[record], np.iinfo(np.int64).min)

    def is_cause(row: Ints) -> Flags:
        elsewhere = (work.stream[row] != stream) & (work.device_number[row] == device)
        found: Flags = elsewhere & (work.queued_ns[row] < limit_ns)
        return found

    before = work.latest.before(stream, launch_ns)
    free_ns = np.where(before >= 0, np.append(work.end_ns, 0)[before], launch_ns)
    after_ns = np.maximum(np.maximum(free_ns, launch_ns), work.start_ns[later] - _NEAR_NS)
    row = work.last_ended(after_ns, work.start_ns[later], is_cause)
    known = row >= 0
    return wait[known], row[known], later[known], np.zeros(np.count_nonzero(known), np.bool_)


def _ended_within(
    work: _Work, waits: _Waits, wait: Ints, accepts: Callable[[Ints], Flags] | None = None
) -> Ints:
    """For each wait, the row of the last work that ended in the last 30 µs of its call; -1 if none.

    The work must be queued before the call began, and `accepts` must accept the row.
    """
    start_ns, end_ns = waits.start_ns[wait], waits.end_ns[wait]

    def was_queued(row: Ints) -> Flags:
        found: Flags = work.queued_ns[row] < start_ns
        return found if accepts is None else found & accepts(row)

    return work.last_ended(np.maximum(start_ns, end_ns - _NEAR_NS), end_ns, was_queued)


def _forward(work: _Work, wait: Ints, row: Ints, end_ns: Ints, recorded: Flags) -> _Edges:
    """The edges from device work to the calls that wait for this work.

    An edge is left out if no work is known (row -1), or if the work ended after the call returned;
    if the trace states the edge, at most `_SKEW_NS` after it.
    """
    until_ns = end_ns[wait] + np.where(recorded, _SKEW_NS, 0)
    kept = (row >= 0) & (np.append(work.end_ns, 0)[row] <= until_ns)
    return wait[kept], row[kept], np.full(np.count_nonzero(kept), -1), recorded[kept]
