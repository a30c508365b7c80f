"""Find the step of the profiler in which a point in time or an interval lies."""

from __future__ import annotations

import numpy as np

from instrument.links.intervals import interval_at, within
from instrument.range_names import STEP_PREFIX
from instrument.trace.events import ANNOTATION, OPERATOR, Events, Ints, flags, is_step


def step_number(events: Events, event: int) -> int:
    """The number of a step, from its name, such as `ProfilerStep#3`."""
    return int(events.names[events.name[event]].removeprefix(STEP_PREFIX))


def finished_steps(events: Events) -> Ints:
    """The positions of the steps that ended before recording stopped, sorted by start."""
    index = np.flatnonzero(events.named(is_step))
    is_cpu = flags((ANNOTATION | OPERATOR).__contains__, events.categories)
    index = index[is_cpu[events.category[index]] & events.finished[index]]
    return index[np.argsort(events.start_ns[index], kind="stable")]


def stepped_ns(events: Events, steps: Ints, start_ns: Ints, end_ns: Ints) -> Ints:
    """The part of each interval that lies in steps; `steps` are sorted and do not overlap."""
    return within((events.start_ns[steps], events.end_ns[steps]), start_ns, end_ns)


def step_at(events: Events, steps: Ints, time_ns: Ints) -> Ints:
    """For each point in time, the step in which it lies, as an index into `steps`; -1 if none.

    `steps` are sorted by start and do not overlap.
    """
    return interval_at((events.start_ns[steps], events.end_ns[steps]), time_ns)
