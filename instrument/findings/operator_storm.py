"""`operator-storm`: loops that call the same few tiny operators again and again.

A loop is a pattern of at most 16 operators and ranges directly inside a range, at least 32 times
without a break (one time is a round), whose calls take 50 µs or less (median). Layers of a model
are no loop: their patterns are longer, or their ranges have other names. In the simulation, one
round does the work of all. Loops whose rounds differ are not found; loops in backward nodes are
left out, because they follow from one in the forward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from instrument.analysis.coverage_rows import CPU_IN_STEPS
from instrument.analysis.places import common_place, range_codes
from instrument.analysis.views import Views
from instrument.base.units import duration, percent
from instrument.findings.check import Check, Edit, Problem, glob_of
from instrument.findings.evidence import evidence, evidence_row
from instrument.links.attribution import OPTIMIZER_STEP
from instrument.trace.events import Ints, called_operators, is_runtime, is_step

_LONGEST_PATTERN, _LEAST_REPEATS = 16, 32
_TINY_NS = 50_000
# A recorded call of an operator takes 2 to 20 µs, even if the operator does almost nothing.
_CALL_NS = 20_000
# If the loop takes at least this part of its range, the scenario shortens the whole range.
_MOST_OF_RANGE = 0.5
# Optimizers of torch that have a fused implementation for CPU and CUDA.
_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_OPTIMIZER = re.compile(rf"{OPTIMIZER_STEP}(\w+)\.step")


class Storm(NamedTuple):
    """The loops of one pattern in one range.

    Attributes:
        path: the range, as an index into `links.scopes.paths`; -1 outside of all ranges.
        events: the positions of all operators and ranges of the loops.
        loops: the number of loops.
        rounds: how often the pattern occurs, in all loops together.
        calls: the number of events in one round.
        elapsed_ns: the time of all events, and at most 50 µs of each gap between them: in a longer
            gap, the program does something else.
    """

    path: int
    events: Ints
    loops: int
    rounds: int
    calls: int
    elapsed_ns: int


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each range with loops over tiny operators, the longest first."""
    events, steps = capture.events, capture.links.counted_steps
    for storm in storms(capture):
        share = steps.share(storm.elapsed_ns)
        if share < CHECK.least_share:
            return
        place = common_place(capture, storm.events)
        in_a_row = f"{storm.rounds / storm.loops:,.0f} in a row, {storm.calls} calls each"
        of_loop = "rounds of the loop", storm.rounds, storm.elapsed_ns
        rounds = evidence_row(capture, *of_loop, storm.events[0], in_a_row)
        median_ns = int(np.median(events.duration_ns[storm.events]))
        yield Problem(
            f"{percent(share)} of the {steps.what} goes to a loop over tiny operators: "
            f"{len(storm.events) / steps.count:,.0f} calls of {duration(median_ns)} (median), and "
            "the gaps between them",
            storm.events,
            share,
            edit=_edit(capture, storm),
            place=place,
            evidence=(rounds, *evidence(capture, storm.events)),
            change=_change(place[0]),
            verify="--ops --by range" if place[0] else "",
        )


CHECK = Check(
    "operator-storm",
    find,
    verify="--ops",
    least_share=0.05,
    least_saving=0.02,
    coverage=(CPU_IN_STEPS,),
)


