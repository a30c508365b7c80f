"""Kernels and copies by name, and the streams on which they ran."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.read.facts.device_work import COMMUNICATION, KERNEL, KINDS, Work, by_group
from instrument.read.facts.groupby import Groups, SortedGroups, cells, groupby
from instrument.read.facts.schema import Schema, schema
from instrument.read.trace.events import Codes, Events, Flags, Ints, decoded
from instrument.read.views.table import Table

KERNELS: Schema = schema(
    name="the kernel's name",
    kind="kernel or communication",
    calls="how many times the kernel ran",
    device_ns="device time of all calls",
    min_ns="the duration of the shortest call",
    mean_ns="the mean duration of a call, rounded down to a nanosecond",
    max_ns="the duration of the longest call",
    launch_ns="CPU time of the calls that launched the kernel; a call that launches several "
    "kernels, such as the launch of a CUDA graph, counts only for the first of these kernels; None "
    "if the trace holds no launch of the kernel",
    short_calls="the number of calls whose device time is shorter than the CPU time of their "
    "launch; if a launch starts several kernels, their device times are summed; None if the trace "
    "holds no launch of the kernel",
    grid="blocks in each dimension, for the longest call; None if the grid was not recorded. On "
    "ROCm, for some kernels these are threads and not blocks",
    block="threads of a block in each dimension, for the longest call; None if the block was not "
    "recorded",
    blocks_per_sm="blocks per multiprocessor, averaged over the kernel's time; None if they were "
    "not recorded",
    occupancy="Kineto's estimate of the achieved occupancy as a fraction, averaged over the time "
    "of the calls that have an estimate",
    occupancy_covered="the time of the calls that have an estimate, as a share of the time of all "
    "calls. Kineto makes no estimate for many kernels, such as the kernels of cuBLAS and NCCL",
)
COPIES: Schema = schema(
    name='the kind of copy or memset, such as "Memcpy HtoD (Pinned -> Device)"',
    calls="how many times this kind of copy or memset ran",
    device_ns="device time of all calls",
    min_ns="the duration of the shortest call",
    mean_ns="the mean duration of a call, rounded down to a nanosecond",
    max_ns="the duration of the longest call",
    bytes="bytes moved, summed over the copies and memsets whose size is known from the device "
    "event or from the CPU call; None if no size is known",
    bytes_per_second="`bytes` divided by the device time of the copies and memsets whose size is "
    "known",
)
STREAMS: Schema = schema(
    device="the device, as the trace numbers it",
    stream="the stream, as the trace numbers it",
    calls="the number of device events that ran on the stream",
    busy_ns="time in which anything ran on the stream",
    compute_ns="time in which a memset, or a kernel that is not communication, ran",
    communication_ns="time in which communication ran",
    copy_ns="time in which copies ran",
    idle_ns="time in which nothing ran on the stream, from its first work to its last work",
)


def kernels(events: Events, work: Work) -> Table:
    """Return one row for each kernel name, the most device time first; see `KERNELS`."""
    chosen = np.flatnonzero(np.isin(work.kind, (KERNEL, COMMUNICATION)))
    event, duration = work.event[chosen], work.duration_ns[chosen]
    groups = groupby(events.name[event])[1]
    by_time = groups.sorted_by(duration)
    last = by_time.row(100)
    longest = event[last]
    launch, short = _launch_costs(events, work)
    launch, short = launch[chosen], short[chosen]
    launched = groups.number(launch >= 0) > 0
    rows, estimated = by_time.rows(), estimated_occupancy(events, event)
    blocks = [averaged(events.blocks_per_sm[event[row]], duration[row])[0] for row in rows]
    occupancy = [averaged(estimated[row], duration[row]) for row in rows]
    columns: dict[str, list[Any]] = {
        "name": [events.names[k] for k in events.name[longest].tolist()],
        "kind": [KINDS[k] for k in work.kind[chosen][last].tolist()],
        **_spread(groups, by_time, duration),
        "launch_ns": cells(groups.sum(np.maximum(launch, 0)), launched),
        "short_calls": cells(groups.number(short), launched),
        "grid": _texts(events, events.grid[longest]),
        "block": _texts(events, events.block[longest]),
        "blocks_per_sm": blocks,
        "occupancy": [mean for mean, _ in occupancy],
        "occupancy_covered": [covered for _, covered in occupancy],
    }
    return Table.of(KERNELS, columns).sort("device_ns")


def copies(events: Events, work: Work) -> Table:
    """Return one row for each kind of copy or memset, the most device time first; see `COPIES`."""
    chosen = np.flatnonzero(~np.isin(work.kind, (KERNEL, COMMUNICATION)))
    event, duration = work.event[chosen], work.duration_ns[chosen]
    size = moved_bytes(events, event, work.call[chosen])
    names, groups = groupby(events.name[event])
    moved, taken = groups.sum(np.maximum(size, 0)), groups.sum(np.where(size >= 0, duration, 0))
    known = groups.number(size >= 0) > 0
    rates = bytes_per_second(moved, taken)
    columns: dict[str, list[Any]] = {
        "name": [events.names[k] for k in names.tolist()],
        **_spread(groups, groups.sorted_by(duration), duration),
        "bytes": cells(moved, known),
        "bytes_per_second": cells(rates, known & (rates >= 0)),
    }
    return Table.of(COPIES, columns).sort("device_ns")


def bytes_per_second(size: Ints, duration_ns: Ints) -> Ints:
    """Each size divided by its duration; -1 for a rate that is unknown or too large for 64 bits."""
    pairs = zip(size.tolist(), duration_ns.tolist())
    rates = [each * 10**9 // ns if ns > 0 and each >= 0 else -1 for each, ns in pairs]
    return np.array([rate if rate < 2**63 else -1 for rate in rates], np.int64)


def streams(events: Events, work: Work) -> Table:
    """Return one row for each stream on which work ran, the busiest first; see `STREAMS`."""
    present, groups = groupby(events.thread[work.event])
    found = by_group(work, groups.of, groups.count)
    names = ("compute_ns", "communication_ns", "copy_ns", "idle_ns")
    threads = [events.threads[k] for k in present.tolist()]
    columns: dict[str, list[Any]] = {
        "device": [device for device, _ in threads],
        "stream": [stream for _, stream in threads],
        "calls": groups.size.tolist(),
        "busy_ns": (found["total_ns"] - found["idle_ns"]).tolist(),
        **{name: found[name].tolist() for name in names},
    }
    return Table.of(STREAMS, columns).sort("busy_ns")


def moved_bytes(events: Events, copy: Ints, call: Ints) -> Ints:
    """The bytes that each copy or memset moves, or else its launching `call`; -1 if not known."""
    own = events.moved_bytes[copy]
    return np.where((own >= 0) | (call < 0), own, events.moved_bytes[call])


def estimated_occupancy(events: Events, kernel: Ints) -> NDArray[np.float64]:
    """Kineto's estimates of the occupancy of kernels as fractions; NaN without an estimate."""
    percent = events.occupancy[kernel].astype(np.float64)
    return np.where(percent > 0, percent / 100, np.nan)


