from __future__ import annotations

import warnings
from itertools import islice, product, takewhile
from typing import Any

import pytest
from torch.profiler import ProfilerAction
from torch.profiler import schedule as torch_schedule

from instrument import ProfilerConfig
from instrument.schedule import Plan, Window, misfit, planned, remedy, windows

STEPS = 60


def cycles(**options: int) -> list[Window]:
    return list(takewhile(lambda w: w.warmup_from < STEPS, windows(**options)))


@pytest.mark.parametrize(("wait", "warmup", "active"), list(product((0, 1, 3), (0, 1, 2), (1, 4))))
def test_each_step_is_recorded_and_warmed_up_for_as_torch_would(wait: int, warmup: int, active: int) -> None:
    for repeat, skip_first, skip_first_wait in product((0, 1, 3), (0, 5), (0, 1)):
        options = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        options |= {"skip_first": skip_first, "skip_first_wait": skip_first_wait}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a schedule without warm-up
            action = torch_schedule(**options)
        ours = cycles(**options)
        for step in range(STEPS):
            recorded = any(w.first <= step <= w.last for w in ours if w.last is not None)
            warming = any(w.warmup_from <= step < w.first for w in ours)
            expected = action(step)
            assert recorded == (expected in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)), (options, step)
            assert warming == (expected == ProfilerAction.WARMUP), (options, step)


def test_without_active_one_window_lasts_until_the_session_stops() -> None:
    options = {"wait": 2, "warmup": 1, "active": None, "repeat": 1, "skip_first": 4, "skip_first_wait": 0}
    assert list(windows(**options)) == [Window(6, 7, None)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ([(3, 5), (8, 10)], "records steps 3–5, then 8–10 (counted from 0)"),
        ([(4, 4)], "records step 4 (counted from 0)"),
        ([(0, None)], "records steps from 0 on (counted from 0)"),
        ([], "records no window"),
        ([(1, 2), (4, 5), (7, 8), (10, 11)], "records steps 1–2, then 4–5, then 7–8, and so on (counted from 0)"),
    ],
)
def test_the_plan_in_words(plan: list[tuple[int, int | None]], words: str) -> None:
    windows = Plan(Window(first, first, last) for first, last in plan)
    assert windows.in_words() == words
    assert windows.in_words() == words, "to say it uses nothing up"


def first_steps(plan: Plan) -> list[int]:
    found = []
    while plan.window is not None:
        found.append(plan.window.first)
        plan.turn()
    return found


def test_a_plan_leaves_out_what_lies_behind() -> None:
    plan = Plan(Window(first, first, first) for first in (2, 5, 8))
    plan.skip_to(5)
    assert first_steps(plan) == [5, 8]
    plan.skip_to(100)
    assert plan.window is None


def test_a_window_put_first_makes_those_it_runs_into_give_way() -> None:
    plan = Plan(Window(first, first, first + 1) for first in (4, 8))
    plan.put_first(Window(3, 3, 5))
    assert plan.window == Window(3, 3, 5)
    plan.turn()
    plan.skip_to(6)
    assert first_steps(plan) == [8]


def test_windows_at_explicit_steps_are_warmed_up_for_where_there_is_room() -> None:
    schedule = ProfilerConfig(at_steps=[500, 1, 10, 13], active=3, warmup=2, wait=7)
    assert list(planned(schedule)) == [
        Window(0, 1, 3),
        Window(8, 10, 12),
        Window(13, 13, 15),
        Window(498, 500, 502),
    ]
    assert list(planned(ProfilerConfig(at_steps=[]))) == []


def test_windows_every_n_steps_go_on_without_end() -> None:
    schedule = ProfilerConfig(every_n_steps=1000, active=2, warmup=1)
    assert list(islice(planned(schedule), 3)) == [
        Window(999, 1000, 1001),
        Window(1999, 2000, 2001),
        Window(2999, 3000, 3001),
    ]
    assert list(islice(planned(ProfilerConfig(every_n_steps=2, active=2, warmup=1)), 2)) == [
        Window(1, 2, 3),
        Window(4, 4, 5),
    ]


