from __future__ import annotations

import os
from pathlib import Path
from time import sleep

import pytest

from instrument import Session
from instrument.cli import main
from instrument.errors import CaptureError
from instrument.triggers import Request
from instrument.triggers.file import File, ask


def touch(path: Path) -> None:
    """As the command touch does, at a time that differs from all before, whatever the file system's clock does."""
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
        assert self.hooks.poll is not None
        self.hooks.poll()
        return list(self.asked)

    def end(self) -> None:
        assert self.hooks.end is not None
        self.hooks.end()


def test_each_touch_asks_once(tmp_path: Path) -> None:
    listening, file = Listening(tmp_path), tmp_path / "record"
    assert listening.polled() == []
    for _ in range(2):
        touch(file)
        assert listening.polled() == [Request("the file record was touched")]
        assert listening.polled() == []
    file.write_text("5\n")
    touch(file)
    assert listening.polled() == [Request("the file record was touched", 5)]
    listening.end()
    assert list(tmp_path.iterdir()) == []


def test_a_file_from_before_the_start_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("5")
    assert Listening(tmp_path).polled() == []
    assert (tmp_path / "record").read_text() == "5"


def test_ranks_that_share_a_folder_all_see_it_and_none_when_another_begins(tmp_path: Path) -> None:
    first, second = Listening(tmp_path), Listening(tmp_path)
    assert first.polled() == []
    assert ask(tmp_path, 3) == [tmp_path / "record"]
    assert first.polled() == second.polled() == [Request("the file record was touched", 3)]
    first.end()
    assert second.polled() == []
    second.end()


def test_the_file_may_go_and_come(tmp_path: Path) -> None:
    listening = Listening(tmp_path)
    (tmp_path / "record").unlink()
    assert listening.polled() == []
    (tmp_path / "record").touch()
    assert len(listening.polled()) == 1


def test_all_runs_below_a_folder_are_asked_and_files_of_others_left_alone(tmp_path: Path) -> None:
    runs = [tmp_path / "outputs" / day / "profile" for day in ("monday", "tuesday")]
    for run in runs:
        run.mkdir(parents=True)
        Listening(run)
    theirs = tmp_path / "outputs" / "record"
    theirs.write_text("the record of our expedition, day by day")
    (tmp_path / "record").mkdir()
    assert sorted(ask(tmp_path, None)) == [run / "record" for run in runs]
    assert theirs.read_text() == "the record of our expedition, day by day"
    assert [sorted(p.name for p in run.iterdir()) for run in runs] == [["record"], ["record"]]


def test_where_nobody_listens_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=r"No run listens in or below .*'profiler/triggers=\[file\]'"):
        ask(tmp_path, None)
    assert main(["trigger", str(tmp_path)]) == 2
    assert f"instrument: No run listens in or below {tmp_path}" in capsys.readouterr().err


def test_the_command_has_a_running_session_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.triggers.watch.POLL_SECONDS", 0.001)
    folder = tmp_path / "profile"
    with Session({"at_steps": [], "output_dir": folder}, triggers=["file"]) as session:
        session.step()
        assert main(["trigger", str(tmp_path), "--steps", "3"]) == 0
        while not session.captures and session.step_number < 100_000:
            session.step()
            sleep(0.001)
    assert len(session.captures[0].steps) == 3
    assert session.captures[0].metadata["window"]["trigger_reason"] == "the file record was touched"
    out = capsys.readouterr().out
    assert out == f"Asked for the next 3 steps by {folder / 'record'}; the run looks there every half second.\n"
    assert not (folder / "record").exists()
