"""`instrument export` does only what the user or the user's run asked for, whatever the folder."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from builders import span
from collected import Log

from instrument import Capture, Session
from instrument.base import files, queue
from instrument.cli.command import main

TRACE = {"traceEvents": [span("aten::add", 1, 5)]}
WINDOW = "steps_000001-000002_rank0"


def download(folder: Path, *, name: str = f".{WINDOW}.queued", **about: Any) -> Path:
    """A folder as anybody may send it, finished or not, whose capture.json asks for something."""
    capture = folder / name
    capture.mkdir(parents=True)
    if name.startswith("."):
        (capture / "trace.json").write_text(json.dumps(TRACE))
    else:
        (capture / "trace.json.gz").write_bytes(gzip.compress(json.dumps(TRACE).encode()))
    (capture / "capture.json").write_text(json.dumps({"run": "f" * 32, "rank": 0, **about}))
    return capture


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "sink",
    [
        {"_target_": "pexpect.popen_spawn.PopenSpawn", "cmd": "touch {here}/made"},
        {"_target_": "io.FileIO", "file": "{here}/victim", "mode": "w"},
        {"_target_": "lies_here.Sink"},
        {"_target_": "instrument.export.sinks.parquet.Parquet", "dir": "{here}/made"},
        {"_target_": "instrument.export.sinks.tensorboard.TensorBoard", "dir": "{here}/made"},
        {"_target_": "instrument.integrations.mlflow.MLflow", "tracking_uri": "{here}/made"},
        {"_target_": "instrument.export.sinks.chrome_trace.ChromeTrace", "copy_to": "{here}/made"},
    ],
    ids=lambda sink: sink["_target_"].rpartition(".")[2],
)
def test_what_a_capture_asks_for_is_not_done(
    tmp_path: Path,
    sink: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("a file of the user's")
    run = tmp_path / "download"
    named = {key: value.format(here=tmp_path) for key, value in sink.items()}
    download(run, config={"sinks": {"theirs": named, "table": {"_target_": "os.remove"}}})
    (run / "lies_here.py").write_text(
        f"open({str(tmp_path / 'made')!r}, 'w')\nclass Sink: write = print"
    )
    monkeypatch.chdir(run)
    assert main(["export", "."]) == 0
    assert told(capsys) == (
        f"Finished {WINDOW}.\n"
        "These sinks did not run, because only the training run knows their options: theirs. "
        "`instrument export . --sink package.module.Class KEY=VALUE` runs one of them.\n"
    )
    assert sorted(path.name for path in (run / WINDOW).iterdir()) == [
        "capture.json", "summary.json", "table.txt", "trace.json.gz",
    ]  # fmt: skip
    assert "lies_here" not in sys.modules
    assert victim.read_text() == "a file of the user's"
    assert not (tmp_path / "made").exists()


def test_what_the_defaults_need_was_recorded_or_they_do_not_run(tmp_path: Path, log: Log) -> None:
    options = {
        "with_stack": True,
        "profile_memory": True,
        "sinks": {"named": Unbuildable()},
        "export": "inline",
    }
    with Session(active=1, output_dir=tmp_path / "out", **options) as session:
        torch.ones(8) + 1
        session.step()
    (place,) = (capture.folder for capture in session.captures)
    with gzip.open(place / "trace.json.gz") as packed:
        (place / "trace.json").write_bytes(packed.read())
    (place / "trace.json.gz").unlink()
    queued = place.rename(place.with_name(f".{place.name}.queued"))
    assert main(["export", str(queued)]) == 0
    assert {"table.txt", "stacks.txt", "memory.html"} <= {path.name for path in place.iterdir()}
    assert log.at("ERROR") == []


class Unbuildable:
    """Runs in the process that made it alone."""

    def write(self, capture: Capture, folder: Path) -> None:
        pass


@pytest.mark.parametrize("name", [f".{WINDOW}.queued", WINDOW])
def test_no_upload_to(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    there = f"file://{tmp_path}/there"
    folder = download(tmp_path / "download", name=name, config={"upload_to": there})
    (tmp_path / "secret").write_text("hunter2")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    (folder / "home").symlink_to(tmp_path)
    assert main(["export", str(tmp_path / "download")]) == 0
    assert not (tmp_path / "there").exists()
    assert (
        f"{WINDOW} was recorded with upload_to={there}, but a URL in a capture is not trusted: add "
        "--upload-to URL " in told(capsys)
    )
    assert main(["export", str(tmp_path / "download"), "--upload-to", there]) == 0
    sent = files.regular_files(tmp_path / "there")
    assert "capture.json" in [path.name for path in sent]
    assert not [path for path in sent if path.read_bytes() == b"hunter2"], (
        "no link leads out of a capture"
    )


def test_download_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = f"file://{tmp_path}/there"
    own = download(tmp_path / "own", name=WINDOW)
    assert main(["export", str(own), "--upload-to", there]) == 0
    before = {path: path.read_bytes() for path in files.regular_files(tmp_path / "there")}
    theirs = download(tmp_path / "theirs", name=WINDOW, evil=True)
    shutil.copy(own / "upload.json", theirs)
    assert main(["export", str(theirs), "--upload-to", there]) == 2
    assert f"there is already a capture at {there}/{WINDOW}-ffffffff" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in files.regular_files(tmp_path / "there")}
    assert after == before


def test_no_sink_writes_through_a_link(tmp_path: Path, log: Log) -> None:
    log.expect("The memory sink failed", "The stacks sink failed")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    linked = "table.txt stacks.txt memory.html summary.json trace.json.gz"
    names = linked.split()
    folder = download(tmp_path / "download", config={"with_stack": True, "profile_memory": True})
    for name in names:
        (elsewhere / name).write_text("a file of the user's")
        (folder / name).symlink_to(elsewhere / name)
    (tmp_path / "download" / "parquet").symlink_to(elsewhere)
    (tmp_path / "download" / "tensorboard").symlink_to(elsewhere)
    main(["export", str(tmp_path / "download")])
    for sink in ("parquet", "tensorboard"):
        assert main(["export", str(tmp_path / "download" / WINDOW), "--sink", sink]) == 2
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == dict.fromkeys(
        names, "a file of the user's"
    )


def test_linked_trace_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = download(tmp_path / "download")
    (folder / "trace.json").unlink()
    (tmp_path / "secret").write_text("hunter2")
    (folder / "trace.json").symlink_to(tmp_path / "secret")
    assert main(["export", str(tmp_path / "download")]) == 2
    assert "trace.json is not a regular file" in capsys.readouterr().err
    assert (tmp_path / "secret").read_text() == "hunter2"


def test_folders_behind_links_are_not_looked_into(tmp_path: Path) -> None:
    download(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "inner").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / f".{WINDOW}.queued").symlink_to(
        tmp_path / "elsewhere" / f".{WINDOW}.queued"
    )
    assert queue.queued(tmp_path / "run", 5) == []


def test_named_sink_finishes_the_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    download(tmp_path / "download", config={"sinks": {"table": {"_target_": "os.remove"}}})
    download(tmp_path / "download", name="whole")
    assert main(["export", str(tmp_path / "download"), "--sink", "table", "rows=1"]) == 0
    names = [WINDOW, "whole"]
    assert (
        told(capsys) == "The table sink ran on "
        f"{', '.join(str(tmp_path / 'download' / name) for name in names)}.\n"
    )
    for name in names:
        assert (tmp_path / "download" / name / "table.txt").exists()


def killed(tmp_path: Path, **options: Any) -> Path:
    """The folder of a run that was killed with its worker when its window was saved."""
    (tmp_path / "own_sink.py").write_text(
        "class Own:\n"
        "    def __init__(self, word): self.word = word\n"
        "    def write(self, capture, folder): (folder / 'own.txt').write_text(self.word)\n"
    )
    out = tmp_path / "out"
    code = (
        "import os, signal, sys, torch; from instrument import Session; from instrument.record "
        "import finisher\n"
        "finisher.Finisher._wake = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"with Session(active=1, output_dir={str(out)!r}, **{options!r}) as session:\n"
        "    torch.ones(2) + 1\n"
        "    session.step()\n"
    )
    warm.run_code(code, folder=tmp_path)
    assert len(queue.queued(out)) == 1
    return out


def test_default_sinks_finish_the_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = f"file://{tmp_path}/there"
    sinks = {"own": {"_target_": "own_sink.Own", "word": "x"}, "table": {"rows": 1}}
    out = killed(tmp_path, sinks=sinks, upload_to=there)
    assert main(["export", str(out)]) == 0
    name, words = "steps_000000-000000_rank0", told(capsys)
    assert words.startswith(f"Finished {out / name}.\n")
    assert (
        "These sinks did not run, because only the training run knows their options: own. " in words
    )
    assert f"{name} was recorded with upload_to={there}, but a URL in a capture is" in words
    assert (out / name / "table.txt").exists()
    assert main(["export", str(out), "--upload-to", there]) == 0
    run = json.loads((out / name / "capture.json").read_text())["run"]
    assert told(capsys) == f"Sent {there}/{name}-{run[:8]}.\n"
    assert (tmp_path / "there" / f"{name}-{run[:8]}" / "table.txt").exists()


def test_a_worker_takes_what_its_own_run_has_queued_and_nothing_else(tmp_path: Path) -> None:
    run = "a" * 32
    own = download(tmp_path, name=".own.queued", run=run)
    download(tmp_path, name=".other_run.queued")
    download(tmp_path, name=".other_rank.queued", run=run, rank=1)
    download(tmp_path, name=".no_rank.queued", run=run, rank=None)
    (tmp_path / ".damaged.queued").mkdir()
    (tmp_path / ".damaged.queued" / "capture.json").write_text("{")
    (tmp_path / "elsewhere").mkdir()
    linked = download(tmp_path / "elsewhere", name=".linked.queued", run=run)
    (tmp_path / ".linked.queued").symlink_to(linked)
    assert queue.queued_of(tmp_path, run, 0, os.getuid()) == [own]
    assert queue.queued_of(tmp_path, run, 0, os.getuid() + 1) == [], (
        "whoever may write into the folder cannot have the worker read for him"
    )


PLANTED = "open({made!r}, 'w').close()\nraise SystemExit('a module of a download was imported')\n"


@pytest.mark.parametrize(
    "command",
    [
        ["export", ".", "--sink", "parquet", "dir=lake"],
        ["ranks", "."],
        pytest.param(["export", "."], marks=pytest.mark.nightly),
        pytest.param(["show", "."], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_nothing_is_imported_from_the_folder(tmp_path: Path, command: list[str]) -> None:
    """Modules that this package or those below it import, and some that are not installed."""
    run = tmp_path / "download"
    for rank in range(2):
        download(run, name=f"{WINDOW[:-1]}{rank}", rank=rank, world_size=2)
        download(run, name=f".steps_000007-000008_rank{rank}.queued", rank=rank)
    modules = "numpy msgspec loguru isal pyarrow instrument json sitecustomize gzip"
    for module in modules.split():
        (run / f"{module}.py").write_text(PLANTED.format(made=str(tmp_path / "made")))
    program = Path(sys.executable).with_name("instrument")
    done = subprocess.run([program, *command], cwd=run, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "made").exists()) == (0, False), done.stderr
