"""Kernels and copies by name, the calls that launched them, and the streams on which they ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from instrument.read.facts.device_work import KINDS, by_group
from instrument.read.facts.groupby import groupby
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.views.table import Table, known_sum

if TYPE_CHECKING:
    from instrument.read.views.views import Views

KERNELS: Schema = schema(
    name="the kernel's name",
    kind="kernel or communication",
    calls="how many times the kernel ran",
    device_ns="device time of all calls",
    min_ns="the duration of the shortest call",
    mean_ns="the mean duration of a call, rounded down to a nanosecond",
    max_ns="the duration of the longest call",
    launch_ns="CPU time of the calls that launched the kernel; a call that launches several "
    "kernels, such as the launch of a CUDA graph, counts only for the first of these kernels; None "
    "if the trace holds no launch of the kernel",
    short_calls="the number of calls whose device time is shorter than the CPU time of their "
    "launch; if a launch starts several kernels, their device times are summed; None if the trace "
    "holds no launch of the kernel",
    grid="blocks in each dimension, for the longest call; None if the grid was not recorded. On "
    "ROCm, for some kernels these are threads and not blocks",
    block="threads of a block in each dimension, for the longest call; None if the block was not "
    "recorded",
    blocks_per_sm="blocks per multiprocessor, averaged over the kernel's time; None if they were "
    "not recorded",
    occupancy="Kineto's estimate of the achieved occupancy as a fraction, averaged over the time "
    "of the calls that have an estimate",
    occupancy_covered="the time of the calls that have an estimate, as a share of the time of all "
    "calls. Kineto makes no estimate for many kernels, such as the kernels of cuBLAS and NCCL",
)
COPIES: Schema = schema(
    name='the kind of copy or memset, such as "Memcpy HtoD (Pinned -> Device)"',
    calls="how many times this kind of copy or memset ran",
    device_ns="device time of all calls",
    min_ns="the duration of the shortest call",
    mean_ns="the mean duration of a call, rounded down to a nanosecond",
    max_ns="the duration of the longest call",
    bytes="bytes moved, summed over the copies and memsets whose size is known from the device "
    "event or from the CPU call; None if no size is known",
    bytes_per_second="`bytes` divided by the device time of the copies and memsets whose size is "
    "known",
)
STREAMS: Schema = schema(
    device="the device, as the trace numbers it",
    stream="the stream, as the trace numbers it",
    calls="the number of device events that ran on the stream",
    busy_ns="time in which anything ran on the stream",
    compute_ns="time in which a memset, or a kernel that is not communication, ran",
    communication_ns="time in which communication ran",
    copy_ns="time in which copies ran",
    idle_ns="time in which nothing ran on the stream, from its first work to its last work",
)
LAUNCHES: Schema = schema(
    name="the name of the CPU call that launched device work, such as cudaLaunchKernel",
    calls="how many calls of this name launched device work",
    device_calls="the number of kernels, copies and memsets that the calls launched",
    launch_ns="CPU time of the calls",
    device_ns="device time of the work that the calls launched",
    median_delay_ns="the median delay from the end of a call to the start of the first work that "
    "it launched (the lower one of two middle delays); a delay is 0 if the work started before "
    "the call returned",
    max_delay_ns="the longest delay",
    short_calls="the number of calls whose CPU time is longer than the device time of the work "
    "that they launched",
)

_KERNELS = pl.col("kind").is_in(["kernel", "communication"])
_SPREAD = (
    pl.len().alias("calls"),
    pl.sum("duration_ns").alias("device_ns"),
    pl.min("duration_ns").alias("min_ns"),
    (pl.sum("duration_ns") // pl.len()).alias("mean_ns"),
    pl.max("duration_ns").alias("max_ns"),
)
_LONGEST = pl.col("duration_ns").arg_sort().last()


def kernels(capture: Views) -> Table:
    """Return one row for each kernel name, the most device time first; see `KERNELS`."""
    return Table.of(KERNELS, kernels_by_name(_work(capture)))


def kernels_by_layer(capture: Views) -> Table:
    """Return the table of kernels with a row for each name and layer."""
    found = kernels_by_name(_work(capture, "layer"), "layer")
    name, *others = names_of(KERNELS)
    return Table(found.select(name, "layer", *others))


def kernels_by_name(work: pl.DataFrame, *by: str) -> pl.DataFrame:
    """The columns of `KERNELS` for some rows of the table of events with their launches.

    The kernels are grouped by their name, and by the columns `by`.
    """
    sm, occupancy, time = pl.col("blocks_per_sm"), pl.col("occupancy"), pl.col("duration_ns")
    known_ns = time.filter(occupancy.is_not_null()).sum()
    groups = work.filter(_KERNELS).group_by("name", *by, maintain_order=True)
    found = groups.agg(
        *_SPREAD,
        pl.col("kind").get(_LONGEST),
        known_sum(pl.col("launch_ns")),
        known_sum(pl.col("is_short")).cast(pl.Int64).alias("short_calls"),
        pl.col("grid", "block").get(_LONGEST),
        _ratio(_millionths(sm * time).sum(), 1_000_000 * time.filter(sm.is_not_null()).sum()).alias(
            "blocks_per_sm"
        ),
        _ratio(_millionths(occupancy * time).sum(), 1_000_000 * known_ns),
        _ratio(known_ns, time.sum()).alias("occupancy_covered"),
    )
    return found.sort("device_ns", descending=True, maintain_order=True)


def copies(capture: Views) -> Table:
    """Return one row for each kind of copy or memset, the most device time first; see `COPIES`."""
    rows = capture.rows("name", "kind", "duration_ns", "bytes")
    rows = rows.filter(pl.col("kind").is_in(["copy", "memset"]))
    known_ns = pl.col("duration_ns").filter(pl.col("bytes").is_not_null()).sum()
    rate = (pl.col("bytes").cast(pl.Int128) * 10**9) // pl.col("known_ns")
    fits = (pl.col("known_ns") > 0) & (rate < 2**63)
    found = rows.group_by("name", maintain_order=True).agg(
        *_SPREAD, known_sum(pl.col("bytes")), known_ns.alias("known_ns")
    )
    found = found.with_columns(pl.when(fits).then(rate).cast(pl.Int64).alias("bytes_per_second"))
    found = found.drop("known_ns").sort("device_ns", descending=True, maintain_order=True)
    return Table.of(COPIES, found)


def launches(capture: Views) -> Table:
    """Return one row for each kind of CPU call that launches device work; see `LAUNCHES`.

    The row with the most CPU time comes first. Device work whose launch is not in the trace is not
    counted. The sums, delays and short calls are those of HTA's `get_cuda_kernel_launch_stats`,
    which leaves out the last step, counts only cudaLaunchKernel, cudaLaunchKernelExC,
    cudaMemcpyAsync and cudaMemsetAsync, counts each pair of a call and a device event once, and
    rounds to microseconds.
    """
    work = _work(capture).filter(pl.col("launcher").is_not_null())
    call = capture.facts.events("name", "duration_ns", "end_ns")
    by_call = work.group_by("launcher", maintain_order=True).agg(
        pl.len().alias("device_calls"),
        pl.sum("duration_ns").alias("device_ns"),
        pl.min("start_ns").alias("first_ns"),
    )
    late_ns = pl.max_horizontal(pl.col("first_ns") - pl.col("end_ns"), 0)
    rows = pl.concat([by_call, call[by_call["launcher"]]], how="horizontal")
    found = (
        rows.with_columns(late_ns.alias("late_ns"))
        .group_by("name", maintain_order=True)
        .agg(
            pl.len().alias("calls"),
            pl.sum("device_calls", "device_ns"),
            pl.sum("duration_ns").alias("launch_ns"),
            pl.col("late_ns").sort().get((pl.len() - 1) // 2).alias("median_delay_ns"),
            pl.max("late_ns").alias("max_delay_ns"),
            (pl.col("device_ns") < pl.col("duration_ns")).sum().alias("short_calls"),
        )
    )
    return Table.of(LAUNCHES, found.sort("launch_ns", descending=True, maintain_order=True))


def _work(capture: Views, *more: str) -> pl.DataFrame:
    """The device events with the time of their launches, and the columns `more`.

    `launch_ns` is the CPU time of the launch for its first event, and 0 for others; `is_short` says
    whether the launch took longer than all its events. Both are null without a launch.
    """
    columns = ("id", "name", "kind", "start_ns", "duration_ns", "launcher")
    of_kernels = ("grid", "block", "blocks_per_sm", "occupancy")
    work = capture.rows(*columns, *of_kernels, *more)
    work = work.filter(pl.col("kind").is_in(KINDS))
    cost = pl.Series("cost_ns", capture.facts.events("duration_ns")["duration_ns"])
    work = work.with_columns(cost.gather(work["launcher"]))
    first = work.sort("start_ns", maintain_order=True).unique("launcher", keep="first")["id"]
    counts = pl.when(pl.col("id").is_in(first.implode())).then("cost_ns").otherwise(0)
    is_known = pl.col("launcher").is_not_null()
    return work.with_columns(
        pl.when(is_known).then(counts).alias("launch_ns"),
        pl.when(is_known)
        .then(pl.sum("duration_ns").over("launcher") < pl.col("cost_ns"))
        .alias("is_short"),
    )


def _millionths(value: pl.Expr) -> pl.Expr:
    """A value as a whole number of millionths, whose sums are exact in any order."""
    return (value * 1_000_000).round().cast(pl.Int128)


def _ratio(part: pl.Expr, whole: pl.Expr) -> pl.Expr:
    return pl.when(whole > 0).then(part / whole)


def streams(capture: Views) -> Table:
    """Return one row for each stream on which work ran, the busiest first; see `STREAMS`."""
    events, work = capture.events, capture.work
    present, groups = groupby(events.thread[work.event])
    found = by_group(work, groups.of, groups.count)
    names = ("compute_ns", "communication_ns", "copy_ns", "idle_ns")
    threads = [events.threads[k] for k in present.tolist()]
    columns: dict[str, list[Any]] = {
        "device": [device for device, _ in threads],
        "stream": [stream for _, stream in threads],
        "calls": groups.size.tolist(),
        "busy_ns": (found["total_ns"] - found["idle_ns"]).tolist(),
        **{name: found[name].tolist() for name in names},
    }
    return Table.of(STREAMS, columns).sort("busy_ns")
