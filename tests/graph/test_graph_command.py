"""`instrument graph`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from instrument.cli.command import main
from instrument.graph.roofline import Machine

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, ids, mask=None):
        x = self.embedding(ids)
        return self.head(x if mask is None else x.masked_fill(~mask, 0))

def build():
    return Net()

built = Net()
text = "no model"
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_mine.py").write_text(MODEL)
    (tmp_path / "needs_what_is_not.py").write_text("import nowhere_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(["graph", *arguments])
    out, err = capsys.readouterr()
    assert (status == 0) == (not err.startswith("instrument: ")), err
    return out if status == 0 else err


@pytest.mark.parametrize("name", ["Net", "build", "built"])
def test_a_class_a_function_or_a_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, f"models_of_mine:{name}", "--input", "2,5:int64", "--runs", "1")
    heading, _, *rows = said.splitlines()
    assert (
        " ".join(heading.split()) == "op name target mean median p95 share calls output shape flops"
    )
    assert [row.split()[:2] for row in rows[:4]] == [
        ["placeholder", "ids"],
        ["call_module", "embedding"],
        ["call_module", "head"],
        ["output", "output"],
    ]
    assert rows[2].endswith(str(2 * 2 * 5 * 8 * 4))
    assert "Captured by torch.fx.symbolic_trace." in said
    assert "4 nodes take " in said


def test_the_options_reach_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = [
        "models_of_mine:Net", "--input", "ids=2,5:int64", "--input", "mask=2,5,1:bool", "--runs",
        "2",
    ]  # fmt: skip
    said = shown(
        capsys,
        *model,
        "--sort",
        "output_bytes",
        "--rows",
        "2",
        "--columns",
        "name,calls,output_bytes",
    )
    assert [line.split()[:2] for line in said.splitlines()[2:4]] == [
        ["embedding", "2"],
        ["masked_fill", "2"],
    ]
    said = shown(capsys, *model, "--train", "--by", "module_type", "--columns", "module_type,nodes")
    assert ["Linear", "1"] in [line.split() for line in said.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["models_of_mine:Nat"], "There is no model 'models_of_mine:Nat' ("),
        (
            ["needs_what_is_not:Net"],
            "There is no model 'needs_what_is_not:Net' (No module named 'nowhere_at_all'): give ",
        ),
        (["torch.nn:Linear"], "'torch.nn:Linear' cannot make a model without arguments ("),
        (
            ["models_of_mine:Net", "--input=-1,3"],
            "--input -1,3 is not a shape: write a shape such as 1,3,224,224, or ",
        ),
        (
            ["models_of_mine:Net", "--input", "2:float8_e4m3fn"],
            "The model or an input cannot be put on cpu (",
        ),
        (["models_of_mine"], "There is no model 'models_of_mine' ("),
        (
            ["models_of_mine:text"],
            "'models_of_mine:text' is or returns a str: give an nn.Module, its class, or a "
            "function that makes it.",
        ),
        (
            ["models_of_mine:Net", "--input", "2;5"],
            "--input 2;5 is not a shape: write a shape such as 1,3,224,224, or ",
        ),
        (["models_of_mine:Net", "--input", "2:int65"], "--input 2:int65 is not a shape: "),
        (
            ["models_of_mine:Net", "--device", "nowhere"],
            "The model or an input cannot be put on nowhere (",
        ),
        (
            ["models_of_mine:Net", "--input", "2:int64", "--sort", "x"],
            "The table has no column 'x'; it has op, name, ",
        ),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, *arguments).startswith(f"instrument: {sentence}")


def test_the_bounds_by_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("this one", {"float32": 10**10}, 10**9)
    monkeypatch.setattr("instrument.graph.roofline.measured", lambda *_: machine)
    call = ["models_of_mine:Net", "--input", "2,5:int64", "--runs", "1", "--roofline"]
    said = shown(capsys, *call, "--sort", "bound_ns", "--rows", "1")
    heading, _, first = said.splitlines()[:3]
    assert " ".join(heading.split()) == (
        "name median flops moved memory intensity bound by bound bound share"
    )
    # nanoseconds too, as the machine moves a byte in each
    moved = 2 * 5 * 8 + 4 * 10 * 8 + 4 * 2 * 5 * 8
    assert first.startswith("embedding ")
    assert f" {moved} ns " in first
    assert said.endswith(f"\nThe bounds are computed from the rates of {machine}.\n")


def test_the_graph_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ("models_of_mine:Net", "--input", "2,5:int64", "--runs", "1")
    said = shown(capsys, *call, "--dot", "graph.dot")
    assert said.endswith("\nThe graph for Graphviz is in graph.dot.\n")
    drawn = (tmp_path / "graph.dot").read_text(encoding="utf-8")
    assert drawn.startswith("digraph {")
    assert "embedding (embedding)" in drawn
    assert shown(capsys, *call, "--dot", "nowhere/graph") == (
        "instrument: nowhere/graph cannot be written (No such file or directory): name a file "
        "in an existing folder that you may write to.\n"
    )
