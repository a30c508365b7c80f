"""`Program`: moments in order, and the computation of when each moment happens.

Each arc says that its target happens at least a given time, the weight of the arc, after its
source. A moment happens as soon as all its arcs allow. To compute these times is the longest-path
problem on a graph without cycles, also known as a max-plus program.

Most moments follow the moment before them on their thread or stream. Such moments form a chain.
Without other arcs, each moment of a chain would happen at a fixed time after the first moment of
the chain. This time is the moment's offset. Each other arc demands that the chain is late by some
time, and the chain never gets less late. So the lateness at a moment is the largest demand of all
arcs up to this moment. numpy computes this running maximum for a whole segment of a chain. A
segment ends before the first arc whose source lies in a segment that is not computed yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.trace.events import Flags, Ints

Floats = NDArray[np.float64]
# The weight of an arc without effect. Sums with this weight stay far from the limit of 64 bits.
NEVER = -(2**60)
# Below this many arcs for each segment on average, numpy costs more than plain Python.
_SHORT = 60


@dataclass(frozen=True, slots=True)
class Path:
    """The longest path to a moment: its arcs, and when each of them begins and ends."""

    arc: Ints
    begin_ns: Ints
    end_ns: Ints


@dataclass(frozen=True, slots=True)
class Times:
    """The times of the moments; `times[moments]` are those of some moments.

    There are very many times, and the caller needs only few. So a time is computed when it is read.
    For several scenarios (see `Program.run_many`), the result has a row for each scenario.
    """

    chains: _Chains
    own: Ints
    offsets: tuple[Ints, ...]
    shares: Floats
    late: NDArray[Any]

    def __getitem__(self, moments: Ints) -> NDArray[Any]:
        at = self.chains.place[moments]
        offset = _with_shares(self.own[at], [each[at] for each in self.offsets], self.shares)
        found: NDArray[Any] = self.late[..., self.chains.decided[at]] + offset
        return found


def _with_shares(own: Ints, changes: Sequence[Ints], shares: Floats) -> NDArray[Any]:
    """`own` plus a share of a change: a row for each pair of a change and a share.

    Without changes, the result is `own`.
    """
    if not changes:
        return own
    found: Floats = own + shares[:, None] * np.stack(changes)[:, None]
    return found.reshape(-1, len(own))


@dataclass(frozen=True)
class Program:
    """The arcs between moments, in an order in which each moment comes after its sources.

    Attributes:
        moment_order: the moments in order.
        target, source: the moments at which each arc ends and starts; a source of -1 is the origin,
            whose time is 0.
        kept: a mask of the arcs that the program uses; see `in_order`.
        chain: the number of each moment's thread or stream.
        follows: a mask of arcs that may link a moment to the one before it on its chain. No
            scenario gives them the weight `NEVER`, and at most one of them ends at a moment.
    """

    moment_order: Ints
    target: Ints
    source: Ints
    kept: Flags
    chain: Ints
    follows: Flags

    def run(self, of_arcs: Ints) -> Ints:
        """The time of each moment, from the weights of the arcs in nanoseconds.

        The cost is that of `run_one`, plus about 10 ns for each moment.
        """
        found: Ints = self.run_one(of_arcs)[np.arange(len(self.moment_order))]
        return found

    def run_one(self, of_arcs: Ints) -> Times:
        """As `run`, but the times are computed when they are read.

        Cost: about 20 ns for each arc plus 5 µs for each segment, but at most 0.2 µs for each arc.
        """
        offset, demand = self._chains.split(of_arcs)
        is_short = len(demand) < _SHORT * len(self._segments)
        late = self._late_one(demand) if is_short else self._late(demand[None])[0]
        return Times(self._chains, offset, (), np.zeros(0), late)

    def run_many(self, base: Ints, changes: Sequence[Ints], shares: Floats) -> Times:
        """The times of the moments in several scenarios.

        Args:
            base: the weights of the arcs.
            changes: changes of the weights, in nanoseconds.
            shares: factors. Each pair of a change and a share is one scenario: its weights are
                `base` plus the change times the share. The scenarios of the first change come
                first, then those of the second change, and so on.

        Cost: about 10 ns for each arc and scenario, 10 µs for each segment, and 10 ns for each
        arc and change.
        """
        own, own_demand = self._chains.split(base)
        offsets, demands = zip(*map(self._chains.split, changes))
        late = self._late(_with_shares(own_demand, demands, shares))
        return Times(self._chains, own, offsets, shares, late)

    def _late(self, demand: NDArray[Any]) -> NDArray[Any]:
        """For each scenario and instruction: how late the chain is, from the arcs' demands."""
        late = np.zeros_like(demand)
        source = self._chains.source
        for begin, end, is_first in self._segments:
            part = late[:, begin:end]
            np.add(late[:, source[begin:end]], demand[:, begin:end], out=part)
            if not is_first:
                np.maximum(part[:, 0], late[:, begin - 1], out=part[:, 0])
            np.maximum.accumulate(part, axis=1, out=part)
        return late

    def _late_one(self, demand: Ints) -> Ints:
        """As `_late`, for one scenario in plain Python, which is faster for short segments."""
        late, demands, source = [0] * len(demand), demand.tolist(), self._chains.source.tolist()
        for begin, end, is_first in self._segments:
            latest = 2 * NEVER if is_first else late[begin - 1]
            for k in range(begin, end):
                reached = late[source[k]] + demands[k]
                if reached > latest:
                    latest = reached
                late[k] = latest
        return np.array(late, np.int64)

    @cached_property
    def _chains(self) -> _Chains:
        return _Chains.of(self)

    @cached_property
    def _segments(self) -> list[tuple[int, int, bool]]:
        return self._chains.segments()

    @cached_property
    def _ordered(self) -> Ints:
        """The arcs in the order of their targets."""
        rank = np.empty(len(self.moment_order), np.int64)
        rank[self.moment_order] = np.arange(len(rank))
        arcs = np.flatnonzero(self.kept)
        return arcs[np.argsort(rank[self.target[arcs]], kind="stable")]

    def critical(self, of_arcs: Ints, times: Ints, moment: int) -> Path:
        """The arcs that decide when a moment happens.

        If several arcs to a moment decide, the first one counts. An arc from the origin can decide,
        for example if a batch arrives from another process. This arc is then on the path. Before
        this arc, the path follows the latest other arc to the same moment. `times` is the result of
        `run`.
        """
        times = np.append(times, 0)
        by_target = np.argsort(self.target[self._ordered], kind="stable")
        arcs = self._ordered[by_target]
        first = np.searchsorted(self.target[arcs], np.arange(len(times)))
        found, begins, ends, at = [], [], [], moment
        while at >= 0:
            into = arcs[first[at] : first[at + 1]]
            reached = times[self.source[into]] + of_arcs[into]
            if not len(into):
                break
            decides = int(np.argmax(reached))
            source = int(self.source[into[decides]])
            if source < 0:
                inside = self.source[into] >= 0
                if inside.any():
                    other = np.argmax(np.where(inside, reached, np.iinfo(np.int64).min))
                    source = int(self.source[into[other]])
            found.append(int(into[decides]))
            begins.append(int(times[source]))
            ends.append(int(times[at]))
            at = source
        return Path(*(np.array(each[::-1], np.int64) for each in (found, begins, ends)))

    def slack(self, of_arcs: Ints, times: Ints, ends: Ints) -> Ints:
        """How much later each moment could happen without delaying any of the moments `ends`.

        If a moment can never delay any of `ends`, its slack is 2**60 or more. `times` is the result
        of `run`.
        """
        last = np.full(len(times) + 1, -NEVER)
        np.minimum.at(last, ends, times[ends])
        latest, arcs = last.tolist(), self._ordered[::-1]
        columns = (self.target[arcs], self.source[arcs], of_arcs[arcs])
        for target, source, weight in zip(*(each.tolist() for each in columns)):
            before = latest[target] - weight
            if before < latest[source]:
                latest[source] = before
        found: Ints = np.array(latest[:-1], np.int64) - times
        return found


