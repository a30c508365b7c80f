"""The clocks of `NodeInterpreter`; a device is stood in for by one that notes what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from instrument.graph.interpreter import NodeInterpreter


class Device:
    """Work takes a millisecond each; events are read only after a wait for the device."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def synchronize(self) -> None:
        self.did.append("wait")

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802 - as torch.cuda has it
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at_ms = self.device.did.count("work")
        self.device.did.append("mark")

    def elapsed_time(self, later: Event) -> float:
        assert self.device.did[-1] == "wait"
        return later.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch, "made_up", made, raising=False)
    return made


def two_works(device: Device) -> fx.Graph:
    graph = fx.Graph()
    for _ in range(2):
        graph.call_function(lambda: device.did.append("work"), ())
    graph.output(None)
    return graph


def test_events_time_each_node_and_are_waited_for_once(device: Device) -> None:
    interpreter = NodeInterpreter(fx.GraphModule(nn.Module(), two_works(device)), "made_up")
    for _ in range(2):
        interpreter.run_timed([])
        assert interpreter.times_ns == [1_000_000, 1_000_000, 0]
        assert device.did == [
            "mark", "work", "mark", "mark", "work", "mark", "mark", "mark", "wait",
        ]  # fmt: skip
        device.did.clear()


def test_values_are_let_go_after_their_last_use() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().cos().tan()

    graph = fx.Tracer().trace(Chain())
    held: list[int] = []

    class Watching(NodeInterpreter):
        def run_node(self, n: fx.Node) -> Any:
            held.append(len(self.env))
            return super().run_node(n)

    Watching(fx.GraphModule(Chain(), graph)).run_timed([torch.ones(2)])
    assert held == [0, 1, 1, 1, 1]
