"""`max_stall_ms`: a window in parts, none of which makes training wait long, and no step is missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log
from recording import run_session

from instrument import Capture, Session
from instrument.read.show.remarks import cost
from instrument.record import limits
from instrument.record.config.schedule import Window
from instrument.record.parts import Parts

pytestmark = pytest.mark.usefixtures("inline_export")

MS = 1_000_000
ENOUGH = 1e6  # even on a busy machine


def work() -> None:
    torch.ones(2) + 1


def parts_of(session: Session) -> list[tuple[int | None, int | None, list[int]]]:
    """For each capture: which part of the window from which step it is, and its steps."""
    about = [(each.metadata["window"], each) for each in session.captures]
    return [(w["part_of_step"], w["part"], each.steps.column("number")) for w, each in about]


def test_the_slowest_of_three_parts_sizes_the_next() -> None:
    parts = Parts(Window(3, 4, 99), 100 * MS)
    assert parts.current == Window(3, 4, 4), "one step, after the warm-up"
    sizes, first = [], 5
    for per_step_ms in (20, 4, 8, 8, 8, 8):
        steps = first - parts.current.first
        following = parts.go_on(first, per_step_ms * steps * MS)
        assert following.warmup_from == following.first == first
        first = (following.last or 0) + 1
        sizes.append(first - following.first)
    assert sizes == [4, 4, 4, 10, 10, 10]
    assert parts.go_on(99, MS) == Window(99, 99, 99), "no more than the whole"
    assert parts.go_on(100, MS) is None


def test_parts_follow_each_other_and_the_schedule_goes_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"wait": 1, "warmup": 1, "active": 4, "repeat": 2}
    session = run_session(tmp_path, 14, work, **options, max_stall_ms=ENOUGH)
    assert parts_of(session) == [(2, 0, [2]), (2, 1, [3, 4, 5]), (8, 0, [8]), (8, 1, [9, 10, 11])]
    windows = [each.metadata["window"] for each in session.captures]
    assert [each["planned_steps"] for each in windows] == [1, 3, 1, 3]
    assert not any(each["truncated"] for each in windows)


def test_without_a_budget_a_window_is_whole(tmp_path: Path) -> None:
    session = run_session(tmp_path, 5, work, active=4)
    assert parts_of(session) == [(None, None, [0, 1, 2, 3])]
    assert session.captures[0].metadata["cost"]["stall_ns"] > 0


def test_a_step_that_alone_takes_longer_is_said(tmp_path: Path, log: Log) -> None:
    session = run_session(tmp_path, 4, work, active=3, max_stall_ms=1e-3)
    assert parts_of(session) == [(0, 0, [0]), (0, 1, [1]), (0, 2, [2])]
    (warning,) = log.at("WARNING")
    assert "The end of a window of one step takes" in warning
    assert "more than profiler.max_stall_ms=0.001" in warning
    for capture in session.captures:
        assert ", more than 1 ns" not in cost(capture)
        assert "more than 1.000 µs" in cost(capture)


def test_a_request_gives_the_part_with_the_most_steps(tmp_path: Path, log: Log) -> None:
    log.expect("only session.request() records a window")
    with Session(at_steps=[], max_stall_ms=ENOUGH, output_dir=tmp_path) as session:
        asked = session.request(steps=5)
        states = []
        for _ in range(8):
            work()
            session.step()
            states.append(asked.state)
        found: Capture = asked.capture
    assert [len(each.steps) for each in session.captures] == [1, 4]
    assert len(found.steps) == 4
    assert states[-1] == "done"
    assert "done" not in states[:5], "as long as parts are missing"


def test_a_run_that_ends_in_a_part_keeps_what_there_is(tmp_path: Path, log: Log) -> None:
    log.expect("the run ended")
    session = run_session(tmp_path, 4, work, active=9, max_stall_ms=ENOUGH)
    assert parts_of(session) == [(0, 0, [0]), (0, 1, [1, 2, 3])]
    assert [each.metadata["window"]["truncated"] for each in session.captures] == [False, True]


def test_time_limit_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("profiler.max_window_s=10")
    now = [0.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def later() -> None:
        now[0] += 4

    session = run_session(tmp_path, 9, later, active=8, max_stall_ms=ENOUGH, max_window_s=10)
    assert parts_of(session) == [(0, 0, [0]), (0, 1, [1, 2])]
