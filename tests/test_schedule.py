from __future__ import annotations

import copy
import json
import pickle
import warnings
from dataclasses import replace
from itertools import islice, product, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from torch.profiler import schedule as torch_schedule

from instrument import ProfilerConfig, Session
from instrument.base.errors import ConfigError
from instrument.capture import Capture
from instrument.config.schedule import (
    Idle,
    Window,
    in_words,
    next_window,
    planned,
    remedy,
    unreachable_window,
)
from instrument.config.schema import as_config
from instrument.record.step_loop import StepCounter

STEPS = 60


def cycles(**options: int) -> list[Window]:
    return list(takewhile(lambda w: w.warmup_from < STEPS, planned(ProfilerConfig(**options))))


@pytest.mark.parametrize(("wait", "warmup", "active"), list(product((0, 1, 3), (0, 1, 2), (1, 4))))
def test_each_step_is_recorded_and_warmed_up_for_as_torch_would(
    wait: int, warmup: int, active: int
) -> None:
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
            assert recorded == (
                expected in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
            ), (options, step)
            assert warming == (expected == ProfilerAction.WARMUP), (options, step)


@pytest.mark.parametrize(("wait", "warmup", "active"), list(product((0, 1, 3), (0, 1, 2), (1, 4))))
def test_of_torchs_own_schedule_the_windows_are_those_of_its_numbers(
    wait: int, warmup: int, active: int
) -> None:
    for repeat, skip_first, skip_first_wait in product((0, 1, 3), (0, 5, 3_000), (0, 1)):
        options = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        options |= {"skip_first": skip_first, "skip_first_wait": skip_first_wait}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = ProfilerConfig(schedule=torch_schedule(**options))
        numbers = ProfilerConfig(**options)
        for step in (0, 1, 7, skip_first, skip_first + 3):
            first, *further = (
                islice(planned(numbers, step), 4) if not repeat else [*planned(numbers, step), None]
            )
            if (
                first is not None
            ):  # of a function it cannot be known how long it has warmed up before
                first = replace(first, warmup_from=max(step, first.warmup_from))
            found = [*islice(planned(asked, step, until=5_000), 4), *[None] * bool(repeat)]
            assert found == [first, *further], (options, step)


def actions(text: str) -> Any:
    """A function that gives the actions that letters stand for, and NONE from then on."""
    letters = dict(zip("-wrs", (ProfilerAction.NONE, ProfilerAction.WARMUP, *reversed(RECORDING))))
    return lambda step: letters[text[step]] if step < len(text) else ProfilerAction.NONE


RECORDING = (ProfilerAction.RECORD_AND_SAVE, ProfilerAction.RECORD)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s", [(0, 0, 0)]),
        ("wrs-ws", [(0, 1, 2), (4, 5, 5)]),
        ("rsrs", [(0, 0, 1), (2, 2, 3)]),
        ("-rr-s", [(1, 1, 2), (4, 4, 4)]),
        ("rwrs", [(0, 0, 0), (1, 2, 3)]),
        ("w-s", [(2, 2, 2)]),
        ("rr", [(0, 0, 1)]),
    ],
)
def test_windows_of_any_function(text: str, expected: list[tuple[int, int, int]]) -> None:
    config = ProfilerConfig(schedule=actions(text))
    windows = [Window(*each) for each in expected]
    assert [*planned(config)] == windows
    for step in range(len(text) + 1):
        found = next_window(config, step)
        ahead = [each for each in windows if each.first >= step]
        if ahead:  # from there on it cannot be known how long it has warmed up
            assert found == replace(ahead[0], warmup_from=max(step, ahead[0].warmup_from)), step
        else:
            assert isinstance(found, Idle)


def test_a_function_s_window_late_in_a_run() -> None:
    config = ProfilerConfig(schedule=actions("-" * 8_000 + "rrs"))
    assert next_window(config, 7_990) == Window(8_000, 8_000, 8_002)


def test_the_recorded_steps_in_words() -> None:
    window = Window(3, 3, 5)
    recorded = [window.done_in_words(ended) for ended in (3, 4, 6)]
    assert recorded == ["a part of step 3", "step 3", "steps 3–5"]


def counter(config: ProfilerConfig) -> StepCounter:
    made = StepCounter("train")
    made.begin(config, 0)
    return made


def test_each_step_is_asked_for_once_and_a_bit_ahead() -> None:
    asked: list[int] = []

    def action(step: int) -> ProfilerAction:
        asked.append(step)
        return ProfilerAction.RECORD_AND_SAVE if step == 4_000 else ProfilerAction.NONE

    plan = counter(ProfilerConfig(schedule=action))
    for step in range(10_000):
        plan.skip_to(step)
        assert asked[-1] <= step + 1_001
        assert (plan.window is not None) == (3_003 <= step <= 4_000)
        assert plan.planned is not None
    assert asked == [*range(len(asked))]
    plan.skip_to(10**9)
    assert len(asked) < 12_100, "a jump asks for nothing between"


