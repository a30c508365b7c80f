"""`recording-overhead`: recording makes the steps so long that the times cannot be trusted.

The usual recorded step is compared with steps of the same kind before the window; the session
measures both, of at least 10 steps (`capture.json`). On the CPU, recording usually adds 2 to 22 %,
most to programs with many small operators, whose share then looks too large. If threads waited for
a CPU, or if windows differ as much, recording need not be the cause: `diagnose` then says so. No
saving is simulated: the steps before the window already show the step without recording.
"""

from __future__ import annotations

from collections.abc import Iterator

from instrument.base.units import duration, percent
from instrument.read.advise.check import QUIET_CPUS, Check, NotRecorded, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.views.coverage import ENOUGH_STEPS, OTHER_KINDS, RECORD_ALL_KINDS
from instrument.read.views.coverage_rows import UNDISTURBED
from instrument.read.views.views import Views

#: Recorded steps are longer than others if they take at least this share more.
LEAST_EXCESS = 0.3


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem if recorded steps are much longer than those before the window."""
    cost = capture.about.cost
    recorded_ns, usual_ns = cost.recorded_step_ns or 0, cost.unrecorded_step_ns or 0
    before = cost.unrecorded_steps or 0
    if recorded_ns <= 0 or before < ENOUGH_STEPS:
        raise NotRecorded(
            f"fewer than {ENOUGH_STEPS} steps before the window were timed",
            "record with a session, and let the window begin later",
        )
    if usual_ns <= 0:
        raise NotRecorded(OTHER_KINDS, RECORD_ALL_KINDS)
    if capture.about.window.steps == 1:
        raise NotRecorded(
            "the window has only one step, which may do more than the steps before it",
            "record several steps",
        )
    excess = recorded_ns / usual_ns - 1
    if excess < LEAST_EXCESS:
        return
    if (recorded_ns * (1 - _waited(capture))) / usual_ns - 1 < LEAST_EXCESS:
        raise NotRecorded(
            "threads without a CPU may explain why recorded steps are longer", QUIET_CPUS
        )
    recorded = capture.about.window.steps or len(capture.links.steps)
    shorter = f"usual step, {duration(recorded_ns - usual_ns)} shorter"
    yield Problem(
        f"Recording makes the steps {percent(excess)} longer, so shares of the step are "
        "different in a run without recording",
        evidence=(
            Evidence("recorded steps", recorded, recorded_ns, detail="usual step"),
            Evidence("steps before the window", before, usual_ns, detail=shorter),
        ),
        change=_change(capture),
    )


CHECK = Check(
    "recording-overhead", find, verify="--coverage", coverage=(UNDISTURBED,), is_caveat=True
)


def _waited(capture: Views) -> float:
    """The part of the window in which threads of the process waited for a CPU; at most 1."""
    wait = capture.about.cpu_wait
    if wait is None or not wait.window_ns:
        return 0.0
    return min(((wait.waited_ns or 0) + (wait.workers_waited_ns or 0)) / wait.window_ns, 1.0)


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
