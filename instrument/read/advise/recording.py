"""The recording itself: a slow first step, and a cost that makes the times untrue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.advise.check import FOUR_STEPS, QUIET_CPUS, Check, NotRecorded, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.facts.groupby import Groups, groupby
from instrument.read.facts.intervals import merged, within
from instrument.read.facts.step_index import step_at, step_number
from instrument.read.trace.events import Ints
from instrument.read.views.coverage import ENOUGH_STEPS, OTHER_KINDS, RECORD_ALL_KINDS
from instrument.read.views.coverage_rows import CPU_IN_STEPS, UNDISTURBED
from instrument.read.views.interruptions import KINDS, kinds_of
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


class _Cause(NamedTuple):
    name: str
    more_ns: int
    calls: int


def first_step(capture: Views) -> Iterator[Problem]:
    """Find a first step much longer than all others, and what it does that the others do not.

    If another step is as long, as where long and short steps take turns, the first is not special.
    """
    took = capture.events.duration_ns[capture.links.steps]
    longest_ns = int(took[1:].max())
    more_ns = int(took[0]) - longest_ns
    if not longest_ns or more_ns < _LEAST_NS or took[0] < _LEAST_FACTOR * longest_ns:
        return
    why, rows = "", []
    for causes in (_kinds, _names):
        cause = max(causes(capture), key=lambda cause: cause.more_ns, default=None)
        if cause is not None and cause.more_ns >= _LEAST_CAUSE * more_ns:
            why = f"; {percent(min(cause.more_ns / more_ns, 1))} of the difference is {cause.name}"
            detail = "more than in other steps"
            rows = [Evidence(cause.name, cause.calls, cause.more_ns, detail=detail)]
            break
    first = step_number(capture.events, int(capture.links.steps[0]))
    yield Problem(
        f"Step {first}, the first recorded, takes {duration(int(took[0]))}, "
        f"{took[0] / longest_ns:.1f} times as long as the longest other step{why}",
        evidence=tuple(rows),
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
        "record_shapes": (events.types >= 0).any(),
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


def _kinds(capture: Views) -> Iterator[_Cause]:
    """For each kind of interruption, its additional time in the first step."""
    events, steps = capture.events, capture.links.steps
    kind = kinds_of(events)
    for number in np.unique(kind[kind >= 0]).tolist():
        chosen = np.flatnonzero(kind == number)
        spent = merged(events.start_ns[chosen], events.end_ns[chosen])
        in_steps = within(spent, events.start_ns[steps], events.end_ns[steps])
        calls = int((step_at(events, steps, events.start_ns[chosen]) == 0).sum())
        yield _Cause(_CAUSES.get(KINDS[number], KINDS[number]), _additional(in_steps), calls)


def _names(capture: Views) -> Iterator[_Cause]:
    """For each name of an operator, call or range, the additional self time in the first step."""
    events, steps, tree = capture.events, capture.links.steps, capture.links.call_tree
    step = step_at(events, steps, tree.start_ns)
    chosen = np.flatnonzero((step >= 0) & ~np.isin(tree.index, steps))
    names, groups = groupby(events.name[tree.index[chosen]].astype(np.int64))
    # The time of each name in each step in which the name occurs.
    cells, of_cells = groupby(groups.of * len(steps) + step[chosen])
    spent_ns = of_cells.sum(tree.own(tree.total_ns)[chosen])
    environment = capture.about.environment
    searches = environment is not None and environment.cudnn_benchmark
    of_names = Groups(cells // len(steps), len(names)).rows()
    for code, rows in zip(names.tolist(), of_names):
        at = cells[rows] % len(steps)
        # If a name occurs in less than half of the other steps, the median is 0.
        counted = len(steps) if 2 * len(rows) >= len(steps) - 1 else 1
        in_steps = np.zeros(counted, np.int64)
        in_steps[at[at < counted]] = spent_ns[rows[at < counted]]
        name = events.names[code]
        if searches and "convolution" in name:
            name = f"{name}, for which cuDNN searches its fastest algorithm"
        calls = int(of_cells.size[rows[at == 0]].sum())
        yield _Cause(name, _additional(in_steps), calls)


def _additional(in_steps: Ints) -> int:
    """How much longer the first step takes than the median of all others; 0 for no others."""
    return int(in_steps[0] - (np.median(in_steps[1:]) if len(in_steps) > 1 else 0))