@pytest.mark.parametrize(
    ("options", "total", "sentence"),
    [
        (
            {"wait": 3, "active": 2},
            3,
            "The run ends with step 2, before the window of steps 3–4: lower profiler.wait, or train longer.",
        ),
        (
            {"wait": 3, "active": 2},
            4,
            "The run ends with step 3, within the window of steps 3–4: "
            "lower profiler.wait or profiler.active, or train longer.",
        ),
        ({"wait": 3, "active": 2}, 5, None),
        (
            {"skip_first": 2, "warmup": 1, "active": 1, "repeat": 3},
            7,
            "The run ends with step 6, before the window of step 7: "
            "lower profiler.warmup, profiler.skip_first or profiler.repeat, or train longer.",
        ),
        ({"warmup": 1, "active": 1, "repeat": 0}, 7, None),
        ({"wait": 9, "active": 1, "repeat": 0}, 9, "before the window of step 9: lower profiler.wait, or train"),
        ({"at_steps": [1, 50], "active": 2}, 50, "before the window of steps 50–51: lower profiler.at_steps, or"),
        ({"every_n_steps": 50, "active": 2}, 120, None),
        ({"every_n_steps": 50, "active": 1}, 50, "the window of step 50: lower profiler.every_n_steps, or train"),
        ({"wait": 5}, 6, None),
        ({"wait": 5}, 5, "before the window of steps from 5 on: lower profiler.wait, or train longer."),
        ({"at_steps": []}, 3, None),
    ],
)
def test_a_window_without_room_is_named_with_what_to_lower(
    options: dict[str, Any], total: int, sentence: str | None
) -> None:
    said = misfit(ProfilerConfig(**options), total)
    assert (said is None) if sentence is None else (said is not None and sentence in said)


def test_room_is_looked_for_from_the_present_step_on() -> None:
    schedule = ProfilerConfig(wait=8, active=2, repeat=2)
    assert misfit(schedule, 20, first_step=9) is None
    assert misfit(schedule, 19, first_step=9) is not None
    assert misfit(schedule, 19, first_step=19) is None, "the run is over already"


@pytest.mark.parametrize(
    ("options", "scheduled", "overlooked"),
    [
        ({"triggers": ["file"]}, 0, None),
        ({"triggers": ["file"], "wait": 2, "skip_first": 9}, 0, "profiler.wait=2 and profiler.skip_first=9 are not"),
        ({"triggers": ["file"], "wait": 2, "active": 1}, 1, None),
        ({"triggers": ["file"], "at_steps": [3, 5], "active": 1}, 2, None),
        ({"triggers": ["out_of_memory"], "wait": 2}, 1, None),
        ({"triggers": ["out_of_memory", "slow_step"]}, 0, None),
        (
            {"at_steps": [3, 5], "wait": 1, "active": 1},
            2,
            "profiler.wait=1 is not looked at: profiler.at_steps says which windows",
        ),
    ],
)
def test_triggers_alone_ask_for_windows_where_no_number_says_which(
    options: dict[str, Any], scheduled: int, overlooked: str | None
) -> None:
    config = ProfilerConfig(**options)
    assert len(list(planned(config))) == scheduled
    assert [note[: len(overlooked or "")] for note in config.notes] == ([overlooked] if overlooked else [])


def test_options_that_are_not_in_play_are_not_advised() -> None:
    config = ProfilerConfig(wait=1, warmup=2, active=1, repeat=3)
    first, second, _ = planned(config)
    assert remedy(config, first) == "lower profiler.wait or profiler.warmup, or train longer"
    assert remedy(config, second) == "lower profiler.wait, profiler.warmup or profiler.repeat, or train longer"
    assert remedy(config, Window(7, 8, 8, trigger="file")) == "train longer"
    assert remedy(ProfilerConfig(active=1), Window(0, 0, 0)) == "train longer"


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (Window(4, 4, 4), "The window of step 4 was cut short after 0 of 1 step (why)"),
        (Window(0, 3, 5), "The window of steps 3–5 was cut short after 1 of 3 steps (why)"),
        (Window(0, 0, None), "The window of steps from 0 on was cut short after 1 step (why)"),
    ],
)
def test_a_window_cut_short_in_words(window: Window, words: str) -> None:
    done = 0 if window.last == window.first else 1
    assert window.cut_short(done, "why") == f"{words}; it is kept and labelled truncated."
