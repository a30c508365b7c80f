"""The CPU calls that launch device work: their number and time, and how late the work starts."""

from __future__ import annotations

from typing import Any

import numpy as np

from instrument.read.facts.device_work import Work
from instrument.read.facts.groupby import groupby
from instrument.read.facts.schema import Schema, schema
from instrument.read.trace.events import Events
from instrument.read.views.table import Table

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


def launches(events: Events, work: Work) -> Table:
    """Return one row for each kind of CPU call that launches device work; see `LAUNCHES`.

    The row with the most CPU time comes first. Device work whose launch is not in the trace is not
    counted. The sums, delays and short calls are those of HTA's `get_cuda_kernel_launch_stats`,
    which leaves out the last step, counts only cudaLaunchKernel, cudaLaunchKernelExC,
    cudaMemcpyAsync and cudaMemsetAsync, counts each pair of a call and a device event once, and
    rounds to microseconds.
    """
    known = np.flatnonzero(work.call >= 0)
    device = work.event[known]
    call, by_call = groupby(work.call[known])
    first = device[by_call.sorted_by(events.start_ns[device]).row(0)]
    launch_ns, ran = events.duration_ns[call], by_call.sum(events.duration_ns[device])
    delay = np.maximum(events.start_ns[first] - events.end_ns[call], 0)
    names, groups = groupby(events.name[call])
    by_delay = groups.sorted_by(delay)
    columns: dict[str, list[Any]] = {
        "name": [events.names[k] for k in names.tolist()],
        "calls": groups.size.tolist(),
        "device_calls": groups.sum(by_call.size).tolist(),
        "launch_ns": groups.sum(launch_ns).tolist(),
        "device_ns": groups.sum(ran).tolist(),
        "median_delay_ns": delay[by_delay.row(50)].tolist(),
        "max_delay_ns": delay[by_delay.row(100)].tolist(),
        "short_calls": groups.number(ran < launch_ns).tolist(),
    }
    return Table.of(LAUNCHES, columns).sort("launch_ns")
