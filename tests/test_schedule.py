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
from golden import Golden
from recording import run_session
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
    requested_window,
    unreachable_window,
)
from instrument.config.schema import as_config
from instrument.record.step_loop import StepCounter

STEPS = 60


def torchs(**options: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a schedule without warm-up
        return torch_schedule(**options)


def cycles(**options: int) -> list[Window]:
    return list(takewhile(lambda w: w.warmup_from < STEPS, planned(ProfilerConfig(**options))))


@pytest.mark.parametrize(("wait", "warmup", "active"), list(product((0, 3), (0, 1, 2), (1, 4))))
def test_each_step_is_recorded_and_warmed_up_for_as_torch_would(
    wait: int, warmup: int, active: int
) -> None:
    for repeat, skip_first, skip_first_wait in product((0, 1, 3), (0, 5), (0, 1)):
        options = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        options |= {"skip_first": skip_first, "skip_first_wait": skip_first_wait}
        action, ours = torchs(**options), cycles(**options)
        for step in range(STEPS):
            recorded = any(w.first <= step <= w.last for w in ours if w.last is not None)
            warming = any(w.warmup_from <= step < w.first for w in ours)
            expected = action(step)
            assert recorded == (
                expected in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
            ), (options, step)
            assert warming == (expected == ProfilerAction.WARMUP), (options, step)


@pytest.mark.parametrize(("wait", "warmup"), list(product((0, 3), (0, 1, 2))))
def test_of_torchs_own_schedule_the_windows_are_those_of_its_numbers(
    wait: int, warmup: int
) -> None:
    for repeat, skip_first, skip_first_wait in product((0, 1, 3), (0, 5, 3_000), (0, 1)):
        options = {"wait": wait, "warmup": warmup, "active": 2, "repeat": repeat}
        options |= {"skip_first": skip_first, "skip_first_wait": skip_first_wait}
        asked = ProfilerConfig(schedule=torchs(**options))
        numbers = ProfilerConfig(**options)
        for step in (0, 1, skip_first + 3):
            expected = [*islice(planned(numbers, step), 4), *[None] * bool(repeat)]
            if expected[0] is not None:  # how long it has warmed up before cannot be known
                warmup_from = max(step, expected[0].warmup_from)
                expected[0] = replace(expected[0], warmup_from=warmup_from)
            found = [*islice(planned(asked, step, until=5_000), 4), *[None] * bool(repeat)]
            assert found == expected, (options, step)


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

    assert recorded_by_us(tmp_path, 50, schedule=action) == [[2], [12], [22], [32]]
    (said,) = log.at("WARNING")
    assert said.startswith("profiler.schedule fails for step 35 (")
    assert said.endswith("): no step is recorded from that step on.")


def test_a_list_shorter_than_what_is_asked_ahead_will_do(tmp_path: Path, log: Log) -> None:
    log.expect("profiler.schedule fails")
    plan = [actions("-wrs----")(step) for step in range(8)]
    assert recorded_by_us(tmp_path, len(plan), schedule=plan.__getitem__) == [[2, 3]]


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
    plan.planned = Window(3, 3, 5)
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
def test_the_first_windows_of_numbers(
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


def recorded_by_torch(folder: Path, schedule: Any, steps: int) -> list[list[int]]:
    """The numbers of the steps in each trace of torch's own profiler."""
    found: list[list[int]] = []

    def keep(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        names = {row.name.partition("#") for row in Capture.load(folder / "trace.json").events}
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


def test_a_config_names_the_schedule_by_its_target(tmp_path: Path, log: Log) -> None:
    log.expect("the run ended")
    described = {"_target_": "torch.profiler.schedule", "wait": 2, "warmup": 1, "active": 2}
    config = ProfilerConfig(schedule=described, export="inline", output_dir=tmp_path, sinks={})
    assert recorded_by_us(tmp_path, 9, schedule=described)[0] == [3, 4]
    assert config.plain()["schedule"] == described
    function = torch_schedule(wait=1, warmup=1, active=1)
    assert ProfilerConfig(schedule=function).plain()["schedule"] == "schedule.<locals>.schedule_fn"
    assert json.dumps(config.plain())


def test_a_run_with_a_function_says_what_came_of_it(tmp_path: Path, log: Log) -> None:
    late = torch_schedule(wait=10_000, warmup=1, active=1)
    assert recorded_by_us(tmp_path, 3, schedule=late) == []
    said = "The run ended after 3 steps, before a window had recorded a step: make profiler.schedule record earlier, or "
    assert f"{said}train longer." in log.at("WARNING")
    assert any(
        line.startswith("Profiler records no window before step 1001, on cpu")
        for line in log.at("INFO")
    )
    once = torch_schedule(wait=1_400, warmup=1, active=1, repeat=1)
    assert recorded_by_us(tmp_path, 1_500, schedule=once) == [[1401]]


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
    for beside, sentence in (
        ({"at_steps": [3]}, r"^profiler\.schedule and profiler\.at_steps are both given, "),
        ({"repeat": 3}, r"^profiler\.repeat is 3, but profiler\.schedule says which windows there"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            ProfilerConfig(schedule=function, **beside)
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
