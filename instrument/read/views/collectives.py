"""Two tables: a row for each collective, and sums by process group and kind.

docs/gpu.md defines the bandwidths, as NCCL's own tests do (doc/PERFORMANCE.md in nccl-tests).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from instrument.read.facts.collective_records import (
    RECORD,
    collective_details,
    collective_records,
    cpu_sides,
    is_on_cpu,
    records,
)
from instrument.read.facts.device_work import COMMUNICATION, KERNEL, MEMSET, Work
from instrument.read.facts.groupby import Groups, cells, group_rows, groupby, groupby_rows, intern
from instrument.read.facts.idle import launching_step
from instrument.read.facts.intervals import Intervals, merged, sweep, within
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at, step_number
from instrument.read.trace.columns import ints
from instrument.read.trace.events import (
    Details,
    Events,
    Flags,
    Ints,
    flags,
)
from instrument.read.views.table import Table

# Every rank waits in such a collective until the last rank has joined it. So the collective ends at
# about the same moment on all ranks.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
# Where a collective ran.
DEVICE, CPU = "device", "CPU"
_RUNS_ON = (DEVICE, CPU, None)
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
KINDS = tuple(kind for kind, _ in _KINDS)
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
# torch's description of a process group that was made without a description.
_NO_DESCRIPTION = "undefined"
_UNKNOWN = -1

_GROUP = {
    "kind": "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, "
    "scatter, send_recv or barrier; None if the trace does not show it",
    "process_group": "torch's name for the process group, such as 0; None if it is not recorded",
    "description": "torch's description of the process group, such as default_pg",
    "ranks": "the ranks of the group, as Kineto writes them; torch shortens a long list",
    "group_size": "how many ranks the group has",
    "runs_on": "device, or CPU for gloo and MPI; None if the trace has only torch's record of the "
    "collective and no kernel or annotation, as in a group of one rank",
}
COLLECTIVES: Schema = schema(
    **_GROUP,
    element_type="torch's names for the types of the elements",
    calls="how many collectives there were",
    bytes="the sizes of the messages, summed over the calls whose size is known. As in NCCL's "
    "tests, the size is the gathered output for all_gather, the whole input for reduce_scatter, "
    "and the data of one rank for all other kinds",
    duration_ns="the time of all calls, including the time of waiting for other ranks",
    min_ns="the duration of the shortest call",
    mean_ns="the mean duration of a call, rounded down to a nanosecond",
    max_ns="the duration of the longest call",
    exposed_ns="the part of `duration_ns` in which no device ran compute; for collectives on the "
    "CPU, the part in which no thread ran an operator",
    exposed_share="`exposed_ns` divided by `duration_ns`",
    algorithm_bytes_per_second="the sum of sizes divided by the sum of times, for the calls whose "
    "size and time are known; a lower bound, because the times include waiting for other ranks",
    bus_bytes_per_second="`algorithm_bytes_per_second` times NCCL's factor for `kind` and "
    "`group_size`; a lower bound. Compare this column with the rate of the link",
    largest_message_bytes="the size of the largest message whose time is known",
    largest_message_calls="the number of calls with a message of `largest_message_bytes`",
    largest_message_bus_bytes_per_second="like `bus_bytes_per_second`, but only for the calls with "
    "the largest message. Latency affects large messages least",
)
COLLECTIVE_CALLS: Schema = schema(
    name="the kernel's name without its parameters, or the annotation's name, or the name in "
    "torch's record",
    **_GROUP,
    element_type="torch's name for the type of the elements",
    number="torch's sequence number of the collective in its process group; None if it is not "
    "recorded",
    step="the number of the finished step that launched the collective; None if no finished step "
    "launched it",
    ordinal="the index among the collectives of the same name and ranks in the step, in order of "
    "start, from 0",
    start_ns="the start, on the trace's own clock; tables print the time since the trace's first "
    "event; None if the trace has no kernel or annotation of the collective",
    end_ns="the end, on the trace's own clock",
    duration_ns="the time of the collective's kernels, or of its annotation on the CPU",
    exposed_ns="the part of `duration_ns` in which no device ran compute; for collectives on the "
    "CPU, the part in which no thread ran an operator",
    bytes="the size of the message as NCCL counts it; None if it is not known, and for a barrier",
    algorithm_bytes_per_second="`bytes` divided by `duration_ns`",
    bus_bytes_per_second="`algorithm_bytes_per_second` times NCCL's factor",
)
#: The columns that are equal for all collectives of one process group and kind.
OF_GROUP = tuple(_GROUP)


def kind_of(name: str) -> str | None:
    """Return the kind of collective that a name contains, such as `all_reduce`; None if unknown."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


