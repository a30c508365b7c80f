"""`max_window_s`: a window that has recorded for long enough ends early, and training and later windows go on."""

from __future__ import annotations

from pathlib import Path

import torch
from collected import Log

from instrument import Session

AT_ONCE = 1e-9
REASON = "profiler.max_window_s=1e-09 was reached"


def run(session: Session, steps: int) -> Session:
    with session:
        for _ in range(steps):
            torch.ones(2) + 1
            session.step()
    return session


def test_a_window_over_its_time_ends_with_the_step(tmp_path: Path, log: Log) -> None:
    options = {"wait": 1, "warmup": 2, "active": 3, "repeat": 2, "max_window_s": AT_ONCE}
    session = run(Session(options, output_dir=tmp_path), 12)
    assert [c.metadata["window"]["first_step"] for c in session.captures] == [3, 9]
    for capture in session.captures:
        about = capture.metadata["window"]
        assert (about["steps"], about["planned_steps"]) == (1, 3)
        assert (about["truncated"], about["reason"]) == (True, REASON)
        assert capture.steps.column("number") == [about["first_step"]]
    assert log.at("WARNING") == [
        f"The window of steps {steps} was cut short after 1 of 3 steps ({REASON}); it is kept and labelled truncated."
        for steps in ("3–5", "9–11")
    ]


def test_a_window_without_end_ends_too(tmp_path: Path) -> None:
    (capture,) = run(Session(max_window_s=AT_ONCE, output_dir=tmp_path), 4).captures
    assert capture.metadata["window"]["last_step"] == 0
    assert capture.metadata["window"]["reason"] == REASON


def test_a_window_in_time_is_whole(tmp_path: Path) -> None:
    (capture,) = run(Session(active=3, max_window_s=3600, output_dir=tmp_path), 4).captures
    assert capture.metadata["window"]["steps"] == 3
    assert capture.metadata["window"]["truncated"] is False


def test_the_last_step_of_a_window_is_no_early_end(tmp_path: Path) -> None:
    (capture,) = run(Session(active=1, max_window_s=AT_ONCE, output_dir=tmp_path), 2).captures
    assert capture.metadata["window"]["truncated"] is False
