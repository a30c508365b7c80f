"""torch's execution trace in the capture: whole, of the window's steps alone, and in nobody's way."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from recording import run_session, window
from torch.profiler import ExecutionTraceObserver

from instrument import Session
from instrument.read.capture import Capture

pytestmark = pytest.mark.usefixtures("inline_export")


def nodes(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["nodes"]


def execution_trace(capture: Capture) -> list[dict[str, Any]]:
    return nodes(capture.folder / "execution_trace.json")


def step() -> None:
    (torch.ones(3, 4, requires_grad=True) @ torch.ones(4, 2)).sum().backward()


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_each_window_has_the_graph_of_its_steps(tmp_path: Path) -> None:
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "execution_trace": True}
    session = run_session(tmp_path, 8, step, **options)
    for capture, numbers in zip(session.captures, ([2, 3], [6, 7])):
        graph = execution_trace(capture)
        steps = [node["name"] for node in graph if node["name"].startswith("ProfilerStep#")]
        assert sorted(steps) == [f"ProfilerStep#{number}" for number in numbers]
        products = [node for node in graph if node["name"] == "aten::mm"]
        assert [node["inputs"]["shapes"] for node in products[:1]] == [[[3, 4], [4, 2]]]
        with gzip.open(capture.trace_path) as file:
            events = json.load(file)["traceEvents"]
        recorded = {
            event["args"]["Record function id"] for event in events if event.get("cat") == "cpu_op"
        }
        linked = {a["value"] for node in graph for a in node["attrs"] if a["name"] == "rf_id"}
        assert len(recorded) > 10
        assert recorded <= linked, "each operator of the trace is a node"
    assert left_over(tmp_path) == []


def test_an_exception_in_the_window_leaves_the_file_whole(tmp_path: Path, log: Log) -> None:
    log.expect("exception KeyError")
    session = Session(active=3, output_dir=tmp_path, execution_trace=True)

    def fails() -> None:
        with session:
            step()
            session.step()
            raise KeyError("theirs")

    with pytest.raises(KeyError):
        fails()
    (capture,) = session.captures
    assert "aten::mm" in [node["name"] for node in execution_trace(capture)]
    assert capture.metadata["window"]["truncated"] is True


def test_a_window_that_holds_nothing_leaves_no_file(tmp_path: Path, log: Log) -> None:
    log.expect("before the first window")
    session = run_session(tmp_path, 1, step, wait=1, active=1, execution_trace=True)
    assert session.captures == []
    assert list(tmp_path.iterdir()) == []


def test_an_observer_of_somebody_elses_goes_on(tmp_path: Path, log: Log) -> None:
    theirs = ExecutionTraceObserver().register_callback(str(tmp_path / "theirs.json"))
    theirs.start()
    try:
        with Session(active=None, output_dir=tmp_path / "ours", execution_trace=True) as session:
            step()
        torch.ones(2).cos()
    finally:
        theirs.cleanup()
    assert "aten::cos" in [node["name"] for node in nodes(tmp_path / "theirs.json")]
    (capture,) = session.captures
    assert "aten::mm" in capture.operators.column("name")
    assert not (capture.folder / "execution_trace.json").exists()
    assert any(
        "either another observer is in use, and torch allows only one in a process, or " in line
        for line in log.at("WARNING")
    )


def test_cut_file_is_removed(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ExecutionTraceObserver,
        "cleanup",
        lambda self: Path(self.output_file_path).write_text('{"no'),
    )
    with Session(active=None, output_dir=tmp_path, execution_trace=True) as session:
        step()
    (capture,) = session.captures
    assert sorted(path.name for path in capture.folder.iterdir()) == [
        "capture.json",
        "summary.json",
        "trace.json.gz",
    ]
    assert any("torch wrote an incomplete execution trace" in line for line in log.at("WARNING"))
    monkeypatch.undo()
    assert execution_trace(window(tmp_path, step, execution_trace=True))
    assert left_over(tmp_path) == []
