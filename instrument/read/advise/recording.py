"""The recording itself: a slow first step, and a cost that makes the times untrue."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from instrument.base.units import duration, percent
from instrument.read.advise.check import FOUR_STEPS, QUIET_CPUS, Check, NotRecorded, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.views.coverage import ENOUGH_STEPS, OTHER_KINDS, RECORD_ALL_KINDS
from instrument.read.views.coverage_rows import CPU_IN_STEPS, UNDISTURBED
from instrument.read.views.interruptions import KINDS, kinds_of
from instrument.read.views.phases import engine_of
from instrument.read.views.views import Views

# The first step must take so many times as long as the longest other step, and so much longer.
_LEAST_FACTOR, _LEAST_NS = 2.0, 10_000_000
# A cause explains at least this part of the difference.
_LEAST_CAUSE = 0.2
# What each kind of interruption is called in a title.
_CAUSES = {
    "loader": "waiting for data, while the loader starts",
    "module loading": "loading kernel code onto the device",
    "memory allocation": "allocating and freeing device memory",
    "profiler": "the profiler's own work",
}
#: Recorded steps are longer than others if they take at least this share more.
LEAST_EXCESS = 0.3


def first_step(capture: Views) -> Iterator[Problem]:
    """Find a first step much longer than all others, and what it does that the others do not.

    If another step is as long, as where long and short steps take turns, the first is not special.
    """
    if engine_of(capture):  # a step with more tokens is longer
        return
    took = capture.events.duration_ns[capture.links.steps]
    longest_ns = int(took[1:].max())
    more_ns = int(took[0]) - longest_ns
    if not longest_ns or more_ns < _LEAST_NS or took[0] < _LEAST_FACTOR * longest_ns:
        return
    why, rows = "", tuple[Evidence, ...]()
    name, cause_ns, calls = max(_causes(capture), key=lambda cause: cause[1], default=("", 0, 0))
    if cause_ns >= _LEAST_CAUSE * more_ns:
        why = f"; {percent(min(cause_ns / more_ns, 1))} of the difference is {name}"
        rows = (Evidence(name, calls, cause_ns, detail="more than in other steps"),)
    first = capture.links.step_numbers[0]
    yield Problem(
        f"Step {first}, the first recorded, takes {duration(int(took[0]))}, "
        f"{took[0] / longest_ns:.1f} times as long as the longest other step{why}",
        evidence=rows,
    )


FIRST_STEP = Check(
    "first-step",
    first_step,
    change="Set profiler.warmup=3 or a larger profiler.wait. The window then begins later, and "
    "holds only usual steps.",
    verify="--steps",
    needs=(FOUR_STEPS,),
    coverage=(CPU_IN_STEPS,),
    is_caveat=True,
)


def recording_overhead(capture: Views) -> Iterator[Problem]:
    """Find recorded steps that are much longer than those of the same kind before the window.

    If threads waited for a CPU, or if windows differ as much (see `diagnose`), recording need not
    be the cause.
    """
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
    excess, wait, waited = recorded_ns / usual_ns - 1, capture.about.cpu_wait, 0.0
    if excess < LEAST_EXCESS:
        return
    if wait is not None and wait.window_ns:
        waited = ((wait.waited_ns or 0) + (wait.workers_waited_ns or 0)) / wait.window_ns
    if recorded_ns * (1 - min(waited, 1.0)) / usual_ns - 1 < LEAST_EXCESS:
        raise NotRecorded(
            "threads without a CPU may explain why recorded steps are longer", QUIET_CPUS
        )
    events, recorded = capture.events, capture.about.window.steps or len(capture.links.steps)
    options = {
        "with_stack": len(capture.links.frames) > 0 or (events.call_stack >= 0).any(),
        "record_shapes": events.records_inputs,
        "profile_memory": len(events.memory) > 0,
    }
    less = ", ".join(f"profiler.{name}=false" for name, is_on in options.items() if is_on)
    shorter = f"usual step, {duration(recorded_ns - usual_ns)} shorter"
    yield Problem(
        f"Recording makes the steps {percent(excess)} longer, so shares of the step are "
        "different in a run without recording",
        evidence=(
            Evidence("recorded steps", recorded, recorded_ns, detail="usual step"),
            Evidence("steps before the window", before, usual_ns, detail=shorter),
        ),
        change=(f"Record less: {less}. " if less else "")
        + "Mark fewer and larger ranges. profiler=timings costs least; it times only ranges.",
    )


RECORDING_OVERHEAD = Check(
    "recording-overhead",
    recording_overhead,
    verify="--coverage",
    coverage=(UNDISTURBED,),
    is_caveat=True,
)


def _causes(capture: Views) -> Iterator[tuple[str, int, int]]:
    """Yield interruptions, operators, calls and ranges of the first step.

    With the name comes how much longer their own time is than the median of the other steps, and
    their number.
    """
    events, steps = capture.events, capture.links.steps
    first = capture.links.step_numbers[0]
    environment = capture.about.environment
    searches = environment is not None and environment.cudnn_benchmark
    kinds = pl.Series([*(_CAUSES.get(kind, kind) for kind in KINDS), None]).gather(kinds_of(events))
    rows = capture.facts.events("name", "kind", "step", "own_ns")
    rows = rows.with_columns(pl.coalesce(kinds, "name").alias("name"))
    rows = rows.filter(pl.col("step").is_not_null() & (pl.col("kind") != "step"))
    own = rows.group_by("name", "step").agg(pl.sum("own_ns"), pl.len().alias("calls"))
    usual = own.filter(pl.col("step") != first).group_by("name").agg("own_ns")
    of_first = own.filter(pl.col("step") == first).join(usual, on="name", how="left")
    for name, _, own_ns, calls, others in of_first.sort("name").iter_rows():
        in_others = np.zeros(len(steps) - 1, np.int64)
        in_others[: len(others or ())] = others or ()
        if searches and "convolution" in name:
            name = f"{name}, for which cuDNN searches its fastest algorithm"
        yield name, int(own_ns - np.median(in_others)), calls