def test_what_never_ends_is_said_to_last() -> None:
    assert [*planned(ProfilerConfig(schedule=lambda _: ProfilerAction.RECORD))] == [
        Window(0, 0, None)
    ]
    plan = counter(ProfilerConfig(schedule=lambda _: ProfilerAction.WARMUP))
    assert plan.window is None
    for config, words in (
        (
            ProfilerConfig(schedule=lambda _: ProfilerAction.WARMUP),
            "records no window before step 10001",
        ),
        (ProfilerConfig(schedule=actions("")), "records no window before step 1001"),
        (ProfilerConfig(schedule=actions("-s-rs")), "records steps 1, then 3–4 (counted from 0)"),
    ):
        assert in_words(config, next_window(config, 0)) == words


def test_a_trigger_comes_between_where_the_plan_is_not_known_further() -> None:
    at_1500 = ProfilerConfig(schedule=actions("-" * 1_500 + "s"))
    plan = counter(at_1500)
    plan.planned = Window(7, 7, 8, "signal")
    assert plan.window == Window(7, 7, 8, "signal")
    plan.advance()
    assert plan.window is None
    plan.skip_to(9)
    assert 1_000 < plan.planned.until < 1_100
    plan.skip_to(plan.planned.until)
    assert plan.window == Window(1_500, 1_500, 1_500)


@pytest.mark.parametrize(
    "wrong", [None, True, "RECORD", SimpleNamespace(name="DEVICE_STOPPED"), IndexError("list")]
)
def test_a_function_that_turns_wrong_ends_the_schedule_and_nothing_else(
    tmp_path: Path, log: Log, wrong: Any
) -> None:
    def action(step: int) -> Any:
        if step >= 35 and isinstance(wrong, Exception):
            raise wrong
        return wrong if step >= 35 else RECORDING[0] if step % 10 == 2 else ProfilerAction.NONE

    seen = recorded_by_us(tmp_path, 50, schedule=action)
    assert seen == [
        ["ProfilerStep#2"],
        ["ProfilerStep#12"],
        ["ProfilerStep#22"],
        ["ProfilerStep#32"],
    ]
    (said,) = log.at("WARNING")
    assert said.startswith("profiler.schedule fails for step 35 (")
    assert said.endswith("): no step is recorded from that step on.")


def test_a_list_shorter_than_what_is_asked_ahead_will_do(tmp_path: Path) -> None:
    plan = [
        ProfilerAction.NONE,
        ProfilerAction.WARMUP,
        *RECORDING[::-1],
        *[ProfilerAction.NONE] * 4,
    ]
    assert recorded_by_us(tmp_path, len(plan), schedule=plan.__getitem__) == [
        ["ProfilerStep#2", "ProfilerStep#3"]
    ]


def test_phases_and_calls_follow_a_function_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "export": "inline",
        "sinks": {},
        "schedule": torch_schedule(wait=1, warmup=1, active=2),
    }
    with Session(output_dir=tmp_path / "phases", phases=["validation"], **options) as session:
        for _ in range(2):
            session.step()
            with session.phase("validation"):
                for _ in range(4):
                    session.step()
    assert [capture.steps.column("number") for capture in session.captures] == [[2, 3], [6, 7]]
    session = Session(output_dir=tmp_path / "calls", **options)
    called = session.record(lambda: torch.ones(1))
    for _ in range(8):
        called()
    session.stop()
    assert [capture.steps.column("number") for capture in session.captures] == [[2, 3], [6, 7]]


def test_a_config_with_a_schedule_is_copied_and_pickled() -> None:
    described = {"_target_": "torch.profiler.schedule", "wait": 1, "warmup": 1, "active": 1}
    for made in (
        ProfilerConfig(schedule=described),
        as_config(ProfilerConfig(schedule=described), keep=3),
    ):
        again = pickle.loads(pickle.dumps(made))
        assert [*islice(planned(again), 2)] == [Window(1, 2, 2), Window(4, 5, 5)]
        assert again.plain()["schedule"] == made.plain()["schedule"] == described
    function = ProfilerConfig(schedule=torch_schedule(wait=1, warmup=1, active=1))
    assert [*islice(planned(copy.deepcopy(function)), 1)] == [Window(1, 2, 2)]