@dataclass(frozen=True, slots=True)
class _Chains:
    """The moments sorted by chain, and the instructions, one for each arc that can delay a chain.

    A place is the index of a moment in this order. If no arc links a moment to the moment before
    it, another chain begins. Instruction 0 is the origin. The other instructions are in the order
    of the places at which their arcs end.

    Attributes:
        place: the place of each moment.
        link: for each place, the arc from the place before; -1 at the first place of a chain.
        begin: the first place of each chain.
        arc: for each instruction except instruction 0, its arc; -1 for no arc, with the weight 0.
        at, start: the places at which these arcs end and start; a start of -1 is the origin.
        decided: for each place, the last instruction at or before this place.
        source: for each instruction, the instruction that decides how late its source is.
    """

    place: Ints
    link: Ints
    begin: Ints
    arc: Ints
    at: Ints
    start: Ints
    decided: Ints
    source: Ints

    @classmethod
    def of(cls, program: Program) -> _Chains:
        order, count = program.moment_order, len(program.moment_order)
        order = order[_sorted_by(program.chain[order])]
        chain = program.chain[order]
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        arcs = np.flatnonzero(program.kept)
        at, start = place[program.target[arcs]], program.source[arcs]
        start = np.where(start >= 0, np.append(place, 0)[start], -1)
        links = program.follows[arcs] & (start >= 0) & (start == at - 1)
        links[links] = chain[at[links]] == chain[start[links]]
        link = np.full(count, -1)
        link[at[links]] = arcs[links]
        arcs, at, start = arcs[~links], at[~links], start[~links]
        # A chain without an arc to its first moment begins at the origin.
        free = np.flatnonzero((link < 0) & (np.bincount(at, minlength=count) == 0))
        arcs, start = (np.append(each, np.full(len(free), -1)) for each in (arcs, start))
        at = np.append(at, free)
        by_place = np.argsort(at, kind="stable")
        arcs, at, start = arcs[by_place], at[by_place], start[by_place]
        decided = np.cumsum(np.bincount(at, minlength=count))
        source = np.append(0, np.append(decided, 0)[start])
        return cls(place, link, np.flatnonzero(link < 0), arcs, at, start, decided, source)

    def split(self, of_arcs: Ints) -> tuple[Ints, Ints]:
        """Split the weights of arcs into an offset of each place and a demand of each instruction.

        Both are sums and differences of weights. So a change of the weights can be split alone, and
        its offsets and demands can be added to those of the weights.
        """
        weights = np.append(of_arcs, 0)
        links = weights[self.link]
        links[self.begin] = 0
        offset = np.cumsum(links)
        # Each chain has its own offsets, so that they stay small.
        lengths = np.diff(np.append(self.begin, len(offset)))
        offset -= np.repeat(offset[self.begin], lengths)
        demand = np.zeros(len(self.source), np.int64)
        demand[1:] = weights[self.arc]
        demand[1:] -= offset[self.at]
        demand[1:] += np.append(offset, 0)[self.start]
        return offset, demand

    def segments(self) -> list[tuple[int, int, bool]]:
        """Cut the instructions into segments, so that all sources lie in earlier segments.

        Returns:
            The first instruction of each segment, the index after its last instruction, and whether
                the segment begins a chain.

        A chain is cut before the first arc whose source lies in no segment yet. The chain goes on
        when a segment of another chain contains this source. For each pair of chains, the arcs
        between them are searched for the first such arc.

        Cost: about 5 µs for each segment.
        """
        count = len(self.link)
        chain = np.cumsum(self.link < 0) - 1
        waits = np.flatnonzero(self.start >= 0)
        to, since = chain[self.at[waits]], chain[self.start[waits]]
        pair = to * len(self.begin) + since
        order = _sorted_by(pair)
        waits, pair = waits[order], pair[order]
        first = np.flatnonzero(np.append(True, np.diff(pair) != 0)[: len(pair)])
        nth = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(pair))))
        # For each arc between two chains, the latest start of this arc and of the arcs between the
        # same chains before it.
        needs = np.maximum.accumulate(self.start[waits] + nth * count) - nth * count
        at = self.at[waits]
        pair_from = first.tolist()
        pair_until = np.append(first, len(pair))[1:].tolist()
        pair_source = since[order][first].tolist()
        of_chain = np.searchsorted(to[order][first], np.arange(len(self.begin) + 1)).tolist()
        done, ends = self.begin.tolist(), np.append(self.begin, count)[1:].tolist()
        waiting: list[list[tuple[int, int]]] = [[] for _ in done]
        found: list[tuple[int, int, bool]] = []
        ready = deque(range(len(done)))
        while ready:
            own = ready.popleft()
            until, blocker, needed = ends[own], own, -1
            for k in range(of_chain[own], of_chain[own + 1]):
                other, end = pair_source[k], pair_until[k]
                pair_from[k] += int(needs[pair_from[k] : end].searchsorted(done[other]))
                if pair_from[k] < end and at[pair_from[k]] < until:
                    until = int(at[pair_from[k]])
                    blocker, needed = other, int(needs[pair_from[k]])
            if until > done[own]:
                is_first = done[own] == self.begin[own]
                found.append((done[own], until, bool(is_first)))
                done[own] = until
                while waiting[own] and waiting[own][0][0] < until:
                    ready.append(heappop(waiting[own])[1])
            if until < ends[own]:
                if needed < done[blocker]:
                    ready.append(own)
                else:
                    heappush(waiting[blocker], (needed, own))
        first_of = np.append(0, self.decided) + 1
        return [
            (int(first_of[begin]), int(first_of[end]), is_first) for begin, end, is_first in found
        ]


def _sorted_by(numbers: Ints) -> Ints:
    """The positions that sort the numbers; equal numbers keep their order."""
    # NumPy sorts integers of at most 16 bits by radix, which is faster.
    narrow = numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))
    return np.argsort(narrow, kind="stable")


def in_order(order: Ints, target: Ints, source: Ints) -> Flags:
    """A mask of the arcs whose source comes before their target.

    All other arcs contradict the clocks of the trace, so a program does not use them.
    """
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    found: Flags = np.where(source >= 0, np.append(rank, -1)[source], -1) < rank[target]
    return found
