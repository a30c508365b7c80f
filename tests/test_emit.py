from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recording import window
from torch.profiler import itt

from instrument import Session, profiled
from instrument.annotate import backends
from instrument.base.errors import ConfigError

pytestmark = pytest.mark.usefixtures("inline_export")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What NVTX and ITT are told, with both made available."""
    told: list[str] = []

    def tells(tool: str, what: str) -> Any:
        return lambda *args: told.append(" ".join([tool, what, *map(str, args)]))

    for tool, module in (("nvtx", torch.cuda.nvtx), ("itt", itt)):
        for what in ("range_push", "range_pop", "mark"):
            monkeypatch.setattr(module, what, tells(tool, what))
    monkeypatch.setattr(itt, "is_available", lambda: True)
    return told


def mine() -> None:
    with profiled("mine"):
        torch.ones(1)


def test_the_same_ranges_reach_every_tool_that_is_named(tmp_path: Path, calls: list[str]) -> None:
    seen: list[str] = []

    def nested() -> None:
        calls.clear()
        with profiled("outer"), profiled("inner"):
            torch.ones(1)
        seen.extend(calls)

    capture = window(tmp_path, nested, emit=["torch", "nvtx", "itt"])
    both = [f"{tool} range_push {name}" for name in ("outer", "inner") for tool in ("nvtx", "itt")]
    assert seen == [*both, *["itt range_pop", "nvtx range_pop"] * 2]
    assert calls[-2:] == ["nvtx mark window ends", "itt mark window ends"]
    assert capture.ranges.column("path") == ["outer", "outer/inner"]


def test_without_torch_the_trace_holds_the_steps_alone(tmp_path: Path, calls: list[str]) -> None:
    capture = window(tmp_path, mine, emit=["itt"])
    assert "itt range_push mine" in calls
    assert list(capture.ranges) == []
    assert capture.steps.column("number") == [0]


def test_next_session_emits_by_its_own_config(tmp_path: Path, calls: list[str], log) -> None:
    log.expect("session.step() was never called")
    Session({"active": 1, "output_dir": str(tmp_path), "emit": ["itt"]}).start().stop()
    calls.clear()
    capture = window(tmp_path, mine)
    assert calls == []
    assert capture.ranges.column("name") == ["mine"]


def test_a_range_is_closed_by_the_tool_that_opened_it(calls: list[str]) -> None:
    intel, nvidia = backends.backend_for(["itt"]), backends.backend_for(["nvtx"])
    backends.arm(intel)
    try:
        with profiled("mine"):
            backends.arm(nvidia)
            backends.disarm(intel)
    finally:
        backends.disarm()
    assert [call for call in calls if "range" in call] == ["itt range_push mine", "itt range_pop"]


def test_everyone_who_armed_gets_the_ranges_until_disarmed() -> None:
    told: list[str] = []

    def tool(name: str) -> backends.Backend:
        return backends.Backend(
            lambda label: told.append(f"{name} opens {label}"),
            lambda _: told.append(f"{name} closes"),
        )

    def ranged(label: str) -> list[str]:
        told.clear()
        with profiled(label):
            pass
        return list(told)

    run, window = tool("run"), tool("window")
    try:
        backends.arm(run)
        assert ranged("before") == ["run opens before", "run closes"]
        backends.arm(window)
        backends.arm(window)  # a second time changes nothing
        assert ranged("during") == [
            "window opens during",
            "run opens during",
            "run closes",
            "window closes",
        ]
        backends.disarm(window)
        assert ranged("after") == ["run opens after", "run closes"]
        backends.disarm(window)
        assert backends.armed
        backends.disarm(run)
        assert (ranged("idle"), backends.armed) == ([], False)
        backends.arm(run)
        backends.arm(window)
        backends.disarm()
        assert (ranged("idle"), backends.armed) == ([], False)
    finally:
        backends.disarm()


@pytest.mark.parametrize(
    ("tool", "lacks"),
    [
        ("nvtx", "without CUDA: install a CUDA build of torch, or leave nvtx out."),
        ("itt", "without ITT: leave itt out."),
    ],
)
def test_a_tool_that_torch_lacks_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, lacks: str
) -> None:
    def missing(_: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", missing)
    monkeypatch.setattr(itt, "is_available", lambda: False)
    with pytest.raises(ConfigError) as raised:
        Session({"emit": ["torch", tool], "output_dir": str(tmp_path)}).start()
    assert str(raised.value) == f"profiler.emit names {tool}, but this torch was built {lacks}"


@pytest.mark.parametrize(
    ("tool", "there"), [("nvtx", torch.version.cuda is not None), ("itt", itt.is_available())]
)
def test_real_tool_takes_ranges_and_marks(tmp_path: Path, tool: str, there: bool) -> None:
    if not there:
        pytest.skip(f"this torch has no {tool}")
    assert window(tmp_path, mine, emit=["torch", tool]).ranges.column("name") == ["mine"]
