"""What a session counts: the steps of training, validation and testing, each by themselves; and loops over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from instrument.annotate.profiled import profiled
from instrument.config import schedule
from instrument.config.schedule import NEVER, Plan, Window
from instrument.config.schema import ProfilerConfig
from instrument.record import metadata
from instrument.record.distributed import Pace
from instrument.record.overhead import Cost
from instrument.triggers import Request

T = TypeVar("T")
NAMES = ("train", "validation", "test", "predict")


@dataclass
class Phase:
    """What a session keeps of one phase.

    Attributes:
        name: train, validation or test.
        step_number: the step that runs now, or runs next when the phase comes again; counted from 0.
        began_at: the step number at the session's start.
        plan: the windows ahead.
        wakes_at: the next step at whose start something is to be done.
        batch_open: whether a batch of `session.steps` is out and its step not yet ended.
        loop_left: whether the loop that it was given to runs no more.
        loss: what was given to `session.step` within that step.
        cost: the times of its steps.
    """

    name: str
    step_number: int = 0
    began_at: int = 0
    plan: Plan = field(default_factory=Plan)
    wakes_at: int = NEVER
    batch_open: bool = False
    loop_left: bool = False
    loss: Any = None
    cost: Cost = field(default_factory=Cost)

    def go_to(self, number: int) -> None:
        """Let the step that runs now have this number."""
        self.began_at = number if self.began_at == self.step_number else self.began_at
        self.step_number, self.wakes_at = number, number + 1

    def close_batch(self, advance: Callable[[Any], None]) -> None:
        """End the step of the batch that is out, if any, by `advance` with the loss given within it."""
        if self.batch_open:
            self.batch_open = False
            loss, self.loss = self.loss, None
            advance(loss)

    def folder_name(self, first: int, last: int | None) -> str:
        """What the capture of these steps is called; without a last one that of the first."""
        prefix = "" if self.name == "train" else f"{self.name}_"
        return f"{prefix}steps_{first:06d}-{first if last is None else last:06d}_rank{metadata.rank()}"


class Phases:
    """The phases of a session.

    Attributes:
        train: the one outside any `session.phase` block.
        present: the one that runs now.
        by_calls: whether the steps are calls of functions, and not training steps.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self.by_calls = False
        self._config = config
        self._recorded: list[str] = []  # in which the schedule is followed; none before the start
        self._behind: Window | None = None  # the last window that lay behind train's first step
        self.train = self.present = Phase("train")
        self._all = {"train": self.train}

    def begin(self) -> None:
        """The session starts: train goes on at its present step number, nothing else of an earlier run is left."""
        self._recorded = list(self._config.phases)
        self._all = {each.name: each for each in (self.train, self.present)}  # it may start within a phase
        for phase in self._all.values():
            phase.step_number = phase.began_at = self.train.step_number if phase is self.train else 0
            phase.plan, phase.wakes_at, phase.cost = self._plan(phase.name), NEVER, Cost()
            phase.plan.skip_to(phase.step_number)
        self._behind = self.train.plan.passed

    def enter(self, name: str) -> None:
        """Make another phase the present one, with its own counter as it was left."""
        if name not in self._all:
            self._all[name] = Phase(name, plan=self._plan(name))
        self.present = self._all[name]

    def pace(self) -> Pace:
        """How far training is, and how fast; may be asked on any thread."""
        return Pace(self.train.step_number, self.train.cost.unrecorded_ns())

    def put_first(self, trigger: str, request: Request) -> str:
        """Plan what a trigger asks for from train's present step on, before the schedule's windows; says so."""
        begin, (why, steps) = self.train.step_number, request
        first = begin + self._config.warmup
        window = Window(begin, first, first + max(1, steps or self._config.active or 1) - 1, trigger, why)
        self.train.plan.put_first(window)
        return f"The trigger {trigger} fired{f' ({why})' if why else ''}: records {window.in_words()}."

    def in_endless_window(self) -> bool:
        """Whether train's present step is recorded in a window that only the session's stop ends."""
        window = self.train.plan.window
        return window is not None and window.last is None and window.first <= self.train.step_number

    def in_window_begun_after(self, step: int) -> bool:
        """Whether train's present step is recorded in a window that began after this step."""
        window = self.train.plan.window
        return window is not None and step < window.first <= self.train.step_number

    def may_record(self) -> bool:
        """Whether any window is planned from the present step on, or may be asked for; known before the start."""
        first = self.train.step_number if self._config.phases == ["train"] else 0
        plan = Plan(self._config)
        plan.skip_to(first)
        return schedule.triggers_ask(self._config) or not plan.ended

    def nothing_ahead(self) -> bool:
        """Whether train has no window left, and neither triggers nor timings need further steps."""
        needed = schedule.triggers_ask(self._config) or self._config.timings is not None
        return self.train.plan.ended and not needed

    def _plan(self, phase: str) -> Plan:
        return Plan(self._config if phase in self._recorded else None)

    def in_words(self) -> str:
        """Say the plan: "records steps 2–4, then 7–9 (counted from 0) in validation, and what triggers ask for"."""
        names, asked = self._config.phases, schedule.triggers_ask(self._config)
        plan = self.train.plan if "train" in self._recorded else Plan(self._config)
        said = plan.in_words() + ("" if names == ["train"] else f" in {' and '.join(names)}")
        if asked:
            said = "records what triggers ask for" if plan.ended else f"{said}, and what triggers ask for"
        return said if self._config.timings is None else f"{said}, and times the whole run"

    def misfit_of_first_pass(self, loader: Iterable[Any]) -> str | None:
        """As `misfit`, for the first loop of the run over a loader, where its length is known; more may follow."""
        batches = _length(loader)
        if batches is None or self.present is not self.train or self.train.step_number > self.train.began_at:
            return None
        return self._misfit(self.train.step_number + batches, "If the run is one pass over the loader, it")

    def misfit(self, total_steps: int | None) -> str | None:
        """Say, at the start, which windows there cannot be in so many steps; None: none such, or nothing is known."""
        config, plan, begin = self._config, self.train.plan, self.train.step_number
        if config.at_steps == [] and not config.triggers and config.timings is None:
            return "profiler.at_steps is [], and there are neither triggers nor timings: nothing will be recorded."
        if plan.ended:
            return (
                None
                if plan.passed is None
                else (
                    f"The run begins with step {begin}, behind all windows of the schedule (the last: "
                    f"{plan.passed.in_words()}), so that none will be recorded: choose later steps."
                )
            )
        if total_steps is not None and total_steps <= begin:
            return f"The run begins with step {begin}, but has {total_steps} steps in all: nothing is left to record."
        return None if total_steps is None else self._misfit(total_steps, "The run")

    def _misfit(self, total_steps: int, run: str) -> str | None:
        if "train" not in self._recorded:
            return None
        return schedule.misfit(self._config, total_steps, self.train.step_number, run)

    def nothing_recorded(self) -> str | None:
        """Say why the run ended without a window; None where the schedule asked for none, or the start has said it."""
        came = [self._all[name] for name in self._config.phases if name in self._all]
        if not came:
            name = self._config.phases[0]
            return f"profiler.phases names {name}, but the run never came to session.phase({name!r})."
        phase = max(came, key=lambda each: each.step_number - each.began_at)
        window, passed = phase.plan.window, phase.plan.passed
        if phase.plan.ended:
            return (
                None
                if passed is None or passed is self._behind
                else (
                    "Nothing was recorded: the step number went past the last window of the schedule "
                    f"({passed.in_words()}) before it could begin."
                )
            )
        done = phase.step_number - phase.began_at
        unit = "call" if self.by_calls else "step"
        after = f"1 {unit}" if done == 1 else f"{done} {unit}s"
        first = "a window" if window is None else f"the first window ({window.in_words()})"
        advice = "call session.step() after each training step, or loop over session.steps(loader)"
        if done:
            longer = "make more calls" if self.by_calls else "train longer"
            advice = schedule.remedy(self._config, window, longer=longer)
        return f"The run ended after {after}, before {first} had recorded one: {advice}."


