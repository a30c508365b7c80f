"""The time that threads spend, as one long axis on which waits have no length.

Each thread has its own part of the axis. A factor on an interval stretches or shrinks the time in
it, so that a faster range is a factor on its intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.errors import CaptureError
from instrument.links.intervals import Intervals, merged, sweep
from instrument.trace.columns import BEYOND_NS
from instrument.trace.events import Codes, Events, Flags, Ints


@dataclass(frozen=True, slots=True)
class CpuTime:
    """The axis of a trace.

    Attributes:
        begin_ns: the start of each thread's part, on the clock of the trace.
        span_ns: the length of each thread's part.
        waits: intervals on the axis in which a thread only waits.
    """

    begin_ns: int
    span_ns: int
    waits: Intervals

    def place(self, thread: Codes | Ints, time_ns: Ints) -> Ints:
        """The position on the axis of points in time on threads."""
        found: Ints = thread.astype(np.int64) * self.span_ns + (time_ns - self.begin_ns)
        return found

    def spent(self, at: Ints) -> Ints:
        """The time that each position's thread has spent until then, without waits."""
        begins = at // self.span_ns * self.span_ns
        return at - begins - within(self.waits, begins, at)

    def changed(self, at: Ints, edits: Sequence[tuple[Intervals, float]]) -> Ints:
        """How much edits change `spent` at each position.

        Args:
            at: positions on the axis.
            edits: intervals on the axis and the factor that multiplies the time in them. Where
                edits overlap, all their factors apply.
        """
        if not edits:
            return np.zeros(len(at), np.int64)
        timeline = sweep([self.waits, *(intervals for intervals, _ in edits)])
        change = np.ones(len(timeline.start_ns))
        for active, (_, factor) in zip(timeline.active[1:], edits):
            change[active] *= factor
        # Segments that no edit covers change nothing, and neither do waits.
        change = np.where(timeline.active[0], 0.0, change - 1.0)
        starts, ends = np.append(timeline.start_ns, 0), np.append(timeline.end_ns, 0)
        sums = np.concatenate([[0.0], np.cumsum(change * (ends - starts)[:-1])])
        change = np.append(change, 0.0)

        def until(place: Ints) -> NDArray[np.float64]:
            k = np.searchsorted(timeline.start_ns, place, "right") - 1
            inside = np.where(k >= 0, np.minimum(place, ends[k]) - starts[k], 0)
            found: NDArray[np.float64] = sums[np.maximum(k, 0)] + change[k] * inside
            return found

        # Few threads have many positions.
        thread = at // self.span_ns
        first = until(np.arange(int(thread.max(initial=0)) + 1) * self.span_ns)
        return np.rint(until(at) - first[thread]).astype(np.int64)

    def inside(
        self, intervals: Intervals, at: Ints, edits: Sequence[tuple[Intervals, float]] = ()
    ) -> Ints:
        """The time without waits that each position's thread has spent in some intervals.

        Args:
            intervals: intervals on the axis.
            at: positions on the axis.
            edits: as in `changed`; the time is that after the edits.
        """
        if not len(intervals[0]):
            return np.zeros(len(at), np.int64)
        return self.changed(at, edits) - self.changed(at, [*edits, (intervals, 0.0)])


def axis_of(events: Events) -> tuple[int, int]:
    """The start and the length of each thread's part of the axis.

    Raises:
        CaptureError: the trace is so long that the axis of all its threads exceeds 64 bits.
    """
    begin_ns = events.begin_ns
    span_ns = int(events.end_ns.max(initial=begin_ns)) - begin_ns + 1
    if span_ns * (len(events.threads) + 1) >= BEYOND_NS:
        raise CaptureError(
            f"The trace spans {span_ns} ns on {len(events.threads)} threads, which is too long to "
            "simulate: record a shorter window."
        )
    return begin_ns, span_ns


def within(intervals: Intervals, start: Ints, end: Ints) -> Ints:
    """How much of each span lies in intervals, which are sorted and do not overlap."""
    starts, ends = intervals
    sums = np.concatenate([[0], np.cumsum(ends - starts)])

    def until(place: Ints) -> Ints:
        k = np.searchsorted(starts, place, "right") - 1
        inside = np.minimum(place, np.append(ends, 0)[k]) - np.append(starts, 0)[k]
        return np.where(k >= 0, sums[np.maximum(k, 0)] + inside, 0)

    return until(end) - until(start)


def joined(start: Ints, end: Ints, chosen: Flags | None = None) -> Intervals:
    """Intervals sorted and merged; those without a duration are left out."""
    keep = end > start if chosen is None else chosen & (end > start)
    return merged(start[keep], end[keep])
