"""`instrument ranks --on ray`: a task for each trace, with Ray's own errors, and on a real local Ray."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from builders import synchronous_steps, write_rank
from commands import Command

from instrument.read.ranks import on_ray, rank_summary
from instrument.read.ranks.run import Run
from instrument.read.show.ranks import as_json


class RayError(Exception):
    """What Ray raises if a task fails."""


class OneProcess(ModuleType):
    """Ray's functions, which run a task when its result is asked for; `killed` names tasks that Ray gives up."""

    def __init__(self, killed: str) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.addresses: list[str | None] = []
        self.killed = killed
        self.options: dict[str, Any] = {}
        self.is_shut_down = False

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str | None = None, **_: Any) -> None:
        self.addresses.append(address)
        if address == "auto":
            raise ConnectionError("Could not find any running Ray instance.")

    def shutdown(self) -> None:
        self.is_shut_down = True

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda path: (function, path))

    def get(self, started: Any) -> Any:
        function, path = started
        if self.killed in str(path):
            raise RayError("Task failed.\n\nThe worker died unexpectedly.")
        return function(path)


def job(folder: Path) -> Path:
    """Six ranks; only rank 0 has a summary, and the trace of rank 4 cannot be read."""
    for rank in range(6):
        made = write_rank(folder, rank, synchronous_steps(400 if rank == 2 else 100 + rank), 6)
        assert made.folder is not None
        if rank:
            (made.folder / "summary.json").unlink()
        if rank == 4:
            (made.folder / "trace.json.gz").write_text("{")
    return folder


def test_what_fails_is_a_sentence_and_a_missing_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = OneProcess("rank5")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(on_ray, "need_package", lambda *_: None)
    run = Run.load(job(tmp_path), read_all=on_ray.read_all)
    assert ray.addresses == ["auto", None], "first a cluster, then this machine"
    assert ray.options == {"num_cpus": 1, "memory": 2**30, "max_retries": 3}
    assert ray.is_shut_down
    (window,) = run.windows
    assert window.ranks.column("rank") == [0, 1, 2, 3]
    assert window.missing == [4, 5]
    cut, died = run.unread
    assert "rank4/trace.json.gz is cut short" in cut
    assert died == (
        f"{tmp_path}/steps_000003-000004_rank5 cannot be summarized on Ray (The worker died unexpectedly.)."
    )


def test_without_ray_the_error_names_the_extra(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.base.errors.find_spec", lambda package: None)
    said = command("ranks", job(tmp_path), "--on", "ray", status=2).err
    assert "--on ray needs the package ray: pip install 'torch-instrument[ray]'." in said


def once_killed(path: Path) -> Any:
    """Kill the worker at the first try of rank 3."""
    tried = Path(path).parent / "tried"
    if "rank3" in str(path) and not tried.exists():
        tried.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return rank_summary.summarize_at(path)


@pytest.mark.nightly
def test_a_local_ray_gives_the_tables_of_the_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    here = Run.load(job(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(on_ray, "summarize_at", once_killed)
    handler = signal.getsignal(signal.SIGTERM)
    there = Run.load(tmp_path, read_all=on_ray.read_all)
    signal.signal(signal.SIGTERM, handler)  # Ray sets its own
    assert not ray.is_initialized()
    assert (tmp_path / "tried").exists(), "a worker was killed, and its task done again"
    assert [as_json(window) for window in there.windows] == [as_json(w) for w in here.windows]
    assert there.unread == here.unread
