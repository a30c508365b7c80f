"""What a session counts: the steps of training, validation and testing, each by themselves; and loops over them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from instrument import metadata, schedule
from instrument.annotate import profiled
from instrument.config import ProfilerConfig
from instrument.cost import Cost
from instrument.schedule import Plan

T = TypeVar("T")
NAMES = ("train", "validation", "test")
NEVER = sys.maxsize


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
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._recorded: list[str] = []  # in which the schedule is followed; none before the start
        self.train = self.present = Phase("train")
        self._all = {"train": self.train}

    def begin(self) -> None:
        """The session starts: train goes on at its present step number, nothing else of an earlier run is left."""
        self._recorded = list(self._config.phases)
        for phase in self._all.values():
            phase.step_number = phase.began_at = self.train.step_number if phase is self.train else 0
            phase.plan, phase.wakes_at, phase.cost = self._plan(phase.name), NEVER, Cost()
            phase.plan.skip_to(phase.step_number)

    def enter(self, name: str) -> None:
        """Make another phase the present one, with its own counter as it was left."""
        if name not in self._all:
            self._all[name] = Phase(name, plan=self._plan(name))
        self.present = self._all[name]

    def _plan(self, phase: str) -> Plan:
        return Plan(schedule.planned(self._config)) if phase in self._recorded else Plan()

    def in_words(self) -> str:
        """Say the plan: "records steps 2–4, then 7–9 (counted from 0) in validation"."""
        triggers = ", and what triggers ask for" if self._config.triggers else ""
        names = self._config.phases
        plan = self.train.plan if "train" in names else self._plan(names[0])
        return plan.in_words() + ("" if names == ["train"] else f" in {' and '.join(names)}") + triggers

    def misfit_of_first_pass(self, batches: int) -> str | None:
        """As `misfit`, for the first loop of the run over a loader of so many batches; more may follow."""
        if self.present is not self.train or self.train.step_number > self.train.began_at:
            return None
        return self.misfit(self.train.step_number + batches, "One pass over the loader")

    def misfit(self, total_steps: int | None, run: str = "The run") -> str | None:
        """Say which window of train has no room in so many steps; None: all have, or nothing is known."""
        if total_steps is None or "train" not in self._recorded:
            return None
        return schedule.misfit(self._config, total_steps, self.train.step_number, run)

    def nothing_recorded(self) -> str | None:
        """Say why the run ended without a window; None where the schedule asked for none."""
        name = self._config.phases[0]
        phase = self._all.get(name)
        if phase is None:
            return f"profiler.phases names {name}, but the run never came to session.phase({name!r})."
        if phase.plan.window is None:
            return None
        done = phase.step_number - phase.began_at
        advice = (
            "lower profiler.wait, profiler.warmup or profiler.skip_first, or train longer"
            if done
            else "call session.step() after each training step, or loop over session.steps(loader)"
        )
        return (
            f"The run ended after {done} steps, before the first window (steps {phase.plan.window}) had recorded one: "
            f"{advice}."
        )


class Steps(Generic[T]):
    """The batches of a loader, a step after each; as long as the loader."""

    def __init__(self, loader: Iterable[T], phases: Phases, advance: Callable[[Any], None]) -> None:
        self._loader = loader
        self._phases = phases
        self._advance = advance

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type] # as the loader answers

    def __iter__(self) -> Iterator[T]:
        phase = self._phases.present
        if phase.batch_open and not phase.loop_left:  # a loop within a loop
            yield from self._loader
            return
        phase.close_batch(self._advance)
        batches: Iterator[T] | None = None
        while True:
            with profiled("data"):
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
