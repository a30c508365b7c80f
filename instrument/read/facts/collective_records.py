"""Find what torch recorded about the collective of each communication kernel.

torch records each collective as a CPU event `record_param_comms` (docs/explanation/joins.md), and
the process group writes an annotation around it, such as `nccl:all_reduce`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from instrument.read.facts.call_tree import nest
from instrument.read.facts.device_work import COMMUNICATION, Work
from instrument.read.facts.groupby import computed
from instrument.read.facts.intervals import Intervals, merged, sweep
from instrument.read.facts.links import Links
from instrument.read.trace.events import ANNOTATION, OPERATOR, Details, Events, Flags, Ints, is_step

#: Where a collective ran.
DEVICE, CPU = "device", "CPU"
RECORD = "record_param_comms"
# torch's description of a process group that was made without a description.
_NO_DESCRIPTION = "undefined"
# What torch's records and the names of events say about a collective.
_DESCRIBED = {
    "name": pl.String, "kind": pl.String, "process_group": pl.String, "description": pl.String,
    "ranks": pl.String, "group_size": pl.Int64, "element_type": pl.String, "number": pl.Int64,
    "bytes": pl.Int64,
}  # fmt: skip
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


def collective_events(links: Links, work: Work) -> pl.DataFrame:
    """The events of collectives: kernels, annotations of gloo and MPI, and torch's bare records.

    `event` is a kernel, sorted by start, an annotation, or a record to which no kernel belongs. The
    record of a kernel is the one that its external id names, else the one around the call that
    launched it. `record` is -1 if there is none. `runs_on` is `DEVICE`, `CPU`, or null for a bare
    record. `launched_ns` is when the CPU began it; below all times if that is not known. The other
    columns are what torch, or the names of the events, say about the collective; null if unknown.
    """
    events, kernels = links.events, np.flatnonzero(work.kind == COMMUNICATION)
    kernels = kernels[np.argsort(work.start_ns[kernels], kind="stable")]
    call, launch = work.call[kernels], work.launch[kernels]
    record, around = _around_launches(events, work.operator[kernels], call)
    on_cpu, is_bare = np.flatnonzero(is_on_cpu(events)), records(events)
    known = [collective_kind(each.collective or "") is not None for each in events.details]
    is_bare &= np.array([*known, False])[events.detail]
    is_bare[record[record >= 0]] = False
    bare = np.flatnonzero(is_bare)
    parts = (
        (DEVICE, work.event[kernels], record, around, launch),
        (CPU, on_cpu, np.full(len(on_cpu), -1), on_cpu, on_cpu),
        (None, bare, bare, np.full(len(bare), -1), bare),
    )
    columns: list[Any] = [*zip(*parts)]
    event, record, around, launch = (np.concatenate(each) for each in columns[1:])
    detail, name = np.append(events.detail, -1), np.append(events.name, -1)
    rows = pl.DataFrame(
        {
            "event": event,
            "record": record,
            "launched_ns": np.where(launch >= 0, events.start_ns[launch], np.iinfo(np.int64).min),
            "runs_on": [where for where, each, *_ in parts for _ in range(len(each))],
            "own": detail[event],
            "recorded": detail[record],
            "code": name[event],
            "outer": name[around],
        },
        schema_overrides={"runs_on": pl.String},
    )
    names, details = [*events.names, ""], [*events.details, Details()]

    def described(own: int, recorded: int, code: int, outer: int) -> tuple[Any, ...]:
        known = {k: v for k, v in details[own]._asdict().items() if v is not None}
        found, name = Details(**details[recorded]._asdict() | known), names[code]
        kinds = map(collective_kind, (found.collective or "", names[outer], name))
        kind = next(filter(None, kinds), None)
        plain = name.replace("(anonymous namespace)::", "").partition("(")[0]
        return (
            (found.collective or "") if name == RECORD else plain,
            kind,
            found.process_group,
            None if found.group_description == _NO_DESCRIPTION else found.group_description,
            found.ranks,
            known_count(found.group_size),
            found.element_type,
            known_count(found.collective_number),
            message_bytes(kind, found),
        )

    keys = ["own", "recorded", "code", "outer"]
    return computed(rows, described, keys, _DESCRIBED).drop(keys)


def _around_launches(events: Events, operator: Ints, call: Ints) -> tuple[Ints, Ints]:
    """The record and the annotation of the collective of each kernel; -1 for none.

    `operator` is the event that the external id of a kernel names, and `call` its launch; or -1.
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


@lru_cache(1024)
def collective_kind(name: str) -> str | None:
    """Return the kind of collective that a name contains, such as `all_reduce`; None if unknown."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


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
