"""`Program`: moments in order, and the computation of when each moment happens.

Each arc has a weight in ns: its target happens at least this time after its source, and a moment as
soon as all arcs to it allow. So the times are the longest paths in a graph without cycles. One pass
over the arcs, in the order of their targets, computes them (a max-plus program).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.read.facts import loops
from instrument.read.trace.events import Flags, Ints

Floats = NDArray[np.float64]
# The weight of an arc without effect. Sums with this weight stay far from the limit of 64 bits.
NEVER = -(2**60)


class Path(NamedTuple):
    """The arcs of a critical path in order of time, and when each begins and ends."""

    arc: Ints
    begin_ns: Ints
    end_ns: Ints


class _Arcs(NamedTuple):
    """Arcs in the order in which they are visited; `number` is the index of each in `Program`."""

    target: NDArray[np.int32]
    source: NDArray[np.int32]
    number: NDArray[np.int32]


@dataclass(frozen=True)
class Program:
    """The simulated graph of moments and arcs.

    Attributes:
        moment_order: the moments, each after the sources of the `kept` arcs that lead to it.
        target, source: the moments at which each arc ends and starts. A source of -1 is the origin,
            whose time is 0: the start of the trace.
        kept: a mask of the arcs that the program uses; see `in_order`.
    """

    moment_order: Ints
    target: Ints
    source: Ints
    kept: Flags

    def run(self, of_arcs: Ints) -> Ints:
        """The simulated time of each moment in ns; `of_arcs` holds the weight of each arc in ns.

        Cost: about 5 ns for each arc with the C extension, and 0.2 µs without it.
        """
        found: Ints = self.run_shares(of_arcs, np.zeros_like(of_arcs), np.zeros(1))[0]
        return found

    def run_shares(self, of_arcs: Ints, change: Ints, shares: Floats) -> Ints:
        """The simulated time of each moment, in a row for each share.

        The weights are `of_arcs` plus the share of `change`, cut to whole nanoseconds.

        Cost: the first share costs as much as `run`, each further one about 2 ns for each arc;
        without the C extension, as much as `run`.
        """
        arcs, earliest = self._ordered, self._earliest
        if loops.compiled is not None:
            columns = (*arcs, of_arcs, change, shares, earliest)
            found = loops.compiled.longest_paths(*map(np.ascontiguousarray, columns))
            return np.frombuffer(found, np.int64).reshape(len(earliest), len(shares)).T
        rows, (targets, sources) = [], (each.tolist() for each in arcs[:2])
        for share in shares.tolist():
            weights = (of_arcs + (share * change).astype(np.int64))[arcs.number]
            times = [*earliest.tolist(), 0]  # the last one is the origin
            for target, source, weight in zip(targets, sources, weights.tolist()):
                reached = times[source] + weight
                if reached > times[target]:
                    times[target] = reached
            rows.append(times[:-1])
        return np.array(rows, np.int64)

    @cached_property
    def _earliest(self) -> Ints:
        """The start value of each moment's time: 0, or far below 0 if an arc leads to it."""
        found = np.zeros(len(self.moment_order), np.int64)
        found[self._ordered.target] = 2 * NEVER
        return found

    @cached_property
    def _ordered(self) -> _Arcs:
        rank = np.empty(len(self.moment_order), np.int64)
        rank[self.moment_order] = np.arange(len(rank))
        arcs = np.flatnonzero(self.kept)
        arcs = arcs[np.argsort(rank[self.target[arcs]], kind="stable")]
        columns = (self.target[arcs], self.source[arcs], arcs)
        return _Arcs(*(each.astype(np.int32) for each in columns))

    def critical(self, of_arcs: Ints, times: Ints, moment: int) -> Path:
        """The arcs that decide when a moment happens; `times` is the result of `run(of_arcs)`.

        Of all arcs to a moment, the first of those that end last decides; the path goes on at its
        source. If this is an arc from the origin, such as the arrival of a batch from another
        process, the path goes on at the source of the latest arc that has one. So the path has no
        holes, but an arc from the origin can begin later here than in the graph.
        """
        arcs = self._ordered
        reached = np.append(times, 0)[arcs.source] + of_arcs[arcs.number]
        deciding = _latest(arcs.target, reached, len(times))
        reached[arcs.source < 0] = np.iinfo(np.int64).min
        going_on = _latest(arcs.target, reached, len(times))
        found, begins, ends, at = [], [], [], moment
        while at >= 0 and deciding[at] >= 0:
            source = int(arcs.source[going_on[at]])
            found.append(int(arcs.number[deciding[at]]))
            begins.append(int(times[source]) if source >= 0 else 0)
            ends.append(int(times[at]))
            at = source
        return Path(*(np.array(each[::-1], np.int64) for each in (found, begins, ends)))


def _latest(target: NDArray[np.int32], reached: Ints, moments: int) -> Ints:
    """For each moment, the first of the arcs to it that end last; -1 if no arc leads to it.

    `reached` holds the time at which each arc ends. Equal values in `target` must be adjacent.
    """
    found = np.full(moments, -1)
    begin = np.flatnonzero(np.diff(target, prepend=-1))
    if len(begin):
        lasts = np.maximum.reduceat(reached, begin)
        counts = np.diff(np.append(begin, len(target)))
        is_last = np.flatnonzero(reached == np.repeat(lasts, counts))
        found[target[is_last[::-1]]] = is_last[::-1]
    return found


def in_order(order: Ints, target: Ints, source: Ints) -> Flags:
    """A mask of the arcs whose source comes before their target in `order`.

    All others contradict the clocks of the trace, so the simulation does not use them.
    """
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    found: Flags = np.where(source >= 0, np.append(rank, -1)[source], -1) < rank[target]
    return found