def bus_factor(kind: str | None, group_size: int | None) -> tuple[int, int] | None:
    """Return bus bandwidth divided by algorithm bandwidth, as numerator and denominator.

    None for a barrier, and if the kind or the group's size is not known. The factors for gather and
    scatter are from the source code of nccl-tests, all others from its doc/PERFORMANCE.md.
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1, 1
    if kind in (None, "barrier") or group_size is None or group_size < 1:
        return None
    return (2 if kind == "all_reduce" else 1) * (group_size - 1), group_size


def bandwidths(
    kind: str | None, group_size: int | None, size: int | None, duration_ns: int | None
) -> tuple[int | None, int | None]:
    """Return the algorithm and the bus bandwidth in bytes per second; None if not known."""
    if size is None or not duration_ns:
        return None, None
    factor = bus_factor(kind, group_size)
    return (
        size * 10**9 // duration_ns,
        size * 10**9 * factor[0] // (factor[1] * duration_ns) if factor else None,
    )


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


class _Found(NamedTuple):
    """Events of collectives, as parallel columns.

    `event` is a kernel, an annotation or a record; `record` is the CPU event in which torch
    recorded the collective; `range` is the annotation around the launch; `step` is the index of the
    finished step that launched it. These are positions or -1. `runs_on` is an index into
    `_RUNS_ON`.
    """

    event: Ints
    record: Ints
    range: Ints
    step: Ints
    exposed_ns: Ints
    runs_on: Ints


def collective_calls(links: Links, work: Work) -> Table:
    """Return one row for each collective, in order of its end; see `COLLECTIVE_CALLS`.

    torch records each collective as a CPU event, which is called its record here. Kernels with the
    same record are one collective. Collectives with a record and without a kernel, as in a group of
    one rank, come last.

    Limit: coalesced collectives run as one kernel, which belongs to none of their records. So each
    of them has a row without a time, and the kernel has a row without a size.

    Cost: sorts the device events. If gloo or MPI ran on the CPU, the call tree is built too.
    """
    events, steps = links.events, links.steps
    on_device = _on_device(events, work, steps)
    others = _on_cpu(links, steps), _recorded_only(events, steps, on_device.record)
    found = _Found(*map(np.concatenate, zip(on_device, *others)))
    table = Table.of(COLLECTIVE_CALLS, _rows(events, steps, found), begin_ns=events.begin_ns)
    return table.sort("end_ns", descending=False)


def _on_device(events: Events, work: Work, steps: Ints) -> _Found:
    chosen = np.flatnonzero(work.kind == COMMUNICATION)
    record, around = collective_records(events, work.operator[chosen], work.call[chosen])
    exposed = _outside(work.of(KERNEL, MEMSET), work.start_ns[chosen], work.end_ns[chosen])
    step = launching_step(events, work, steps)[chosen]
    return _Found(work.event[chosen], record, around, step, exposed, np.zeros_like(step))


def _on_cpu(links: Links, steps: Ints) -> _Found:
    events = links.events
    index = np.flatnonzero(is_on_cpu(events))
    start, end = events.start_ns[index], events.end_ns[index]
    exposed = _outside(cpu_sides(links)[1], start, end) if len(index) else start
    none = np.full(len(index), -1)
    step = step_at(events, steps, start)
    return _Found(index, none, index, step, exposed, np.ones_like(index))


def _recorded_only(events: Events, steps: Ints, used: Ints) -> _Found:
    """The collectives that have a record and no kernel; `used` are the records with a kernel."""
    is_named = flags(lambda each: kind_of(each.collective or "") is not None, events.details)
    chosen = records(events)
    chosen &= np.append(is_named, False)[events.detail]
    chosen[used[used >= 0]] = False
    index = np.flatnonzero(chosen)
    step = step_at(events, steps, events.start_ns[index])
    none = np.full(len(index), -1)
    return _Found(index, index, none, step, np.zeros_like(index), np.full(len(index), 2))


def _outside(intervals: Intervals, start_ns: Ints, end_ns: Ints) -> Ints:
    """How many ns of each span from `start_ns` to `end_ns` are outside of all intervals."""
    return end_ns - start_ns - within(merged(*intervals), start_ns, end_ns)


def _rows(events: Events, steps: Ints, found: _Found) -> dict[str, list[Any]]:
    """The columns of `COLLECTIVE_CALLS`: events with the same record share one row."""
    unit = np.where(found.record >= 0, found.record, len(events) + np.arange(len(found.record)))
    groups = groupby(unit)[1]
    first = groups.sorted_by(events.start_ns[found.event]).row(0)
    event = found.event[first]
    start_ns = groups.min(events.start_ns[found.event])
    end_ns = -groups.min(-events.end_ns[found.event])
    duration_ns, exposed_ns = (
        groups.sum(values) for values in (events.duration_ns[found.event], found.exposed_ns)
    )
    of, details = collective_details(events, event, found.record[first])
    described = [details[code] for code in of.tolist()]
    ranges = np.append(events.name, -1)[found.range[first]]
    names, kinds = _names(events, event, ranges, of, details)
    step = found.step[first]
    numbers = [*(step_number(events, k) for k in steps.tolist()), None]
    sizes = [message_bytes(kind, each) for kind, each in zip(kinds, described)]
    group_sizes = [_count(each.group_size) for each in described]
    runs_on = [_RUNS_ON[k] for k in found.runs_on[first].tolist()]
    has_work = np.array([each is not None for each in runs_on], np.bool_)
    times = cells(duration_ns, has_work)
    rates = [bandwidths(*each) for each in zip(kinds, group_sizes, sizes, times)]
    ranks = [each.ranks for each in described]
    alike = group_rows(step, found.runs_on[first], intern(names)[0], intern(ranks)[0])
    return {
        "name": names,
        "kind": kinds,
        "process_group": [each.process_group for each in described],
        "description": [
            None if each.group_description == _NO_DESCRIPTION else each.group_description
            for each in described
        ],
        "ranks": ranks,
        "group_size": group_sizes,
        "runs_on": runs_on,
        "element_type": [each.element_type for each in described],
        "number": [_count(each.collective_number) for each in described],
        "step": [numbers[k] for k in step.tolist()],
        "ordinal": alike.sorted_by(start_ns).ordinals().tolist(),
        "start_ns": cells(start_ns, has_work),
        "end_ns": cells(end_ns, has_work),
        "duration_ns": times,
        "exposed_ns": cells(exposed_ns, has_work),
        "bytes": sizes,
        "algorithm_bytes_per_second": [rate for rate, _ in rates],
        "bus_bytes_per_second": [rate for _, rate in rates],
    }


def _count(value: int | None) -> int | None:
    """A number from torch's record; None if it is negative or does not fit into 64 bits."""
    return value if value is not None and 0 <= value < 2**63 else None


