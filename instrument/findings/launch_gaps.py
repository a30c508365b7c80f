"""The gaps in which the devices wait for the CPU to launch something."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.analysis import interruptions
from instrument.analysis.interruptions import kinds_of
from instrument.analysis.steps import gaps
from instrument.analysis.views import Views
from instrument.links.intervals import Intervals, sweep
from instrument.trace.events import Flags, Ints

#: A gap of this length or more is `device-idle`, a shorter one is `launch-bound`.
LONG_NS = 1_000_000
# Interruptions that have findings of their own, or that show no problem of the program.
_EXPLAINED = (
    interruptions.LOADER,
    interruptions.GARBAGE_COLLECTION,
    interruptions.COMPILATION,
    interruptions.MODULE_LOADING,
    interruptions.ALLOCATION,
    interruptions.PROFILER,
)


@dataclass(frozen=True, slots=True)
class LaunchGaps:
    """Gaps in the work of the devices, as parallel columns.

    Attributes:
        start_ns: the start of each gap.
        queued_ns: when the call that launches the next work returned, but at most the end of the
            gap. For a gap after all device work, it is the end of the gap.
        call: the CPU call that launches the next work; -1 for a gap after all device work.
        wait_ns: the time from `start_ns` to `queued_ns` inside the counted steps. The
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
