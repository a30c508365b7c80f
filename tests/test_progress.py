"""Progress bars: the system knows how far a file is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from instrument.cli import progress


def _names() -> dict[str, progress.OpenFile]:
    return {file.name.rpartition("/")[2]: file for file in progress.files_being_read()}


def test_the_position_of_a_file_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace\n.json"
    path.write_bytes(bytes(3 << 20))
    with path.open("rb", buffering=0) as file:
        file.read(1 << 20)
        name = f"{tmp_path.name}/trace\\n.json"
        assert _names()["trace\\n.json"] == (name, 1 << 20, 3 << 20)
        assert file.tell() == 1 << 20, "asking moves nothing"
    assert "trace\\n.json" not in _names()


def test_small_files_and_files_that_are_written_have_no_bar(tmp_path: Path) -> None:
    small, written = tmp_path / "small", tmp_path / "written"
    small.write_bytes(b"x")
    with small.open("rb"), written.open("wb") as file:
        file.write(bytes(2 << 20))
        file.flush()
        assert not _names().keys() & {"small", "written"}


def test_without_a_terminal_there_is_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "Thread", None)  # starting one would fail
    with progress.shown():
        os.getpid()
    assert capsys.readouterr().err == ""
