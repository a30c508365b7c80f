"""The time of all threads on one axis, and the CPU time between positions on this axis.

Each thread has its own part of the axis. Waits do not count as CPU time. An edit multiplies the CPU
time in some intervals by a factor. For example, a range that is twice as fast has the factor 0.5 on
its intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.errors import CaptureError
from instrument.links.intervals import Intervals, merged
from instrument.trace.columns import BEYOND_NS
from instrument.trace.events import Codes, Events, Flags, Ints

# Intervals on the axis and the factor that multiplies the time in them. The intervals of an edit are
# sorted and do not overlap. Where edits overlap, all their factors apply.
Edits = Sequence[tuple[Intervals, float]]


@dataclass(frozen=True, slots=True)
class CpuTime:
    """The axis of a trace.

    Attributes:
        begin_ns: the time of the trace at which each thread's part of the axis starts.
        span_ns: the length of each thread's part.
        waits: intervals on the axis in which a thread only waits.
    """

    begin_ns: int
    span_ns: int
    waits: Intervals

    def place(self, thread: Codes | Ints, time_ns: Ints) -> Ints:
        """Convert a thread and a time of the trace to a position on the axis."""
        found: Ints = thread.astype(np.int64) * self.span_ns + (time_ns - self.begin_ns)
        return found

    def recorded(self, at: Ints) -> Ints:
        """The time without waits from the start of the axis until each position."""
        return at - _covered(self.waits, at)

    def spent(self, at: Ints, recorded: Ints, edits: Edits = ()) -> Ints:
        """The CPU time of each position's thread until this position, after edits, without waits.

        Args:
            at: positions on the axis.
            recorded: the result of `recorded` for `at`, which the caller can reuse.
            edits: the edits, in order.
        """
        # There are few threads, so the start of every thread is computed once.
        begins = np.arange(int(at.max(initial=0)) // self.span_ns + 1) * self.span_ns
        thread, first = at // self.span_ns, self.recorded(begins)
        found = recorded - first[thread]
        if edits:
            places, times = np.concatenate([at, begins]), np.concatenate([recorded, first])
            change, of_begins = np.split(self._change(places, times, edits), [len(at)])
            found += np.rint(change - of_begins[thread]).astype(np.int64)
        return found

    def inside(self, intervals: Intervals, at: Ints, recorded: Ints, edits: Edits = ()) -> Ints:
        """The part of `spent` that lies in some intervals."""
        if not len(intervals[0]):
            return np.zeros(len(at), np.int64)
        left = self.spent(at, recorded, [*edits, (intervals, 0.0)])
        return self.spent(at, recorded, edits) - left

    def _change(self, at: Ints, recorded: Ints, edits: Edits) -> NDArray[np.float64]:
        """How much the edits change the results of `recorded`, in nanoseconds.

        Each edit multiplies the time after the edits before it.
        """
        if not edits:
            return np.zeros(len(at))
        (starts, ends), factor = edits[-1]
        if not len(starts):
            return self._change(at, recorded, edits[:-1])
        first, last = self.recorded(starts), self.recorded(ends)
        places, times = np.concatenate([at, starts, ends]), np.concatenate([recorded, first, last])
        change, of_first, of_last = np.split(
            self._change(places, times, edits[:-1]), [len(at), len(at) + len(starts)]
        )
        sums = np.concatenate([[0.0], np.cumsum((last - first) + (of_last - of_first))])
        begun = np.searchsorted(starts, at, "right")
        # A position can lie inside the last interval that has begun.
        k = begun - 1
        left = np.where(at < ends[k], (last[k] - recorded) + (of_last[k] - change), 0.0)
        found: NDArray[np.float64] = change + (factor - 1) * np.where(k >= 0, sums[begun] - left, 0)
        return found


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
    """How much of each span lies in `intervals`, which are sorted and do not overlap."""
    return _covered(intervals, end) - _covered(intervals, start)


def _covered(intervals: Intervals, at: Ints) -> Ints:
    """How much of the time from 0 to each position lies in `intervals`."""
    starts, ends = intervals
    if not len(starts):
        return np.zeros(len(at), np.int64)
    sums = np.concatenate([[0], np.cumsum(ends - starts)])
    begun = np.searchsorted(starts, at, "right")
    found: Ints = sums[begun] - np.maximum(ends[begun - 1] - at, 0) * (begun > 0)
    return found


def joined(start: Ints, end: Ints, chosen: Flags | None = None) -> Intervals:
    """Intervals sorted and merged; those without a duration are left out."""
    keep = end > start if chosen is None else chosen & (end > start)
    return merged(start[keep], end[keep])
