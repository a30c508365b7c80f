"""When no device works, and why: the time of devices by kind of work and cause of waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from instrument.read.facts.device_work import COPY, Work, launched_ns, layers_of, masks
from instrument.read.facts.intervals import Intervals, Timeline, concatenated, sweep
from instrument.read.facts.links import Links
from instrument.read.facts.step_index import CountedSteps, step_at
from instrument.read.facts.traced import Traced
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    Events,
    Flags,
    Ints,
    is_loader,
    is_runtime,
    is_synchronising,
)

# The other parts of the devices' time.
_PARTS = (
    "compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns", "total_ns",
    "communication_ns", "copy_ns", "overlap_ns",
)  # fmt: skip
#: A free stream starts its work 5 to 50 µs after the launch. A longer delay has another cause.
LONGEST_DELAY_NS = 1_000_000
#: The causes of idle time of the devices; docs/show.md defines them.
WAITS = ("launch_wait_ns", "gap_wait_ns", "loader_wait_ns", "sync_wait_ns", "unknown_wait_ns")


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


def device_time_of(events: Events, work: Work, start_ns: Ints, end_ns: Ints) -> dict[str, Ints]:
    """Return the time of the devices in each span, by kind of work and cause of waiting.

    docs/show.md defines the causes (`WAITS`); they sum to `idle_ns`. Limits: with several streams,
    the causes do not show which stream waited. The clocks of CPU and device may differ by
    microseconds, which is not corrected.
    """
    timeline, busy, causes = _timeline(events, work, start_ns, end_ns)
    found = {name: timeline.within(at, start_ns, end_ns) for name, at in causes.items()}
    idle_ns = end_ns - start_ns - timeline.within(busy, start_ns, end_ns)
    found["launch_wait_ns"] = idle_ns - sum(found[name] for name in WAITS[1:])
    for name, where in masks(timeline.active).items():
        found[name] = timeline.within(where, start_ns, end_ns)
    return found | {"idle_ns": idle_ns, "total_ns": end_ns - start_ns}


def lasting_steps(links: Links, work: Work) -> CountedSteps:
    """The finished steps, each until the device has ended what it launched; else the recording.

    So, as in the simulation, a step begins where the CPU and the device have ended the step before.
    A recording without steps begins with `late_work`, if there is some.
    """
    steps = links.finished_steps
    if steps.what == "recording":
        return replace(
            steps, start_ns=np.append(work.start_ns[late_work(links, work)], steps.start_ns)[:1]
        )
    step = launching_step(links.events, work, links.steps)
    start_ns, end_ns = lasting(steps.start_ns, steps.end_ns, work, step)
    return replace(steps, start_ns=start_ns, end_ns=end_ns)


def late_work(links: Links, work: Work) -> Ints:
    """The row of the first device work of a recording without steps, if it begins late; else none.

    Before it, the device may have run what was launched before the recording.
    """
    first = work.by_start[:1]
    call = work.call[first]
    is_late = work.start_ns[first] - links.events.end_ns[call] > LONGEST_DELAY_NS
    return first[(call >= 0) & is_late] if not len(links.steps) else first[:0]


def lasting(start_ns: Ints, end_ns: Ints, work: Work, step: Ints) -> Intervals:
    """The spans, each from the end of the one before until the device has ended its work.

    `step` is the span that launched each device event; -1 for none.
    """
    end_ns = end_ns.copy()
    np.maximum.at(end_ns, step[step >= 0], work.end_ns[step >= 0])
    end_ns = np.maximum.accumulate(end_ns)
    return np.maximum(start_ns, np.append(start_ns[:1], end_ns[:-1])), end_ns


def device_steps(links: Links, work: Work) -> CountedSteps:
    """As `lasting_steps`; without finished steps, from the first device work to the last."""
    steps = lasting_steps(links, work)
    if steps.what == "step":
        return steps
    first_ns, last_ns = work.start_ns.min(keepdims=True), work.end_ns.max(keepdims=True)
    return replace(steps, start_ns=first_ns, end_ns=last_ns)


def device_spans(links: Links, work: Work) -> Intervals:
    """The counted ones of `device_steps`."""
    steps = device_steps(links, work).only(links.counted_steps.kept)
    return steps.start_ns, steps.end_ns


def device_time(capture: Traced) -> dict[str, int]:
    """Return the sums of `device_time_of` over `device_spans`; all are 0 without device work.

    Computed once for a capture.
    """

    def compute() -> dict[str, int]:
        links, work = capture.links, capture.work
        if not len(work.event):
            return dict.fromkeys((*_PARTS, *WAITS), 0)
        found = device_time_of(links.events, work, *device_spans(links, work))
        return {name: int(ns.sum()) for name, ns in found.items()}

    return capture.once("device-time", compute)


def device_stretches(
    events: Events, work: Work, start_ns: Ints, end_ns: Ints
) -> dict[str, Intervals]:
    """Return when compute and communication overlap, and when no device is busy, by cause.

    The spans are sorted by start; the intervals may go beyond them.
    """
    timeline, _, causes = _timeline(events, work, start_ns, end_ns)
    overlap = timeline.merged(masks(timeline.active)["overlap_ns"])
    return {"overlap_ns": overlap, **{name: timeline.merged(causes[name]) for name in WAITS}}


def idle_stretches(events: Events, work: Work, start_ns: int, end_ns: int) -> dict[str, Intervals]:
    """Return the intervals in which no device is busy, by the causes of `WAITS`."""
    found = {}
    every = device_stretches(events, work, np.array([start_ns]), np.array([end_ns]))
    for name in WAITS:
        start, end = (np.clip(side, start_ns, end_ns) for side in every[name])
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
    for name, applies in zip(WAITS[1:], timeline.active[4:]):
        causes[name] = rest & applies
        rest = rest & ~applies
    return timeline, busy, {"launch_wait_ns": rest, **causes}
