"""Sentences that say which steps a session will record, or why it has recorded no step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from instrument.base.units import counted
from instrument.record.config import schedule
from instrument.record.config.schedule import Window, next_window
from instrument.record.config.schema import ProfilerConfig

if TYPE_CHECKING:
    from instrument.record.step_loop import StepCounter


def in_words(config: ProfilerConfig, train: StepCounter) -> str:
    """The plan in words, such as "records steps 2–4 (counted from 0)"."""
    planned = train.window if train.schedule is not None else next_window(config, 0)
    where = "" if config.phases == ["train"] else f" in {' and '.join(config.phases)}"
    words = schedule.in_words(config, planned) + where
    if schedule.triggers_ask(config):
        requested = "the windows that triggers request"
        words = f"records {requested}" if planned is None else f"{words}, and {requested}"
    if config.timings is None:
        return words
    return f"{words}, and measures the times of ranges and steps in the whole run"


def unreachable_window(
    config: ProfilerConfig, train: StepCounter, total_steps: int | None
) -> str | None:
    """A warning for the start of a run, about windows that it cannot record, if any."""
    begin, skipped = train.step_number, train.skipped
    if config.at_steps == [] and not config.triggers and config.timings is None:
        return (
            "profiler.at_steps is [], and there are neither triggers nor timings: only "
            "session.request() records a window."
        )
    if train.window is None:
        if skipped is None:
            return None
        return (
            f"The run begins with step {begin}, after the last window of the schedule "
            f"({skipped.in_words()}), so no window will be recorded: choose later steps."
        )
    if total_steps is not None and total_steps <= begin:
        return (
            f"The run begins with step {begin}, but has {total_steps} steps in all: nothing is "
            "left to record."
        )
    if total_steps is None or train.schedule is None:
        return None
    return schedule.unreachable_window(config, total_steps, begin)


def nothing_recorded(
    config: ProfilerConfig, entered: Sequence[StepCounter], known_skipped: Window | None, unit: str
) -> str | None:
    """Say why the run ended without a window; None if none was planned or a warning came before.

    Args:
        config: the config of the session.
        entered: the counters of those phases in `profiler.phases` that the run has entered.
        known_skipped: the last window that the start of the session skipped, of which it has
            already warned; None if no window was skipped then.
        unit: the word for a step: "step" or "call".
    """
    if not entered:
        name = config.phases[0]
        return f"profiler.phases names {name}, but the run never entered session.phase({name!r})."
    counter = max(entered, key=lambda each: each.step_number - each.began_at)
    window, skipped = counter.window, counter.skipped
    if window is None:
        if skipped is None or skipped is known_skipped:
            return None
        return (
            "Nothing was recorded: the step number went past the last window of the schedule "
            f"({skipped.in_words()}) before that window could begin."
        )
    done = counter.step_number - counter.began_at
    advice = "call session.step() after each training step, or loop over session.steps(loader)"
    if done:
        longer = "make more calls" if unit == "call" else "train longer"
        advice = schedule.remedy(config, window, longer=longer)
    return (
        f"The run ended after {counted(done, unit)}, before the first window "
        f"({window.in_words()}) had recorded a step: {advice}."
    )
