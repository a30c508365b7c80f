"""The launch queue of each stream: work that the CPU has launched and the device has not started.

A launch is outstanding from the start of its CPU call until the device starts its work, as in HTA's
`get_queue_length_time_series`. A call that starts several device events, such as the launch of a
CUDA graph, is one launch on each of their streams, until the first of them starts. HTA does not
count such calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from instrument.base.errors import CaptureError
from instrument.read.facts.device_work import Work
from instrument.read.facts.groupby import Groups, cells, group_rows, groupby
from instrument.read.facts.schema import Schema, schema
from instrument.read.trace.events import Events, Ints, Thread
from instrument.read.views.table import Table

# If a stream has this many outstanding launches, the next CUDA call for the stream waits until the
# work of one launch starts. CUDA allows about 1024. Measured on a V100: all 1288 calls that found
# 1021 outstanding launches waited, and no other call waited.
FULL_QUEUE = 1021

QUEUE: Schema = schema(
    device="the device, as the trace numbers it",
    stream="the stream, as the trace numbers it",
    launches="the number of launches on this stream for which the trace has the CPU call; a call "
    "that starts several device events, such as the launch of a CUDA graph, is one launch",
    mean_length="the number of outstanding launches, averaged over `total_ns`; a launch is "
    "outstanding from the start of its CPU call until the device starts its work",
    max_length="the largest number of outstanding launches",
    empty_ns="part of `total_ns` in which no launch was outstanding: the device had nothing to "
    "start next",
    total_ns="time from the first launch until the device started the last work",
    blocked_calls="the number of calls that waited because the queue was full: CUDA allows about "
    "1024 outstanding launches for each stream; None if no CUDA call launched work on the stream",
    blocked_ns="how long the calls of `blocked_calls` waited for the device to start the oldest "
    "outstanding work",
    unlaunched="the number of device events whose launch is not in the trace, for example because "
    "the launch was before the recording. These events do not count as launches, so the queue was "
    "longer than shown",
)
QUEUE_SERIES: Schema = schema(
    time_ns="a time at which a launch begins or its work starts, on the trace's own clock",
    length="the number of outstanding launches from this time until the time of the next row",
)


def queue_series(
    events: Events, work: Work, stream: int | str | None, device: int | str | None
) -> Table:
    """Return the queue length of one stream over time; see `Views.queue_series`."""
    found = _queues(events, work)
    for (of_device, of_stream), rows in zip(found.streams, found.of.rows()):
        if len(rows) and stream in (None, of_stream) and device in (None, of_device):
            return Table.of(
                QUEUE_SERIES,
                {"time_ns": found.time_ns[rows], "length": found.length[rows]},
                begin_ns=events.begin_ns,
            )
    asked = [("stream", stream), ("device", device)]
    where = " of ".join(f"{kind} {value}" for kind, value in asked if value is not None)
    raise CaptureError(
        f"The trace holds no launch of work on {where or 'any stream'}; "
        "the table capture.queue lists the streams."
    )


class _Queues(NamedTuple):
    """The launches on each stream, and the lengths of the streams' queues, as parallel columns.

    Attributes:
        streams: the devices and streams with work, sorted by their launches.
        unlaunched: for each stream, the number of device events whose launch is not in the trace.
        launched: the launches, grouped by stream.
        call, started_ns: for each launch, the position of its call, and when its work started.
        of, time_ns, length: the times at which the length of a queue changes, grouped by stream.
    """

    streams: list[Thread]
    unlaunched: Ints
    launched: Groups
    call: Ints
    started_ns: Ints
    of: Groups
    time_ns: Ints
    length: Ints


def _queues(events: Events, work: Work) -> _Queues:
    present, ran = groupby(events.thread[work.event])
    known = work.call >= 0
    stream, call = ran.of[known], work.call[known]
    started_ns = np.maximum(work.start_ns[known], events.start_ns[call])
    first = group_rows(stream, call).sorted_by(started_ns).row(0)
    call, started_ns = call[first], started_ns[first]
    launched = Groups(stream[first], ran.count)
    order = np.argsort(-launched.size, kind="stable")
    launched, unlaunched = launched.renumbered(order), ran.number(~known)[order]
    lengths = _lengths(launched, events.start_ns[call], started_ns)
    streams = [events.threads[k] for k in present[order].tolist()]
    return _Queues(streams, unlaunched, launched, call, started_ns, *lengths)


def queue(events: Events, work: Work) -> Table:
    """Return one row for each stream on which work ran, the most launches first; see `QUEUE`.

    The clocks of CPU and device may differ: a device event that seems to start before its launch
    counts as outstanding for 0 ns. Cost: three sorts of the launches.
    """
    streams, unlaunched, launched, call, started_ns, of, time_ns, length = _queues(events, work)
    until_ns = np.append(time_ns[1:], time_ns[-1:])
    lasts_ns = np.where(
        np.append(np.diff(of.of) == 0, False)[: len(time_ns)], until_ns - time_ns, 0
    )
    total_ns, waited_ns = of.sum(lasts_ns), launched.sum(started_ns - events.start_ns[call])
    is_cuda = events.named(lambda name: name.startswith("cu"))[call]
    blocked_ns = _blocked_ns(events, launched, call, started_ns)
    has_queue, has_cuda = launched.size > 0, launched.number(is_cuda) > 0
    # The integral of the queue's length over time is the sum of the times that launches wait in it.
    means = [
        waited / total if total else None
        for waited, total in zip(waited_ns.tolist(), total_ns.tolist())
    ]
    columns: dict[str, Any] = {
        "device": [device for device, _ in streams],
        "stream": [stream for _, stream in streams],
        "launches": launched.size,
        "mean_length": means,
        "max_length": cells(-of.min(-length), has_queue),
        "empty_ns": cells(of.sum(lasts_ns, length == 0), has_queue),
        "total_ns": cells(total_ns, has_queue),
        "blocked_calls": cells(launched.number(blocked_ns > 0), has_cuda),
        "blocked_ns": cells(launched.sum(blocked_ns), has_cuda),
        "unlaunched": unlaunched,
    }
    return Table.of(QUEUE, columns)


def _lengths(launched: Groups, called_ns: Ints, started_ns: Ints) -> tuple[Groups, Ints, Ints]:
    stream = np.concatenate([launched.of, launched.of])
    time_ns = np.concatenate([called_ns, started_ns])
    change = np.repeat(np.array([1, -1]), len(called_ns))
    order = np.lexsort((time_ns, stream))
    stream, time_ns = stream[order], time_ns[order]
    last = np.append((np.diff(stream) != 0) | (np.diff(time_ns) != 0), True)[: len(order)]
    # A launch adds 1, and the start of its work subtracts 1. So the running sum is 0 at the end of
    # each stream, and one sum is enough for all streams.
    return Groups(stream[last], launched.count), time_ns[last], np.cumsum(change[order])[last]


def _blocked_ns(events: Events, launched: Groups, call: Ints, started_ns: Ints) -> Ints:
    """How long each call waited because the queue of its stream was full; 0 if it did not wait.

    A call that finds `FULL_QUEUE` outstanding launches waits until the device starts the oldest
    one, unless it returns before this start.
    """
    called_ns = events.start_ns[call]
    blocked_ns = np.zeros(len(call), np.int64)
    for rows in launched.rows():
        if len(rows) <= FULL_QUEUE:
            continue
        rows = rows[np.argsort(called_ns[rows], kind="stable")]
        started = np.sort(started_ns[rows])
        gone = np.searchsorted(started, called_ns[rows], "right")
        oldest_ns = np.append(started, started[-1])[gone]
        full = (np.arange(len(rows)) - gone >= FULL_QUEUE) & (
            oldest_ns <= events.end_ns[call[rows]]
        )
        blocked_ns[rows] = np.where(full, oldest_ns - called_ns[rows], 0)
    return blocked_ns
