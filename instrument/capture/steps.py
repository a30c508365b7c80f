"""The profiler's steps: what the device did for each, and in each."""

from __future__ import annotations

from typing import Any

import numpy as np

from instrument.capture.breakdown import Work, by_group, layers_of, masks, with_idle
from instrument.capture.events import ANNOTATION, OPERATOR, STEP_PREFIX, Events, Ints, is_step
from instrument.capture.idle import waits
from instrument.capture.table import Table
from instrument.capture.timeline import sweep


def step_number(events: Events, event: int) -> int:
    """The number that a step bears in its name."""
    return int(events.names[events.name[event]].removeprefix(STEP_PREFIX))


def finished_steps(events: Events) -> Ints:
    """The positions of the steps that ended inside the window, by start."""
    index = np.flatnonzero(events.among(ANNOTATION | OPERATOR) & events.named(is_step) & events.finished)
    return index[np.argsort(events.start_ns[index], kind="stable")]


def steps(events: Events, work: Work) -> Table:
    """The steps that ended inside the window, by start.

    Columns: `number start_ns duration_ns`; then, from `compute_ns` to `overlap_ns`, the columns of `breakdown` for the
    device work that the step launched, whenever it ran, with `total_ns` from the first of it to its end; then the same
    with `clipped_` before them for whatever ran between the step's own start and end, which the first three and
    `clipped_idle_ns` sum to; last what that idle time waited for: `launch_wait_ns gap_wait_ns loader_wait_ns
    sync_wait_ns unknown_wait_ns`, as `idle.waits` tells them apart. All of them are None in a trace without device
    events.

    `start_ns` is on the trace's own clock, to which `events.base_ns` adds up to Unix time. Device work whose launch is
    not in the trace belongs to no step. A step owns the launches of every thread while it lasts.
    """
    index = finished_steps(events)
    start, end = events.start_ns[index], events.end_ns[index]
    launched = by_group(work, launching_step(events, work, index), len(index))
    clipped = _clipped(work, start, end)
    waited = waits(events, work, start, end) if len(index) and len(work.event) else {}
    device: dict[str, Any] = {**launched, **clipped, **{name: waited.get(name, start) for name in _WAITS}}
    return Table(
        {
            "number": [step_number(events, k) for k in index.tolist()],
            "start_ns": start.tolist(),
            "duration_ns": (end - start).tolist(),
            **{name: v.tolist() if len(work.event) else [None] * len(index) for name, v in device.items()},
        }
    )


_WAITS = ("launch_wait_ns", "gap_wait_ns", "loader_wait_ns", "sync_wait_ns", "unknown_wait_ns")


def launching_step(events: Events, work: Work, index: Ints) -> Ints:
    """For each device event the step, counted from 0, in which the host launched it, or -1."""
    host = np.where(work.call >= 0, work.call, work.operator)
    if not len(index):
        return np.full(len(host), -1)
    time = events.start_ns[host]
    at = np.searchsorted(events.start_ns[index], time, "right") - 1
    inside = (host >= 0) & (at >= 0) & (time < events.end_ns[index][at])
    return np.where(inside, at, -1)


def _clipped(work: Work, start: Ints, end: Ints) -> dict[str, Ints]:
    timeline = sweep(layers_of(work))
    found = {name: timeline.within(where, start, end) for name, where in masks(timeline.active).items()}
    columns = with_idle(found, end - start)
    return {f"clipped_{name}": values for name, values in columns.items() if name != "total_ns"}
