"""From step numbers to windows: which steps are warmed up for, and which are recorded.

Steps count from 0, as `torch.profiler.schedule` counts them.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any, Protocol

# No step has this number.
NEVER = sys.maxsize

# What says by itself which windows there are, and what then has nothing more to say, with the value of each that is
# nothing said. Presets set `wait`, so that one is passed over.
_WHOLE = ("schedule", "at_steps", "every_n_steps")
_CYCLES = {"repeat": 1, "skip_first": 0, "skip_first_wait": 0}

# The names of torch's `ProfilerAction`, and how far ahead a function is asked that gives them: so far for a window, and
# so far for the end of a window or of its warm-up. A longer window lasts until the session stops.
ACTIONS = ("NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE")
_AHEAD, _LONGEST = 1_000, 10_000


class Schedule(Protocol):
    """The options that say which steps are recorded; `ProfilerConfig` tells their meaning."""

    wait: int
    warmup: int
    active: int | None
    repeat: int
    skip_first: int
    skip_first_wait: int
    at_steps: list[int] | None
    every_n_steps: int | None
    schedule: Callable[[int], str] | None
    triggers: dict[str, Any]


@dataclass(frozen=True)
class Window:
    """Consecutive recorded steps.

    Attributes:
        warmup_from: the step at whose start the profiler begins to warm up; equals `first` without warmup.
        first: the first recorded step.
        last: the last recorded step; None: until the session stops.
        trigger: the name of the trigger that asked for it; None: the schedule did.
        trigger_reason: why it asked, in words; None where it gave none.
    """

    warmup_from: int
    first: int
    last: int | None
    trigger: str | None = None
    trigger_reason: str | None = None

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first} on"
        return f"{self.first}" if self.first == self.last else f"{self.first}–{self.last}"

    def in_words(self) -> str:
        """Its steps, for a sentence: "step 5", "steps 3–4", "steps from 0 on"."""
        return f"step {self}" if self.first == self.last else f"steps {self}"

    def done_in_words(self, ended: int) -> str:
        """The whole steps recorded where it ended before step `ended`, for a sentence."""
        if ended == self.first:
            return f"a part of step {self.first}"
        return (
            f"step {self.first}" if ended == self.first + 1 else f"steps {self.first}–{ended - 1}"
        )

    def cut_short(self, done: int, cut: str) -> str:
        """Say that it ended after so many steps, because of `cut`."""
        whole = done if self.last is None else self.last - self.first + 1
        after = (f"{done}" if self.last is None else f"{done} of {whole}") + (
            " step" if whole == 1 else " steps"
        )
        return f"The window of {self.in_words()} was cut short after {after} ({cut}); it is kept and labelled truncated."


@dataclass(frozen=True)
class Idle:
    """No window begins before the step `until`, and what comes then is to be asked there."""

    until: int


def next_window(schedule: Schedule, step: int) -> Window | Idle | None:
    """The first window of a schedule whose first recorded step is this step or a later one; None: there is none.

    It depends on nothing else, so that step numbers may jump. Where triggers alone ask for windows, there is none.
    """
    if triggers_alone(schedule):
        return None
    if schedule.schedule is not None:
        return _next_asked(schedule.schedule, step)
    if schedule.at_steps is not None:
        steps = sorted(set(schedule.at_steps))
        place = bisect_left(steps, step)
        if place == len(steps):
            return None
        return _window_from(schedule, steps[place], steps[place - 1] if place else None)
    if schedule.every_n_steps is not None:
        every = schedule.every_n_steps
        first = max(1, -(-step // every)) * every
        return _window_from(schedule, first, first - every if first > every else None)
    if schedule.active is None:
        window = _cycle(schedule, 0)
        return window if window.first >= step else None
    length = schedule.wait + schedule.warmup + schedule.active
    number = max(0, -(-(step - _cycle(schedule, 0).first) // length))
    return None if 0 < schedule.repeat <= number else _cycle(schedule, number)


def last_window(schedule: Schedule) -> Window | None:
    """The last window of a schedule; None of one that has none, or no end."""
    if schedule.at_steps:
        found = next_window(schedule, max(schedule.at_steps))
        return found if isinstance(found, Window) else None
    if _whole(schedule) is not None or triggers_alone(schedule) or not schedule.repeat:
        return None
    return _cycle(schedule, schedule.repeat - 1)


def planned(schedule: Schedule, step: int = 0, until: int = 0) -> Iterator[Window]:
    """The windows of a schedule from a step on, in order: all, or those before `until` and as far as they are known."""
    while True:
        found = next_window(schedule, step)
        if isinstance(found, Window):
            yield found
            if found.last is None:
                return
            step = found.last + 1
        elif found is not None and found.until < until:
            step = found.until
        else:
            return


def triggers_ask(schedule: Schedule) -> bool:
    """Whether any trigger may ask for a window; one that never does says `asks = False`."""
    return any(getattr(trigger, "asks", True) for trigger in schedule.triggers.values())


def triggers_alone(schedule: Schedule) -> bool:
    """Whether no window is scheduled because triggers ask for them, and nothing says which steps or how many."""
    return schedule.active is None and _whole(schedule) is None and triggers_ask(schedule)


def _whole(schedule: Schedule) -> str | None:
    """The option that says by itself which windows there are; None: the numbers of cycles do."""
    return next((name for name in _WHOLE if getattr(schedule, name) is not None), None)


def _cycle(schedule: Schedule, number: int) -> Window:
    """One window of cycles, with the meaning that `torch.profiler.schedule` gives to each number.

    After `skip_first` steps, cycles of `wait` idle, `warmup` discarded and `active` recorded steps follow, `repeat`
    of them (0: without end). `skip_first_wait` other than 0 leaves out the first cycle's wait. `active=None` gives one
    window without end.
    """
    begin = schedule.skip_first + (0 if schedule.skip_first_wait else schedule.wait)
    begin += number * (schedule.wait + schedule.warmup + (schedule.active or 0))
    first = begin + schedule.warmup
    return Window(begin, first, None if schedule.active is None else first + schedule.active - 1)


def _window_from(schedule: Schedule, first: int, before: int | None) -> Window:
    """A window of `active` steps from `first` on, warmed up as far as the window from `before` on leaves room."""
    active = schedule.active or 1
    free_from = 0 if before is None else before + active
    return Window(max(free_from, first - schedule.warmup), first, first + active - 1)


def _next_asked(action: Callable[[int], str], step: int) -> Window | Idle:
    """As `next_window`, of a function that gives the name of torch's action for a step.

    A window ends with RECORD_AND_SAVE or, though torch warns of it, before a step that is not recorded. One that began
    before `step` is left out.
    """
    begin = step
    if step and action(step - 1) == "RECORD":
        begin = _end_of_recording(action, step)
        begin += action(begin) == "RECORD_AND_SAVE"
    warmup_from: int | None = None
    for at in count(begin):
        name = action(at)
        if name in ("RECORD", "RECORD_AND_SAVE"):
            end = _end_of_recording(action, at)
            last = (
                None
                if end - at >= _LONGEST
                else end
                if action(end) == "RECORD_AND_SAVE"
                else end - 1
            )
            return Window(at if warmup_from is None else warmup_from, at, last)
        warmup_from = None if name == "NONE" else at if warmup_from is None else warmup_from
        if at - step >= (_AHEAD if warmup_from is None else _LONGEST):
            return Idle(at + 1)
    raise AssertionError("unreachable")


def _end_of_recording(action: Callable[[int], str], step: int) -> int:
    """The first step from one on that is not RECORD, which goes on; or the one as far ahead as is looked."""
    return next(at for at in count(step) if at - step >= _LONGEST or action(at) != "RECORD")


def contradiction(schedule: Schedule) -> str | None:
    """What in a schedule cannot be meant, in one sentence; None: nothing."""
    option = _whole(schedule)
    if option is None:
        if schedule.active is None and schedule.repeat != 1:
            return _needs_active("repeat", schedule.repeat, "the first window has")
        return None
    whole = [f"profiler.{name}" for name in _WHOLE if getattr(schedule, name) is not None]
    if len(whole) > 1 and not (
        schedule.at_steps == [] and len(whole) == 2
    ):  # [] says: none but what others ask for
        return f"{whole[0]} and {whole[1]} are both given, but each is a schedule: leave one out."
    for name, default in _CYCLES.items():
        if getattr(schedule, name) != default:
            given = getattr(schedule, name)
            return f"profiler.{name} is {given}, but profiler.{option} says which windows there are: leave one out."
    if schedule.active is None and option != "schedule" and getattr(schedule, option):
        return _needs_active(option, getattr(schedule, option), "a window has")
    return _overlap(schedule)


def overlooked(schedule: Schedule) -> str | None:
    """Which numbers of cycles are given and not looked at, in one sentence; None: there are none."""
    if whole := _whole(schedule):
        names, why = ["wait"], f"profiler.{whole} says which windows there are"
        if whole == "schedule" and not triggers_ask(schedule):
            names += ["warmup", "active"]
    elif triggers_alone(schedule):
        names = ["wait", "skip_first", "skip_first_wait"]
        why = "without profiler.active, triggers alone ask for windows"
    else:
        return None
    given = [
        f"profiler.{name}={getattr(schedule, name)}" for name in names if getattr(schedule, name)
    ]
    return (
        f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} not looked at: {why}."
        if given
        else None
    )


def _needs_active(option: str, given: object, subject: str) -> str:
    return (
        f"profiler.{option} is {given}, but without profiler.active {subject} no end: "
        "set profiler.active to the steps of a window."
    )


def _overlap(schedule: Schedule) -> str | None:
    active, every = schedule.active or 1, schedule.every_n_steps
    if every is not None and every < active:
        return f"profiler.every_n_steps is {every}, but a window has profiler.active={active} steps: lower that one."
    for first, second in pairwise(sorted(set(schedule.at_steps or []))):
        if second < first + active:
            return (
                f"profiler.at_steps holds {first} and {second}, but a window from {first} on lasts until "
                f"{first + active - 1} (profiler.active={active}): lower profiler.active, or leave out {second}."
            )
    return None


def misfit(
    schedule: Schedule, total_steps: int, first_step: int = 0, run: str = "The run"
) -> str | None:
    """Say which window has no room in a run that begins with `first_step` and has `total_steps`, counted from 0.

    None: all have. Of a schedule without end only the first one must.
    """
    if first_step >= total_steps:
        return None
    without_end = schedule.repeat == 0 if _whole(schedule) is None else schedule.at_steps is None
    within_run = [*islice(planned(schedule, first_step, total_steps), 1 if without_end else None)]
    if schedule.schedule is not None and not within_run:
        these = f"the steps from {first_step} on" if first_step else "its steps"
        return f"{run} ends with step {total_steps - 1}, and profiler.schedule asks for none of {these}."
    for window in within_run:
        if (window.first if window.last is None else window.last) >= total_steps:
            within = window.first < total_steps
            return (
                f"{run} ends with step {total_steps - 1}, {'within' if within else 'before'} the window of "
                f"{window.in_words()}: {remedy(schedule, window, within=within)}."
            )
    return None


def remedy(
    schedule: Schedule, window: Window | None, *, within: bool = False, longer: str = "train longer"
) -> str:
    """What gives a window room in a run that ends before it, or `within` it: "lower profiler.wait, or train longer".

    None: the window that a function has not named yet.
    """
    if window is None or (schedule.schedule is not None and window.trigger is None):
        return f"have profiler.schedule record earlier, or {longer}"
    names = [f"profiler.{name}" for name in _to_lower(schedule, window, within)]
    *others, last = names or [""]
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"lower {listed}, or {longer}" if listed else longer


def _to_lower(schedule: Schedule, window: Window, within: bool) -> list[str]:
    """Those options that put the window late or, where the run ends within it, make it long."""
    if window.trigger is not None:
        return []
    whole = _whole(schedule)
    late = (
        [whole]
        if whole
        else [name for name in ("wait", "warmup", "skip_first") if getattr(schedule, name)]
    )
    long = ["active"] if within and (schedule.active or 1) > 1 else []
    again = ["repeat"] if schedule.repeat > 1 and window != next_window(schedule, 0) else []
    return late + long + again


def in_words(schedule: Schedule, upcoming: Window | Idle | None) -> str:
    """Say which steps are recorded from what is planned next on: "records steps 2–4, then 7–9 (counted from 0)"."""
    if upcoming is None:
        return "records no window"
    if isinstance(upcoming, Idle):
        return f"records no window before step {upcoming.until}"
    known = [str(upcoming)]
    if upcoming.last is not None:
        known += [str(window) for window in islice(planned(schedule, upcoming.last + 1), 3)]
    shown = ", then ".join(known[:3]) + (", and so on" if len(known) > 3 else "")
    noun = "step" if shown.isdecimal() else "steps"
    return f"records {noun} {shown} (counted from 0)"
