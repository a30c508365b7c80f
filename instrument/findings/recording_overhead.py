"""`recording-overhead`: recording makes the steps so long that the times cannot be trusted.

The check compares two median durations: of the recorded steps, and of the steps before the window.
The session measures both and stores them in `capture.json` under `cost`. There is a finding if
recorded steps are at least 30 % longer. On the CPU, recording usually adds 2 to 22 %. It adds most
to programs with many small operators, and can double a step of a millisecond. The capture of such a
program shows too large a share for small operators, and too small a share for long kernels.

No saving is simulated, because the steps before the window already show the step without recording.
The check needs `capture.json` and at least 10 steps before the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from instrument.analysis.coverage import ENOUGH_STEPS
from instrument.analysis.coverage_rows import UNDISTURBED
from instrument.analysis.views import Views
from instrument.findings.finding import Check, Evidence, Finding, NotRecorded, show_command
from instrument.units import duration, percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_EXCESS = 0.3


def find(capture: Views, _: Scenario) -> Iterator[Finding]:
    """Yield one finding if recorded steps are at least 30 % longer than those before the window."""
    cost = capture.about.cost
    recorded_ns, usual_ns = cost.recorded_step_ns, cost.unrecorded_step_ns
    known = recorded_ns and usual_ns and recorded_ns > 0 and usual_ns > 0
    if not known or (cost.unrecorded_steps or 0) < ENOUGH_STEPS:
        raise NotRecorded(
            f"fewer than {ENOUGH_STEPS} steps before the window were timed",
            "record with a session, and let the window begin later",
        )
    assert recorded_ns is not None
    assert usual_ns is not None
    excess = recorded_ns / usual_ns - 1
    if excess < _LEAST_EXCESS:
        return
    yield Finding(
        code="recording-overhead",
        title=f"Recording makes the steps {percent(excess)} longer, so shares of the step are "
        "different in a run without recording",
        change=_change(capture),
        verify=show_command(capture, "--coverage"),
        evidence=(
            Evidence("recorded steps", _recorded_steps(capture), recorded_ns, None, "median step"),
            Evidence(
                "steps before the window",
                cost.unrecorded_steps or 0,
                usual_ns,
                None,
                f"median step, {duration(recorded_ns - usual_ns)} shorter",
            ),
        ),
        coverage=(UNDISTURBED,),
    )


def _change(capture: Views) -> str:
    events = capture.events
    recorded = {
        "with_stack": len(capture.links.frames) > 0 or (events.call_stack >= 0).any(),
        "record_shapes": (events.types >= 0).any(),
        "profile_memory": len(events.memory) > 0,
    }
    options = ", ".join(f"profiler.{name}=false" for name, is_on in recorded.items() if is_on)
    less = f"Record less: {options}. " if options else ""
    return (
        f"{less}Mark fewer and larger ranges. profiler=timings costs least; it times only ranges."
    )


def _recorded_steps(capture: Views) -> int:
    return capture.about.window.steps or len(capture.links.steps)


CHECK = Check("recording-overhead", find)
