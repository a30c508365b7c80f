"""`first-step`: the first step is much slower, so sums over all steps are too large.

It must take at least twice as long as the longest other step, and at least 10 ms more: if another
step is as long, as where long and short steps take turns, the first is not special. The cause is
the kind of interruption whose time in the first step exceeds its median in the others most, if this
is at least 20 % of the difference; else the operator, call or range, under the same condition.
There is no saving: the simulation leaves the first step out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.advise.check import FOUR_STEPS, Check, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.facts.groupby import Groups, groupby
from instrument.read.facts.intervals import merged, within
from instrument.read.facts.step_index import step_at, step_number
from instrument.read.trace.events import Ints
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.interruptions import KINDS, kinds_of
from instrument.read.views.views import Views

_LEAST_FACTOR = 2.0
_LEAST_NS = 10_000_000
_LEAST_CAUSE = 0.2
# What each kind of interruption is called in a title.
_CAUSES = {
    "loader": "waiting for data, while the loader starts",
    "module loading": "loading kernel code onto the device",
    "memory allocation": "allocating and freeing device memory",
    "profiler": "the profiler's own work",
}


class _Cause(NamedTuple):
    name: str
    more_ns: int
    calls: int


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem if the first step is much slower than the others."""
    took = capture.events.duration_ns[capture.links.steps]
    longest_ns = int(took[1:].max())
    more_ns = int(took[0]) - longest_ns
    if not longest_ns or more_ns < _LEAST_NS or took[0] < _LEAST_FACTOR * longest_ns:
        return
    cause, why, rows = _cause(capture, more_ns), "", []
    if cause is not None:
        why = f"; {percent(min(cause.more_ns / more_ns, 1))} of the difference is {cause.name}"
        detail = "more than in other steps"
        rows = [Evidence(cause.name, cause.calls, cause.more_ns, detail=detail)]
    first = step_number(capture.events, int(capture.links.steps[0]))
    yield Problem(
        f"Step {first}, the first recorded, takes {duration(int(took[0]))}, "
        f"{took[0] / longest_ns:.1f} times as long as the longest other step{why}",
        evidence=tuple(rows),
    )


CHECK = Check(
    "first-step",
    find,
    change="Set profiler.warmup=3 or a larger profiler.wait. The window then begins later, and "
    "holds only usual steps.",
    verify="--steps",
    needs=(FOUR_STEPS,),
    coverage=(CPU_IN_STEPS,),
    is_caveat=True,
)


def _cause(capture: Views, more_ns: float) -> _Cause | None:
    """The cause of `more_ns`, the additional time of the first step; None if it is not known."""
    for causes in (_kinds, _names):
        found = max(causes(capture), key=lambda cause: cause.more_ns, default=None)
        if found is not None and found.more_ns >= _LEAST_CAUSE * more_ns:
            return found
    return None


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
