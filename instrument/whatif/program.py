"""`Program`: moments in order, each the latest of what it waits for, and the pass over them.

A moment is a point in time whose position follows from earlier moments: each arc says that the
moment happens at least so long after another one. This is the longest-path problem on a graph
without cycles, also known as a max-plus program. The measured order of the moments is an order in
which all sources come first, so one pass in this order computes all times.

Each instruction has exactly two arcs, so that the pass is one short loop. A moment with one arc uses
it twice. A moment with more arcs becomes several instructions, of which the last one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.trace.events import Flags, Ints

Floats = NDArray[np.float64]
# The weight of an arc that does not bind; sums with it stay far from the limit of 64 bits.
NEVER = -(2**60)


@dataclass(frozen=True, slots=True)
class Path:
    """The longest path to a moment: its arcs, and when each of them begins and ends."""

    arc: Ints
    begin_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions, in an order in which each comes after its sources.

    Instruction 0 is the origin; its time is 0.

    Attributes:
        source: the instructions that the two arcs of each instruction start from; shape (2, n).
        arc: the arc of each side, as an index into the arcs that the program was built from; -1 for
            none, which has the weight `constant`. Shape (2, n).
        result: for each moment, its last instruction.
        moment_order: the moments in the order of the instructions.
    """

    source: Ints
    arc: Ints
    result: Ints
    moment_order: Ints

    def weights(self, of_arcs: NDArray[Any]) -> NDArray[Any]:
        """The weights of both sides of each instruction, from the weights of the arcs.

        `of_arcs` has one row for each arc, and a column for each scenario if it has two dimensions.
        """
        shape = (1, *of_arcs.shape[1:])
        padded = np.concatenate([of_arcs, np.zeros(shape, of_arcs.dtype)])
        found: NDArray[Any] = padded[self.arc]
        return found

    def run(self, of_arcs: Ints) -> Ints:
        """The time of each moment, from the weights of the arcs in nanoseconds.

        Cost: about 0.15 µs for each instruction.
        """
        times = self._times(of_arcs)
        return times[self.result]

    def _times(self, of_arcs: Ints) -> Ints:
        first, second = self.weights(of_arcs)[:, 1:].tolist()
        one, other = self.source[:, 1:].tolist()
        times = [0]
        append = times.append
        for a, wa, b, wb in zip(one, first, other, second):
            x = times[a] + wa
            y = times[b] + wb
            append(x if x > y else y)
        return np.array(times, np.int64)

    def run_many(self, of_arcs: Floats) -> Floats:
        """The time of each moment in several scenarios; `of_arcs` has a column for each scenario.

        Cost: about 2 µs for each instruction, and 10 ns for each instruction and scenario.
        """
        first, second = self.weights(of_arcs)
        times = np.zeros_like(first)
        one, other = self.source.tolist()
        maximum = np.maximum
        for k in range(1, len(first)):
            first[k] += times[one[k]]
            second[k] += times[other[k]]
            maximum(first[k], second[k], out=times[k])
        found: Floats = times[self.result]
        return found

    def critical(self, of_arcs: Ints, moment: int) -> Path:
        """The arcs that decide when a moment happens.

        If both sides are equal, the first one counts. An arc from the origin that decides because
        something arrives from outside is on the path, and the path goes on through the other side.
        """
        times = self._times(of_arcs)
        weights = self.weights(of_arcs)
        arcs, begins, ends, at = [], [], [], int(self.result[moment])
        while at > 0:
            reached = times[self.source[:, at]] + weights[:, at]
            side = 0 if reached[0] >= reached[1] else 1
            source = int(self.source[side, at])
            if source == 0 and self.source[1 - side, at] > 0:
                source = int(self.source[1 - side, at])
            if self.arc[side, at] >= 0:
                arcs.append(int(self.arc[side, at]))
                begins.append(int(times[source]))
                ends.append(int(times[at]))
            at = source
        found = (np.array(each[::-1], np.int64) for each in (arcs, begins, ends))
        return Path(*found)

    def slack(self, of_arcs: Ints, ends: Ints) -> Ints:
        """How much later each moment could happen without delaying any of the moments `ends`.

        A moment that delays none of them, however late it is, has a slack of 2**60 or more.
        """
        times = self._times(of_arcs)
        weights = self.weights(of_arcs).tolist()
        one, other = self.source.tolist()
        latest = [-NEVER] * len(times)
        for at, time in zip(self.result[ends].tolist(), times[self.result[ends]].tolist()):
            latest[at] = min(latest[at], time)
        for k in range(len(latest) - 1, 0, -1):
            by_first, by_second = latest[k] - weights[0][k], latest[k] - weights[1][k]
            if by_first < latest[one[k]]:
                latest[one[k]] = by_first
            if by_second < latest[other[k]]:
                latest[other[k]] = by_second
        found: Ints = (np.array(latest, np.int64) - times)[self.result]
        return found


def build(order: Ints, target: Ints, source: Ints) -> tuple[Program, Flags]:
    """Build a program of moments and arcs.

    Args:
        order: the moments in the order of the instructions.
        target: the moment at which each arc ends.
        source: the moment at which each arc starts; -1 for the origin.

    Returns:
        The program; and a mask of the arcs that it has. An arc whose source comes after its target
            is left out: the trace's clocks contradict it.
    """
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    of_source = np.where(source >= 0, np.append(rank, -1)[source], -1)
    kept = of_source < rank[target]
    arcs = np.flatnonzero(kept)
    arcs = arcs[np.argsort(rank[target[arcs]], kind="stable")]
    arriving = rank[target[arcs]]
    counts = np.bincount(arriving, minlength=len(order))
    # The origin, then max(arcs - 1, 1) instructions for each moment.
    instructions = np.maximum(counts - 1, 1)
    last = np.cumsum(instructions)
    begin = last - instructions + 1
    length = int(last[-1]) + 1 if len(last) else 1
    nth = np.arange(len(arcs)) - (np.cumsum(counts) - counts)[arriving]
    of_instruction = begin[arriving] + np.maximum(nth - 1, 0)
    side = np.where(nth == 0, 0, 1)
    from_instruction = np.where(of_source >= 0, np.append(last, 0)[of_source], 0)[arcs]
    found_source = np.zeros((2, length), np.int64)
    found_arc = np.full((2, length), -1)
    found_source[side, of_instruction] = from_instruction
    found_arc[side, of_instruction] = arcs
    # The first side of a further instruction is the instruction before it.
    further = np.ones(length, np.bool_)
    further[begin], further[0] = False, False
    found_source[0, further] = np.flatnonzero(further) - 1
    single = begin[counts == 1]
    found_source[1, single], found_arc[1, single] = found_source[0, single], found_arc[0, single]
    result = last[rank]
    return Program(found_source, found_arc, result, order), kept
