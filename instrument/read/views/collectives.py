"""Two tables: a row for each collective, and sums by process group and kind.

docs/how-to/collectives.md defines the bandwidths, as NCCL's own tests do (doc/PERFORMANCE.md in
nccl-tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from instrument.read.facts.collective_records import CPU, DEVICE, cpu_sides, is_on_cpu
from instrument.read.facts.device_work import KERNEL, MEMSET
from instrument.read.facts.intervals import merged, sweep, within
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at, step_bounds
from instrument.read.trace.events import Ints
from instrument.read.views.table import Table, known_sum

if TYPE_CHECKING:
    from instrument.read.views.views import Views

# Every rank waits in such a collective until the last rank has joined it. So the collective ends at
# about the same moment on all ranks.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")

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
    links, events, found = capture.links, capture.events, capture.facts.collectives
    event, own = found["event"].to_numpy(), len(events) + pl.int_range(pl.len())
    step = step_at(events, links.steps, found["launched_ns"].to_numpy())
    numbers = pl.Series([*links.step_numbers, None], dtype=pl.Int64)
    sums = pl.col("duration_ns", "exposed_ns").sum(), pl.col("end_ns").max()
    calls = (
        found.with_columns(
            unit=pl.when(pl.col("record") >= 0).then("record").otherwise(own),
            step=numbers.gather(np.where(step >= 0, step, len(numbers) - 1)),
            start_ns=events.start_ns[event],
            end_ns=events.end_ns[event],
            duration_ns=events.duration_ns[event],
            exposed_ns=_exposed_ns(capture, found),
        )
        .sort("unit", "start_ns", maintain_order=True)
        .group_by("unit", maintain_order=True)
        .agg(*sums, pl.exclude("duration_ns", "exposed_ns", "end_ns", "event", "record").first())
    )
    alike = pl.col("start_ns").rank("ordinal").over("step", "runs_on", "name", "ranks")
    calls = calls.drop("unit", "launched_ns").with_columns(ordinal=alike.cast(pl.Int64) - 1)
    times = pl.col("start_ns", "end_ns", "duration_ns", "exposed_ns")
    calls = calls.with_columns(pl.when(pl.col("runs_on").is_not_null()).then(times))
    algorithm, bus = _rates(calls, "bytes", "duration_ns")
    calls = calls.with_columns(algorithm_bytes_per_second=algorithm, bus_bytes_per_second=bus)
    calls = calls.sort("end_ns", nulls_last=True, maintain_order=True)
    return Table.of(COLLECTIVE_CALLS, calls, begin_ns=events.begin_ns)


def _exposed_ns(capture: Views, found: pl.DataFrame) -> Ints:
    """The part of each event in which no device computes, or no thread runs an operator."""
    event, exposed_ns = found["event"].to_numpy(), np.zeros(len(found), np.int64)
    for where in (DEVICE, CPU):
        chosen = found["runs_on"].eq_missing(where).to_numpy()
        if chosen.any():
            on_device = where == DEVICE
            busy = capture.work.of(KERNEL, MEMSET) if on_device else cpu_sides(capture.links)[1]
            start_ns, end_ns = (
                side[event[chosen]] for side in (capture.events.start_ns, capture.events.end_ns)
            )
            exposed_ns[chosen] = end_ns - start_ns - within(merged(*busy), start_ns, end_ns)
    return exposed_ns


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
    begin, end = step_bounds(events, steps)
    return {name: timeline.within(mask, begin, end).tolist() for name, mask in where.items()}
