"""The time of all threads on one axis, and the CPU time between two positions on this axis.

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
from instrument.links.intervals import Intervals, merged, sweep
from instrument.trace.columns import BEYOND_NS
from instrument.trace.events import Codes, Events, Ints

# Each edit has intervals on the axis, and a factor that multiplies the CPU time in them. The
# intervals of one edit are sorted and do not overlap. Where two edits overlap, both factors apply.
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

    def spent(self, at: Ints, edits: Edits = (), inside: Intervals | None = None) -> Ints:
        """For each position: the CPU time that its thread has used until then.

        Edits are applied. Waits do not count.

        Args:
            at: positions on the axis.
            edits: the edits. Where several edits overlap, their factors are multiplied.
            inside: intervals on the axis. If they are given, only CPU time inside them counts.

        Cost: a sort of all intervals, and a binary search for each position.
        """
        threads = np.arange(int(at.max(initial=0)) // self.span_ns + 1, dtype=np.int64)
        axis = (np.zeros(1, np.int64), (threads[-1:] + 1) * self.span_ns)
        layers = [axis, self.waits, *(intervals for intervals, _ in edits)]
        pieces = sweep(layers if inside is None else [*layers, inside])
        rate = np.where(pieces.active[1], 0.0, 1.0)
        for layer, (_, factor) in zip(pieces.active[2:], edits):
            rate *= np.where(layer, factor, 1.0)
        if inside is not None:
            rate *= pieces.active[-1]
        until_piece = np.cumsum(rate * (pieces.end_ns - pieces.start_ns))

        def until(position: Ints) -> NDArray[np.float64]:
            k = np.searchsorted(pieces.start_ns, position, "right") - 1
            found: NDArray[np.float64] = until_piece[k] - rate[k] * (pieces.end_ns[k] - position)
            return found

        # There are few threads, so the start of each thread is computed once.
        begins = until(threads * self.span_ns)
        return np.rint(until(at) - begins[at // self.span_ns]).astype(np.int64)


def axis_of(events: Events) -> tuple[int, int]:
    """The time at which each thread's part of the axis starts, and its length, in nanoseconds.

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


def joined(start: Ints, end: Ints) -> Intervals:
    """Merge intervals, and leave out those without a duration; see `merged`."""
    lasting = end > start
    return merged(start[lasting], end[lasting])
