from __future__ import annotations

import warnings
from itertools import islice, product, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import Golden
from recording import run_session
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from torch.profiler import schedule as torch_schedule

from instrument import ProfilerConfig, Session
from instrument.base.errors import ConfigError
from instrument.read.capture import Capture
from instrument.record.config.schedule import (
    Window,
    in_words,
    next_window,
    planned,
    remedy,
    requested_window,
    unreachable_window,
)
from instrument.record.step_loop import StepCounter

STEPS = 60


def torchs(**options: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a schedule without warm-up
        return torch_schedule(**options)


def cycles(**options: int) -> list[Window]:
    return list(takewhile(lambda w: w.warmup_from < STEPS, planned(ProfilerConfig(**options))))


@pytest.mark.parametrize(("wait", "warmup", "active"), list(product((0, 3), (0, 1, 2), (1, 4))))
def test_schedule_equals_torchs(wait: int, warmup: int, active: int) -> None:
    for repeat, skip_first in product((0, 1, 3), (0, 5)):
        options = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        options["skip_first"] = skip_first
        action, ours = torchs(**options), cycles(**options)
        for step in range(STEPS):
            recorded = any(w.first <= step <= w.last for w in ours if w.last is not None)
            warming = any(w.warmup_from <= step < w.first for w in ours)
            expected = action(step)
            assert recorded == (
                expected in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
            ), (options, step)
            assert warming == (expected == ProfilerAction.WARMUP), (options, step)


def test_the_recorded_steps_in_words() -> None:
    window = Window(3, 3, 5)
    recorded = [window.done_in_words(ended) for ended in (3, 4, 6)]
    assert recorded == ["a part of step 3", "step 3", "steps 3–5"]


def counter(config: ProfilerConfig) -> StepCounter:
    made = StepCounter("train")
    made.begin(config, 0)
    return made


def test_plans_in_words(golden: Golden) -> None:
    plans: list[dict[str, Any]] = [
        {"wait": 3, "active": 3, "repeat": 2},
        {"at_steps": [4], "active": 1},
        {},
        {"at_steps": []},
        {"at_steps": [1, 4, 7, 10], "active": 2},
        {"at_steps": [1, 4, 7], "active": 1},
    ]
    lengths: list[tuple[int, dict[str, Any]]] = [
        (3, {"wait": 3, "active": 2}),
        (4, {"wait": 3, "active": 2}),
        (5, {"wait": 3, "active": 2}),
        (7, {"skip_first": 2, "warmup": 1, "active": 1, "repeat": 3}),
        (7, {"warmup": 1, "active": 1, "repeat": 0}),
        (9, {"wait": 9, "active": 1, "repeat": 0}),
        (50, {"at_steps": [1, 50], "active": 2}),
        (120, {"every_n_steps": 50, "active": 2}),
        (50, {"every_n_steps": 50, "active": 1}),
        (6, {"wait": 5}),
        (5, {"wait": 5}),
        (3, {"at_steps": []}),
    ]
    cut_short = [(Window(4, 4, 4), 0), (Window(0, 3, 5), 1), (Window(0, 0, None), 1)]
    lines = []
    for plan in plans:
        config = ProfilerConfig(**plan)
        lines.append(f"{plan}: {in_words(config, next_window(config, 0))}")
    for total, plan in lengths:
        said = unreachable_window(ProfilerConfig(**plan), total)
        lines.append(f"{total} steps, {plan}: {said or 'there is room'}")
    lines += [window.cut_short(done, "why") for window, done in cut_short]
    golden("schedules_in_words.txt", "\n".join(lines))


def test_a_requested_window_is_as_long_as_asked_or_as_one_of_the_schedule() -> None:
    config = ProfilerConfig(warmup=2, active=3)
    for schedule, steps, last in (
        (config, None, 9),
        (config, 1, 7),
        (ProfilerConfig(warmup=2), None, 7),
    ):
        found = requested_window(schedule, 5, steps, "signal", "why")
        assert found == Window(5, 7, last, "signal", "why")


def first_steps(plan: StepCounter) -> list[int]:
    found = []
    while plan.window is not None:
        found.append(plan.window.first)
        plan.advance()
    return found


def test_a_plan_leaves_out_what_lies_behind() -> None:
    config = ProfilerConfig(at_steps=[2, 5, 8], active=1)
    plan = counter(config)
    plan.skip_to(5)
    assert first_steps(plan) == [5, 8]
    plan = counter(config)
    plan.skip_to(100)
    assert plan.window is None
    assert plan.skipped == Window(8, 8, 8)


def test_a_window_put_first_makes_those_it_runs_into_give_way() -> None:
    plan = counter(ProfilerConfig(at_steps=[4, 8], active=2))
    plan.window = Window(3, 3, 5)
    assert plan.window == Window(3, 3, 5)
    plan.advance()
    plan.skip_to(6)
    assert first_steps(plan) == [8]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"wait": 2, "warmup": 1, "skip_first": 4, "repeat": 1}, [(6, 7, None)]),
        (
            {"at_steps": [500, 1, 10, 13], "active": 3, "warmup": 2, "wait": 7},
            [(0, 1, 3), (8, 10, 12), (13, 13, 15), (498, 500, 502)],
        ),
        ({"at_steps": []}, []),
        (
            {"every_n_steps": 1000, "active": 2, "warmup": 1},
            [(n - 1, n, n + 1) for n in (1000, 2000, 3000, 4000, 5000)],
        ),
        ({"every_n_steps": 3, "active": 3}, [(n, n, n + 2) for n in (3, 6, 9, 12, 15)]),
        (
            {"every_n_steps": 2, "active": 2, "warmup": 1},
            [(1, 2, 3), *((n, n, n + 1) for n in (4, 6, 8, 10))],
        ),
    ],
)
def test_first_windows(
    options: dict[str, Any], expected: list[tuple[int, int, int | None]]
) -> None:
    found = islice(planned(ProfilerConfig(**options)), 5)
    assert [*found] == [Window(*each) for each in expected]


