"""`instrument ls`: the captures below a folder, by run, with their verdicts."""

from __future__ import annotations

import csv
import json
import os
import re
from argparse import Namespace
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from builders import annotation, steps, write_capture
from commands import Command
from golden import Golden
from rich.console import Console

from instrument.base import queue
from instrument.base.file_lock import FileLock
from instrument.cli import ls
from instrument.read.advise.verdict import verdict
from instrument.read.capture import Capture
from instrument.read.show.terminal import draw


@pytest.fixture
def runs(tmp_path: Path) -> list[Capture]:
    """Three captures of two runs; the last one is the newest."""
    found = []
    for age, (run, name) in enumerate([("a", "steps_1-2"), ("b", "steps_1-2"), ("b", "steps_5-6")]):
        (tmp_path / run).mkdir(exist_ok=True)
        capture = write_capture(tmp_path / run, [*steps(), annotation("net", 0, 40)], name)
        os.utime(capture.folder / "capture.json", (age, age))
        found.append(capture)
    return found


Listed = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def listed(tmp_path: Path, command: Command) -> Listed:
    """What `ls --json` gives."""
    return lambda *options: json.loads(command("ls", tmp_path, "--json", *options).out)["captures"]


def test_each_capture_has_its_verdict_the_newest_first(
    runs: list[Capture], tmp_path: Path, listed: Listed, command: Command
) -> None:
    found = listed()
    assert [row["run"] for row in found] == [str(tmp_path / run) for run in "bba"]
    for row, capture in zip(found, reversed(runs)):
        diagnosis = capture.diagnose()
        assert row["verdict"] == verdict(diagnosis)
        assert row["step_ns"] == diagnosis.step_ns
    assert len(listed("--rows", "2")) == 2
    as_csv = csv.DictReader(StringIO(command("ls", tmp_path, "--csv").out))
    assert [row["name"] for row in as_csv] == [row["name"] for row in found]


@pytest.mark.usefixtures("runs")
def test_the_list_as_text_has_a_table_for_each_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transcript: Callable[[list[str]], str],
    golden: Golden,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = transcript(["ls .", "ls . --rows 2", "ls . --no-verdict", "ls missing", "show missing"])
    local_time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    golden("ls.txt", re.sub(local_time, "YYYY-MM-DD hh:mm:ss", text))


def test_ls_fits_80_columns(tmp_path: Path, listed: Listed) -> None:
    for number, phase in enumerate(("train", "validation")):
        window = {"phase": phase, "first_step": 2, "last_step": 4}
        name, began = f"steps_000002-000004_rank0-{number}", f"2026-11-23T03:00:0{number}+00:00"
        write_capture(tmp_path, steps(), name, started_at=began, window=window)
    parts = ls.run(Namespace(path=tmp_path, rows=15, no_verdict=False, json=False, csv=False))
    text = draw(parts, Console(file=StringIO(), width=80, _environ={}))
    assert ", 2 captures, rank 0 name " in " ".join(text.split())
    assert "left out" not in text
    header = next(line for line in text.splitlines() if line.startswith("name"))
    assert header.split() == ["name", "started", "at", "phase", "steps", "step"]
    for row in listed():
        assert row["started_at"] in text
        assert row["phase"] in text


def test_parts_of_a_window_are_one_row(tmp_path: Path, listed: Listed, command: Command) -> None:
    folders = []
    for k in range(3):
        window = {"first_step": k, "last_step": k, "part": k, "part_of_step": 0}
        about: dict[str, Any] = {"run": "r", "started_at": f"2026-11-23T03:00:0{k}+00:00"}
        made = write_capture(tmp_path, steps(), f"steps_{k}", **about, window=window)
        folders.append(made.folder)
    (row,) = listed()
    assert [row[name] for name in ("parts", "first_step", "last_step")] == [3, 0, 2]
    assert ", 3 captures, " in command("ls", tmp_path).out
    all_parts, one = (command("diagnose", each).out for each in (folders[0], folders[1]))
    assert "(median of the captures)" in all_parts
    assert "of the captures" not in one
    assert "part 2 of the window from step 0 on" in command("show", folders[1]).out


def test_without_verdicts_no_trace_is_read(runs: list[Capture], listed: Listed) -> None:
    for capture in runs:
        capture.trace_path.write_text("no trace")
    assert {row["verdict"] for row in listed("--no-verdict")} == {None}


def test_unreadable_capture_is_listed_with_reason(runs: list[Capture], listed: Listed) -> None:
    (runs[0].folder / "capture.json").write_text("{")
    runs[1].trace_path.write_text("no trace")
    by_place = {(Path(row["run"]).name, row["name"]): row["verdict"] for row in listed()}
    assert "cannot be read" in by_place["a", "steps_1-2"]
    assert "trace" in by_place["b", "steps_1-2"]
    assert by_place["b", "steps_5-6"] == verdict(runs[2].diagnose())


def test_capture_without_trace(runs: list[Capture], listed: Listed, command: Command) -> None:
    runs[2].trace_path.unlink()
    newest = listed()[0]
    text = f"The capture {runs[2].folder} holds no trace: there is no trace.json.gz in it. "
    assert newest["verdict"].startswith(text)
    assert newest["step_ns"] is None
    assert newest["first_step"] == 3
    assert text in command("show", runs[2].folder, status=2).err


def test_unexported_windows_are_named_with_reason(tmp_path: Path, command: Command) -> None:
    alive = FileLock(queue.lock_of(tmp_path, "a" * 32))
    assert alive.hold()
    folders = [
        queue.queue(queue.stage(tmp_path, name, run), {"run": run})
        for name, run in (("first", "a" * 32), ("second", "b" * 32), ("third", "b" * 32))
    ]
    queue.say_why(queue.take(folders[2]), "The exporter ended while it worked on it (SIGILL).")
    out = command("ls", tmp_path).out
    waiting = json.loads(command("ls", tmp_path, "--json").out)
    alive.release(done=True)
    assert waiting["captures"] == []
    assert {each["name"]: each["why"] for each in waiting["queued"]} == {
        "first": "Its run is alive, and exports it.",
        "second": "Its run has ended.",
        "third": "The exporter ended while it worked on it (SIGILL).",
    }
    words = " ".join(out.split())
    assert "Not exported: third. The exporter ended while it worked on it (SIGILL)." in words
    assert f"`instrument export {tmp_path}` exports what ended runs have left." in words
