"""The inputs of a window's operators are those of the like operators in its detail window, or unknown."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Event, allocation, annotation, in_steps, span, write_capture
from recording import run_session
from torch import nn

from instrument import Capture
from instrument.base.files import DETAIL_FILE
from instrument.cli.command import main
from instrument.read.views import coverage_rows
from instrument.read.views.coverage import part

LENGTH = 100
TYPES = ["float", "float"]


def mm(
    at: float, rows: int | None = None, name: str = "aten::mm", types: Any = TYPES, **more: Any
) -> Event:
    """A product of a matrix of so many rows with a 3 × 4 matrix; None: without inputs."""
    if rows is None:
        return span(name, at, 5, **more)
    inputs = {"Input_Dims": [[rows, 3], [3, 4]], "Input_type": types, "Concrete_Inputs": ["", ""]}
    return span(name, at, 5, **inputs, **more)


def detailed(
    folder: Path, window: list[Event], detail: list[Event] | bytes, **about: Any
) -> Capture:
    found = write_capture(folder, window, detail={"first_step": 5, "steps": 2, **about})
    assert found.folder is not None
    text = detail if isinstance(detail, bytes) else json.dumps({"traceEvents": detail}).encode()
    (found.folder / DETAIL_FILE).write_bytes(gzip.compress(text))
    return Capture.load(found.folder)


def shapes(capture: Capture) -> list[str | None]:
    """The first shape of each operator, as text."""
    rows = capture.facts.events("kind", "shapes", "start_ns").sort("start_ns")
    found = rows.filter(kind="operator")["shapes"].to_list()
    return [None if each is None else str(json.loads(each)[0]) for each in found]


def of_steps(*steps: list[Event]) -> list[Event]:
    """Steps of different events."""
    return [
        {**event, "ts": event["ts"] + number * LENGTH}
        for number, events in enumerate(steps)
        for event in (annotation(f"ProfilerStep#{number}", 0, LENGTH), *events)
    ]


def two(*inside: Event) -> list[Event]:
    return in_steps(2, LENGTH, *inside)


SIX, SEVEN = "[6, 3]", "[7, 3]"
RANGES = [annotation("a", 0, 20), annotation("b", 50, 20)]

CASES: dict[str, tuple[list[Event], list[Event], list[str | None]]] = {
    "the n-th of its name": (
        two(mm(1), mm(9)),
        two(mm(20, 6), mm(70, 7)),
        [SIX, SEVEN, SIX, SEVEN],
    ),
    "steps of the detail differ": (
        two(mm(1), mm(9)),
        of_steps([mm(1, 6), mm(9, 6)], [mm(1, 6), mm(9, 7)]),
        [SIX, None, SIX, None],
    ),
    "one step of the detail calls it more often": (
        two(mm(1)),
        of_steps([mm(1, 6)], [mm(1, 6), mm(9, 6)]),
        [None, None],
    ),
    "one step of the window calls it more often": (
        of_steps([mm(1), mm(9)], [mm(1)]),
        two(mm(1, 6)),
        [None, None, SIX],
    ),
    "one step of the detail does not call it": (two(mm(1)), of_steps([mm(1, 6)], []), [None, None]),
    "another name": (two(mm(1, name="aten::bmm")), two(mm(1, 6)), [None, None]),
    "in the same range": (
        two(*RANGES, mm(1), mm(51)),
        two(annotation("b", 0, 20), annotation("a", 50, 20), mm(1, 6), mm(51, 7)),
        [SEVEN, SIX, SEVEN, SIX],
    ),
    "in no range": (two(mm(1)), two(annotation("a", 0, 20), mm(1, 6)), [None, None]),
    "below the same name": (
        two(span("aten::a", 1, 10), mm(2), span("aten::b", 20, 10), mm(21)),
        two(span("aten::b", 1, 10), mm(2, 6), span("aten::a", 20, 10), mm(21, 7)),
        [None, SEVEN, None, SIX, None, SEVEN, None, SIX],
    ),
    "on one other thread": (two(mm(1, tid=9)), two(mm(1, 6, tid=8)), [SIX, SIX]),
    "in the order of chance on two other threads": (
        two(mm(1, tid=8), mm(2, tid=9)),
        two(mm(1, 6, tid=8), mm(2, 6, tid=9)),
        [None] * 4,
    ),
    "outside of steps": ([mm(1), mm(9)], two(mm(1, 6)), [None, None]),
    "a detail without steps": (two(mm(1)), [mm(1, 6)], [None, None]),
}


@pytest.mark.parametrize(("window", "detail", "expected"), CASES.values(), ids=CASES)
def test_inputs_are_those_of_the_like_operator(tmp_path, window, detail, expected) -> None:
    capture = detailed(tmp_path, window, detail)
    assert shapes(capture) == expected
    assert len(capture.events) == len(window), "no event is of the detail window"


def test_each_input_is_known_for_itself(tmp_path: Path) -> None:
    detail = of_steps([mm(1, 6)], [mm(1, 6, types=["float", "double"])])
    capture = detailed(tmp_path, two(mm(1)), detail)
    row = capture.facts.events("name", "shapes", "types", "concrete").filter(name="aten::mm")
    assert row["shapes"].to_list() == ["[[6, 3], [3, 4]]"] * 2
    assert row["types"].to_list() == [None, None]
    assert row["concrete"].to_list() == ['["", ""]'] * 2


def test_flops_are_known_only_if_all_are(tmp_path: Path) -> None:
    whole = detailed(tmp_path / "whole", two(mm(1)), two(mm(1, 6)))
    assert whole.operators.where(name="aten::mm").column("flops") == [2 * 2 * 6 * 3 * 4]
    window = of_steps([mm(1), mm(9)], [mm(1)])
    part_of_it = detailed(tmp_path / "part", window, two(mm(1, 6)))
    assert part_of_it.operators.where(name="aten::mm").column("flops") == [None]
    assert shapes(part_of_it) == [None, None, SIX]
    by_shapes = part_of_it.operators_by("input_shapes").where(name="aten::mm")
    assert by_shapes.column("input_shapes") == [None, "[[6, 3], [3, 4]]"]


def test_the_coverage_says_for_how_many_the_inputs_are_known(tmp_path: Path) -> None:
    window = of_steps([mm(1), mm(9), span("never", 30, 1)], [mm(1), span("never", 30, 1)])
    capture = detailed(tmp_path, window, two(mm(1, 6), span("never", 30, 1)))
    found = part(capture, coverage_rows.INPUTS)
    assert found is not None
    assert found.share == pytest.approx(1 / 3)
    assert "2 steps from step 5 on" in (found.why or "")
    differ = detailed(tmp_path / "differ", two(mm(1)), of_steps([mm(1, 6)], [mm(1, 7)]))
    found = part(differ, coverage_rows.INPUTS)
    assert found is not None
    assert found.share == 0, "although their types are known"
    own = write_capture(tmp_path / "own", two(mm(1, 6)), detail=None)
    assert part(own, coverage_rows.INPUTS) is None


@pytest.mark.parametrize(
    "content", [b"", b"no JSON", b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "na']
)
def test_a_damaged_detail_is_none(tmp_path: Path, content: bytes) -> None:
    capture = detailed(tmp_path, two(mm(1)), content)
    assert capture.detail is None
    assert shapes(capture) == [None, None]
    assert capture.operators.where(name="aten::mm").column("flops") == [None]
    found = part(capture, coverage_rows.INPUTS)
    assert found is not None
    assert found.share == 0


def test_a_link_is_no_detail(tmp_path: Path) -> None:
    capture = detailed(tmp_path, two(mm(1)), two(mm(1, 6)))
    assert capture.folder is not None
    file = capture.folder / DETAIL_FILE
    file.rename(tmp_path / "elsewhere.json.gz")
    file.symlink_to(tmp_path / "elsewhere.json.gz")
    assert Capture.load(capture.folder).detail is None


def test_it_is_a_part_of_the_capture_at_a_url(tmp_path: Path) -> None:
    folder = detailed(tmp_path, two(mm(1)), two(mm(1, 6))).folder
    assert shapes(Capture.load(f"file://{folder}")) == [SIX, SIX]


def test_it_is_read_only_for_inputs(tmp_path: Path) -> None:
    capture = detailed(tmp_path, two(mm(1)), two(mm(1, 6)))
    for name in ("steps", "interruptions", "kernels", "moments", "collectives", "breakdown"):
        assert getattr(capture, name) is not None
    assert "detail" not in vars(capture)
    assert capture.during(steps=1).operators.where(name="aten::mm").column("flops") == [144]
    assert "detail" in vars(capture)


def test_its_own_inputs_win(tmp_path: Path) -> None:
    capture = detailed(tmp_path, two(mm(1, 7)), two(mm(1, 6)))
    assert shapes(capture) == [SEVEN, SEVEN]
    assert "detail" not in vars(capture)


def test_memory_is_that_of_the_detail_window(tmp_path, capsys) -> None:
    detail = [*two(mm(1, 6)), allocation(2, 64, 1)]
    capture = detailed(tmp_path, two(mm(1)), detail, memory=True)
    assert len(capture.events.memory) == 0
    assert capture.memory_devices.column("device") == ["cpu"]
    assert capture.memory_steps.column("number") == [0, 1]
    assert capture.memory_events.column("operator")
    without = detailed(tmp_path / "other", two(mm(1)), detail, memory=False)
    assert len(without.memory_devices) == 0
    assert main(["show", str(capture.folder), "--memory"]) == 0
    assert "cpu" in capsys.readouterr().out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.usefixtures("inline_export")
def test_a_training_has_the_inputs_that_record_shapes_gives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        loss = net(torch.randn(2, 3, 8, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def inputs(name: str, **options: Any) -> Counter[tuple[Any, ...]]:
        folder = tmp_path / name
        (capture,) = run_session(folder, 8, train, wait=1, active=3, **options).captures
        rows = capture.facts.events("name", "kind", "shapes", "types", "flops")
        assert capture.operators.where(name="aten::addmm").column("flops")[0]
        return Counter(rows.filter(kind="operator").select("name", "shapes", "types").rows())

    expected = inputs("own", record_shapes=True)
    assert inputs("detail", detail=2) == expected
    assert any(shapes for _, shapes, _ in expected)
