"""Device work, the gaps in it, and the calls that launched it, for the findings about devices."""

from __future__ import annotations

from dataclasses import dataclass
from glob import escape

import numpy as np

from instrument.analysis import interruptions
from instrument.analysis.interruptions import kinds_of
from instrument.analysis.steps import gaps
from instrument.analysis.synchronisations import callers
from instrument.analysis.views import Views
from instrument.findings.evidence import evidence_by_name, without_overloads
from instrument.findings.finding import RECORD_DEVICE, Evidence, NotRecorded
from instrument.links.intervals import Intervals, sweep
from instrument.links.step_index import CountedSteps
from instrument.trace.events import Flags, Ints

# Interruptions that have findings of their own, or that show no problem of the program.
_EXPLAINED = (
    interruptions.LOADER,
    interruptions.GARBAGE_COLLECTION,
    interruptions.COMPILATION,
    interruptions.MODULE_LOADING,
    interruptions.ALLOCATION,
    interruptions.PROFILER,
)
#: If the simulated change saves a smaller share of the step, most checks yield no finding.
LEAST_SAVING = 0.01


@dataclass(frozen=True, slots=True)
class LaunchGaps:
    """The gaps in which the devices wait for the CPU to launch something, as parallel columns.

    Attributes:
        start_ns: the start of each gap.
        queued_ns: when the call that launches the next work returned, but at most the end of the
            gap. For a gap after all device work, it is the end of the gap.
        call: the CPU call that launches the next work; -1 for a gap after all device work.
        wait_ns: the time from `start_ns` to `queued_ns` inside the measured steps. The
            interruptions in `_EXPLAINED`, such as waits for data, do not count.
        waiting: the time of `wait_ns` as merged intervals, sorted by start. There is not one
            interval for each gap. The method `only` selects gaps, but does not change `waiting`.
    """

    start_ns: Ints
    queued_ns: Ints
    call: Ints
    wait_ns: Ints
    waiting: Intervals

    def only(self, chosen: Flags) -> LaunchGaps:
        """The gaps that a mask selects."""
        return LaunchGaps(
            self.start_ns[chosen],
            self.queued_ns[chosen],
            self.call[chosen],
            self.wait_ns[chosen],
            self.waiting,
        )


def has_device_work(capture: Views) -> bool:
    """Whether the trace holds work of a device; False if the run used no device.

    Raises:
        NotRecorded: the machine has a device, but the trace holds no work of it.
    """
    if len(capture.work.event):
        return True
    if capture.events.devices or capture.about.devices:
        raise NotRecorded("the trace has no device work", RECORD_DEVICE)
    return False


def launch_gaps(capture: Views) -> LaunchGaps:
    """Find the gaps in which the devices wait for launches; see `LaunchGaps`.

    A gap that begins while the CPU waits for the device is left out, because its cause is that
    wait. A gap is left out too if the launch of the next device event is not in the trace.
    """
    events, time = capture.events, capture.links.counted_steps
    found = gaps(events, capture.work, time.start_ns, time.end_ns)
    waits = found.known & ~found.syncing & (found.queued_ns > found.start_ns)
    start, queued = found.start_ns[waits], found.queued_ns[waits]
    explained = np.isin(kinds_of(events), _EXPLAINED)
    timeline = sweep(
        [
            (start, queued),
            (time.start_ns, time.end_ns),
            (events.start_ns[explained], events.end_ns[explained]),
        ]
    )
    counts = timeline.active[0] & timeline.active[1] & ~timeline.active[2]
    wait_ns = timeline.within(counts, start, queued)
    kept = wait_ns > 0
    call, waiting = found.call[waits][kept], timeline.merged(counts)
    return LaunchGaps(start[kept], queued[kept], call, wait_ns[kept], waiting)


def device_share(capture: Views, time: CountedSteps, events: Ints) -> float:
    """The share of the measured steps' time in which at least one given device event runs."""
    table = capture.events
    return time.covered(table.start_ns[events], table.end_ns[events])


def launched_by(capture: Views, nodes: Ints) -> tuple[Ints, Ints]:
    """The device events that the given calls launched, directly or in calls inside them.

    Args:
        capture: the capture.
        nodes: the calls, as nodes of the call tree.

    Returns:
        The device events, and for each of them the index in `nodes` of the innermost call around
            its launch.
    """
    device, launcher = capture.links.launched
    around = capture.links.call_tree.nearest_of(nodes, launcher)
    inside = around >= 0
    return device[inside], around[inside]


def by_operator(
    capture: Views, calls: Ints, time_ns: Ints, detail: str, most: int = 5
) -> tuple[Evidence, ...]:
    """Make one row of evidence for each operator around the given calls.

    `time_ns` is a time for each call, and `detail` says what this time is. Calls outside all
    operators are grouped by their own names.
    """
    operator, _ = callers(capture.links, calls)
    name = np.where(operator >= 0, operator, capture.events.name[calls])
    return without_overloads(evidence_by_name(capture, name, calls, time_ns, most, detail))


def glob_of(path: str | None) -> str:
    """The pattern that matches only the range of this path; "*" if the path is None."""
    return "*" if path is None else f"/{escape(path)}"
