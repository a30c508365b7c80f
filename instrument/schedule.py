"""From step numbers to windows: which steps are warmed up for, and which are recorded.

Steps count from 0, as `torch.profiler.schedule` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice


@dataclass(frozen=True)
class Window:
    """Consecutive recorded steps.

    Attributes:
        warmup_from: the step at whose start the profiler begins to warm up; equals `first` without warmup.
        first: the first recorded step.
        last: the last recorded step; None: until the session stops.
        trigger: the name of the trigger that asked for it; None: the schedule did.
    """

    warmup_from: int
    first: int
    last: int | None
    trigger: str | None = None

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.first} and on until stopped"
        return f"{self.first}" if self.first == self.last else f"{self.first}–{self.last}"


def windows(
    *, wait: int, warmup: int, active: int | None, repeat: int, skip_first: int, skip_first_wait: int
) -> Iterator[Window]:
    """The windows of a schedule, in order, with the meaning that `torch.profiler.schedule` gives to each number.

    After `skip_first` steps, cycles of `wait` idle, `warmup` discarded and `active` recorded steps follow, `repeat`
    of them (0: without end). `skip_first_wait` other than 0 leaves out the first cycle's wait. `active=None` gives one
    window without end, and `active=0` none at all.
    """
    start = skip_first - (wait if skip_first_wait else 0)
    if active is None:
        yield Window(start + wait, start + wait + warmup, None)
        return
    if active == 0:
        return
    length = wait + warmup + active
    for cycle in range(repeat) if repeat else count():
        begin = start + cycle * length
        yield Window(begin + wait, begin + wait + warmup, begin + length - 1)


def in_words(plan: Iterator[Window]) -> str:
    """Say which steps a plan records: "records steps 2–4, then 7–9 (counted from 0)"."""
    first_few = [str(window) for window in islice(plan, 4)]
    if not first_few:
        return "records no step on schedule, only what triggers ask for"
    shown = ", then ".join(first_few[:3]) + (", and so on" if len(first_few) > 3 else "")
    noun = "step" if shown.isdecimal() else "steps"
    return f"records {noun} {shown} (counted from 0)"
