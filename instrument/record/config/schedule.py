"""Computes windows from the options of a schedule and a step number.

A window consists of consecutive recorded steps; warm-up steps may come before the window. Steps are
counted from 0, as in `torch.profiler.schedule`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instrument.record.config.schema import ProfilerConfig as Schedule

# A step number that is never reached.
NEVER = sys.maxsize

# If one of the `_WINDOW_OPTIONS` is given, it replaces the cycles of wait, warmup and active steps.
# The options in `_CYCLE_DEFAULTS` must then have their defaults. `wait` may have any value, because
# presets set `wait`.
_WINDOW_OPTIONS = ("at_steps", "every_n_steps")
_CYCLE_DEFAULTS = {"repeat": 1, "skip_first": 0}


@dataclass(frozen=True)
class Window:
    """Consecutive recorded steps.

    Attributes:
        warmup_from: the first step of the warm-up; equals `first` if there is no warm-up.
        first: the first recorded step.
        last: the last recorded step; None if the window lasts until the session stops.
        trigger: the name of the trigger that requested the window; None for a window of the
            schedule.
        trigger_reason: why the trigger requested the window; None if the trigger gave no reason.
        seconds: how long the window lasts if a trigger requested this in place of steps, or None.
    """

    warmup_from: int
    first: int
    last: int | None
    trigger: str | None = None
    trigger_reason: str | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.last is None:
            return f"from {self.first} on" + (f" for {self.seconds:g} s" if self.seconds else "")
        return f"{self.first}" if self.first == self.last else f"{self.first}–{self.last}"

    def in_words(self) -> str:
        """The steps, for a sentence: "step 5", "steps 3–4", "steps from 0 on"."""
        return f"step {self}" if self.first == self.last else f"steps {self}"

    def done_in_words(self, ended: int) -> str:
        """The steps that the window has recorded, such as "steps 3–4"; the last is `ended - 1`.

        If no step of the window is complete, the text is like "a part of step 3".
        """
        if ended == self.first:
            return f"a part of step {self.first}"
        return replace(self, last=ended - 1).in_words()

    def cut_short(self, done: int, reason: str) -> str:
        """A sentence that says that the window ended early, after `done` steps, for `reason`."""
        planned = done if self.last is None else self.last - self.first + 1
        steps = f"{done}" if self.last is None else f"{done} of {planned}"
        steps += " step" if planned == 1 else " steps"
        return (
            f"The window of {self.in_words()} ended early, after {steps} ({reason}); it is kept "
            "and labelled truncated."
        )


def requested_window(
    schedule: Schedule, begin: int, steps: int | None, trigger: str | None, why: str | None
) -> Window:
    """The window that a trigger requests, whose warm-up begins with the step `begin`.

    If `steps` is None, the window has as many steps as one of the schedule, or one.
    """
    first = begin + schedule.warmup
    return Window(begin, first, first + max(1, steps or schedule.active or 1) - 1, trigger, why)


def next_window(schedule: Schedule, step: int) -> Window | None:
    """The first window whose recording begins at `step` or later.

    The result is None if there is no such window, or if only triggers request windows. It depends
    only on the schedule and on `step`, not on earlier calls.
    """
    if triggers_alone(schedule):
        return None
    if schedule.at_steps is not None:
        steps = sorted(set(schedule.at_steps))
        index = bisect_left(steps, step)
        if index == len(steps):
            return None
        return _window_from(schedule, steps[index], steps[index - 1] if index else None)
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
    """The last window of a schedule; None if the schedule has no windows or no known end."""
    if schedule.at_steps:
        return next_window(schedule, max(schedule.at_steps))
    if _window_option(schedule) is not None or triggers_alone(schedule) or not schedule.repeat:
        return None
    return _cycle(schedule, schedule.repeat - 1)


def planned(schedule: Schedule, step: int = 0) -> Iterator[Window]:
    """The windows from a step on, in order."""
    while (found := next_window(schedule, step)) is not None:
        yield found
        if found.last is None:
            return
        step = found.last + 1


def triggers_ask(schedule: Schedule) -> bool:
    """Whether any trigger may request a window; a trigger with `asks = False` requests none."""
    return any(getattr(trigger, "asks", True) for trigger in schedule.triggers.values())


def triggers_alone(schedule: Schedule) -> bool:
    """Whether only triggers request windows, if any, because no option says where one ends."""
    if schedule.active is not None or _window_option(schedule) is not None:
        return False
    others = bool(schedule.triggers) or schedule.timings is not None
    return triggers_ask(schedule) or (others and "active" not in schedule.model_fields_set)


def _window_option(schedule: Schedule) -> str | None:
    return next((name for name in _WINDOW_OPTIONS if getattr(schedule, name) is not None), None)


def _cycle(schedule: Schedule, number: int) -> Window:
    """The window of one cycle, as torch computes it; without `active`, the window has no end."""
    begin = schedule.skip_first + schedule.wait
    begin += number * (schedule.wait + schedule.warmup + (schedule.active or 0))
    first = begin + schedule.warmup
    return Window(begin, first, None if schedule.active is None else first + schedule.active - 1)


def _window_from(schedule: Schedule, first: int, before: int | None) -> Window:
    """A window from `first` on, whose warm-up begins after the window that began at `before`."""
    active = schedule.active or 1
    free_from = 0 if before is None else before + active
    return Window(max(free_from, first - schedule.warmup), first, first + active - 1)


def conflict(schedule: Schedule) -> str | None:
    """A sentence about options of the schedule that conflict; None if no options conflict."""
    option = _window_option(schedule)
    if option is None:
        if schedule.active is None and schedule.repeat != 1:
            return _needs_active("repeat", schedule.repeat, "the first window has")
        return None
    given = [f"profiler.{name}" for name in _WINDOW_OPTIONS if getattr(schedule, name) is not None]
    # at_steps=[] may be given with another option, because it adds no window.
    if len(given) > 1 and not (schedule.at_steps == [] and len(given) == 2):
        return f"{given[0]} and {given[1]} are both given, but each is a schedule: leave one out."
    for name, default in _CYCLE_DEFAULTS.items():
        if (value := getattr(schedule, name)) != default:
            return (
                f"profiler.{name} is {value}, but profiler.{option} says which windows there are: "
                "leave one out."
            )
    if schedule.active is None and getattr(schedule, option):
        return _needs_active(option, getattr(schedule, option), "a window has")
    return _overlap(schedule)


def ignored_options(schedule: Schedule) -> str | None:
    """A sentence that names the given options that have no effect; None if all have an effect."""
    if option := _window_option(schedule):
        names, why = ["wait"], f"profiler.{option} says which windows there are"
    elif triggers_alone(schedule):
        names = ["wait", "skip_first"]
        why = "without profiler.active, no window is scheduled"
    else:
        return None
    given = [
        f"profiler.{name}={getattr(schedule, name)}" for name in names if getattr(schedule, name)
    ]
    if not given:
        return None
    return f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} ignored: {why}."


def _needs_active(option: str, given: object, subject: str) -> str:
    return (
        f"profiler.{option} is {given}, but without profiler.active {subject} no end: "
        "set profiler.active to the number of steps of a window."
    )


def _overlap(schedule: Schedule) -> str | None:
    active, every = schedule.active or 1, schedule.every_n_steps
    if every is not None and every < active:
        return (
            f"profiler.every_n_steps is {every}, but a window has profiler.active={active} steps: "
            "lower profiler.active."
        )
    for first, second in pairwise(sorted(set(schedule.at_steps or []))):
        if second < first + active:
            return (
                f"profiler.at_steps holds {first} and {second}, but a window from {first} on lasts "
                f"until {first + active - 1} (profiler.active={active}): lower profiler.active, or "
                f"leave out {second}."
            )
    return None


def unreachable_window(schedule: Schedule, total_steps: int, first_step: int = 0) -> str | None:
    """A sentence about the first window that does not fit into a run; None if all fit.

    The run has the steps from `first_step` to `total_steps - 1`. Of a schedule without end, only
    the first window must fit.
    """
    if first_step >= total_steps:
        return None
    by_cycles = _window_option(schedule) is None
    without_end = schedule.repeat == 0 if by_cycles else schedule.at_steps is None
    within_run = [*islice(planned(schedule, first_step), 1 if without_end else None)]
    for window in within_run:
        if (window.first if window.last is None else window.last) >= total_steps:
            within = window.first < total_steps
            return (
                f"The run ends with step {total_steps - 1}, {'within' if within else 'before'} the "
                f"window of {window.in_words()}: {remedy(schedule, window, within=within)}."
            )
    return None


def remedy(
    schedule: Schedule, window: Window, *, within: bool = False, longer: str = "train longer"
) -> str:
    """Advice for a run that ends before a window, such as "lower profiler.wait, or train longer".

    If `within` is true, the run ends within the window. `longer` says how to make the run longer.
    """
    names = [f"profiler.{name}" for name in _options_to_lower(schedule, window, within)]
    *others, last = names or [""]
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"lower {listed}, or {longer}" if listed else longer


def _options_to_lower(schedule: Schedule, window: Window, within: bool) -> list[str]:
    """The options to lower to make the window begin earlier or, if `within`, end earlier."""
    if window.trigger is not None:
        return []
    late = [name for name in ("wait", "warmup", "skip_first") if getattr(schedule, name)]
    if option := _window_option(schedule):
        late = [option]
    long = ["active"] if within and (schedule.active or 1) > 1 else []
    again = ["repeat"] if schedule.repeat > 1 and window != next_window(schedule, 0) else []
    return late + long + again


def in_words(schedule: Schedule, upcoming: Window | None) -> str:
    """The recorded steps, such as "records steps 2–4, then 7–9 (counted from 0)"."""
    if upcoming is None:
        return "records no window"
    known = [str(upcoming)]
    if upcoming.last is not None:
        known += [str(window) for window in islice(planned(schedule, upcoming.last + 1), 3)]
    shown = ", then ".join(known[:3]) + (", and so on" if len(known) > 3 else "")
    noun = "step" if shown.isdecimal() else "steps"
    return f"records {noun} {shown} (counted from 0)"
