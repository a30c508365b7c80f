"""Two tables: a row for each collective, and sums by process group and kind.

docs/gpu.md defines the bandwidths, as NCCL's own tests do (doc/PERFORMANCE.md in nccl-tests).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from instrument.read.facts.collective_records import (
    RECORD,
    collective_details,
    collective_kind,
    collective_records,
    cpu_sides,
    is_on_cpu,
    kinds_of_collectives,
    known_count,
    message_bytes,
    records,
)
from instrument.read.facts.device_work import COMMUNICATION, KERNEL, MEMSET, Work
from instrument.read.facts.idle import launching_step
from instrument.read.facts.intervals import Intervals, merged, sweep, within
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at, step_number
from instrument.read.trace.events import Events, Ints, flags
from instrument.read.views.table import Table, known_sum

if TYPE_CHECKING:
    from instrument.read.views.views import Views

# Every rank waits in such a collective until the last rank has joined it. So the collective ends at
# about the same moment on all ranks.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
# Where a collective ran.
DEVICE, CPU = "device", "CPU"
# torch's description of a process group that was made without a description.
_NO_DESCRIPTION = "undefined"

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
# The columns that torch's records and the names of events give; see `_described`.
_DESCRIBED = ("name", *OF_GROUP[:-1], "element_type", "number", "bytes")


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


def collective_calls(capture: Views) -> Table:
    """Return one row for each collective, in order of its end; see `COLLECTIVE_CALLS`.

    torch records each collective as a CPU event, which is called its record here. Kernels with the
    same record are one collective. Collectives with a record and without a kernel, as in a group of
    one rank, come last.

    Limit: coalesced collectives run as one kernel, which belongs to none of their records. So each
    of them has a row without a time, and the kernel has a row without a size.

    Cost: sorts the device events. If gloo or MPI ran on the CPU, the call tree is built too.
    """
    links, work = capture.links, capture.work
    events, steps = links.events, links.steps
    on_device = _on_device(events, work, steps)
    recorded_only = _recorded_only(events, steps, on_device["record"].to_numpy())
    found = pl.concat([on_device, _on_cpu(links, steps), recorded_only])
    event = found["event"].to_numpy()
    of_record, own = pl.col("record"), len(events) + pl.int_range(pl.len())
    calls = (
        found.with_columns(
            unit=pl.when(of_record >= 0).then(of_record).otherwise(own),
            start_ns=events.start_ns[event],
            end_ns=events.end_ns[event],
            duration_ns=events.duration_ns[event],
        )
        .sort("unit", "start_ns", maintain_order=True)
        .group_by("unit", maintain_order=True)
        .agg(
            pl.col("event", "record", "around", "step", "runs_on", "start_ns").first(),
            pl.col("end_ns").max(),
            pl.col("duration_ns", "exposed_ns").sum(),
        )
    )
    described = [*zip(*_described(events, calls))] or [()] * len(_DESCRIBED)
    names = Table({name: [*cells] for name, cells in zip(_DESCRIBED, described)}).frame
    alike = pl.col("start_ns").rank("ordinal").over("step", "runs_on", "name", "ranks")
    numbers = {k: step_number(events, event) for k, event in enumerate(steps.tolist())}
    calls = calls.drop("event", "record", "around", "unit").hstack(names)
    calls = calls.with_columns(
        ordinal=alike.cast(pl.Int64) - 1,
        step=pl.col("step").replace_strict(numbers, default=None, return_dtype=pl.Int64),
    )
    times = pl.col("start_ns", "end_ns", "duration_ns", "exposed_ns")
    calls = calls.with_columns(pl.when(pl.col("runs_on").is_not_null()).then(times))
    algorithm, bus = _rates(calls, "bytes", "duration_ns")
    calls = calls.with_columns(algorithm_bytes_per_second=algorithm, bus_bytes_per_second=bus)
    calls = calls.sort("end_ns", nulls_last=True, maintain_order=True)
    return Table.of(COLLECTIVE_CALLS, calls, begin_ns=events.begin_ns)


def _found(
    event: Ints, record: Ints, around: Ints, step: Ints, exposed_ns: Ints, runs_on: str | None
) -> pl.DataFrame:
    """Events of collectives, whose positions, or -1, are in `event`, `record` and `around`.

    `event` is a kernel, an annotation or a record; `record` is the CPU event in which torch
    recorded the collective; `around` is the annotation around the launch; `step` is the index of
    the finished step that launched it.
    """
    columns = {
        "event": event,
        "record": record,
        "around": around,
        "step": step,
        "exposed_ns": exposed_ns,
    }
    frame = pl.DataFrame({name: each.astype(np.int64) for name, each in columns.items()})
    return frame.with_columns(runs_on=pl.lit(runs_on, pl.String))


def _on_device(events: Events, work: Work, steps: Ints) -> pl.DataFrame:
    chosen = np.flatnonzero(work.kind == COMMUNICATION)
    record, around = collective_records(events, work.operator[chosen], work.call[chosen])
    exposed = _outside(work.of(KERNEL, MEMSET), work.start_ns[chosen], work.end_ns[chosen])
    step = launching_step(events, work, steps)[chosen]
    return _found(work.event[chosen], record, around, step, exposed, DEVICE)


def _on_cpu(links: Links, steps: Ints) -> pl.DataFrame:
    events = links.events
    index = np.flatnonzero(is_on_cpu(events))
    start, end = events.start_ns[index], events.end_ns[index]
    exposed = _outside(cpu_sides(links)[1], start, end) if len(index) else start
    none = np.full(len(index), -1)
    return _found(index, none, index, step_at(events, steps, start), exposed, CPU)


def _recorded_only(events: Events, steps: Ints, used: Ints) -> pl.DataFrame:
    """The collectives that have a record and no kernel; `used` are the records with a kernel."""
    is_named = flags(
        lambda each: collective_kind(each.collective or "") is not None, events.details
    )
    chosen = records(events)
    chosen &= np.append(is_named, False)[events.detail]
    chosen[used[used >= 0]] = False
    index = np.flatnonzero(chosen)
    none, step = np.full(len(index), -1), step_at(events, steps, events.start_ns[index])
    return _found(index, index, none, step, np.zeros_like(index), None)


def _outside(intervals: Intervals, start_ns: Ints, end_ns: Ints) -> Ints:
    """How many ns of each span from `start_ns` to `end_ns` are outside of all intervals."""
    return end_ns - start_ns - within(merged(*intervals), start_ns, end_ns)


def _described(events: Events, calls: pl.DataFrame) -> Iterator[tuple[Any, ...]]:
    """What torch says about each collective, and the names: the columns `_DESCRIBED`."""
    event, record, around = (calls[name].to_numpy() for name in ("event", "record", "around"))
    details = collective_details(events, event, record)
    kinds = kinds_of_collectives(events, details, event, around)
    for each, kind, own in zip(details, kinds, events.name[event].tolist()):
        name = events.names[own].replace("(anonymous namespace)::", "").partition("(")[0]
        about = each.group_description
        yield (
            (each.collective or "") if name == RECORD else name,
            kind,
            each.process_group,
            None if about == _NO_DESCRIPTION else about,
            each.ranks,
            known_count(each.group_size),
            each.element_type,
            known_count(each.collective_number),
            message_bytes(kind, each),
        )


def collectives(capture: Views) -> Table:
    """Return one row for each process group and kind of collective; see `COLLECTIVES`.

    The row with the longest total time comes first. The kernel of a collective starts when the rank
    is ready, and ends when all ranks are done. So the bandwidths are lower bounds.
    `Ranks.collectives` has times without the waiting.
    """
    duration, size, exposed = pl.col("duration_ns"), pl.col("bytes"), pl.col("exposed_ns")
    sized = duration.is_not_null() & size.is_not_null()
    largest = sized & (size == size.filter(sized).max())

    groups = capture.collective_calls.frame.group_by(OF_GROUP, maintain_order=True).agg(
        element_type=pl.col("element_type").drop_nulls().unique().sort().str.join(", "),
        calls=pl.len().cast(pl.Int64),
        bytes=known_sum(size),
        duration_ns=known_sum(duration),
        min_ns=duration.min(),
        mean_ns=duration.sum() // duration.count(),
        max_ns=duration.max(),
        exposed_ns=known_sum(exposed),
        exposed_share=exposed.sum() / duration.sum(),
        largest_message_bytes=size.filter(sized).max(),
        largest_message_calls=pl.when(sized.any()).then(largest.sum().cast(pl.Int64)),
        sized_bytes=known_sum(size.filter(sized)),
        sized_ns=known_sum(duration.filter(sized)),
        largest_bytes=known_sum(size.filter(largest)),
        largest_ns=known_sum(duration.filter(largest)),
    )
    algorithm, bus = _rates(groups, "sized_bytes", "sized_ns")
    _, of_largest = _rates(groups, "largest_bytes", "largest_ns")
    groups = groups.with_columns(
        pl.col("element_type").replace("", None),
        pl.col("exposed_share").fill_nan(None),
        algorithm_bytes_per_second=algorithm,
        bus_bytes_per_second=bus,
        largest_message_bus_bytes_per_second=of_largest,
    ).drop("sized_bytes", "sized_ns", "largest_bytes", "largest_ns")
    return Table.of(COLLECTIVES, groups).sort("duration_ns")


def _rates(frame: pl.DataFrame, size: str, duration: str) -> tuple[pl.Series, pl.Series]:
    """The algorithm and the bus bandwidth of each row, as `bandwidths` computes them."""
    rows = frame.select("kind", "group_size", size, duration).iter_rows()
    rates = [*zip(*(bandwidths(*row) for row in rows))] or [(), ()]
    algorithm, bus = (pl.Series(each, dtype=pl.Int64, strict=False) for each in rates)
    return algorithm, bus


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
