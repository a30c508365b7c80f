"""The steps of a trace (`ProfilerStep#…`): their device work, and why the device was idle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.base.range_names import MOMENT
from instrument.read.facts.device_work import by_group
from instrument.read.facts.idle import WAITS, device_time_of, launching_step
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.facts.step_index import step_at, step_bounds
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    is_moment,
)
from instrument.read.views.breakdown import BREAKDOWN
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views


# The columns of device work. All are None in a trace without device events.
_LAUNCHED = {
    column.name: f"{column.doc}; only work that the step launched counts, even if it ran later"
    for column in BREAKDOWN
}
_CLIPPED = {
    f"clipped_{column.name}": f"{column.doc}; only time between start and end of the step counts"
    for column in BREAKDOWN
    if column.name != "total_ns"
}
STEPS: Schema = schema(
    number="the step's number, counted from 0",
    start_ns="the start of the step, on the trace's own clock; tables print the time since the "
    "trace's first event",
    duration_ns="the duration of the step on the CPU",
    **_LAUNCHED,
    **_CLIPPED,
    launch_wait_ns="part of `clipped_idle_ns`: the CPU had not yet launched the next work",
    gap_wait_ns="part of `clipped_idle_ns`: the CPU had launched the next work, and the device had "
    "not yet started it",
    loader_wait_ns="part of `clipped_idle_ns`: the CPU waited for data",
    sync_wait_ns="part of `clipped_idle_ns`: the CPU had waited for the device, so it could launch "
    "the next work only afterwards",
    unknown_wait_ns="part of `clipped_idle_ns`: the launch of the next work is not in the trace",
)
MOMENTS: Schema = schema(
    name="the name that was given to `instrument.mark`",
    start_ns="the time of the call of `instrument.mark`, on the trace's own clock; tables print "
    "the time since the trace's first event",
    thread="the thread, as process/thread",
    step="the number of the step around the call; None outside of finished steps",
)


def steps(capture: Views) -> Table:
    """Return the steps that ended inside the window, in order of start; see `STEPS`.

    The device work of a step is the work that any thread launched during the step. Device work
    whose launch is not in the trace belongs to no step.
    """
    links, work = capture.links, capture.work
    events, index = links.events, links.steps
    start, end = step_bounds(events, index)
    columns: dict[str, Any] = dict.fromkeys(names_of(STEPS), [None] * len(index))
    columns["number"] = links.step_numbers
    columns |= {"start_ns": start, "duration_ns": end - start}
    if len(index) and len(work.event):
        columns |= by_group(work, launching_step(events, work, index), len(index))
        for name, ns in device_time_of(events, work, start, end).items():
            if name != "total_ns":
                columns[name if name in WAITS else f"clipped_{name}"] = ns
    return Table.of(STEPS, columns, begin_ns=events.begin_ns)


def moments(capture: Views) -> Table:
    """Return the moments marked with `instrument.mark`, in order of time; see `MOMENTS`."""
    links = capture.links
    events, finished = links.events, links.steps
    index = np.flatnonzero(events.among(ANNOTATION | OPERATOR) & events.named(is_moment))
    index = index[np.argsort(events.start_ns[index], kind="stable")]
    start_ns = events.start_ns[index]
    numbers = [*links.step_numbers, None]
    return Table.of(
        MOMENTS,
        {
            "name": [events.names[k].removesuffix(MOMENT) for k in events.name[index].tolist()],
            "start_ns": start_ns,
            "thread": ["{}/{}".format(*events.threads[k]) for k in events.thread[index].tolist()],
            "step": [numbers[k] for k in step_at(events, finished, start_ns).tolist()],
        },
        begin_ns=events.begin_ns,
    )
