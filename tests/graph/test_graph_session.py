"""`profiler=graph`: windows that run the session's model node by node."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from torch import Tensor, nn

from instrument import Session, instrument_model
from instrument.annotate.modules import forget
from instrument.fx.interpreter import NodeInterpreter

pytestmark = pytest.mark.usefixtures("inline_export")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.dropout(x, 0.1, self.training).mean((2, 3)))


class Branching(Net):
    """No graph can follow it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


NODES = ["x", "conv", "norm", "relu", "dropout", "mean", "head", "output"]


Trained = tuple[list[float], list[Tensor], Session, list[bool]]


def train(kind: type[Net], folder: Path, **options: Any) -> Trained:
    """Six steps, the fifth with a smaller batch: the losses, what the model then holds, and when its graph was used."""
    torch.manual_seed(0)
    model, losses, replaced = kind(), [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session("graph", output_dir=folder, export="inline", model=model, **options) as session:
        for step in range(6):
            loss = model(torch.randn(2 if step == 4 else 4, 3, 8, 8)).square().sum()
            loss.backward()
            replaced.append("forward" in vars(model))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            session.step()
    assert "forward" not in vars(model)
    return losses, list(model.state_dict().values()), session, replaced


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(Net, tmp_path_factory.mktemp("trained"))


def test_training_is_what_it_is_without(trained: Trained, tmp_path: Path) -> None:
    losses, state, _, replaced = trained
    bare_losses, bare_state, _, never = train(Net, tmp_path, enabled=False)
    assert losses == bare_losses
    assert all(torch.equal(one, other) for one, other in zip(state, bare_state))
    assert replaced == [False, True, True, True, True, False]  # one step warms up, three are recorded
    assert not any(never)


def test_each_node_is_a_range_with_all_that_ranges_have(trained: Trained) -> None:
    (capture,) = trained[2].captures
    rows = {row.path: row for row in capture.ranges}
    assert [path for path in rows if path.startswith("Net/") and "capture" not in path] == [f"Net/{n}" for n in NODES]
    for name in ("conv", "norm", "relu", "dropout", "mean", "head"):
        assert rows[f"Net/{name}"].calls == 3
        assert rows[f"Net/{name}"].backward_ns > 0
    batches = 4 + 4 + 2
    assert rows["Net/head"].flops == 2 * 2 * batches * 8 * 4 + 2 * batches * 8 * 4  # and those of two gradients
    assert rows["Net/relu"].flops is None
    assert rows["Net/conv"].bytes == batches * 8 * 6 * 6 * 4
    assert "\n  head  " in (capture.folder / "table.txt").read_text(encoding="utf-8")


def test_a_kind_of_inputs_that_comes_within_the_window_is_captured_there(trained: Trained) -> None:
    (capture,) = trained[2].captures
    (row,) = capture.ranges.where(path="Net/graph capture")  # of the smaller batch
    assert row.calls == 1


def test_what_cannot_be_captured_gets_its_modules_ranges(tmp_path: Path, log: Log) -> None:
    losses, state, session, replaced = train(Branching, tmp_path, modules={"exclude": ["norm"]})
    bare_losses, bare_state, *_ = train(Branching, tmp_path, enabled=False)
    assert losses == bare_losses
    assert all(torch.equal(one, other) for one, other in zip(state, bare_state))
    assert not any(replaced)
    (capture,) = session.captures
    assert [path for path in capture.ranges.column("path") if path.startswith("Branching")] == [
        "Branching",
        "Branching/conv",
        "Branching/head",
    ]
    (warning,) = (line for line in log.at("WARNING") if "captured" in line)
    assert warning.startswith("Branching cannot be captured as a graph: ")
    assert f"{__file__}:" in warning
    assert warning.endswith("Its ranges are its submodules instead.")


def test_a_copy_made_in_a_window_has_its_own_forward(tmp_path: Path, log: Log) -> None:
    model, x = Net().eval(), torch.randn(4, 3, 8, 8)
    with Session(graph=True, active=1, output_dir=tmp_path, model=model):
        expected = model(x)
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        model.head.weight.data.zero_()
        for twin in twins:
            torch.testing.assert_close(twin(x), expected)
    assert "INFO Ranges are the nodes of Net's graph, captured by torch.fx.symbolic_trace." in log


def test_a_forward_that_its_owner_has_replaced_comes_back(tmp_path: Path) -> None:
    model = Net().eval()
    model.forward = own = lambda x: Net.forward(model, x) + 1
    with Session(graph=True, active=1, output_dir=tmp_path, model=model):
        given = model(torch.ones(4, 3, 8, 8))
    assert model.forward is own
    torch.testing.assert_close(given, model(torch.ones(4, 3, 8, 8)))


def test_an_error_of_the_model_ends_its_ranges_and_reaches_the_caller(tmp_path: Path) -> None:
    model = Net()
    with Session(graph=True, active=1, output_dir=tmp_path, model=model):
        model(torch.ones(4, 3, 8, 8))
        with pytest.raises(RuntimeError, match="channels"):
            model(torch.ones(4, 2, 8, 8))
    assert "forward" not in vars(model)


def test_a_graph_that_fails_costs_no_step(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net().eval(), torch.ones(4, 3, 8, 8)
    expected = model(x)
    with Session(graph=True, active=2, output_dir=tmp_path, model=model) as session:
        model(x)
        monkeypatch.setattr(NodeInterpreter, "run_node", lambda *_: 1 / 0)
        session.step()
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
        session.step()
    (warning,) = (line for line in log.at("WARNING") if "graph" in line)
    assert "graph cannot be run: ZeroDivisionError" in warning
    assert "Net/conv" in session.captures[0].ranges.column("path")


def test_a_model_whose_forward_is_not_called_gets_its_modules_ranges(tmp_path: Path, log: Log) -> None:
    model, x = Net().eval(), torch.ones(4, 3, 8, 8)
    with Session(graph=True, active=1, repeat=2, output_dir=tmp_path, model=model) as session:
        for _ in range(2):
            model.conv(x)
            session.step()
    assert [capture.ranges.column("path") for capture in session.captures] == [[], ["conv"]]
    (warning,) = (line for line in log.at("WARNING") if "forward" in line)
    assert warning == (
        "The forward of Net was not called in a window: for its graph, give the session, or the trainer's callback, "
        "the module that is called, as model=…. Its ranges are its submodules instead."
    )


def test_a_compiled_model_keeps_its_code_and_its_modules_ranges(tmp_path: Path, log: Log) -> None:
    model = torch.compile(Net().eval(), backend="eager")
    with Session(graph=True, active=1, output_dir=tmp_path, model=model), torch.no_grad():
        model(torch.ones(4, 3, 8, 8))
        assert "forward" not in vars(model._orig_mod)
    assert any("leaves out what torch.compile has made of it" in line for line in log.at("WARNING"))


def test_there_must_be_a_model_to_run(tmp_path: Path, log: Log) -> None:
    with Session(graph=True, active=1, output_dir=tmp_path):
        pass
    assert "the session has no model: give it one, as in Session(config, model=model)." in log.at("WARNING")[0]
    model = instrument_model(Net(), depth=1)
    with Session(graph=True, active=1, output_dir=tmp_path, model=model) as session:
        model(torch.ones(4, 3, 8, 8))
        session.step()
    forget(model)
    assert "WARNING profiler.graph=true does nothing, for instrument_model has chosen ranges: leave that out." in log
    assert session.captures[-1].ranges.column("path") == ["Net", "Net/conv", "Net/norm", "Net/head"]
