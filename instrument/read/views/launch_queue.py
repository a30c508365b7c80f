"""The launch queue of each stream: work that the CPU has launched and the device has not started.

A launch is outstanding from the start of its CPU call until the device starts its work, as in HTA's
`get_queue_length_time_series`. A call that starts several device events, such as the launch of a
CUDA graph, is one launch on each of their streams, until the first of them starts. HTA does not
count such calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from instrument.read.facts.device_work import queued_launches
from instrument.read.facts.schema import Schema, schema
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

# If a stream has this many outstanding launches, the next CUDA call for the stream waits until the
# work of one launch starts. CUDA allows about 1024. Measured on a V100: all 1288 calls that found
# 1021 outstanding launches waited, and no other call waited.
FULL_QUEUE = 1021

QUEUE: Schema = schema(
    device="the device, as the trace numbers it",
    stream="the stream, as the trace numbers it",
    launches="the number of launches on this stream for which the trace has the CPU call; a call "
    "that starts several device events, such as the launch of a CUDA graph, is one launch",
    mean_length="the number of outstanding launches, averaged over `total_ns`; a launch is "
    "outstanding from the start of its CPU call until the device starts its work",
    max_length="the largest number of outstanding launches",
    empty_ns="part of `total_ns` in which no launch was outstanding: the device had nothing to "
    "start next",
    total_ns="time from the first launch until the device started the last work",
    blocked_calls="the number of calls that waited because the queue was full: CUDA allows about "
    "1024 outstanding launches for each stream; None if no CUDA call launched work on the stream",
    blocked_ns="how long the calls of `blocked_calls` waited for the device to start the oldest "
    "outstanding work",
    unlaunched="the number of device events whose launch is not in the trace, for example because "
    "the launch was before the recording. These events do not count as launches, so the queue was "
    "longer than shown",
)


def queue(capture: Views) -> Table:
    """Return one row for each stream on which work ran, the most launches first; see `QUEUE`.

    The clocks of CPU and device may differ: a device event that seems to start before its launch
    counts as outstanding for 0 ns. Cost: some sorts of the launches.
    """
    events, work = capture.events, capture.work
    ran = pl.DataFrame({"stream": events.thread[work.event].astype(np.int64), "call": work.call})
    streams = ran.group_by("stream").agg(unlaunched=(pl.col("call") < 0).sum()).sort("stream")
    launched = queued_launches(events, work).with_columns(
        pl.max_horizontal("started_ns", "called_ns").alias("started_ns")
    )
    # A call that finds `FULL_QUEUE` outstanding launches waits until the device starts the oldest
    # one, unless it returns before this start.
    called, starts = pl.col("called_ns"), pl.col("started_ns").sort()
    started = starts.search_sorted(called, side="right").cast(pl.Int64)
    oldest = starts.gather(pl.min_horizontal(started, pl.len().cast(pl.Int64) - 1))
    is_full = pl.int_range(pl.len()) - started >= FULL_QUEUE
    blocked = pl.when(is_full & (oldest <= pl.col("returned_ns"))).then(oldest - called)
    is_cuda = pl.col("is_cuda").any()
    launches = launched.group_by("stream").agg(
        launches=pl.len(),
        waited_ns=(pl.col("started_ns") - called).sum(),
        blocked_calls=pl.when(is_cuda).then((blocked > 0).sum()),
        blocked_ns=pl.when(is_cuda).then(blocked.sum()),
    )
    changes = [
        launched.select("stream", time_ns=time, change=pl.lit(change))
        for time, change in (("called_ns", 1), ("started_ns", -1))
    ]
    lengths = pl.concat(changes).group_by("stream", "time_ns").agg(pl.col("change").sum())
    length, lasts_ns = pl.col("change").cum_sum(), pl.col("time_ns").diff().shift(-1).fill_null(0)
    lengths = (
        lengths.sort("stream", "time_ns")
        .group_by("stream")
        .agg(
            max_length=length.max(),
            empty_ns=lasts_ns.filter(length == 0).sum(),
            total_ns=lasts_ns.sum(),
        )
    )
    # The integral of the queue's length over time is the sum of the times that launches wait in it.
    found = (
        streams.join(launches, on="stream", how="left")
        .join(lengths, on="stream", how="left")
        .sort("stream")
        .with_columns(pl.col("launches").fill_null(0))
        .sort("launches", descending=True, maintain_order=True)
        .with_columns(
            pl.col(pl.UInt32).cast(pl.Int64),
            mean_length=pl.when(pl.col("total_ns") > 0).then(
                pl.col("waited_ns") / pl.col("total_ns")
            ),
        )
    )
    threads = [events.threads[k] for k in found["stream"].to_list()]
    cells = found.drop("stream", "waited_ns").to_dict()
    device, stream_of = [device for device, _ in threads], [stream for _, stream in threads]
    return Table.of(QUEUE, {**cells, "device": device, "stream": stream_of})