def test_room_is_looked_for_from_the_present_step_on() -> None:
    schedule = ProfilerConfig(wait=8, active=2, repeat=2)
    assert unreachable_window(schedule, 20, first_step=9) is None
    assert unreachable_window(schedule, 19, first_step=9) is not None
    assert unreachable_window(schedule, 19, first_step=19) is None, "the run is over already"


@pytest.mark.parametrize(
    ("options", "scheduled", "ignored"),
    [
        ({"triggers": ["file"]}, 0, None),
        (
            {"triggers": ["file"], "wait": 2, "skip_first": 9},
            0,
            "profiler.wait=2 and profiler.skip_first=9 are ignored",
        ),
        ({"triggers": ["file"], "wait": 2, "active": 1}, 1, None),
        ({"triggers": ["file"], "at_steps": [3, 5], "active": 1}, 2, None),
        ({"triggers": ["out_of_memory"], "wait": 2}, 0, "profiler.wait=2 is ignored: without"),
        ({"triggers": ["out_of_memory", "slow_step"]}, 0, None),
        (
            {"at_steps": [3, 5], "wait": 1, "active": 1},
            2,
            "profiler.wait=1 is ignored: profiler.at_steps says which windows",
        ),
    ],
)
def test_windows_of_triggers(options: dict[str, Any], scheduled: int, ignored: str | None) -> None:
    config = ProfilerConfig(**options)
    assert len(list(planned(config))) == scheduled
    assert [note[: len(ignored or "")] for note in config.notes] == ([ignored] if ignored else [])


def test_options_that_are_not_in_play_are_not_advised() -> None:
    config = ProfilerConfig(wait=1, warmup=2, active=1, repeat=2)
    first, second = planned(config)
    assert remedy(config, first) == "lower profiler.wait or profiler.warmup, or train longer"
    found = remedy(config, second)
    assert found == "lower profiler.wait, profiler.warmup or profiler.repeat, or train longer"
    assert remedy(config, Window(7, 8, 8, trigger="file")) == "train longer"
    assert remedy(ProfilerConfig(active=1), Window(0, 0, 0)) == "train longer"


def recorded_by_torch(folder: Path, schedule: Any, steps: int) -> list[list[int]]:
    """The numbers of the steps in each trace of torch's own profiler."""
    found: list[list[int]] = []

    def keep(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        names = {name.partition("#") for name in Capture.load(folder / "trace.json").events.names}
        found.append(
            sorted(int(number) for name, _, number in names if name == "ProfilerStep" and number)
        )

    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, schedule=schedule, on_trace_ready=keep) as profiler:
        for _ in range(steps):
            torch.ones(1)
            profiler.step()
    return found


def recorded_by_us(folder: Path, steps: int, **options: Any) -> list[list[int]]:
    options = {"export": "inline", "sinks": {}, **options}
    session = run_session(folder, steps, lambda: torch.ones(1), **options)
    return [capture.steps.column("number") for capture in session.captures]


def test_a_session_records_what_torchs_profiler_does_by_the_same_numbers(tmp_path: Path) -> None:
    numbers = {"skip_first": 1, "wait": 1, "warmup": 1, "active": 2, "repeat": 2}
    ours = recorded_by_us(tmp_path / "ours", 10, **numbers)
    assert ours == recorded_by_torch(tmp_path, torchs(**numbers), 10) == [[3, 4], [7, 8]]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("schedule", "give the numbers of torch.profiler.schedule"),
        ("on_trace_ready", "choose sinks instead, which process each window"),
    ],
)
def test_torchs_options_are_answered_with_ours(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^profiler\.{option} is not an option: {said}"):
        Session(active=None, **{option: print})
