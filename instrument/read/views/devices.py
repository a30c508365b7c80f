"""How well each device was used, by the definitions of torch-tb-profiler 0.4, TensorBoard's plugin.

A step ends when both its CPU work and the last device event that it launched have ended, and the
next step starts at this end or later. Steps at the end without device work are left out, and so is
a last step with less than 0.8 of the device events of the step before. A trace without steps is one
step.
"""

from __future__ import annotations

import numpy as np

from instrument.read.facts.device_work import COMMUNICATION, KERNEL, Work
from instrument.read.facts.groupby import Groups, intern
from instrument.read.facts.idle import launching_step
from instrument.read.facts.intervals import Intervals, sweep
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.trace.events import OPERATOR, Events, Floats, Ints, works_on_device
from instrument.read.views.kernels import averaged, estimated_occupancy
from instrument.read.views.table import Table

# If the last step has less than this fraction of the device events of the step before, the window
# cut off the last step, and the step is left out.
_WHOLE_STEP = 0.8


DEVICES: Schema = schema(
    device="the device, as the trace numbers it",
    name="the device's product name; None if the trace does not have it",
    kernels="how many kernels ran between the start of the first step and the end of the last step",
    busy_ns="time in which a kernel ran",
    total_ns="time from the start of the first step to the end of the last step",
    utilization="`busy_ns` divided by `total_ns`",
    sm_efficiency="the fraction of multiprocessors with a block to run, averaged over `total_ns`. "
    "At each moment, the fraction is the sum of the running kernels' blocks per multiprocessor, at "
    "most 1; None if the trace does not hold blocks per multiprocessor",
    occupancy="Kineto's estimate of the achieved occupancy as a fraction, averaged over the "
    "kernels' time; None if the trace holds no estimate, as on ROCm",
    occupancy_covered="the time of the kernels whose occupancy Kineto estimated, as a fraction of "
    "the time of all kernels",
)


def devices(links: Links, work: Work) -> Table:
    """Return one row for each device: how well the steps used it; see `DEVICES`.

    The plugin's occupancy is `occupancy` times `occupancy_covered`: it counts a missing estimate as
    0.
    """
    events = links.events
    start_ns, end_ns = _steps(links, work)
    kernels = np.flatnonzero(np.isin(work.kind, (KERNEL, COMMUNICATION)))
    number, processes = intern(process for process, _ in events.threads)
    groups = Groups(number[events.thread[work.event[kernels]]], len(processes))
    used = {
        process: _usage(events, work.event[kernels[rows]], start_ns[0], end_ns[-1])
        for process, rows in zip(processes, groups.rows())
        if len(rows) and len(start_ns)
    }
    rows = [
        {"device": process, "name": None if device is None else device.name, **usage}
        for (process, usage), device in zip(used.items(), events.devices_of(used))
    ]
    return Table.of_dicts(DEVICES, rows)


def _usage(events: Events, kernel: Ints, first: int, last: int) -> dict[str, int | float | None]:
    kernel = kernel[(events.end_ns[kernel] > first) & (events.start_ns[kernel] < last)]
    start, end = (np.clip(times[kernel], first, last) for times in (events.start_ns, events.end_ns))
    timeline = sweep([(start, end)])
    busy, total = int(timeline.total_ns(timeline.active[0])[0]), int(last - first)
    blocks = events.blocks_per_sm[kernel]
    occupancy, covered = averaged(estimated_occupancy(events, kernel), end - start)
    filled = _filled_ns(start, end, blocks)
    return {
        "kernels": len(kernel),
        "busy_ns": busy,
        "total_ns": total,
        "utilization": busy / total if total else None,
        "sm_efficiency": filled / total if total and (blocks > 0).any() else None,
        "occupancy": occupancy,
        "occupancy_covered": covered,
    }


def _filled_ns(start: Ints, end: Ints, blocks: Floats) -> float:
    """The integral over time of the running kernels' blocks per multiprocessor, at most 1."""
    known = blocks > 0
    times = np.concatenate([start[known], end[known]])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([blocks[known], -blocks[known]]).astype(np.float64)
    running = np.cumsum(changes[order])[:-1]
    return float(np.sum(np.diff(times[order]) * np.clip(running, 0, 1)))


def _steps(links: Links, work: Work) -> Intervals:
    """The steps as TensorBoard's plugin defines them."""
    events, index = links.events, links.steps
    if not len(index):
        return _whole_recording(events)
    launched, step = _launched(events, work, index)
    end = events.end_ns[index].copy()
    np.maximum.at(end, step, work.end_ns[launched])
    first = events.start_ns[index[0]]
    if (own := launched[step == 0]).size:
        earlier = np.delete(work.end_ns, launched)
        first = earlier[earlier < work.start_ns[own].min()].max(initial=first)
    end = np.maximum.accumulate(np.maximum(end, first))
    start = np.maximum(events.start_ns[index], np.concatenate([[first], end[:-1]]))
    kept = _uncut(np.bincount(step, minlength=len(index)))
    return start[:kept], end[:kept]


def _whole_recording(events: Events) -> Intervals:
    chosen = np.flatnonzero(events.among(OPERATOR) | works_on_device(events))
    if not len(chosen):
        return chosen, chosen
    start, end = events.start_ns[chosen], events.end_ns[chosen]
    return start.min(keepdims=True), end.max(keepdims=True)


def _launched(events: Events, work: Work, index: Ints) -> tuple[Ints, Ints]:
    """The device events whose launch is wholly inside a step, and the index of this step."""
    step = np.where(work.call >= 0, launching_step(events, work, index), -1)
    inside = (step >= 0) & (events.end_ns[work.call] <= events.end_ns[index][step])
    return np.flatnonzero(inside), step[inside]


def _uncut(counts: Ints) -> int:
    """How many steps `_steps` keeps, given the number of device events of each step."""
    active = np.flatnonzero(counts)
    if not len(active) or len(counts) < 2:
        return len(counts)
    last = int(active[-1])
    return last if last > 0 and counts[last - 1] * _WHOLE_STEP > counts[last] else last + 1
