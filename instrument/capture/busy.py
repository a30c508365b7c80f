"""How long at least one of many intervals lasted."""

from __future__ import annotations

import numpy as np

from instrument.capture.events import Ints


def covered_ns(group: Ints, interval: Ints, start_ns: Ints, end_ns: Ints, count: int) -> Ints:
    """For each of `count` groups the length of the union of its intervals; pairs of a group and an interval's position.

    Each group gets a stretch of its own on one axis, of ranks, as times themselves could run out of 64 bits there.
    """
    times, rank = np.unique(np.concatenate([start_ns, end_ns]), return_inverse=True)
    first, last = (group * len(times) + part[interval] for part in np.split(rank.reshape(-1), 2))
    order = np.argsort(first)
    first, last = first[order], np.maximum.accumulate(last[order])
    fresh = np.maximum(first, np.concatenate([first[:1], last[:-1]]))
    total = np.zeros(count, np.int64)
    np.add.at(total, group[order], times[last % len(times)] - times[fresh % len(times)])
    return total


def idle_ns(start_ns: Ints, end_ns: Ints, busy_start_ns: Ints, busy_end_ns: Ints) -> Ints:
    """For each interval the part of it that lies in none of the busy ones, of which there is at least one."""
    order = np.argsort(busy_start_ns)
    end = np.maximum.accumulate(busy_end_ns[order])
    start = np.maximum(busy_start_ns[order], np.concatenate([busy_start_ns[order][:1], end[:-1]]))
    summed = np.concatenate([[0], np.cumsum(end - start)])

    def busy_until(time_ns: Ints) -> Ints:
        begun = np.searchsorted(start, time_ns, "right")
        return summed[begun] - np.where(begun > 0, np.maximum(end[begun - 1] - time_ns, 0), 0)

    idle: Ints = end_ns - start_ns - (busy_until(end_ns) - busy_until(start_ns))
    return idle
