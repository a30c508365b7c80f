"""The figures of the overview page of TensorBoard's PyTorch plugin, by the plugin's definitions.

The definitions are those of torch-tb-profiler 0.4 (its documentation, and the tooltips of the
page). The time of a step is split by activity. If several activities run at the same time, this
time counts for the first of them in this order: kernel, memcpy, memset, communication, runtime,
data loader, CPU. If no activity runs, the time counts as other. A step ends when its device work
ends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from instrument.analysis.breakdown import COMMUNICATION, COPY, KERNEL, MEMSET, Work
from instrument.analysis.kernels import covered, estimated_occupancy, weighted_mean
from instrument.analysis.steps import launching_step, loading
from instrument.analysis.table import Schema, Table, schema
from instrument.links.groupby import Groups, intern
from instrument.links.intervals import Intervals, concatenated, merged, sweep
from instrument.links.step_index import finished_steps, step_number
from instrument.trace.events import (
    ANNOTATION,
    OPERATOR,
    Events,
    Floats,
    Ints,
    called_operators,
    is_runtime,
    works_on_device,
)

_ROLES = (
    "kernel_ns",
    "memcpy_ns",
    "memset_ns",
    "communication_ns",
    "runtime_ns",
    "loader_ns",
    "cpu_ns",
)
# If the last step has less than this fraction of the device events of the step before, the window
# cut off the last step, and the step is left out.
_WHOLE_STEP = 0.8
# Prefixes of the CPU events of collectives: the only events of communication in a trace without a
# device.
_COLLECTIVES = ("nccl:", "gloo:")


class Steps(NamedTuple):
    """The steps as TensorBoard's plugin defines them: positions in `Events`, starts and ends.

    If the trace has no steps, the whole recording is one step with the position -1.
    """

    event: Ints
    start_ns: Ints
    end_ns: Ints


# The last eight columns sum to `duration_ns`. A moment that fits several of these columns counts
# for the first of them.
OVERVIEW: Schema = schema(
    number="the step's number; None if the trace has no steps and counts as one step",
    start_ns="the start of the step, on the trace's own clock",
    duration_ns="time until the step's last device event ends, or until the step ends on the CPU "
    "if that is later",
    kernel_ns="time in which a kernel other than communication ran",
    memcpy_ns="time in which a copy ran, without the time in `kernel_ns`",
    memset_ns="time in which a memset ran, without the time in the columns above",
    communication_ns="time in which communication ran, without the time in the columns above",
    runtime_ns="time in which a call of the device's runtime ran, without the time in the columns "
    "above",
    loader_ns="time in which the data loader ran, without the time in the columns above",
    cpu_ns="time in which an operator ran on the CPU, without the time in the columns above",
    other_ns="the part of `duration_ns` that is in none of the columns above",
)
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


def overview(events: Events, work: Work) -> Table:
    """Return one row for each step, as TensorBoard's plugin defines steps; see `OVERVIEW`.

    A step ends when both its CPU work and the last device event that it launched have ended. The
    next step starts at this end, or later. A trace without steps counts as one step, whose `number`
    is None.

    In a trace with device work, steps after the last step with device work are left out. If this
    last step has less than 0.8 of the device events of the step before, it is left out too, because
    its work was probably cut off.

    Three things differ from the plugin:
    - Communication is recognised by the rule of `breakdown`.
    - An annotation of the data loader counts like an operator of the same name.
    - A trace without steps lasts until its device work has ended.
    """
    steps = _steps(events, work)
    timeline = sweep(_layers(events, work))
    left = np.ones(len(timeline.group), np.bool_)
    columns: dict[str, Ints] = {}
    for name, active in zip(_ROLES, timeline.active):
        columns[name] = timeline.within(active & left, steps.start_ns, steps.end_ns)
        left &= ~active
    duration = steps.end_ns - steps.start_ns
    columns["other_ns"] = duration - sum(columns.values())
    return Table.of(
        OVERVIEW,
        {
            "number": [step_number(events, k) if k >= 0 else None for k in steps.event.tolist()],
            "start_ns": steps.start_ns.tolist(),
            "duration_ns": duration.tolist(),
            **{name: values.tolist() for name, values in columns.items()},
        },
        begin_ns=events.begin_ns,
    )


def devices(events: Events, work: Work) -> Table:
    """Return one row for each device: how well the steps used it; see `DEVICES`.

    TensorBoard's plugin counts a missing estimate of the occupancy as 0. So the plugin's occupancy
    is `occupancy` times `occupancy_covered`.
    """
    steps = _steps(events, work)
    kernels = np.flatnonzero(np.isin(work.kind, (KERNEL, COMMUNICATION)))
    number, processes = intern(process for process, _ in events.threads)
    groups = Groups(number[events.thread[work.event[kernels]]], len(processes))
    used = {
        process: _usage(events, work.event[kernels[rows]], steps)
        for process, rows in zip(processes, groups.rows())
        if len(rows) and len(steps.event)
    }
    names = (
        "kernels",
        "busy_ns",
        "total_ns",
        "utilization",
        "sm_efficiency",
        "occupancy",
        "occupancy_covered",
    )
    found = events.devices_of(used)
    cells = {
        "device": list(used),
        "name": [None if device is None else device.name for device in found],
        **{name: [row[name] for row in used.values()] for name in names},
    }
    return Table.of(DEVICES, cells)


def _usage(events: Events, kernel: Ints, steps: Steps) -> dict[str, int | float | None]:
    first, last = steps.start_ns[0], steps.end_ns[-1]
    kernel = kernel[(events.end_ns[kernel] > first) & (events.start_ns[kernel] < last)]
    start, end = (np.clip(times[kernel], first, last) for times in (events.start_ns, events.end_ns))
    timeline = sweep([(start, end)])
    busy, total = int(timeline.total_ns(timeline.active[0])[0]), int(last - first)
    blocks, occupancy = events.blocks_per_sm[kernel], estimated_occupancy(events, kernel)
    return {
        "kernels": len(kernel),
        "busy_ns": busy,
        "total_ns": total,
        "utilization": busy / total if total else None,
        "sm_efficiency": _filled_ns(start, end, blocks) / total
        if total and (blocks > 0).any()
        else None,
        "occupancy": weighted_mean(occupancy, end - start),
        "occupancy_covered": covered(occupancy, end - start),
    }


def _filled_ns(start: Ints, end: Ints, blocks: Floats) -> float:
    """The time in ns for which the running kernels filled the multiprocessors.

    At each time, the blocks per multiprocessor of all running kernels are added. A sum above 1
    counts as 1. The result is the integral of this sum over time.
    """
    known = blocks > 0
    times = np.concatenate([start[known], end[known]])
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.concatenate([blocks[known], -blocks[known]]).astype(np.float64)[order])[
        :-1
    ]
    return float(np.sum(np.diff(times[order]) * np.clip(running, 0, 1)))


def _steps(events: Events, work: Work) -> Steps:
    """The steps as `overview` defines them."""
    index = finished_steps(events)
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
    return Steps(index[:kept], start[:kept], end[:kept])


def _whole_recording(events: Events) -> Steps:
    chosen = np.flatnonzero(events.among(OPERATOR) | works_on_device(events))
    whole = (
        [(-1, events.start_ns[chosen].min(), events.end_ns[chosen].max())] if len(chosen) else []
    )
    return Steps(*np.array(whole, np.int64).reshape(-1, 3).T)


def _launched(events: Events, work: Work, index: Ints) -> tuple[Ints, Ints]:
    """The device events whose launch is wholly inside a step, and the index of this step."""
    step = np.where(work.call >= 0, launching_step(events, work, index), -1)
    inside = (step >= 0) & (events.end_ns[work.call] <= events.end_ns[index][step])
    return np.flatnonzero(inside), step[inside]


def _uncut(counts: Ints) -> int:
    """How many steps `overview` keeps; it leaves out only steps at the end of the window.

    `counts` holds the number of device events of each step.
    """
    active = np.flatnonzero(counts)
    if not len(active) or len(counts) < 2:
        return len(counts)
    last = int(active[-1])
    return last if last > 0 and counts[last - 1] * _WHOLE_STEP > counts[last] else last + 1


def _layers(events: Events, work: Work) -> list[Intervals]:
    operators = events.among(OPERATOR | ANNOTATION)
    collective = operators & events.named(lambda name: name.startswith(_COLLECTIVES))
    runtime = events.among(is_runtime)
    operator = called_operators(events)
    communication = (events.start_ns[collective], events.end_ns[collective])
    return [
        work.of(KERNEL),
        work.of(COPY),
        work.of(MEMSET),
        concatenated([work.of(COMMUNICATION), communication]),
        (events.start_ns[runtime], events.end_ns[runtime]),
        loading(events),
        merged(events.start_ns[operator], events.end_ns[operator]),
    ]
