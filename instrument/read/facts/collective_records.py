"""Find what torch recorded about the collective of each communication kernel.

torch records each collective as a CPU event `record_param_comms` (docs/architecture.md), and the
process group writes an annotation around it, such as `nccl:all_reduce`.
"""

from __future__ import annotations

import numpy as np

from instrument.read.facts.call_tree import nest
from instrument.read.facts.intervals import Intervals, merged, sweep
from instrument.read.facts.links import Links
from instrument.read.trace.events import ANNOTATION, OPERATOR, Details, Events, Flags, Ints, is_step

RECORD = "record_param_comms"
# The annotation of a process group on the CPU lasts as long as its collective. The annotation of
# NCCL ends as soon as the collective is queued.
ON_CPU = ("gloo:", "mpi:")
# Operators that only start a collective or wait for it.
_STARTING_OR_WAITING = "c10d::"
_OF_PROCESS_GROUPS = (*ON_CPU, "nccl:", "ucc:", "xccl:", "hccl:")


def is_collective(name: str) -> bool:
    """Whether a process group writes annotations of this name, such as "nccl:all_reduce"."""
    return name.startswith(_OF_PROCESS_GROUPS)


def records(events: Events) -> Flags:
    """A mask of the events that record a collective, or a wait for a collective."""
    found = events.named(RECORD.__eq__)
    return found & events.among(OPERATOR | ANNOTATION) if found.any() else found


def collective_records(events: Events, operator: Ints, call: Ints) -> tuple[Ints, Ints]:
    """For each communication kernel, the record and the annotation of its collective.

    The record is the one that the external id of the kernel names, else the one around the call
    that launched the kernel. The annotation is always the one around this call.

    Args:
        events: the events of the trace.
        operator: for each kernel, the event that its external id names; -1 if there is none.
        call: for each kernel, the call that launched it; -1 if there is none.

    Returns:
        Two arrays of positions among the events; -1 for none.
    """
    if not len(operator):
        return operator, operator
    is_record = records(events)
    is_range = events.among(ANNOTATION) & events.named(is_collective)
    record = np.where((operator >= 0) & is_record[operator], operator, -1)
    tree = nest(events, is_record | is_range)
    node = tree.node_at(events.thread[call], events.start_ns[call])
    node[call < 0] = -1
    position = np.append(tree.index, -1)
    around = [position[tree.nearest(chosen[tree.index], node)] for chosen in (is_record, is_range)]
    return np.where(record >= 0, record, around[0]), around[1]


def collective_details(events: Events, kernel: Ints, record: Ints) -> list[Details]:
    """The details of each collective: those of its kernel, completed from its record.

    `kernel` and `record` hold positions among the events, or -1.
    """
    codes, found = np.append(events.detail.astype(np.int64), -1), dict[tuple[int, int], Details]()
    every, pairs = (
        [*events.details, Details()],
        [*zip(codes[kernel].tolist(), codes[record].tolist())],
    )
    for pair in {*pairs}:
        first, second = (every[code]._asdict() for code in pair)
        found[pair] = Details(**second | {k: v for k, v in first.items() if v is not None})
    return [found[pair] for pair in pairs]


def is_on_cpu(events: Events) -> Flags:
    """A mask of torch's annotations of the collectives that run on the CPU (gloo and MPI)."""
    return events.among(ANNOTATION) & events.named(lambda name: name.startswith(ON_CPU))


def exposed_on_cpu(links: Links) -> Intervals:
    """The intervals in which communication on the CPU was exposed; see `cpu_waits`."""
    communicating, working = (timeline := sweep(cpu_sides(links))).active
    return timeline.merged(communicating & ~working)


def cpu_sides(links: Links) -> list[Intervals]:
    """Two lists of intervals: when collectives ran on the CPU, and when other operators ran."""
    events, call_tree = links.events, links.call_tree
    communicates = is_on_cpu(events)[call_tree.index]
    operator = events.among(OPERATOR) & ~events.named(
        lambda name: name.startswith(_STARTING_OR_WAITING) or is_step(name)
    )
    own_work = operator[call_tree.index] & ~call_tree.at_or_inside(communicates)
    sides = [call_tree.index[chosen] for chosen in (communicates, own_work)]
    return [merged(events.start_ns[k], events.end_ns[k]) for k in sides]
