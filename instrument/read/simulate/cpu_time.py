"""The time of all threads on one axis, and the CPU time between two positions on this axis.

Each thread has its own part of the axis, as long as the trace, so one number stands for a thread
and a time. Waits are no CPU time. An edit multiplies the CPU time in some intervals by a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.base.errors import CaptureError
from instrument.read.facts.intervals import Intervals, Timeline, begun_by, merged, overlap, sweep
from instrument.read.trace.columns import BEYOND_NS
from instrument.read.trace.events import Codes, Events, Ints

# For each edit, sorted intervals on the axis, and a factor for the CPU time in them. Where two
# edits overlap, both factors apply.
Edits = Sequence[tuple[Intervals, float]]


@dataclass(frozen=True, slots=True)
class CpuTime:
    """The axis that joins the times of all threads, one thread after another.

    Each part starts at `begin_ns` of the trace and is `span_ns` long. `waits` are the intervals
    on the axis in which a thread only waits.
    """

    begin_ns: int
    span_ns: int
    waits: Intervals

    def place(self, thread: Codes | Ints, time_ns: Ints) -> Ints:
        """Convert a thread and a time of the trace to a position on the axis."""
        found: Ints = thread.astype(np.int64) * self.span_ns + (time_ns - self.begin_ns)
        return found

    def spent(self, at: Ints, edits: Edits = (), inside: Intervals | None = None) -> Ints:
        """For each position, the edited CPU time that its thread has used before this position.

        If `inside` is given, only CPU time in these intervals counts.

        Cost: sorts all intervals, then does a binary search for each position.
        """
        threads = np.arange(int(at.max(initial=0)) // self.span_ns + 1, dtype=np.int64)
        pieces, rate = self._rates(int(threads[-1]) + 1, edits, inside)
        until_piece = np.cumsum(rate * (pieces.end_ns - pieces.start_ns))

        def until(position: Ints) -> NDArray[np.float64]:
            k = begun_by(pieces.start_ns, position) - 1
            found: NDArray[np.float64] = until_piece[k] - rate[k] * (pieces.end_ns[k] - position)
            return found

        # Positions are many and threads are few, so the start of each thread is computed once.
        begins = until(threads * self.span_ns)
        return np.rint(until(at) - begins[at // self.span_ns]).astype(np.int64)

    def spent_within(self, start_ns: Ints, end_ns: Ints, edits: Edits, inside: Intervals) -> int:
        """The edited CPU time of all threads in the intervals `inside` and within spans of time.

        The spans, such as steps, count from the start of the trace; where two overlap, the time
        counts twice.
        """
        threads = int(inside[1].max(initial=0)) // self.span_ns + 1
        pieces, rate = self._rates(threads, edits, inside)
        counts = np.flatnonzero(rate)  # such a piece lies on one thread, as `inside` does
        begin = pieces.start_ns[counts] % self.span_ns
        end = begin + pieces.end_ns[counts] - pieces.start_ns[counts]
        lasts = overlap(start_ns, end_ns, end) - overlap(start_ns, end_ns, begin)
        return int(np.rint(np.sum(rate[counts] * lasts)))

    def _rates(
        self, threads: int, edits: Edits, inside: Intervals | None
    ) -> tuple[Timeline, NDArray[np.float64]]:
        """Cut the axis of the first threads into pieces, each with one rate of edited CPU time."""
        axis = (np.zeros(1, np.int64), np.array([threads * self.span_ns]))
        layers = [axis, self.waits, *(intervals for intervals, _ in edits)]
        pieces = sweep(layers if inside is None else [*layers, inside])
        rate = np.where(pieces.active[1], 0.0, 1.0)
        for layer, (_, factor) in zip(pieces.active[2:], edits):
            rate *= np.where(layer, factor, 1.0)
        if inside is not None:
            rate *= pieces.active[-1]
        return pieces, rate


def axis_of(events: Events) -> CpuTime:
    """The axis of a trace, without waits.

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
    none = np.zeros(0, np.int64)
    return CpuTime(begin_ns, span_ns, (none, none))


def joined(start: Ints, end: Ints) -> Intervals:
    """Merge intervals, and leave out those without a duration; see `merged`."""
    lasting = end > start
    return merged(start[lasting], end[lasting])
