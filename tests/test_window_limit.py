"""`max_window_s` and `max_window_memory`: a window over its limit ends early, and training and later windows go on."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from recording import run_session

from instrument import Session
from instrument.record import limits

pytestmark = pytest.mark.usefixtures("inline_export")

AT_ONCE = 1e-9
REASON = "profiler.max_window_s=1e-09 was reached"


def work() -> None:
    torch.ones(2) + 1


def test_a_window_over_its_time_ends_with_the_step(tmp_path: Path, log: Log) -> None:
    options: dict[str, Any] = {
        "wait": 1, "warmup": 2, "active": 3, "repeat": 2, "max_window_s": AT_ONCE,
    }  # fmt: skip
    session = run_session(tmp_path, 12, work, **options)
    assert [c.metadata["window"]["first_step"] for c in session.captures] == [3, 9]
    for capture in session.captures:
        about = capture.metadata["window"]
        assert (about["steps"], about["planned_steps"]) == (1, 3)
        assert (about["truncated"], about["reason"]) == (True, REASON)
        assert capture.steps.column("number") == [about["first_step"]]
    assert log.at("WARNING") == [
        f"The window of steps {steps} ended early, after 1 of 3 steps ({REASON}); it is kept and labelled truncated."
        for steps in ("3–5", "9–11")
    ]


@pytest.mark.parametrize(
    ("active", "max_window_s", "last_step", "reason"),
    [(None, AT_ONCE, 0, REASON), (3, 3600, 2, None), (1, AT_ONCE, 0, None)],
)
def test_max_window_s(
    tmp_path: Path, log: Log, active: int | None, max_window_s: float, last_step: int, reason: Any
) -> None:
    """A window without end ends too; one that is whole in time, or with its last step, is not cut."""
    (capture,) = run_session(
        tmp_path, 2 if active == 1 else 4, work, active=active, max_window_s=max_window_s
    ).captures
    about = capture.metadata["window"]
    found = (about["last_step"], about["reason"], about["truncated"])
    assert found == (last_step, reason, reason is not None)
    assert len(log.at("WARNING")) == (reason is not None)


def test_memory_growth_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("the memory of the process grew")
    sizes = count(10**9, 30_000_000)  # 30 MB from each look to the next
    monkeypatch.setattr(limits, "resident_bytes", lambda: next(sizes))
    (capture,) = run_session(tmp_path, 5, work, active=5, max_window_memory="80MB").captures
    about = capture.metadata["window"]
    assert (about["steps"], about["truncated"]) == (3, True)
    assert about["reason"] == (
        "the memory of the process grew by 0.09 GB during the window, over the limit of 0.08 GB "
        "(profiler.max_window_memory)"
    )


def test_endless_step_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("before the first window", "the memory of the process grew")
    monkeypatch.setattr(limits, "_LOOK_S", 0.01)
    held, looked = 10**9, threading.Event()

    def look() -> int:
        looked.set()
        return held

    monkeypatch.setattr(limits, "resident_bytes", look)
    options = {"active": None, "profile_all_threads": True, "max_window_memory": "1MB"}
    with Session(options, output_dir=tmp_path) as session:
        held += 1_900_000
        for _ in range(3):  # after the second look, the thread has drawn nothing from the first
            looked.clear()
            looked.wait()
        assert session._loop.recording
        held += 200_000
        while session._loop.recording:
            torch.ones(2) + 1
    (capture,) = session.captures
    assert capture.metadata["window"]["truncated"] is True
    assert "profiler.max_window_memory" in capture.metadata["window"]["reason"]


def test_uncut_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """So nothing watches it, and it ends with the step."""
    log.expect("the memory of the process grew")
    held = 10**9
    monkeypatch.setattr(limits, "resident_bytes", lambda: held)
    with Session(active=2, max_window_memory="1MB", output_dir=tmp_path) as session:
        assert not [each for each in threading.enumerate() if each.name == "instrument-limits"]
        held += 3_000_000
        assert session._loop.recording
        session.step()
    (capture,) = session.captures
    assert (capture.metadata["window"]["steps"], capture.metadata["window"]["truncated"]) == (
        1,
        True,
    )


def test_eighth_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("the memory of the process grew")
    monkeypatch.setattr(limits, "machine_bytes", lambda: 800)
    sizes = count(0, 60)
    monkeypatch.setattr(limits, "resident_bytes", lambda: next(sizes))
    (capture,) = run_session(tmp_path, 5, work, active=5).captures
    assert capture.metadata["window"]["steps"] == 2


@pytest.mark.skipif(not limits._free_bytes(), reason="glibc's malloc says what it keeps")
def test_memory_that_malloc_had_kept_counts_when_it_is_used_again(monkeypatch: Any) -> None:
    """The process does not grow while torch fills the memory of an earlier window; Linux may take pages from it."""
    monkeypatch.setattr(limits.Path, "read_text", lambda _: "1000000 1000000 0")
    blocks = [torch.empty(10_000, dtype=torch.uint8) for _ in range(4_000)]
    kept = torch.empty(10_000, dtype=torch.uint8)  # so that the memory before it is not returned
    blocks.clear()
    before = limits.resident_bytes()
    blocks += [torch.empty(10_000, dtype=torch.uint8) for _ in range(4_000)]
    assert len(kept) == 10_000
    assert 35_000_000 < limits.resident_bytes() - before < 60_000_000


def test_no_limit_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.threads, "start", lambda *_: pytest.fail("a thread"))
    (capture,) = run_session(tmp_path, 3, work, active=2, max_window_memory=None).captures
    assert capture.metadata["window"]["steps"] == 2
