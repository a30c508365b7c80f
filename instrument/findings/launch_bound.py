"""`launch-bound`: kernels are so short that the device waits for the CPU to launch the next one.

Counted are the gaps of under 1 ms in which all devices are idle, until the call that launches the
next work has returned (`launch_gaps`); longer gaps are `device-idle`. In published traces, healthy
programs spend up to 3 % of the step in such gaps, programs with too many small kernels 9 to 73 %.
The check cannot see which kernels could be replaced by larger ones. A gap on one device or stream
does not count while another one works.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.analysis.coverage_rows import ORDERED
from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.check import Check, Problem, glob_of
from instrument.findings.evidence import evidence_by_operator
from instrument.findings.launch_gaps import LONG_NS, launch_gaps
from instrument.links.attribution import OPTIMIZER_STEP
from instrument.units import duration, percent

_LEAST_GAPS = 20


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all short gaps."""
    found, steps = launch_gaps(capture), capture.links.counted_steps
    short = found.only((found.wait_ns < LONG_NS) & (found.call >= 0))
    waited_ns = int(short.wait_ns.sum())
    share = steps.share(waited_ns)
    if share < CHECK.least_share or len(short.call) < _LEAST_GAPS:
        return
    path, source = common_place(capture, short.call, short.wait_ns)
    work_ns = capture.work.end_ns - capture.work.start_ns
    mean_ns = waited_ns // len(short.call)
    trains = any(name.startswith(OPTIMIZER_STEP) for name in capture.events.names)
    yield Problem(
        f"The device waits {percent(share)} of the {steps.what} for launches: "
        f"{len(short.call) / steps.count:,.0f} gaps of {duration(mean_ns)} on average, between "
        f"kernels of {duration(int(np.median(work_ns)))} (median)",
        short.call,
        share,
        edit=lambda whatif: whatif.graph_launch(range=glob_of(path)),
        place=(path, source),
        evidence=evidence_by_operator(
            capture,
            short.call,
            short.wait_ns,
            "time in which the device waited for the operator's kernels",
        ),
        change="Launch less often: model = torch.compile(model, mode='reduce-overhead') fuses "
        "small kernels and records them as CUDA graphs; or increase the batch size"
        + (", and use fused=True in the optimizer." if trains else "."),
    )


CHECK = Check(
    "launch-bound",
    find,
    verify="--steps --launches",
    least_share=0.05,
    least_saving=0.01,
    on_device=True,
    coverage=ORDERED,
)
