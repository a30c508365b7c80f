"""Phases of a session: what each counts, what is recorded of it, and what becomes of an open window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log

from instrument import Capture, ConfigError, Session
from instrument.record.triggers import Step

pytestmark = pytest.mark.usefixtures("inline_export")


def work() -> None:
    torch.ones(4).sum()


def numbers(capture: Capture) -> list[int]:
    return capture.steps.column("number")


def epoch(session: Session, train: int, validation: int) -> None:
    for _ in session.steps(range(train)):
        work()
    with session.phase("validation"):
        for _ in session.steps(range(validation)):
            work()


def test_validation_does_not_move_the_steps_of_train(tmp_path: Path) -> None:
    with Session(wait=5, active=2, output_dir=tmp_path) as session:
        for _ in range(3):
            epoch(session, train=3, validation=4)
    assert session.step_number == 9
    (capture,) = session.captures
    assert capture.metadata["window"]["phase"] == "train"
    assert numbers(capture) == [5, 6]


def test_a_phase_outside_of_a_run_records_nothing(tmp_path: Path) -> None:
    session = Session(active=1, phases=["validation"], output_dir=tmp_path)
    with session.phase("validation"):
        assert not torch.autograd._profiler_enabled()
    with session:
        epoch(session, train=1, validation=1)
    assert [numbers(capture) for capture in session.captures] == [[0]]
    with session.phase("validation"), session:
        session.step()
    assert [numbers(capture) for capture in session.captures] == [[0], [0]]


def test_a_break_after_a_whole_batch_ends_the_batch_s_step(tmp_path: Path) -> None:
    options: dict[str, Any] = {"phases": ["validation"], "wait": 1, "active": 1, "repeat": 2}
    with Session(options, output_dir=tmp_path) as session:
        for _ in range(2):
            with session.phase("validation"):
                for batch in session.steps(range(9)):
                    work()
                    if batch == 1:
                        break
    assert [numbers(capture) for capture in session.captures] == [[1], [3]]


@pytest.mark.parametrize("left_at", [None, 4])
def test_accumulated_batches_are_one_step(tmp_path: Path, left_at: int | None) -> None:
    with Session(active=2, repeat=2, output_dir=tmp_path) as session:
        for batch in session.steps(range(11), every=3):
            work()
            session.step(loss=float(batch))
            with session.phase("validation"):
                for _ in session.steps(range(2)):
                    work()
            if batch == left_at:
                break
        assert session.step_number == (4 if left_at is None else 1)
    found = [(numbers(each), each.ranges.where(path="data")) for each in session.captures]
    if left_at is None:  # the last step has two batches
        assert [(steps, row.calls) for steps, (row,) in found] == [([0, 1], 6), ([2, 3], 5)]
    else:
        assert [(steps, row.calls) for steps, (row,) in found] == [([0, 1], 5)]
    with pytest.raises(ConfigError, match="every=0, but it must be a whole number"):
        session.steps([], every=0)


def test_each_phase_has_its_own_count(tmp_path: Path, log: Log) -> None:
    options: dict[str, Any] = {"wait": 5, "active": 2, "phases": ["train", "validation"]}
    with Session(options, output_dir=tmp_path) as session:
        for _ in range(3):
            epoch(session, train=4, validation=4)
    found = {
        capture.name: (capture.metadata["window"]["phase"], numbers(capture))
        for capture in session.captures
    }
    assert found == {
        "steps_000005-000006_rank0": ("train", [5, 6]),
        "validation_steps_000005-000006_rank0": ("validation", [5, 6]),
    }
    assert "records steps 5–6 (counted from 0) in train and validation, on cpu" in log.at("INFO")[0]


def test_an_open_window_goes_on_and_shows_validation_as_a_range(tmp_path: Path) -> None:
    with Session(active=4, output_dir=tmp_path) as session:
        epoch(session, train=2, validation=3)
        epoch(session, train=2, validation=3)
    (capture,) = session.captures
    assert numbers(capture) == [0, 1, 2, 3]
    assert not capture.metadata["window"]["truncated"]
    (row,) = capture.ranges.where(path="validation")
    assert row.calls == 1, "the second time, the window is over"
    steps = [name for name in capture.events.names if name.startswith("ProfilerStep#")]
    assert sorted(steps) == [f"ProfilerStep#{number}" for number in range(4)]


def test_validation_within_the_loop_of_train_is_no_loop_within_a_loop(tmp_path: Path) -> None:
    with Session(active=2, phases=["validation"], output_dir=tmp_path) as session:
        for number in session.steps(range(4)):
            work()
            if number == 1:
                with session.phase("validation"):
                    for _ in session.steps(range(3)):
                        work()
    assert session.step_number == 4
    assert [(c.name, numbers(c)) for c in session.captures] == [
        ("validation_steps_000000-000001_rank0", [0, 1])
    ]


def test_a_window_ends_with_its_phase_and_is_labelled(tmp_path: Path, log: Log) -> None:
    with Session(active=3, phases=["test"], output_dir=tmp_path) as session:
        with session.phase("test"):
            for _ in session.steps(range(2)):
                work()
        session.step()
    (capture,) = session.captures
    window = capture.metadata["window"]
    assert (window["steps"], window["planned_steps"]) == (2, 3)
    assert window["reason"] == "the phase test ended"
    assert numbers(capture) == [0, 1]
    assert "ended early, after 2 of 3 steps (the phase test ended)" in log.at("WARNING")[0]


def test_a_window_that_has_just_begun_waits_for_the_next_visit(tmp_path: Path, log: Log) -> None:
    with Session(wait=2, active=2, phases=["validation"], output_dir=tmp_path) as session:
        epoch(session, train=1, validation=2)
        assert session.captures == []
        epoch(session, train=1, validation=2)
    assert [numbers(capture) for capture in session.captures] == [[2, 3]]
    assert log.at("WARNING") == []


def test_an_exception_in_a_phase_keeps_its_window_and_goes_on(tmp_path: Path, log: Log) -> None:
    log.expect("exception ZeroDivisionError")
    session = Session(active=3, phases=["validation"], export="inline", output_dir=tmp_path)

    def run() -> None:
        with session, session.phase("validation"):
            for number in session.steps(range(3)):
                work()
                if number == 1:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    (capture,) = session.captures
    assert capture.metadata["window"]["reason"] == "exception ZeroDivisionError"
    assert numbers(capture) == [0]


def test_a_phase_that_came_in_an_earlier_run_alone_is_told(tmp_path: Path, log: Log) -> None:
    session = Session(active=1, phases=["validation"], output_dir=tmp_path)
    with session:
        epoch(session, train=1, validation=2)
    assert log.at("WARNING") == []
    with session:
        session.step()
    assert log.at("WARNING") == [
        "profiler.phases names validation, but the run never entered session.phase('validation')."
    ]


def test_a_phase_has_any_name_and_is_counted_by_itself(tmp_path: Path, log: Log) -> None:
    with Session(wait=1, active=1, phases=["rollout"], output_dir=tmp_path) as session:
        for _ in range(2):
            for name in ("rollout", "not recorded"):
                with session.phase(name):
                    session.step()
            session.step()
    found = [(capture.name, capture.phase, numbers(capture)) for capture in session.captures]
    assert found == [("rollout_steps_000001-000001_rank0", "rollout", [1])]
    assert log.at("WARNING") == []


def test_a_restarted_session_counts_each_phase_anew(tmp_path: Path) -> None:
    session = Session(active=1, phases=["train", "validation"], output_dir=tmp_path)
    for _ in range(2):
        with session:
            epoch(session, train=2, validation=2)
    name = "steps_000000-000000_rank0"
    names = [name, f"validation_{name}", f"{name}-2", f"validation_{name}-2"]
    assert [capture.name for capture in session.captures] == names


def test_triggers_see_only_steps_of_train(tmp_path: Path, log: Log, now: list[int]) -> None:
    log.expect("before the first window")
    seen: list[Step] = []

    class Remembers:
        def fires(self, step: Step) -> bool:
            seen.append(step)
            return False

    options: dict[str, Any] = {"skip_first": 50, "active": 1, "phases": ["train", "validation"]}
    with Session(options, output_dir=tmp_path, triggers={"mine": Remembers()}) as session:
        for _ in range(2):
            now[0] += 7
            with session.phase("validation"):
                for _ in range(3):
                    now[0] += 1000
                    session.step()
            now[0] += 4
            session.step()
    assert [(step.number, step.duration_ns) for step in seen] == [(0, 11), (1, 11)]


def test_a_block_of_train_within_train_takes_no_step_out_of_the_timings(tmp_path: Path) -> None:
    options: dict[str, Any] = {"at_steps": [1, 4], "active": 1, "timings": {"device": False}}
    with Session(options, output_dir=tmp_path) as session:
        for _ in range(2):
            with session.phase("train"):
                for _ in session.steps(range(3)):
                    work()
    assert session.step_number == 6
    assert [numbers(capture) for capture in session.captures] == [[1], [4]]
    calls = {row.name: row.calls for row in session.timings.table()}
    assert calls == {"ProfilerStep*": 6, "data": 6, "train": 2}


def test_a_step_of_validation_is_none_of_the_window_of_train(tmp_path: Path, log: Log) -> None:
    log.expect("the run ended")
    with Session(active=2, output_dir=tmp_path) as session:
        with session.phase("validation"):
            session.step()
        assert session._loop.window.step_ns == []
        session.step()
        assert len(session._loop.window.step_ns) == 1
