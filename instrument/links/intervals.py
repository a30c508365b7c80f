"""Overlapping intervals: put together, in groups, and swept in layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.trace.events import Flags, Ints

Intervals = tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Time cut wherever an interval of any layer starts or ends; each group of intervals is a time of its own.

    Segment k is from `start_ns[k]` to `end_ns[k]` in the group `group[k]`; `active[layer, k]` tells whether any
    interval of that layer covers it. Masks of segments combine layers; no rounding anywhere.
    """

    start_ns: Ints
    end_ns: Ints
    group: Ints
    active: NDArray[np.bool_]

    def total_ns(self, where: Flags, groups: int = 1) -> Ints:
        """How long the segments of a mask last, for each group."""
        totals = np.zeros(groups, np.int64)
        np.add.at(totals, self.group[where], (self.end_ns - self.start_ns)[where])
        return totals

    def within(self, where: Flags, start_ns: Ints, end_ns: Ints) -> Ints:
        """How long the segments of a mask last inside each window; of a timeline with one group."""
        if not len(self.start_ns):
            return np.zeros(len(start_ns), np.int64)
        before = np.concatenate([[0], np.cumsum(np.where(where, self.end_ns - self.start_ns, 0))])

        def until(time_ns: Ints) -> Ints:
            at = np.maximum(np.searchsorted(self.start_ns, time_ns, "right") - 1, 0)
            into = np.clip(time_ns, self.start_ns[at], self.end_ns[at]) - self.start_ns[at]
            reached: Ints = before[at] + np.where(where[at], into, 0)
            return reached

        return until(end_ns) - until(start_ns)

    def pieces(self, where: Flags) -> Intervals:
        """The segments of a mask, those that touch put together; of a timeline with one group."""
        lasting = self.end_ns > self.start_ns
        inside = np.concatenate([[False], where[lasting], [False]])
        change = np.flatnonzero(inside[1:] != inside[:-1])
        return self.start_ns[lasting][change[::2]], self.end_ns[lasting][change[1::2] - 1]


def sweep(layers: Sequence[Intervals], groups: Sequence[Ints] | None = None) -> Timeline:
    """The timeline of some layers of intervals, each a pair of starts and ends; `groups` holds each interval's group.

    Within a layer intervals may overlap; one without a duration covers nothing.

    Cost: a sort of all starts and ends, and a pass for each layer; about 0.3 µs an interval.
    """
    sizes = [len(start) for start, _ in layers]
    start, end = (np.concatenate([layer[side] for layer in layers]) for side in (0, 1))
    group = np.concatenate(groups) if groups is not None else np.zeros(len(start), np.int64)
    times, twice = np.concatenate([start, end]), np.concatenate([group, group])
    order = np.lexsort((times, twice))
    times, twice = times[order], twice[order]
    change = np.repeat(np.array([1, -1], np.int32), len(start))[order]
    layer = np.tile(np.repeat(np.arange(len(layers)), sizes), 2)[order]
    active = np.stack(
        [np.cumsum(np.where(layer == k, change, 0))[:-1] > 0 for k in range(len(layers))]
    )
    # From one group's last end to the next one's first start is no segment.
    return Timeline(
        times[:-1], np.where(twice[1:] == twice[:-1], times[1:], times[:-1]), twice[:-1], active
    )


def merged(start_ns: Ints, end_ns: Ints) -> Intervals:
    """The intervals by start, those that touch or overlap put together.

    Cost: a sort, cheap where they are nearly in order; before a sweep it spares two ends for each that lies in another.
    """
    order = np.argsort(start_ns, kind="stable")
    start, until = start_ns[order], np.maximum.accumulate(end_ns[order])
    apart = np.flatnonzero(start[1:] > until[:-1])
    return start[np.append(0, apart + 1)[: len(start)]], until[
        np.append(apart, len(start) - 1)[: len(start)]
    ]
