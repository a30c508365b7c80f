"""Find the steps of a trace, those that count, and the step in which a time lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from instrument.base.range_names import STEP_PREFIX
from instrument.base.step_times import counting
from instrument.read.facts.grammars import parse
from instrument.read.facts.intervals import Intervals, interval_at, merged, within
from instrument.read.trace.events import ANNOTATION, OPERATOR, Events, Ints, flags, is_step

# Kineto's span of its own run, which may begin long before the first event that it recorded.
_PROFILER = frozenset({"Trace"})
# Between two steps of an engine, in usual steps.
_LONGEST_PAUSE = 3


@dataclass(frozen=True, slots=True)
class CountedSteps:
    """The steps that count; see `instrument.base.step_times.counting`.

    How long a step takes, shares of the step, counters, findings, comparisons and simulations are
    about these steps.

    Attributes:
        what: "step", or "recording" if no step was finished.
        kept: which of the finished steps count.
        start_ns, end_ns: the start and end of each step, sorted. A step that another step overlaps
            ends where the other begins. If there is no step, the start and end of the recording.
    """

    what: Literal["step", "recording"]
    kept: slice
    start_ns: Ints
    end_ns: Ints

    @property
    def total_ns(self) -> int:
        """The duration of all steps together."""
        return int((self.end_ns - self.start_ns).sum())

    @property
    def count(self) -> int:
        """The number of steps; 1 for a recording without steps."""
        return len(self.start_ns)

    def only(self, kept: slice) -> CountedSteps:
        """Some of the steps."""
        return CountedSteps(self.what, kept, self.start_ns[kept], self.end_ns[kept])

    def share(self, time_ns: int) -> float:
        """A time inside the steps as a share of `total_ns`; 0 if `total_ns` is 0."""
        return time_ns / self.total_ns if self.total_ns else 0.0

    def within(self, start_ns: Ints, end_ns: Ints) -> Ints:
        """How much of each interval lies in the steps, in ns."""
        return within((self.start_ns, self.end_ns), start_ns, end_ns)

    def covered(self, start_ns: Ints, end_ns: Ints) -> float:
        """The share of the steps' time in which at least one of the intervals lies; at most 1."""
        return self.share(int(self.within(*merged(start_ns, end_ns)).sum()))

    def holds(self, time_ns: Ints) -> Ints:
        """The index of the step around each point in time; -1 for none."""
        return interval_at((self.start_ns, self.end_ns), time_ns)


def spans_of_steps(events: Events, steps: Ints) -> CountedSteps:
    """All finished steps of a trace; `steps` are their positions, sorted by start."""
    if not len(steps):
        recorded = ~events.among(_PROFILER)
        begin = int(events.start_ns[recorded].min()) if recorded.any() else events.begin_ns
        end = int(events.end_ns[recorded].max(initial=begin))
        return CountedSteps("recording", slice(None), np.array([begin]), np.array([end]))
    start_ns, end_ns = step_bounds(events, steps)
    end_ns[:-1] = np.minimum(end_ns[:-1], start_ns[1:])
    return CountedSteps("step", slice(None), start_ns, end_ns)


def counted_steps(every: CountedSteps) -> CountedSteps:
    """Those of all finished steps that count."""
    if every.what == "recording":
        return every
    return every.only(counting((every.end_ns - every.start_ns).tolist()))


def step_numbers(events: Events, steps: Ints, first: int = 0) -> list[int]:
    """The numbers of the steps, such as 3 for `ProfilerStep#3`; an engine's count from `first`."""
    names = [events.names[name] for name in events.name[steps].tolist()]
    return [
        int(name.removeprefix(STEP_PREFIX)) if is_step(name) else number
        for number, name in enumerate(names, first)
    ]


def finished_steps(events: Events, least: int = 2) -> Ints:
    """The positions of the steps that ended before recording stopped, sorted by start.

    If the profiler marked none, those that an inference engine annotated, if there are at least
    `least`: of a single one, a trace does not show when the device could begin with it.
    """
    found = _finished(events, is_step)
    if len(found):
        return found
    found = engine_steps(events)
    return found if len(found) >= least else found[:0]


def engine_steps(events: Events) -> Ints:
    """The positions of the finished steps that an engine annotated, sorted by start.

    They are on the thread with most of them, and none is a step that begins inside another one.
    """
    found = _finished(events, lambda name: (said := parse(name)) is not None and said.is_step)
    if not len(found):
        return found
    found = found[events.thread[found] == np.bincount(events.thread[found]).argmax()]
    is_part = events.start_ns[found][1:] < np.maximum.accumulate(events.end_ns[found])[:-1]
    outermost: Ints = found[np.append(True, ~is_part)]
    return outermost


def _finished(events: Events, fits: Callable[[str], bool]) -> Ints:
    index = np.flatnonzero(events.named(fits))
    is_cpu = flags((ANNOTATION | OPERATOR).__contains__, events.categories)
    index = index[is_cpu[events.category[index]] & events.finished[index]]
    return index[np.argsort(events.start_ns[index], kind="stable")]


def step_at(events: Events, steps: Ints, time_ns: Ints) -> Ints:
    """For each point in time, the step in which it lies, as an index into `steps`; -1 if none.

    `steps` are sorted by start and do not overlap.
    """
    return interval_at(step_bounds(events, steps), time_ns)


def step_bounds(events: Events, steps: Ints) -> Intervals:
    """The start and end of each of the steps, which are sorted by start.

    An engine's step lasts until the next one begins, which includes sampling and scheduling. If
    that is much later, the engine had no requests, and the step ends with its range.
    """
    start_ns, end_ns = events.start_ns[steps], events.end_ns[steps]
    if len(steps) > 1 and not is_step(events.names[events.name[steps[0]]]):
        lasts_ns = np.diff(start_ns)
        is_next = start_ns[1:] - end_ns[:-1] <= _LONGEST_PAUSE * np.median(lasts_ns)
        end_ns[:-1][is_next] = start_ns[1:][is_next]
    return start_ns, end_ns