def storms(capture: Views) -> list[Storm]:
    """Find the loops over tiny operators in the steps, the longest first."""
    events, tree = capture.events, capture.links.call_tree
    nodes, parent = _sequences(capture)
    if not len(nodes):
        return []
    name = events.name[tree.index[nodes]].astype(np.int64)
    loops = _loops(name, parent)
    start, end = tree.start_ns[nodes], tree.end_ns[nodes]
    lasts = end - start
    loops = [loop for loop in loops if np.median(lasts[loop[0] : loop[1]]) <= _TINY_NS]
    paths = range_codes(capture, tree.index[nodes[[first for first, _, _ in loops]]]).tolist()
    by_pattern = defaultdict(list)
    for path, (first, last, period) in zip(paths, loops):
        pattern = frozenset(name[first : first + period].tolist())
        by_pattern[path, pattern].append((first, last, period))
    found = [
        Storm(
            path,
            tree.index[nodes[np.concatenate([np.arange(*loop[:2]) for loop in same])]],
            loops=len(same),
            rounds=sum((last - first) // period for first, last, period in same),
            calls=same[0][2],
            elapsed_ns=sum(_elapsed_ns(start[i:k], end[i:k]) for i, k, _ in same),
        )
        for (path, _), same in by_pattern.items()
    ]
    return sorted(found, key=lambda storm: -storm.elapsed_ns)


def _elapsed_ns(start_ns: Ints, end_ns: Ints) -> int:
    reached = np.maximum.accumulate(end_ns)
    too_long = np.maximum(start_ns[1:] - reached[:-1] - _TINY_NS, 0)
    return int(reached[-1] - start_ns[0] - too_long.sum())


def _sequences(capture: Views) -> tuple[Ints, Ints]:
    """The nodes that can be part of a loop, and the parent of each node.

    These are the operators and ranges in the steps, without all that is inside an operator or a
    backward node. Nodes with the same parent follow each other in order of start.
    """
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    other = (events.among(is_runtime) | events.named(is_step))[tree.index]
    other |= tree.inside(called_operators(events)[tree.index])
    other |= np.append(scopes.backward, False)[scopes.innermost]
    nodes = np.flatnonzero(~other & (links.counted_steps.holds(tree.start_ns) >= 0))
    order = np.argsort(tree.parent[nodes], kind="stable")  # children in order of start
    # All roots have the parent -1, so a negative number for each thread distinguishes the threads.
    parent = np.where(tree.parent[nodes] >= 0, tree.parent[nodes], -1 - tree.thread[nodes])
    return nodes[order], parent[order]


def _loops(name: Ints, parent: Ints) -> list[tuple[int, int, int]]:
    """For each loop: its first index in `name`, the index after its end, the length of its pattern.

    Loops do not overlap. If patterns of several lengths fit, the shortest is used.
    """
    taken, found = np.zeros(len(name), np.bool_), []
    for period in range(1, _LONGEST_PATTERN + 1):
        if len(name) <= period:
            break
        repeats = (name[period:] == name[:-period]) & (parent[period:] == parent[:-period])
        change = np.diff(np.concatenate([[False], repeats, [False]]).astype(np.int8))
        starts, ends = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
        long = ends - starts >= (_LEAST_REPEATS - 1) * period
        for first, last in zip(starts[long].tolist(), (ends[long] + period).tolist()):
            if not taken[first:last].any():
                taken[first:last] = True
                found.append((first, last, period))
    return sorted(found)


def _edit(capture: Views, storm: Storm) -> Edit:
    """The step as if each loop had one round, which does the work of all rounds.

    The first `_CALL_NS` of a call are overhead, which is removed except in one round of each loop;
    the rest is work. If the loops take at least half of their range, the time of the whole range is
    scaled, so that its backward and the time between the calls become shorter too.
    """
    scopes, steps = capture.links.scopes, capture.links.counted_steps
    lasts = capture.events.duration_ns[storm.events]
    one_round = storm.loops / storm.rounds
    work_ns = int(np.maximum(lasts - _CALL_NS, 0).sum()) * (1 - one_round)
    if storm.path >= 0:
        own = scopes.opened == storm.path
        inside_ns = steps.within(scopes.ranges.start_ns[own], scopes.ranges.end_ns[own]).sum()
        if storm.elapsed_ns >= _MOST_OF_RANGE * inside_ns:
            saved_ns = storm.elapsed_ns * (1 - one_round) - work_ns
            left = min(max(1 - saved_ns / max(int(inside_ns), 1), 0.0), 1.0)
            path = glob_of(scopes.paths.texts[storm.path])
            return lambda whatif: whatif.scale(range=path, by=left)
    left = min(one_round + work_ns / max(int(lasts.sum()), 1), 1.0)
    return lambda whatif: whatif.scale_events(storm.events, by=left)


def _change(path: str | None) -> str:
    optimizer = _OPTIMIZER.search(path or "")
    if optimizer:
        option = "fused=True" if optimizer[1] in _FUSED else "foreach=True"
        return f"torch.optim.{optimizer[1]}(params, ..., {option}) updates all parameters together."
    if "zero_grad" in (path or ""):
        return "optimizer.zero_grad(set_to_none=True) needs no operator for the parameters."
    return (
        "Do all rounds of the loop in one call: stack the rows and use a batched operator or "
        "torch.vmap; over parameters, use torch._foreach_* operators or foreach=True."
    )
