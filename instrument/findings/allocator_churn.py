"""`allocator-churn`: the driver allocates and frees device memory again and again.

torch keeps freed memory and uses it again. So after the first steps, a program hardly calls
cudaMalloc or cudaFree. The check looks for such calls in all finished steps except the first, on
the threads that launch device work. Calls of HIP and of the driver API count too, and so do
allocations of pinned memory. cudaFree also waits for the device.

There is a finding if these calls occur in at least two steps and take at least 2 % of the time of
the steps. Even then, there is no finding if the simulation without these calls saves less than 1 %
of the step.

The trace does not show why the allocator freed memory. Causes can be torch.cuda.empty_cache(),
sizes that change from step to step, or too little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.coverage_rows import FILE
from instrument.analysis.interruptions import ALLOCATION, kinds_of
from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.device_time import LEAST_SAVING
from instrument.findings.evidence import evidence
from instrument.findings.finding import RECORD_STEPS, Check, Finding, NotRecorded, show_command
from instrument.findings.saving import is_worth, scaled
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE, _LEAST_STEPS = 0.02, 2


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if allocating and freeing device memory takes at least 2 % of the steps."""
    events, time = capture.events, capture.links.counted_steps
    launching = capture.work.call[capture.work.call >= 0]
    calls = np.flatnonzero(kinds_of(events) == ALLOCATION)
    calls = calls[np.isin(events.thread[calls], events.thread[launching])]
    step = time.holds(events.start_ns[calls])
    calls, step = calls[step >= 0], step[step >= 0]
    share = time.covered(events.start_ns[calls], events.end_ns[calls])
    if share < _LEAST_SHARE:
        return
    if time.what != "step" or time.count < _LEAST_STEPS:
        raise NotRecorded(
            "the trace has too few finished steps to show whether allocations repeat",
            RECORD_STEPS,
        )
    if len(np.unique(step)) < _LEAST_STEPS:
        return
    saving = scaled(whatif, calls)
    if not is_worth(saving, LEAST_SAVING):
        return
    path, source = common_place(capture, calls)
    yield Finding(
        code="allocator-churn",
        title=f"The driver takes {percent(share)} of the step to allocate and free memory: "
        f"{len(calls) / time.count:,.0f} calls a step",
        change="Remove torch.cuda.empty_cache() from the loop; if the sizes of tensors change, set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or pad them; if memory is short, use a "
        "smaller batch.",
        verify=show_command(capture, "--interruptions"),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=evidence(capture, calls),
        coverage=FILE,
    )


CHECK = Check("allocator-churn", find, needs_device_work=True)
