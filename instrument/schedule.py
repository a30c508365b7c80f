"""From step numbers to windows: which steps are warmed up for, and which are recorded.

Steps count from 0, as `torch.profiler.schedule` counts them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise, takewhile, tee
from typing import Any, Protocol

# No step has this number.
NEVER = sys.maxsize

# What says by itself which windows there are, and what then has nothing more to say, with the value of each that is
# nothing said. Presets set `wait`, so that one is passed over.
_WHOLE = ("at_steps", "every_n_steps", "schedule")
_CYCLES = {"repeat": 1, "skip_first": 0, "skip_first_wait": 0}

# The names of torch's `ProfilerAction`, and how many steps a function that gives them is asked for at once. A window
# that it does not save within so many steps lasts until the session stops.
ACTIONS = ("NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE")
_AHEAD, _LONGEST = 1_000, 100_000


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
    schedule: Callable[[int], Any] | None
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

    def cut_short(self, done: int, cut: str) -> str:
        """Say that it ended after so many steps, because of `cut`."""
        whole = done if self.last is None else self.last - self.first + 1
        after = (f"{done}" if self.last is None else f"{done} of {whole}") + (" step" if whole == 1 else " steps")
        return (
            f"The window of {self.in_words()} was cut short after {after} ({cut}); it is kept and labelled truncated."
        )


@dataclass(frozen=True)
class Idle:
    """No window begins before the step `until`, and nobody has asked yet what comes then."""

    until: int


def planned(schedule: Schedule) -> Iterator[Window | Idle]:
    """The windows of a schedule, in order; none where triggers alone ask for windows."""
    if triggers_alone(schedule):
        return iter(())
    if schedule.schedule is not None:
        return windows_asked(schedule.schedule)
    if schedule.at_steps is not None:
        return windows_at(sorted(set(schedule.at_steps)), schedule.warmup, schedule.active or 1)
    if schedule.every_n_steps is not None:
        return windows_at(count(schedule.every_n_steps, schedule.every_n_steps), schedule.warmup, schedule.active or 1)
    names = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
    return windows(**{name: getattr(schedule, name) for name in names})


def triggers_ask(schedule: Schedule) -> bool:
    """Whether any trigger may ask for a window; one that never does says `asks = False`."""
    return any(getattr(trigger, "asks", True) for trigger in schedule.triggers.values())


def triggers_alone(schedule: Schedule) -> bool:
    """Whether no window is scheduled because triggers ask for them, and nothing says which steps or how many."""
    return schedule.active is None and _whole(schedule) is None and triggers_ask(schedule)


def _whole(schedule: Schedule) -> str | None:
    """The option that says by itself which windows there are; None: the numbers of cycles do."""
    return next((name for name in _WHOLE if getattr(schedule, name) is not None), None)


def windows(
    *, wait: int, warmup: int, active: int | None, repeat: int, skip_first: int, skip_first_wait: int
) -> Iterator[Window]:
    """The windows of cycles, with the meaning that `torch.profiler.schedule` gives to each number.

    After `skip_first` steps, cycles of `wait` idle, `warmup` discarded and `active` recorded steps follow, `repeat`
    of them (0: without end). `skip_first_wait` other than 0 leaves out the first cycle's wait. `active=None` gives one
    window without end.
    """
    start = skip_first - (wait if skip_first_wait else 0)
    if active is None:
        yield Window(start + wait, start + wait + warmup, None)
        return
    length = wait + warmup + active
    for cycle in range(repeat) if repeat else count():
        begin = start + cycle * length
        yield Window(begin + wait, begin + wait + warmup, begin + length - 1)


def windows_at(steps: Iterable[int], warmup: int, active: int) -> Iterator[Window]:
    """A window of `active` steps from each of these on, warmed up for as far as the window before leaves room."""
    free_from = 0
    for first in steps:
        yield Window(max(free_from, first - warmup), first, first + active - 1)
        free_from = first + active


def windows_asked(action: Callable[[int], Any]) -> Iterator[Window | Idle]:
    """The windows of a function from a step to torch's `ProfilerAction`, asked for each step once, in order.

    A window ends with RECORD_AND_SAVE or, though torch warns of it, before a step that is not recorded. After 1,000
    steps in which none begins comes `Idle`, so that a function that has no more of them can be asked bit by bit.
    """
    warmup_from: int | None = None
    first: int | None = None
    idle_from = 0
    for step in count():
        name = action(step).name
        if first is not None and not name.startswith("RECORD"):
            yield Window(first if warmup_from is None else warmup_from, first, step - 1)
            warmup_from, first, idle_from = None, None, step
        if name in ("NONE", "WARMUP"):
            warmup_from = None if name == "NONE" else step if warmup_from is None else warmup_from
            if step - idle_from >= (_AHEAD if name == "NONE" else _LONGEST):
                yield Idle(step + 1)
                idle_from = step
        else:
            first = step if first is None else first
            endless = step - first >= _LONGEST
            if endless or name == "RECORD_AND_SAVE":
                yield Window(first if warmup_from is None else warmup_from, first, None if endless else step)
                warmup_from, first, idle_from = None, None, step
            if endless:
                return


def contradiction(schedule: Schedule) -> str | None:
    """What in a schedule cannot be meant, in one sentence; None: nothing."""
    option = _whole(schedule)
    if option is None:
        if schedule.active is None and schedule.repeat != 1:
            return _needs_active("repeat", schedule.repeat, "the first window has")
        return None
    whole = [f"profiler.{name}" for name in _WHOLE if getattr(schedule, name) is not None]
    if len(whole) > 1:
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
    given = [f"profiler.{name}={getattr(schedule, name)}" for name in names if getattr(schedule, name)]
    return f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} not looked at: {why}." if given else None


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


def misfit(schedule: Schedule, total_steps: int, first_step: int = 0, run: str = "The run") -> str | None:
    """Say which window has no room in a run that begins with `first_step` and has `total_steps`, counted from 0.

    None: all have. Of a schedule without end only the first one must.
    """
    if first_step >= total_steps:
        return None
    without_end = schedule.repeat == 0 if _whole(schedule) is None else schedule.at_steps is None
    ahead = (window for window in _planned_before(schedule, total_steps) if window.first >= first_step)
    windows = [*islice(ahead, 1 if without_end else None)]
    if schedule.schedule is not None and not windows:
        return f"{run} ends with step {total_steps - 1}, and profiler.schedule asks for none of its steps."
    for window in windows:
        if (window.first if window.last is None else window.last) >= total_steps:
            within = window.first < total_steps
            return (
                f"{run} ends with step {total_steps - 1}, {'within' if within else 'before'} the window of "
                f"{window.in_words()}: {remedy(schedule, window, within=within)}."
            )
    return None


def _planned_before(schedule: Schedule, step: int) -> Iterator[Window]:
    """The windows of a schedule, as far as they are known before anybody has come to a step."""
    for each in planned(schedule):
        if isinstance(each, Window):
            yield each
        elif each.until >= step:
            return


def remedy(schedule: Schedule, window: Window, *, within: bool = False, longer: str = "train longer") -> str:
    """What gives a window room in a run that ends before it, or `within` it: "lower profiler.wait, or train longer"."""
    if schedule.schedule is not None and window.trigger is None:
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
    late = [whole] if whole else [name for name in ("wait", "warmup", "skip_first") if getattr(schedule, name)]
    long = ["active"] if within and (schedule.active or 1) > 1 else []
    again = ["repeat"] if schedule.repeat > 1 and window != next(planned(schedule)) else []
    return late + long + again


class Plan:
    """The windows ahead, in order: those of the schedule, and before them what triggers ask for.

    Attributes:
        passed: the last that was left out because its first step lay behind; None: none was.
    """

    def __init__(self, windows: Iterable[Window | Idle] = ()) -> None:
        self._ahead = iter(windows)
        self._next = next(self._ahead, None)
        self.passed: Window | None = None

    @property
    def window(self) -> Window | None:
        """The one that is open, or else the next; None: there is none left, or it is not known yet."""
        return self._next if isinstance(self._next, Window) else None

    @property
    def known_until(self) -> int:
        """The step at which the plan is to be looked at again where `window` is None."""
        return self._next.until if isinstance(self._next, Idle) else NEVER

    @property
    def ended(self) -> bool:
        """Whether there is no window left."""
        return self._next is None

    def turn(self) -> None:
        """Go on to the next window: this one is over, or cannot be recorded."""
        self._next = next(self._ahead, None)

    def skip_to(self, step: int) -> None:
        """Leave out the windows whose first step lies before this one; a step number from a checkpoint jumps."""
        while self.known_until <= step or (self.window is not None and self.window.first < step):
            self.passed = self.window or self.passed
            self.turn()

    def put_first(self, window: Window) -> None:
        """Put a window before all others; those that it runs into are left out when their turn comes."""
        self._ahead = chain([self._next] if self._next else [], self._ahead)
        self._next = window

    def in_words(self) -> str:
        """Say which steps it records: "records steps 2–4, then 7–9 (counted from 0)"."""
        self._ahead, copy = tee(self._ahead)
        first_few = [*islice(chain([self._next] if self._next else [], copy), 4)]
        known = [str(window) for window in takewhile(lambda each: isinstance(each, Window), first_few)]
        later = next((each.until for each in first_few if isinstance(each, Idle)), None)
        if not known:
            return "records no window" if later is None else f"records no window before step {later}"
        shown = ", then ".join(known[:3]) + (", and so on" if len(known) > 3 else "")
        noun = "step" if shown.isdecimal() else "steps"
        return f"records {noun} {shown} (counted from 0)"
