"""Windows on request, from any thread: their states, their capture, and what a request refuses."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from collected import Log

from instrument import CaptureError, ConfigError, Session
from instrument.record.trigger_runner import REQUEST

pytestmark = pytest.mark.usefixtures("inline_export")


def step(session: Session, times: int = 1) -> None:
    for _ in range(times):
        torch.ones(2).add(1)
        session.step()


@pytest.fixture
def session(tmp_path: Path) -> Any:
    with Session(at_steps=[], triggers={}, timings={}, warmup=1, output_dir=tmp_path) as running:
        yield running


def test_a_request_without_triggers_goes_from_waiting_to_done(session: Session) -> None:
    step(session, 3)
    assert session.window is None
    window = session.request(steps=2, why="the loss jumped")
    states = [window.state]
    for _ in range(4):
        with pytest.raises(CaptureError, match=rf"it is {window.state}: call wait\(\) on a thread"):
            assert window.capture
        step(session)
        states.append(window.state)
    assert states == ["waiting", "waiting", "recording", "recording", "done"]
    assert window.wait() == "done"
    about = window.capture.metadata["window"]
    assert (about["first_step"], about["last_step"]) == (5, 6)
    assert (about["trigger"], about["trigger_reason"]) == (
        REQUEST,
        f"the loss jumped, id {window.id}",
    )
    assert window.folder == window.capture.folder == session.capture.folder
    assert (session.saved, session.window) == (1, None)


def test_another_thread_waits_for_its_window_and_the_next_one_follows(session: Session) -> None:
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(session.request(steps=1).wait(120)))
    thread.start()
    while thread.is_alive():
        step(session)
    thread.join()
    assert found == ["done"]
    first = session.request(steps=1)
    step(session)
    second = session.request(steps=1)
    step(session, 6)
    assert (first.state, second.state) == ("done", "done")
    numbers = [each.steps.column("number")[0] for each in session.captures]
    assert numbers == sorted(set(numbers))


def test_a_scheduled_window_that_is_open_comes_first(tmp_path: Path) -> None:
    with Session(active=2, output_dir=tmp_path) as session:
        window = session.request()
        step(session, 5)
        assert window.state == "done"
    found = [each.steps.column("number") for each in session.captures]
    assert found == [[0, 1], [3, 4]]


def test_what_cannot_be_met_has_failed_and_says_why(tmp_path: Path, log: Log) -> None:
    for off in (Session(None), Session(active=1, output_dir=tmp_path)):
        with pytest.raises(CaptureError, match="it is failed: the session does not run"):
            assert off.request().capture
    with Session(at_steps=[], timings={}, output_dir=tmp_path) as session:
        first, second = session.request(), session.request()
        assert (first.state, second.wait()) == ("waiting", "failed")
        with pytest.raises(CaptureError, match="an earlier requested window has not begun"):
            assert second.capture
    refused = "A requested window is not recorded: an earlier requested window has not begun."
    assert refused in log.at("INFO")
    assert first.state == "failed", "the session has stopped"
    with pytest.raises(CaptureError, match="the session has stopped before it"):
        assert first.capture


def test_a_request_of_nothing_or_of_both_is_refused(session: Session) -> None:
    for wrong in ({"steps": 0}, {"seconds": -1}, {"steps": 1, "seconds": 1}):
        with pytest.raises(ConfigError, match="it takes one of the two"):
            session.request(**wrong)


def test_renamed_window_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"at_steps": [], "triggers": {}, "timings": {}, "warmup": 0}
    with Session(**options, output_dir=tmp_path) as session:
        window = session.request(steps=1)
        step(session, 3)
        [capture] = session.captures
        queued = capture.folder.rename(tmp_path / f".{capture.name}.queued")
        found = Session._capture_folders

        def renaming(session: Session) -> Any:
            monkeypatch.undo()
            captures = found(session)
            queued.rename(tmp_path / capture.name)  # after both kinds of folders were listed
            return captures

        monkeypatch.setattr(Session, "_capture_folders", renaming)
        assert [window.state, window.state] == ["exporting", "done"]


def test_a_removed_capture_is_said(session: Session) -> None:
    window = session.request(steps=1)
    step(session, 3)
    folder = window.capture.folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(CaptureError, match="was removed"):
        assert window.capture


def test_no_capture_yet_says_what_the_session_does(tmp_path: Path, log: Log) -> None:
    log.expect("before the first window")
    session = Session(wait=9, active=1, output_dir=tmp_path)
    plan = r"no capture yet of <Session: records step 9 \(counted from 0\); "
    with pytest.raises(CaptureError, match=plan + r"not running, at step 0, 0 captures>: let it"):
        assert session.capture
    with session:
        step(session)
        with pytest.raises(CaptureError, match=plan + "at step 1, 0 captures>: let it run"):
            assert session.capture
    with pytest.raises(CaptureError, match=r"<Session: disabled; .*see the log"):
        assert Session(None).capture


def test_a_dropped_window_is_not_saved_and_later_ones_are(tmp_path: Path) -> None:
    with Session(active=2, repeat=2, output_dir=tmp_path) as session:
        step(session)
        assert session.recording
        session.drop_window()
        assert not session.recording
        step(session, 3)
    assert [each.steps.column("number") for each in session.captures] == [[2, 3]]