def test_of_a_function_it_is_said_whether_a_run_has_room_for_its_window() -> None:
    config = ProfilerConfig(schedule=torch_schedule(wait=10, warmup=1, active=3))
    assert unreachable_window(config, 14) is None
    assert unreachable_window(config, 13) == (
        "The run ends with step 12, within the window of steps 11–13: make profiler.schedule record earlier, or train "
        "longer."
    )
    none = "The run ends with step 99, and profiler.schedule records none of its steps."
    assert unreachable_window(ProfilerConfig(schedule=lambda _: ProfilerAction.NONE), 100) == none


def test_without_active_one_window_lasts_until_the_session_stops() -> None:
    options = {
        "wait": 2,
        "warmup": 1,
        "active": None,
        "repeat": 1,
        "skip_first": 4,
        "skip_first_wait": 0,
    }
    assert list(planned(ProfilerConfig(**options))) == [Window(6, 7, None)]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"wait": 3, "active": 3, "repeat": 2}, "records steps 3–5, then 9–11 (counted from 0)"),
        ({"at_steps": [4], "active": 1}, "records step 4 (counted from 0)"),
        ({}, "records steps from 0 on (counted from 0)"),
        ({"at_steps": []}, "records no window"),
        (
            {"at_steps": [1, 4, 7, 10], "active": 2},
            "records steps 1–2, then 4–5, then 7–8, and so on (counted from 0)",
        ),
        ({"at_steps": [1, 4, 7], "active": 1}, "records steps 1, then 4, then 7 (counted from 0)"),
    ],
)
def test_the_plan_in_words(plan: dict[str, Any], words: str) -> None:
    config = ProfilerConfig(**plan)
    assert in_words(config, next_window(config, 0)) == words


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
    plan.planned = Window(3, 3, 5)
    assert plan.window == Window(3, 3, 5)
    plan.advance()
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
    assert list(islice(planned(ProfilerConfig(every_n_steps=3, active=3)), 2)) == [
        Window(3, 3, 5),
        Window(6, 6, 8),
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
        (
            {"wait": 9, "active": 1, "repeat": 0},
            9,
            "before the window of step 9: lower profiler.wait, or train",
        ),
        (
            {"at_steps": [1, 50], "active": 2},
            50,
            "before the window of steps 50–51: lower profiler.at_steps, or",
        ),
        ({"every_n_steps": 50, "active": 2}, 120, None),
        (
            {"every_n_steps": 50, "active": 1},
            50,
            "the window of step 50: lower profiler.every_n_steps, or train",
        ),
        ({"wait": 5}, 6, None),
        (
            {"wait": 5},
            5,
            "before the window of steps from 5 on: lower profiler.wait, or train longer.",
        ),
        ({"at_steps": []}, 3, None),
    ],
)
def test_a_window_without_room_is_named_with_what_to_lower(
    options: dict[str, Any], total: int, sentence: str | None
) -> None:
    said = unreachable_window(ProfilerConfig(**options), total)
    assert (said is None) if sentence is None else (said is not None and sentence in said)


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
        ({"triggers": ["out_of_memory"], "wait": 2}, 1, None),
        ({"triggers": ["out_of_memory", "slow_step"]}, 0, None),
        (
            {"at_steps": [3, 5], "wait": 1, "active": 1},
            2,
            "profiler.wait=1 is ignored: profiler.at_steps says which windows",
        ),
    ],
)
def test_triggers_alone_ask_for_windows_where_no_number_says_which(
    options: dict[str, Any], scheduled: int, ignored: str | None
) -> None:
    config = ProfilerConfig(**options)
    assert len(list(planned(config))) == scheduled
    assert [note[: len(ignored or "")] for note in config.notes] == ([ignored] if ignored else [])


def test_options_that_are_not_in_play_are_not_advised() -> None:
    config = ProfilerConfig(wait=1, warmup=2, active=1, repeat=2)
    first, second = planned(config)
    assert remedy(config, first) == "lower profiler.wait or profiler.warmup, or train longer"
    assert (
        remedy(config, second)
        == "lower profiler.wait, profiler.warmup or profiler.repeat, or train longer"
    )
    assert remedy(config, Window(7, 8, 8, trigger="file")) == "train longer"
    assert remedy(ProfilerConfig(active=1), Window(0, 0, 0)) == "train longer"


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (Window(4, 4, 4), "The window of step 4 ended early, after 0 of 1 step (why)"),
        (Window(0, 3, 5), "The window of steps 3–5 ended early, after 1 of 3 steps (why)"),
        (Window(0, 0, None), "The window of steps from 0 on ended early, after 1 step (why)"),
    ],
)
def test_a_window_cut_short_in_words(window: Window, words: str) -> None:
    done = 0 if window.last == window.first else 1
    assert window.cut_short(done, "why") == f"{words}; it is kept and labelled truncated."


