"""Find what torch recorded about the collective of each communication kernel.

torch records each collective as a CPU event `record_param_comms` (docs/architecture.md), and the
process group writes an annotation around it, such as `nccl:all_reduce`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

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
# For each kind, a pattern that finds the kind in the names of annotations and kernels, and in the
# records of collectives that torch writes.
_KINDS = (
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_to_all", r"all_?to_?all"),
    ("barrier", r"barrier"),
    ("broadcast", r"broadcast"),
    ("send_recv", r"send_?recv|(?<![a-z])(send|recv)"),
    ("gather", r"(?<![a-z])gather(?![a-z])"),
    ("scatter", r"(?<![a-z])scatter(?![a-z])"),
    ("reduce", r"(?<![a-z])reduce(?![a-z])"),
)
#: The kinds of collectives.
COLLECTIVE_KINDS = tuple(kind for kind, _ in _KINDS)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)
# The size of an element in bytes, and the element types of this size by torch's names.
_SIZES = {
    1: "Byte Char Bool QInt8 QUInt8",
    2: "Short Half BFloat16 UInt16",
    4: "Int Float ComplexHalf QInt32 UInt32",
    8: "Long Double ComplexFloat UInt64",
    16: "ComplexDouble",
}
_ELEMENT_BYTES = {name: size for size, names in _SIZES.items() for name in names.split()}
_FLOAT8 = "Float8_"
_MOST_BYTES = 2**43  # 9 TB; torch recorded a wrong size if a message is larger


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


@lru_cache(1024)
def collective_kind(name: str) -> str | None:
    """Return the kind of collective that a name contains, such as `all_reduce`; None if unknown."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


def kinds_of_collectives(
    events: Events, details: Sequence[Details], event: Ints, around: Ints
) -> list[str | None]:
    """The kind of each collective; None if the trace does not show it.

    It is in torch's record, or else in the name of the annotation, or else in that of the kernel.
    `event` and `around` hold the positions of kernels and annotations, or -1.
    """
    names = [*events.names, ""]
    of_event, of_range = (np.append(events.name, -1)[each].tolist() for each in (event, around))
    return [
        collective_kind(each.collective or "")
        or collective_kind(names[outer])
        or collective_kind(names[own])
        for each, outer, own in zip(details, of_range, of_event)
    ]


def message_bytes(kind: str | None, details: Details) -> int | None:
    """Return the size of a message as NCCL counts it: the larger of the rank's input and output.

    None for a barrier, and for an unknown or impossible size.
    """
    known = (details.input_elements, details.output_elements)
    name = details.element_type or ""
    element = 1 if name.startswith(_FLOAT8) else _ELEMENT_BYTES.get(name)
    if kind in (None, "barrier") or element is None:
        return None
    counts = [count for count in known if count is not None and count >= 0]
    size = max(counts) * element if len(counts) == len(known) else _MOST_BYTES
    return size if size < _MOST_BYTES else None


def known_count(value: int | None) -> int | None:
    """A number from torch's record; None if it is negative or does not fit into 64 bits."""
    return value if value is not None and 0 <= value < 2**63 else None


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
