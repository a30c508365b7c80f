"""The steps of a trace (`ProfilerStep#…`): their device work, and why the device was idle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from instrument.base.range_names import MOMENT
from instrument.read.facts.device_work import COPY, Work, by_group, launched_ns, layers_of, masks
from instrument.read.facts.intervals import Intervals, Timeline, concatenated, sweep
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.facts.step_index import step_at, step_number
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    Events,
    Flags,
    Ints,
    is_loader,
    is_moment,
    is_runtime,
    is_synchronising,
)
from instrument.read.views.breakdown import BREAKDOWN
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

_WAITS = ("launch_wait_ns", "gap_wait_ns", "loader_wait_ns", "sync_wait_ns", "unknown_wait_ns")


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


def steps(links: Links, work: Work) -> Table:
    """Return the steps that ended inside the window, in order of start; see `STEPS`.

    The device work of a step is the work that any thread launched during the step. Device work
    whose launch is not in the trace belongs to no step.
    """
    events, index = links.events, links.steps
    start, end = events.start_ns[index], events.end_ns[index]
    columns: dict[str, Any] = dict.fromkeys(names_of(STEPS), [None] * len(index))
    columns["number"] = [step_number(events, k) for k in index.tolist()]
    columns |= {"start_ns": start, "duration_ns": end - start}
    if len(index) and len(work.event):
        parts = _timeline(events, work, start, end)
        timeline, waited = parts[0], _waited(*parts, start, end)
        columns |= by_group(work, launching_step(events, work, index), len(index)) | waited
        for name, where in masks(timeline.active).items():
            columns[f"clipped_{name}"] = timeline.within(where, start, end)
        columns["clipped_idle_ns"] = sum(waited.values())
    return Table.of(STEPS, columns, begin_ns=events.begin_ns)


def moments(links: Links) -> Table:
    """Return the moments marked with `instrument.mark`, in order of time; see `MOMENTS`."""
    events, finished = links.events, links.steps
    index = np.flatnonzero(events.among(ANNOTATION | OPERATOR) & events.named(is_moment))
    index = index[np.argsort(events.start_ns[index], kind="stable")]
    start_ns = events.start_ns[index]
    numbers = [*(step_number(events, k) for k in finished.tolist()), None]
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


def launching_step(events: Events, work: Work, index: Ints) -> Ints:
    """For each device event, which of the steps in `index` launched it; -1 if none or not known."""
    return np.where(work.launch >= 0, step_at(events, index, launched_ns(events, work)), -1)


def is_loading(events: Events) -> Flags:
    """A mask of the calls of `DataLoader.__next__`, in which the CPU waits for data."""
    found: Flags = events.named(is_loader)
    return events.among(OPERATOR | ANNOTATION) & found if found.any() else found


def loading(events: Events) -> Intervals:
    """The intervals of `DataLoader.__next__` calls, in which the CPU waited for data."""
    chosen = is_loading(events)
    return events.start_ns[chosen], events.end_ns[chosen]


class Gaps(NamedTuple):
    """The times in which no device is busy, as parallel columns.

    Attributes:
        start_ns, end_ns: the start and end of each gap.
        call: the position of the CPU call that launched the work at the end of the gap; -1 if the
            trace does not hold the call, or if no work follows the gap.
        queued_ns: when `call` returned, clipped to the gap; the end of the gap if `call` is -1.
        known: whether the trace holds `call`; True if no work follows the gap.
        syncing: whether the CPU waited for the device when the gap began; False if not `known`.
    """

    start_ns: Ints
    end_ns: Ints
    call: Ints
    queued_ns: Ints
    known: Flags
    syncing: Flags


def gaps(events: Events, work: Work, start_ns: Ints, end_ns: Ints) -> Gaps:
    """Return the gaps between the earliest start and the latest end of all spans and device work.

    The spans are sorted by start.
    """
    start, until = work.busy
    begin = np.append(min(start_ns[0], work.start_ns.min(initial=start_ns[0])), until)
    end = np.append(start, max(end_ns.max(), work.end_ns.max(initial=end_ns[0])))
    begin, end = begin[begin < end], end[begin < end]
    at = np.searchsorted(work.start_ns[work.by_start], end)
    call = np.append(work.call[work.by_start], -1)[at]
    known = (at == len(work.by_start)) | (call >= 0)
    queued = np.where(call >= 0, events.end_ns[call], end)
    named = events.among(is_runtime) & events.named(is_synchronising)
    copies = (work.kind == COPY) & (work.call >= 0)
    copied, returned = work.start_ns[copies], events.end_ns[work.call[copies]]
    calls = events.start_ns[named], events.end_ns[named]
    sides = concatenated([calls, (copied, np.maximum(copied, returned))])
    began, ended = (np.searchsorted(np.sort(side), begin, "right") for side in sides)
    syncing = known & (began > ended)
    return Gaps(begin, end, call, np.clip(queued, begin, end), known, syncing)


def waits(events: Events, work: Work, start_ns: Ints, end_ns: Ints) -> dict[str, Ints]:
    """Return the idle time of the devices in each span of time, split by cause.

    docs/show.md defines the causes. They sum to the idle time. Limits: with several
    streams, the causes do not show which stream waited. The clocks of CPU and device may differ by
    microseconds, which is not corrected.
    """
    return _waited(*_timeline(events, work, start_ns, end_ns), start_ns, end_ns)


def _waited(
    timeline: Timeline, busy: Flags, causes: dict[str, Flags], start_ns: Ints, end_ns: Ints
) -> dict[str, Ints]:
    found_ns = {
        name: timeline.within(where, start_ns, end_ns)
        for name, where in causes.items()
        if name != "launch_wait_ns"
    }
    idle = end_ns - start_ns - timeline.within(busy, start_ns, end_ns)
    return {"launch_wait_ns": idle - sum(found_ns.values()), **found_ns}


def device_spans(links: Links, work: Work) -> Intervals:
    """The counted steps, each until the device has ended what it and the steps before launched.

    So, as in the simulation, a step begins when the CPU and the device have ended the step before.
    Without finished steps, the time from the first device work to the last.
    """
    steps = links.counted_steps
    if steps.what == "recording":
        return work.start_ns.min(keepdims=True), work.end_ns.max(keepdims=True)
    launch_ns = launched_ns(links.events, work)
    before_ns = work.end_ns[launch_ns < steps.start_ns[0]].max(initial=steps.start_ns[0])
    end_ns = steps.end_ns.copy()
    end_ns[-1] = work.end_ns[steps.holds(launch_ns) >= 0].max(initial=end_ns[-1])
    start_ns = np.maximum(steps.start_ns, before_ns)
    return start_ns, np.maximum(end_ns, start_ns)


def device_time(capture: Views) -> dict[str, int]:
    """Return the columns of `BREAKDOWN` and of `waits` for `device_spans`, summed over the spans.

    All are 0 if the trace has no device work. Computed once for a capture.
    """
    return capture.once("device-time", lambda: _device_time(capture.links, capture.work))


def _device_time(links: Links, work: Work) -> dict[str, int]:
    if not len(work.event):
        return dict.fromkeys((*names_of(BREAKDOWN), *_WAITS), 0)
    start_ns, end_ns = device_spans(links, work)
    parts = _timeline(links.events, work, start_ns, end_ns)
    found = _waited(*parts, start_ns, end_ns)
    for name, where in masks(parts[0].active).items():
        found[name] = parts[0].within(where, start_ns, end_ns)
    sums = {name: int(ns.sum()) for name, ns in found.items()}
    total_ns = int((end_ns - start_ns).sum())
    return sums | {"idle_ns": sum(sums[name] for name in _WAITS), "total_ns": total_ns}


def idle_stretches(events: Events, work: Work, start_ns: int, end_ns: int) -> dict[str, Intervals]:
    """Return the intervals in which no device is busy, by the causes of `waits`."""
    span = np.array([start_ns]), np.array([end_ns])
    timeline, _, causes = _timeline(events, work, *span)
    found = {}
    for name, where in causes.items():
        start, end = (np.clip(side, start_ns, end_ns) for side in timeline.merged(where))
        found[name] = start[end > start], end[end > start]
    return found


def _timeline(
    events: Events, work: Work, start_ns: Ints, end_ns: Ints
) -> tuple[Timeline, Flags, dict[str, Flags]]:
    """A timeline, a mask of its busy segments, and for each cause a mask of its idle segments.

    Segments that `gaps` does not search are in no mask.
    """
    begin, end, _, queued, known, syncing = gaps(events, work, start_ns, end_ns)
    layers = [
        *layers_of(work),
        (begin, end),
        (queued[known], end[known]),
        loading(events),
        (begin[syncing], end[syncing]),
        (begin[~known], end[~known]),
    ]
    timeline = sweep(layers)
    busy: Flags = np.logical_or.reduce(timeline.active[:3])
    rest, causes = ~busy & timeline.active[3], {}
    for name, applies in zip(_WAITS[1:], timeline.active[4:]):
        causes[name] = rest & applies
        rest = rest & ~applies
    return timeline, busy, {"launch_wait_ns": rest, **causes}