def recorded_by_torch(folder: Path, schedule: Any, steps: int) -> list[list[str]]:
    """The names of the steps in each trace of torch's own profiler."""
    found: list[list[str]] = []

    def keep(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        names = {
            row.name
            for row in Capture.load(folder / "trace.json").events
            if row.name.startswith("ProfilerStep#")
        }
        found.append(sorted(names))

    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=keep
    ) as profiler:
        for _ in range(steps):
            torch.ones(1)
            profiler.step()
    return found


def recorded_by_us(folder: Path, steps: int, **options: Any) -> list[list[str]]:
    with Session(export="inline", sinks={}, output_dir=folder, **options) as session:
        for _ in range(steps):
            torch.ones(1)
            session.step()
    return [
        [f"ProfilerStep#{number}" for number in capture.steps.column("number")]
        for capture in session.captures
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of a profiler that is used twice
@pytest.mark.parametrize(
    "schedule",
    [
        torch_schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=2),
        torch_schedule(wait=0, warmup=1, active=1, repeat=0),
        lambda step: RECORDING[0] if step in (3, 5) else ProfilerAction.WARMUP,
    ],
)
def test_a_session_records_what_torchs_profiler_does_by_the_same_schedule(
    tmp_path: Path, schedule: Any
) -> None:
    ours = recorded_by_us(tmp_path / "ours", 10, schedule=schedule)
    assert ours == recorded_by_torch(tmp_path, schedule, 10)
    assert len(ours) >= 2


def test_a_config_names_the_schedule_by_its_target(tmp_path: Path) -> None:
    described = {"_target_": "torch.profiler.schedule", "wait": 2, "warmup": 1, "active": 2}
    config = ProfilerConfig(schedule=described, export="inline", output_dir=tmp_path, sinks={})
    assert recorded_by_us(tmp_path, 9, schedule=described)[0] == [
        "ProfilerStep#3",
        "ProfilerStep#4",
    ]
    assert config.plain()["schedule"] == described
    function = torch_schedule(wait=1, warmup=1, active=1)
    assert ProfilerConfig(schedule=function).plain()["schedule"] == "schedule.<locals>.schedule_fn"
    assert json.dumps(config.plain())


def test_a_run_with_a_function_says_what_came_of_it(tmp_path: Path, log: Log) -> None:
    assert (
        recorded_by_us(tmp_path, 3, schedule=torch_schedule(wait=10_000, warmup=1, active=1)) == []
    )
    said = "The run ended after 3 steps, before a window had recorded a step: make profiler.schedule record earlier, or "
    assert f"{said}train longer." in log.at("WARNING")
    assert any(
        line.startswith("Profiler records no window before step 1001 on cpu")
        for line in log.at("INFO")
    )
    assert recorded_by_us(
        tmp_path, 1_500, schedule=torch_schedule(wait=1_400, warmup=1, active=1, repeat=1)
    ) == [["ProfilerStep#1401"]]


def test_a_checkpoints_step_number_moves_on_in_it(tmp_path: Path) -> None:
    session = Session(
        schedule=torch_schedule(wait=3, warmup=1, active=1),
        export="inline",
        sinks={},
        output_dir=tmp_path,
    )
    session.step_number = 12_346
    with session:
        for _ in range(6):
            session.step()
    assert [capture.steps.column("number") for capture in session.captures] == [[12_349]]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "soon",
            "profiler.schedule is 'soon', but it must be a function from steps to torch's ProfilerAction, such as ",
        ),
        ({"wait": 1}, "profiler.schedule is {'wait': 1}, but it must be a function "),
        (
            lambda _: True,
            "profiler.schedule fails for step 0 (it returned True): it must be a function ",
        ),
        (torch_schedule, "profiler.schedule fails for step 0 (schedule() "),
        (
            {"_target_": "torch.profiler.schedul"},
            "profiler.schedule._target_ is 'torch.profiler.schedul', which cannot",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ProfilerConfig(schedule=given)
    assert str(refused.value).startswith(sentence)


def test_what_stands_beside_a_function_is_refused_or_named() -> None:
    function = torch_schedule(wait=1, warmup=1, active=1)
    with pytest.raises(
        ConfigError, match=r"^profiler\.schedule and profiler\.at_steps are both given, "
    ):
        ProfilerConfig(schedule=function, at_steps=[3])
    with pytest.raises(
        ConfigError,
        match=r"^profiler\.repeat is 3, but profiler\.schedule says which windows there",
    ):
        ProfilerConfig(schedule=function, repeat=3)
    (note,) = ProfilerConfig(schedule=function, wait=2, active=3).notes
    assert note.startswith(
        "profiler.wait=2 and profiler.active=3 are ignored: profiler.schedule says"
    )


def test_torchs_callback_is_answered_with_sinks() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^profiler\.on_trace_ready is not an option: choose sinks instead, which process each window",
    ):
        Session(on_trace_ready=print)
