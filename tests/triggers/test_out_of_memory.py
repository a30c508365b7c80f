from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collected import Log

from instrument import Session


def run_out(folder: Path, error: Exception, **options: Any) -> Session:
    given = {"active": 5, "output_dir": folder, "export": "inline", **options}
    session = Session(given, triggers=["out_of_memory"])

    def run() -> None:
        with session:
            session.step()
            raise error

    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error, "it goes on unchanged"
    return session


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of an allocator that stands in for CUDA's."""
    calls: list[Any] = []
    stands_in = SimpleNamespace(
        _snapshot=lambda: {"segments": [7]},
        _record_memory_history=lambda **options: calls.append(options),
    )
    monkeypatch.setattr(torch.cuda, "memory", stands_in)
    return calls


def test_snapshot_folder(tmp_path: Path, memory: list[Any], log: Log) -> None:
    for _ in range(2):
        session = run_out(
            tmp_path, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")
        )
        assert [c.metadata["window"]["reason"] for c in session.captures] == [
            "exception OutOfMemoryError"
        ]
    kept = sorted(tmp_path.glob("out_of_memory_*"))
    assert [folder.name for folder in kept] == [
        "out_of_memory_step_000001_rank0",
        "out_of_memory_step_000001_rank0-2",
    ]
    for folder in kept:
        assert pickle.loads((folder / "memory_snapshot.pickle").read_bytes()) == {"segments": [7]}
        assert (folder / "error.txt").read_text() == "CUDA out of memory. Tried to allocate 2 TiB\n"
    assert f"Out of memory in step 1: the snapshot of the allocator is in {kept[0]}" in log.at(
        "WARNING"
    )


def test_other_errors_leave_nothing(tmp_path: Path, memory: list[Any], log: Log) -> None:
    log.expect("exception ValueError")
    run_out(tmp_path, ValueError("mine"))
    assert not list(tmp_path.glob("out_of_memory_*"))


def test_failing_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    log.expect("exception OutOfMemoryError")

    def fails() -> None:
        raise RuntimeError("no allocator")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fails)
    assert len(run_out(tmp_path, torch.OutOfMemoryError("out")).captures) == 1
    assert "The trigger out_of_memory failed" in log.at("ERROR")[0]


@pytest.mark.parametrize("history", [0, 500])
def test_the_history_runs_with_the_session(
    tmp_path: Path, memory: list[Any], monkeypatch: pytest.MonkeyPatch, history: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = {"at_steps": [], "activities": ["cpu"], "output_dir": tmp_path}
    with Session(options, triggers={"out_of_memory": {"history": history}}) as session:
        begun = list(memory)
        session.step()
    expected = [{"max_entries": 500, "stacks": "python"}] if history else []
    assert begun == expected
    assert memory == expected + ([{"enabled": None}] if history else [])
