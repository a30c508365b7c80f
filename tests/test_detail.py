"""`profiler.detail`: the steps after a window, recorded with shapes into the capture of the window."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import warm
from collected import Log
from recording import run_session
from waits import until

from instrument import Capture, Session
from instrument.base import queue
from instrument.base.files import DETAIL_FILE
from instrument.cli.command import main
from instrument.record import detail
from instrument.record.config.schema import as_config
from instrument.record.detail import Detail, detail_options

inline = pytest.mark.usefixtures("inline_export")
ONE: dict[str, Any] = {"wait": 1, "active": 2, "detail": 2}


def work() -> None:
    torch.ones(2, 3) @ torch.ones(3, 4)


def details(session: Session) -> dict[int, tuple[int, int] | None]:
    """The first step of each capture, and the first step and number of steps of its detail."""
    found = {}
    for each in session.captures:
        about = each.metadata["detail"]
        found[each.metadata["window"]["first_step"]] = about and (
            about["first_step"],
            about["steps"],
        )
        assert (each.folder / DETAIL_FILE).exists() == (about is not None)
        assert not [*each.folder.glob(".*")], "nothing is left of how it was made"
    return found


@inline
def test_the_steps_after_a_window_are_its_detail(tmp_path: Path) -> None:
    session = run_session(tmp_path, 7, work, **ONE)
    assert details(session) == {1: (3, 2)}
    (capture,) = session.captures
    assert capture.steps.column("number") == [1, 2], "its steps are no steps of the window"
    assert capture.metadata["window"]["steps"] == 2
    folder = capture.folder
    second = Capture.load(folder / DETAIL_FILE)
    assert second.steps.column("number") == [3, 4]
    assert (second.events.shapes >= 0).any()
    assert capture.metadata["detail"]["stall_ns"] > 0


@inline
@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (3, {}, {1: None}),  # the run ends with the window
        (4, {}, {1: (3, 1)}),
        (12, {"repeat": 0, "wait": 3}, {3: (5, 2), 8: None}),  # only the first window
        (12, {"repeat": 0, "wait": 3, "keep": 1}, {8: (10, 2)}),  # unless it is removed
        (9, {"repeat": 0, "wait": 1}, {1: None, 4: None, 7: None}),  # the next one begins sooner
        (7, {"record_shapes": True}, {1: None}),
        (7, {"max_stall_ms": 1e6, "active": 1}, {1: None}),
        (7, {"detail": 0}, {1: None}),
        (7, {"active": None}, {1: None}),
    ],
)
def test_when_there_is_a_detail(
    tmp_path: Path, steps: int, options: dict[str, Any], expected: object
) -> None:
    assert details(run_session(tmp_path, steps, work, **ONE | options)) == expected


@inline
def test_each_phase_has_one(tmp_path: Path) -> None:
    with Session(output_dir=tmp_path, phases=["train", "validation"], **ONE) as session:
        for _ in range(6):
            session.step()
        for _ in range(2):
            with session.phase("validation"):
                for _ in range(4):
                    session.step()
    found = [(each.phase, each.metadata["detail"]["steps"]) for each in session.captures]
    assert found == [("train", 2), ("validation", 1)]


@inline
def test_a_call_of_wait_does_not_wait_for_steps(tmp_path: Path) -> None:
    with Session(output_dir=tmp_path, **ONE) as session:
        for number in range(8):
            work()
            session.step()
            if number == 2:
                session.wait(60)
                assert details(session) == {1: None}
    assert details(session) == {1: None}


@inline
def test_error_loses_the_detail(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Detail, "save", fail)
    log.expect("Recording failed and training goes on: the disk is full.")
    session = run_session(tmp_path, 8, work, **ONE)
    assert details(session) == {1: None}


@inline
def test_it_goes_with_the_trace(tmp_path: Path) -> None:
    sinks = {"chrome_trace": {"keep": False}}
    (capture,) = run_session(tmp_path, 7, work, **ONE, sinks=sinks).captures
    assert not [*capture.folder.glob("*.json.gz")]


@inline
def test_observers_add_what_they_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def observe() -> detail.End:
        steps.append(session.step_number)

        def end() -> dict[str, Any]:
            steps.append(session.step_number)
            return {"seen": len(steps)}

        return end

    monkeypatch.setattr(detail, "observers", [observe])
    with Session(output_dir=tmp_path, **ONE) as session:
        for _ in range(7):
            session.step()
    assert steps == [3, 5]
    assert session.captures[0].metadata["detail"]["seen"] == 2


@inline
def test_other_work_ends_the_detail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ONE | {"profile_all_threads": True}
    with Session(output_dir=tmp_path, **options) as session:
        for _ in range(3):
            session.step()
        assert session.recording
        assert torch._C._len_torch_function_stack() == 1
        until(lambda: not session.recording)  # without the end of a step
        session.step()
        assert torch._C._len_torch_function_stack() == 0, "the observer has left its thread"
        session.wait(60)
        assert details(session) == {1: None}


def test_memory_is_recorded_where_torch_can() -> None:
    def memory(activities: list[str], on_one_thread: bool, **options: Any) -> tuple[bool, bool]:
        config = as_config(active=1, detail=2, **options)
        found = detail_options(config, activities, 0, on_one_thread=on_one_thread)
        assert found.record_shapes
        assert not found.with_stack
        return found.profile_memory, found.profile_all_threads

    every, cuda = {"profile_all_threads": True}, ["cpu", "cuda"]
    assert memory(["cpu"], True) == (False, False), "torch warns of memory of unknown size"
    assert memory(cuda, False, with_stack=True) == (True, False)
    assert memory(cuda, True, **every) == (True, False)
    assert memory(cuda, False, **every) == (False, True)
    own = {"experimental_config": every}
    assert memory(cuda, True, **own) == (False, False)


KILLED = """
    import os, signal, sys
    from instrument import Session
    with Session(output_dir=sys.argv[1], wait=1, active=2, detail=3) as session:
        for number in range(9):
            if number == 4:
                os.kill(os.getpid(), getattr(signal, sys.argv[2]))
            session.step()
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_run_that_is_killed_in_a_detail_keeps_its_window(tmp_path: Path, name: str) -> None:
    env = {**os.environ, warm.EXPORTER: "yes"}
    done = warm.run_apart(["-c", dedent(KILLED), str(tmp_path), name], tmp_path, env)
    assert done.returncode == -getattr(signal, name), done.stderr
    capture = tmp_path / "steps_000001-000002_rank0"
    until(capture.exists)  # the exporter outlives the run
    assert not [*capture.glob(".*")]
    assert Capture.load(capture).steps.column("number") == [1, 2]
    assert not (capture / DETAIL_FILE).exists()


def test_a_detail_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    run_session(tmp_path, 3, work, active=2, export="inline")
    (folder,) = tmp_path.glob("steps_*")
    queued = folder.rename(queue.queued_path(folder))
    queue.need(queued, queue.DETAIL)
    (queued / ".detail.tmp").write_text('{"traceEvents": [')
    os.utime(queued)
    assert main(["export", str(tmp_path)]) == 0
    assert not [*folder.glob(".*")]
    assert not (folder / DETAIL_FILE).exists()
