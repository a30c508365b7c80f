"""Where everything that happened belongs: which range, and which kind of work for it.

Every nanosecond of every top-level CPU event of every thread has one place: the innermost range or backward node that
holds it. A range's own time is placed at the range itself; a backward node's at the range of its forward operator,
wherever the engine ran it (see `instrument.links.autograd`). A range opened inside a backward node, as recomputation
opens them, is placed at itself again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.links.autograd import is_accumulation
from instrument.links.flops import UNKNOWN
from instrument.links.links import Links
from instrument.trace.events import Flags, Ints

OPTIMIZER_STEP = "Optimizer.step#"
KINDS = ("forward", "backward", "accumulate", "optimizer", "unattributed", "recompute")
FORWARD, BACKWARD, ACCUMULATE, OPTIMIZER, UNATTRIBUTED, RECOMPUTE = range(6)


@dataclass(frozen=True, slots=True)
class AttributedWork:
    """What happened, summed by where: the path it ran in, the path it is placed at (-1: none of either), and its kind.

    `counted_cpu_ns` and `counted_device_ns` are what of the times lies, or was launched, in the steps that shares are
    of. `unlaunched_ns` is the time of device events whose launch is not known: they have no place. `device` holds the
    place, start and end of each device event whose launch is known; `operations` counts the
    operators whose FLOPs are.
    """

    enclosing: Ints
    attributed: Ints
    kind: Ints
    cpu_ns: Ints
    device_ns: Ints | None
    counted_cpu_ns: Ints
    counted_device_ns: Ints | None
    flops: Ints | None
    operations: Ints | None
    unlaunched_ns: int
    counted_unlaunched_ns: int
    device: tuple[Ints, Ints, Ints]


def attributed_work(links: Links) -> AttributedWork:
    """Put the CPU's time, what it launched and what it computed where it belongs."""
    events, scopes = links.events, links.scopes
    width = len(scopes.paths.names) + 1
    kind = _kinds(links)
    key = ((scopes.enclosing + 1) * width + scopes.attributed + 1) * len(KINDS) + kind
    distinct, place = np.unique(
        np.append(key, FORWARD), return_inverse=True
    )  # the last: outside of every mark
    place = place.reshape(-1)
    count = len(distinct)
    roots, position = links.call_tree.parent < 0, np.zeros(len(events), np.int64)
    position[links.call_tree.index] = np.arange(len(links.call_tree))

    def own(total_ns: Ints) -> Ints:
        """Each mark's own part of the time of the nodes, then what lies outside of all marks."""
        of_marks = total_ns[position[scopes.nodes.index]]
        outside = total_ns[roots].sum() - of_marks[scopes.nodes.parent < 0].sum()
        return np.append(scopes.nodes.own(of_marks), outside)

    recorded, launcher = links.launched
    known = launcher >= 0
    device, launched = recorded[known], place[scopes.innermost[launcher[known]]]
    flops, operations = _operations(links, place, count)
    return AttributedWork(
        enclosing=distinct // len(KINDS) // width - 1,
        attributed=distinct // len(KINDS) % width - 1,
        kind=distinct % len(KINDS),
        cpu_ns=summed(own(links.spent_ns), place, count),
        device_ns=summed(events.duration_ns[device], launched, count) if len(recorded) else None,
        counted_cpu_ns=summed(own(links.counted_ns), place, count),
        counted_device_ns=summed(links.counted_device_ns[known], launched, count)
        if len(recorded)
        else None,
        flops=flops,
        operations=operations,
        unlaunched_ns=int(events.duration_ns[recorded[~known]].sum()),
        counted_unlaunched_ns=int(links.counted_device_ns[~known].sum()),
        device=(launched, events.start_ns[device], events.end_ns[device]),
    )


def summed(values: Ints, group: Ints, count: int) -> Ints:
    """The sum of each of `count` groups, in integers."""
    totals = np.zeros(count, np.int64)
    np.add.at(totals, group, values)
    return totals


def _kinds(links: Links) -> Ints:
    """What each mark's own time is."""
    events, scopes = links.events, links.scopes
    under_step = np.append(_under_step(links), False)
    of_range = np.where(
        scopes.recomputed, RECOMPUTE, np.where(under_step[scopes.enclosing], OPTIMIZER, FORWARD)
    )
    of_node = np.where(is_accumulation(events, scopes.nodes.index), ACCUMULATE, BACKWARD)
    return np.where(scopes.backward, np.where(scopes.unattributed, UNATTRIBUTED, of_node), of_range)


def _under_step(links: Links) -> Flags:
    """Which paths are the optimizer's: its step and what is in it, but for ranges of the closure that it was given."""
    paths = links.scopes.paths
    is_step = np.array([name.startswith(OPTIMIZER_STEP) for name in paths.names], np.bool_)
    under = paths.at_or_below(is_step)
    holds_closure = paths.with_inner(_recording_gradients(links)) > 0
    return under & ~paths.at_or_below(holds_closure & under & ~is_step)


def _recording_gradients(links: Links) -> Ints:
    """How many marks of each path hold operators called while gradients were recorded, as no optimizer's own are."""
    scopes = links.scopes
    scope = scopes.innermost[scopes.recording]
    scope = scope[scope >= 0]
    enclosing = scopes.enclosing[scope[~scopes.backward[scope]]]
    return np.bincount(enclosing[enclosing >= 0], minlength=len(scopes.paths.names))


def _operations(links: Links, place: Ints, count: int) -> tuple[Ints | None, Ints | None]:
    """The FLOPs of each place, and how many operators they are of."""
    flops = links.flops
    if flops is None:
        return None, None
    known = np.flatnonzero(flops != UNKNOWN)
    of = place[links.scopes.innermost[known]]
    return summed(flops[known], of, count), np.bincount(of, minlength=count)