def averaged(values: NDArray[np.floating[Any]], weights: Ints) -> tuple[float | None, float | None]:
    """Return the weighted mean of the values that are not NaN, and their share of the weight.

    A result is None if it would be divided by 0.
    """
    known = ~np.isnan(values)
    weight, whole = int(weights[known].sum()), int(weights.sum())
    mean = float(np.sum(values[known] * weights[known])) / weight if weight else None
    return mean, weight / whole if whole else None


def _launch_costs(events: Events, work: Work) -> tuple[Ints, Flags]:
    """For each device event, the CPU time of its launch, and whether the event is short.

    An event is short if its launch takes longer than all device events of the launch. The CPU time
    is -1 if the launch is not in the trace, and 0 for all events of a launch but the first.
    """
    known = work.call >= 0
    launch_ns = np.where(known, events.duration_ns[work.call], -1)
    ran = Groups(work.call[known], len(events)).sum(events.duration_ns[work.event[known]])
    by_start = work.by_start
    _, first = np.unique(work.call[by_start], return_index=True)
    counts = np.isin(np.arange(len(launch_ns)), by_start[first]) | (launch_ns < 0)
    return np.where(counts, launch_ns, 0), (launch_ns >= 0) & (ran[work.call] < launch_ns)


def _spread(groups: Groups, by_time: SortedGroups, duration: Ints) -> dict[str, list[int]]:
    total = groups.sum(duration)
    return {
        "calls": groups.size.tolist(),
        "device_ns": total.tolist(),
        "min_ns": duration[by_time.row(0)].tolist(),
        "mean_ns": (total // groups.size).tolist(),
        "max_ns": duration[by_time.row(100)].tolist(),
    }


def _texts(events: Events, codes: Codes) -> list[str | None]:
    return [str(decoded(events.grids[code])) if code >= 0 else None for code in codes.tolist()]
