"""`launch-bound`: kernels are so short that the device waits for the CPU to launch the next one.

The check looks at gaps in which all devices are idle. A gap counts from its start until the call
that launches the next work has returned. The time of the data loader, compilation, garbage
collection, allocations and the profiler does not count. A gap does not count if the CPU waits for
the device when the gap begins. Only gaps shorter than 1 ms count. In a longer gap, the CPU does not
only launch work: such gaps belong to the check `device-idle`.

There is a finding if there are at least 20 such gaps and they take at least 5 % of the time of the
steps. Even then, there is no finding if the simulation saves less than 1 % of the step. In
published traces, healthy programs spend up to 3 % of the step in such gaps. Programs with too many
small kernels spend 9 to 73 %.

The check cannot see which kernels could be replaced by larger ones. A gap on one device or stream
does not count while another device or stream works.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.coverage_rows import ORDERED
from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.device_time import (
    LEAST_SAVING,
    by_operator,
    glob_of,
    has_device_work,
    launch_gaps,
)
from instrument.findings.finding import Check, Finding, show_command
from instrument.findings.saving import is_worth, simulated
from instrument.links.attribution import OPTIMIZER_STEP
from instrument.units import duration, percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

#: A gap of this length or more counts for `device_idle` instead.
LONG_NS = 1_000_000
_LEAST_SHARE, _LEAST_GAPS = 0.05, 20


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if the device waits for launches in many short gaps."""
    if not has_device_work(capture):
        return
    found, time = launch_gaps(capture), capture.links.counted_steps
    short = found.only((found.wait_ns < LONG_NS) & (found.call >= 0))
    waited_ns = int(short.wait_ns.sum())
    share = time.share(waited_ns)
    if share < _LEAST_SHARE or len(short.call) < _LEAST_GAPS:
        return
    path, source = common_place(capture, short.call, short.wait_ns)
    saving = simulated(lambda: whatif.graph_launch(range=glob_of(path)))
    if not is_worth(saving, LEAST_SAVING):
        return
    work_ns = capture.work.end_ns - capture.work.start_ns
    mean_ns = waited_ns // len(short.call)
    yield Finding(
        code="launch-bound",
        title=f"The device waits {percent(share)} of the {time.what} for launches: "
        f"{len(short.call) / time.count:,.0f} gaps of {duration(mean_ns)} on average, between "
        f"kernels of {duration(int(np.median(work_ns)))} (median)",
        change="Launch less often: model = torch.compile(model, mode='reduce-overhead') fuses "
        "small kernels and records them as CUDA graphs; or increase the batch size"
        + (", and use fused=True in the optimizer." if _trains(capture) else "."),
        verify=show_command(capture, "--steps --launches"),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=by_operator(
            capture,
            short.call,
            short.wait_ns,
            "time in which the device waited for the operator's kernels",
        ),
        coverage=ORDERED,
    )


CHECK = Check("launch-bound", find, needs_device_work=True)


def _trains(capture: Views) -> bool:
    return any(name.startswith(OPTIMIZER_STEP) for name in capture.events.names)
