"""Sum CPU time, device time and FLOPs for each range and kind of work.

A scope is a range or a backward node (see `facts.autograd`). Each nanosecond of a thread
counts for the innermost scope that is open then, and a scope's time for the range that it belongs
to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.read.facts.autograd import is_accumulation
from instrument.read.facts.flops import UNKNOWN
from instrument.read.facts.groupby import Groups, groupby
from instrument.read.facts.links import Links
from instrument.read.trace.events import Flags, Ints

OPTIMIZER_STEP = "Optimizer.step#"
KINDS = ("forward", "backward", "accumulate", "optimizer", "unattributed", "recompute")
FORWARD, BACKWARD, ACCUMULATE, OPTIMIZER, UNATTRIBUTED, RECOMPUTE = range(6)


@dataclass(frozen=True, slots=True)
class AttributedWork:
    """All work of a trace, in groups with equal `enclosing`, `attributed` and `kind`.

    Attributes:
        enclosing: for each group, the path of the innermost range in which the work ran, as an
            index into `Scopes.paths`; -1 if there is no range.
        attributed: for each group, the path of the range that the work belongs to; -1 for none.
        kind: the kind of work of each group, as an index into `KINDS`.
        cpu_ns: the CPU time of each group.
        device_ns: the time of the device events that each group launched; None if the trace has no
            device events.
        counted_cpu_ns: the part of `cpu_ns` in the steps that count; all of it if no step finished.
            Percentages in tables are shares of the counted times.
        counted_device_ns: as `device_ns`, for device events launched in the steps that count.
        flops: the FLOPs of each group, by formula; None if the trace has no input shapes.
        operations: for each group, the number of operators whose FLOPs are in `flops`; None if the
            trace has no input shapes.
        unlaunched_ns: the time of the device events whose launch is not known; they are in no
            group.
        counted_unlaunched_ns: as `unlaunched_ns`, for device events that began in the steps that
            count.
        device: the group, start and end of each device event whose launch is known.
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
    """Sum CPU time, device time and FLOPs for each range and kind of work."""
    events, scopes = links.events, links.scopes
    width = len(scopes.paths.names) + 1
    kind = kinds_of_scopes(links)
    key = ((scopes.enclosing + 1) * width + scopes.attributed + 1) * len(KINDS) + kind
    # The last entry is for the work outside all scopes, whose scope is -1.
    distinct, groups = groupby(np.append(key, FORWARD))
    roots = links.call_tree.parent < 0
    node_of_scope = links.call_tree.nodes_of(scopes.nodes.index)

    def own(total_ns: Ints) -> Ints:
        """The time of each scope without inner scopes, then the time outside all scopes."""
        of_scopes = total_ns[node_of_scope]
        outside = total_ns[roots].sum() - of_scopes[scopes.nodes.parent < 0].sum()
        return np.append(scopes.nodes.own(of_scopes), outside)

    recorded, launcher = links.launched
    known = launcher >= 0
    device = recorded[known]
    launched = Groups(groups.of[scopes.innermost[launcher[known]]], groups.count)
    device_ns = counted_device_ns = None
    if len(recorded):
        device_ns = launched.sum(events.duration_ns[device])
        counted_device_ns = launched.sum(links.counted_device_ns[known])
    flops = operations = None
    if links.flops is not None:
        known_flops = np.flatnonzero(links.flops != UNKNOWN)
        counted = Groups(groups.of[scopes.innermost[known_flops]], groups.count)
        flops, operations = counted.sum(links.flops[known_flops]), counted.size
    return AttributedWork(
        enclosing=distinct // len(KINDS) // width - 1,
        attributed=distinct // len(KINDS) % width - 1,
        kind=distinct % len(KINDS),
        cpu_ns=groups.sum(own(links.spent_ns)),
        device_ns=device_ns,
        counted_cpu_ns=groups.sum(own(links.counted_ns)),
        counted_device_ns=counted_device_ns,
        flops=flops,
        operations=operations,
        unlaunched_ns=int(events.duration_ns[recorded[~known]].sum()),
        counted_unlaunched_ns=int(links.counted_device_ns[~known].sum()),
        device=(launched.of, events.start_ns[device], events.end_ns[device]),
    )


def kinds_of_scopes(links: Links) -> Ints:
    """The kind of work of each scope, as an index into `KINDS`."""
    events, scopes = links.events, links.scopes
    under_step = np.append(_under_step(links), False)
    of_range = np.where(
        scopes.recomputed, RECOMPUTE, np.where(under_step[scopes.enclosing], OPTIMIZER, FORWARD)
    )
    of_node = np.where(is_accumulation(events, scopes.nodes.index), ACCUMULATE, BACKWARD)
    return np.where(scopes.backward, np.where(scopes.unattributed, UNATTRIBUTED, of_node), of_range)


def _under_step(links: Links) -> Flags:
    """A mask of the paths that are work of an optimizer: `Optimizer.step` and the ranges in it.

    A range in whose operators gradients are recorded belongs to the closure that `step` called.
    """
    paths = links.scopes.paths
    is_step = np.array([name.startswith(OPTIMIZER_STEP) for name in paths.names], np.bool_)
    under = paths.at_or_below(is_step)
    # The operators of an optimizer itself do not run in grad mode.
    scope = links.scopes.innermost[links.scopes.recording]
    scope = scope[scope >= 0]
    enclosing = links.scopes.enclosing[scope[~links.scopes.backward[scope]]]
    recording = np.bincount(enclosing[enclosing >= 0], minlength=len(paths.names))
    holds_closure = paths.with_descendants(recording) > 0
    return under & ~paths.at_or_below(holds_closure & under & ~is_step)