class Steps(Generic[T]):
    """The batches of a loader, a step after each; whatever else is asked of it, the loader answers.

    The wait for each batch is a range `data`. One more, which brings no batch, is there at the end of a loader whose
    length is not known.
    """

    __slots__ = ("_advance", "_loader", "_phases")

    def __init__(self, loader: Iterable[T], phases: Phases, advance: Callable[[Any], None]) -> None:
        self._loader: Any = loader
        self._phases = phases
        self._advance = advance

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Steps.__slots__:  # what copying asks for, and what a copy has not yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Steps.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __contains__(self, batch: object) -> bool:
        return batch in self._loader

    def __getitem__(self, index: Any) -> Any:
        return self._loader[index]

    def __repr__(self) -> str:
        return repr(self._loader)

    def __iter__(self) -> Iterator[T]:
        phase = self._phases.present
        if phase.batch_open and not phase.loop_left:  # a loop within a loop
            yield from self._loader
            return
        phase.close_batch(self._advance)
        batches: Iterator[T] | None = None
        length, data = _length(self._loader), profiled("data")
        for number in count():
            with data if number != length else nullcontext():
                batches = iter(self._loader) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            phase.batch_open, phase.loop_left = True, False
            try:
                yield batch
            finally:
                phase.loop_left = True  # by break or an exception, which a generator cannot tell apart
            phase.close_batch(self._advance)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # it has none, or the user's code does not know
        return None
