"""The record of one run of a program: the median times of its steps, and its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from instrument.base.errors import CaptureError
from instrument.read.compare.counters import Count, counters
from instrument.read.facts.segments import ranges_of_steps
from instrument.read.views.find_captures import captures_below
from instrument.read.views.views import TRAIN, Views


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The medians over the steps of one run, without the first step of each window.

    Attributes:
        steps: the number of steps.
        step_ns: the median duration of a step.
        ranges_ns: the median time that a step spends in each range, by the path of the range.
        counters: the counters of the first window.
    """

    steps: int
    step_ns: float
    ranges_ns: dict[str, float]
    counters: dict[str, Count | None]


def read_run(folder: Path) -> RunRecord:
    """Read the record of a run from its windows.

    Only training windows of the lowest rank with at least two steps are used.

    Raises:
        CaptureError: no steps are recorded, or a file cannot be read.
        TraceError: a trace cannot be read.
    """
    captures = [Views.load(path) for path in captures_below(folder)]
    training = [each for each in captures if each.phase == TRAIN]
    lowest = min((each.about.rank or 0 for each in training), default=0)
    windows = [each for each in training if (each.about.rank or 0) == lowest]
    windows = [each for each in windows if len(each.links.steps) > 1]
    if not windows:
        raise CaptureError(
            "The run has recorded no window with two steps: train in a Session with profiler=trace."
        )
    steps = [each for window in windows for each in ranges_of_steps(window)]
    counts = counters(windows[0]).counts
    return RunRecord(
        len(steps), median(sum(each.values()) for each in steps), _medians(steps), counts
    )


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        path: median(each.get(path, 0) for each in steps)
        for path in dict.fromkeys(path for each in steps for path in each)
    }
