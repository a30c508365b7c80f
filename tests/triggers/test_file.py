from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest
from commands import Command

from instrument import Session
from instrument.base.errors import CaptureError
from instrument.record.triggers import Request
from instrument.record.triggers.file import File, ask

pytestmark = pytest.mark.usefixtures("inline_export")


def touch(path: Path) -> None:
    """Like the command touch, at a time that differs from all before, whatever the clock does."""
    stamp = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(stamp, stamp))


class Listening:
    """The file trigger in a run, and what it asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[Request] = []
        self.hooks = File().begin(folder, self.asked.append)

    def polled(self) -> list[Request]:
        """What it asks for when it is polled."""
        self.asked.clear()
        self.hooks.poll()
        return list(self.asked)

    def end(self) -> None:
        self.hooks.end()


TOUCHED, ASKED = "the file record was touched", "instrument trigger requested a window"


def test_each_touch_asks_once(tmp_path: Path) -> None:
    listening, file = Listening(tmp_path), tmp_path / "record"
    assert listening.polled() == []
    file.touch()
    assert listening.polled() == [Request(TOUCHED)]
    assert listening.polled() == []
    touch(file)
    assert listening.polled() == [Request(TOUCHED)]
    file.write_text("5\n")
    touch(file)
    assert listening.polled() == [Request(TOUCHED, 5)]
    listening.end()
    assert list(tmp_path.iterdir()) == [file], "who has made it may remove it"


def test_a_file_from_before_the_start_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("5")
    listening = Listening(tmp_path)
    assert listening.polled() == []
    touch(tmp_path / "record")
    assert listening.polled() == [Request(TOUCHED, 5)]


def test_a_file_of_something_else_stays_and_asks_for_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "record"
    theirs.write_text("the record of our expedition, day by day")
    listening = Listening(tmp_path)
    theirs.write_text("the record of our expedition, day by day, and night by night")
    touch(theirs)
    assert listening.polled() == []
    assert ask(tmp_path, 5) == [tmp_path]
    assert listening.polled() == [Request(ASKED, 5)]
    listening.end()
    assert [each.name for each in tmp_path.iterdir()] == ["record"]
    assert theirs.read_text() == "the record of our expedition, day by day, and night by night"
    theirs.unlink()
    theirs.mkdir()
    again = Listening(tmp_path)
    touch(theirs)
    assert again.polled() == []


def test_the_command_asks_anew_each_time(tmp_path: Path) -> None:
    listening = Listening(tmp_path)
    for steps in (5, 12, None, 7):
        assert ask(tmp_path, steps) == [tmp_path]
        assert listening.polled() == [Request(ASKED, steps)]
        assert listening.polled() == []


def test_ranks_and_runs_share_a_folder(tmp_path: Path) -> None:
    first, second = Listening(tmp_path), Listening(tmp_path)
    assert first.polled() == []
    assert ask(tmp_path, 3) == [tmp_path]
    assert first.polled() == second.polled() == [Request(ASKED, 3)]
    (tmp_path / "record").touch()
    assert first.polled() == second.polled() == [Request(TOUCHED)]
    first.end()
    assert second.polled() == []
    assert ask(tmp_path, None) == [tmp_path]
    assert second.polled() == [Request(ASKED)]
    second.end()
    with pytest.raises(CaptureError):
        ask(tmp_path, None)


def test_the_file_may_go_and_come(tmp_path: Path) -> None:
    (tmp_path / "record").touch()
    listening = Listening(tmp_path)
    (tmp_path / "record").unlink()
    assert listening.polled() == []
    (tmp_path / "record").touch()
    assert len(listening.polled()) == 1


def test_all_runs_below_a_folder_are_asked(tmp_path: Path) -> None:
    runs = [tmp_path / "outputs" / day / "profile" for day in ("monday", "tuesday")]
    for run in runs:
        run.mkdir(parents=True)
    listening = [Listening(run) for run in runs]
    assert ask(tmp_path, None) == runs
    assert [each.polled() for each in listening] == [[Request(ASKED)]] * 2


def test_through_a_link_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("5")
    (tmp_path / ".listens-aaaaaaaaaaaa").symlink_to(tmp_path / "theirs")
    with pytest.raises(CaptureError):
        ask(tmp_path, 7)
    assert (tmp_path / "theirs").read_text() == "5"


def test_trigger_without_a_listener(tmp_path: Path, command: Command) -> None:
    with pytest.raises(CaptureError, match=r"No run in or below .*'profiler/triggers=\[file\]'"):
        ask(tmp_path, None)
    said = command("trigger", tmp_path, status=2).err
    assert f"instrument: No run in or below {tmp_path} has the trigger 'file'" in said


def test_the_command_has_a_running_session_record(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.record.trigger_runner.POLL_SECONDS", 0.001)
    folder = tmp_path / "profile"
    with Session({"at_steps": [], "output_dir": folder}, triggers=["file"]) as session:
        session.step()
        out = command("trigger", tmp_path, "--steps", "3").out
        while not session.captures and session.step_number < 100_000:
            session.step()
            sleep(0.001)
    assert len(session.captures[0].steps) == 3
    assert session.captures[0].metadata["window"]["trigger_reason"] == ASKED
    said = f"Asked for the next 3 steps in {folder}; a run looks for requests every half second.\n"
    assert out == said
    assert not [*folder.glob(".listens*")]


def test_a_run_that_was_killed_is_not_asked(tmp_path: Path) -> None:
    listen = (
        "import os, sys; from pathlib import Path; from instrument.record.triggers.file import File\n"
        "File().begin(Path(sys.argv[1]), print); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", listen, str(tmp_path)], check=False)
    assert len([*tmp_path.glob(".listens-*")]) == 1
    with pytest.raises(CaptureError, match="No run in or below"):
        ask(tmp_path, None)
    listening = Listening(tmp_path)
    assert ask(tmp_path, None) == [tmp_path]
    assert listening.polled() == [Request(ASKED)]
