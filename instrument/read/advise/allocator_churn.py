"""`allocator-churn`: the driver allocates and frees device memory again and again.

Calls such as cudaMalloc and cudaFree count on the threads that launch device work: a warm program
hardly makes any. They must occur in at least two steps and take `least_share` of the steps. The
trace does not show why the allocator freed memory: torch.cuda.empty_cache(), sizes that change from
step to step, or too little memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import RECORD_STEPS, Check, NotRecorded, Problem
from instrument.read.advise.evidence import share_of
from instrument.read.views.coverage_rows import FILE
from instrument.read.views.interruptions import ALLOCATION, kinds_of
from instrument.read.views.views import Views

_LEAST_STEPS = 2


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all calls that allocate or free device memory."""
    events, steps = capture.events, capture.links.counted_steps
    launching = capture.work.call[capture.work.call >= 0]
    calls = np.flatnonzero(kinds_of(events) == ALLOCATION)
    calls = calls[np.isin(events.thread[calls], events.thread[launching])]
    step = steps.holds(events.start_ns[calls])
    calls, step = calls[step >= 0], step[step >= 0]
    share = share_of(capture, calls)
    if share < CHECK.least_share:
        return
    if steps.what != "step" or steps.count < _LEAST_STEPS:
        raise NotRecorded(
            "the trace has too few finished steps to show whether allocations repeat",
            RECORD_STEPS,
        )
    if len(np.unique(step)) >= _LEAST_STEPS:
        yield Problem(
            f"The driver takes {percent(share)} of the step to allocate and free memory: "
            f"{len(calls) / steps.count:,.0f} calls a step",
            calls,
            share,
        )


CHECK = Check(
    "allocator-churn",
    find,
    change="Remove torch.cuda.empty_cache() from the loop; if the sizes of tensors change, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or pad them; if memory is short, use a "
    "smaller batch.",
    verify="--interruptions",
    least_share=0.02,
    factor=0,
    on_device=True,
    coverage=FILE,
)