def _names(
    events: Events, event: Ints, ranges: Ints, of: Ints, details: Sequence[Details]
) -> tuple[list[str], list[str | None]]:
    """The name and the kind of each collective.

    The kind is in torch's record, or else in the name of the annotation, or else in that of the
    kernel.
    """
    keys, groups = groupby_rows(of, ranges, events.name[event])
    names, kinds = [], []
    for number, around, own in keys.T.tolist():
        recorded = details[number].collective or ""
        name = events.names[own].replace("(anonymous namespace)::", "").partition("(")[0]
        texts = (recorded, events.names[around] if around >= 0 else "", events.names[own])
        kinds.append(next(filter(None, map(kind_of, texts)), None))
        names.append(recorded if name == RECORD else name)
    every = groups.of.tolist()
    return [names[k] for k in every], [kinds[k] for k in every]


def collectives(collective_calls: Table) -> Table:
    """Return one row for each process group and kind of collective; see `COLLECTIVES`.

    The row with the longest total time comes first. The kernel of a collective starts when the rank
    is ready, and ends when all ranks are done. So the bandwidths are lower bounds.
    `Ranks.collectives` has times without the waiting.
    """
    key, distinct = intern(zip(*(collective_calls.column(name) for name in OF_GROUP)))
    groups = Groups(key, len(distinct))
    duration = ints(collective_calls.column("duration_ns"), _UNKNOWN)
    size = ints(collective_calls.column("bytes"), _UNKNOWN)
    lasting, sized = duration >= 0, size >= 0
    both = lasting & sized
    largest = np.full(groups.count, _UNKNOWN)
    np.maximum.at(largest, key[both], size[both])
    is_largest = both & (size == largest[key])
    totals = groups.sums(duration, lasting)
    exposed = groups.sums(ints(collective_calls.column("exposed_ns"), 0), lasting)
    timed = groups.number(lasting)
    means = [total // count if count else None for total, count in zip(totals, timed.tolist())]
    shortest = groups.min(np.where(lasting, duration, np.iinfo(np.int64).max))
    rates = _rates(distinct, groups, size, duration, both)
    rates_of_largest = _rates(distinct, groups, size, duration, is_largest)
    types = collective_calls.column("element_type")
    columns: dict[str, list[Any]] = {
        **{name: [each[k] for each in distinct] for k, name in enumerate(OF_GROUP)},
        "element_type": [
            ", ".join(sorted({types[k] for k in rows.tolist()} - {None})) or None
            for rows in groups.rows()
        ],
        "calls": groups.size.tolist(),
        "bytes": groups.sums(size, sized),
        "duration_ns": totals,
        "min_ns": groups.cells(shortest, timed > 0),
        "mean_ns": means,
        "max_ns": groups.cells(-groups.min(-duration), timed > 0),
        "exposed_ns": exposed,
        "exposed_share": [
            part / whole if part is not None and whole else None
            for part, whole in zip(exposed, totals)
        ],
        "algorithm_bytes_per_second": [rate for rate, _ in rates],
        "bus_bytes_per_second": [rate for _, rate in rates],
        "largest_message_bytes": cells(largest, largest >= 0),
        "largest_message_calls": cells(groups.number(is_largest), largest >= 0),
        "largest_message_bus_bytes_per_second": [rate for _, rate in rates_of_largest],
    }
    return Table.of(COLLECTIVES, columns).sort("duration_ns")


def _rates(
    distinct: Sequence[Any], groups: Groups, size: Ints, duration: Ints, where: Flags
) -> list[tuple[int | None, int | None]]:
    """The two bandwidths of each group; see `bandwidths`. `where` is a mask of the calls to sum."""
    kind, count = (OF_GROUP.index(name) for name in ("kind", "group_size"))
    sums = zip(groups.sums(size, where), groups.sums(duration, where))
    return [bandwidths(each[kind], each[count], *both) for each, both in zip(distinct, sums)]


def cpu_waits(links: Links) -> dict[str, list[int]]:
    """Return the communication time of each finished step in a trace without device events.

    The columns are `communication_ns` and `exposed_communication_ns`; none if no collective ran on
    the CPU. Communication is exposed while no thread runs an operator. Operators that start a
    collective, run it or wait for it do not count.
    """
    events = links.events
    if not is_on_cpu(events).any():
        return {}
    timeline = sweep(cpu_sides(links))
    communicating, working = timeline.active
    steps = links.steps
    where = {
        "communication_ns": communicating,
        "exposed_communication_ns": communicating & ~working,
    }
    begin, end = events.start_ns[steps], events.end_ns[steps]
    return {name: timeline.within(mask, begin, end).tolist() for name, mask in where.items()}
