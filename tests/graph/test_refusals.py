"""Which calls no graph stands for: refused before the model runs once more, or by what the graph leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collected import Log
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instrument import Session
from instrument.errors import GraphError
from instrument.fx import NodeProfiler, profile_graph
from instrument.fx.forward import GraphForward
from instrument.fx.interpreter import NodeInterpreter
from instrument.fx.side_effects import unchanged

pytestmark = pytest.mark.usefixtures("inline_export")
X = torch.linspace(-1, 1, 12).reshape(3, 4)
Forward = Callable[..., Any]


class Counting(nn.Module):
    """A model whose forward is given."""

    def __init__(self, forward: Forward = lambda self, x: self.layer(x)) -> None:
        super().__init__()
        self.layer, self.do, self.runs = nn.Linear(4, 4), forward, []
        self.alpha, self.last = 1.0, None
        self.register_buffer("n", torch.zeros(()))

    def forward(self, *args: Any) -> Any:
        return self.do(self, *args)


RUNS: list[int] = []


def counted(self: Counting, x: Tensor) -> Tensor:
    RUNS.append(1)
    return self.layer(x)


@pytest.fixture(autouse=True)
def no_runs() -> None:
    RUNS.clear()


def in_a_window(model: nn.Module, *inputs: Any, folder: Path, call: Forward | None = None) -> list[Any]:
    """What two steps give while a graph is asked for."""
    results = []
    with Session(graph=True, active=2, repeat=1, output_dir=folder, model=model) as session:
        for _ in range(2):
            results.append((call or model)(*inputs))
            session.step()
    return results


class Data:
    """An object whose repr does not tell what it holds."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __repr__(self) -> str:
        return "Data()"


def test_objects_among_the_inputs_are_refused_before_any_run(tmp_path: Path, log: Log) -> None:
    model = Counting(lambda self, data: counted(self, data.x))
    with pytest.raises(GraphError, match=r"^Counting takes a Data, of which a graph cannot tell what is in it: pass "):
        profile_graph(model, Data(X))
    assert not RUNS
    given = in_a_window(model, Data(X), folder=tmp_path)
    assert len(RUNS) == 2
    assert all(torch.equal(each, model.layer(X)) for each in given)
    assert sum("takes a Data" in line for line in log.at("WARNING")) == 1
    profiler = NodeProfiler(Counting(lambda self, x: self.layer(x if isinstance(x, Tensor) else x.x)))
    profiler.run(X)
    with pytest.raises(GraphError, match="takes a Data"):
        profiler.run(Data(X))


def test_a_dict_that_the_model_empties_is_emptied_once(tmp_path: Path, log: Log) -> None:
    model, batches = Counting(lambda self, batch: self.layer(batch.pop("x"))), [{"x": X, "y": 1} for _ in range(2)]
    rest = iter(batches)
    in_a_window(model, folder=tmp_path, call=lambda: model(next(rest)))
    assert batches == [{"y": 1}, {"y": 1}]
    assert any("changes the dicts or lists that it is given" in line for line in log.at("WARNING"))


def test_no_graph_is_captured_beside_other_ranks(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    model = Counting(counted)
    with GraphForward(model, lambda: None):
        for _ in range(2):
            model(X)
    assert len(RUNS) == 2
    (warning,) = log.at("WARNING")
    assert "Counting trains on 2 ranks, where a run of its own could wait for the others for ever" in warning


def counts_in_place(self: Counting, x: Tensor) -> Tensor:
    self.n += 1
    return self.layer(x)


def counts_in_python(self: Counting, x: Tensor) -> Tensor:
    self.alpha += 1
    return self.layer(x)


def remembers(self: Counting, x: Tensor) -> Tensor:
    self.last = self.layer(x)
    return self.last


def appends(self: Counting, x: Tensor) -> Tensor:
    self.runs.append(1)
    return self.layer(x)


def test_buffers_count_each_call_once(tmp_path: Path, log: Log) -> None:
    model = Counting(counts_in_place)
    in_a_window(model, X, folder=tmp_path)
    assert model.n.item() == 2
    assert any("torch.export, because torch.fx.symbolic_trace leaves other buffers" in line for line in log.at("INFO"))


@pytest.mark.parametrize(("forward", "name"), [(counts_in_python, "alpha"), (remembers, "last"), (appends, "runs")])
def test_attributes_that_a_call_changes_are_no_graphs(forward: Forward, name: str, tmp_path: Path, log: Log) -> None:
    model = Counting(forward)
    with pytest.raises(GraphError, match=f"symbolic_trace (leaves another {name} in a module than|.*; torch.export)"):
        profile_graph(model, X)
    assert (model.alpha, model.last) == (1, None)
    in_a_window(model, X, folder=tmp_path)
    assert model.alpha == (3 if name == "alpha" else 1)
    assert (model.last is None) == (name != "last")
    assert any("cannot be captured" in line for line in log.at("WARNING"))


def test_a_schedule_of_an_attribute_is_followed(tmp_path: Path) -> None:
    model = Counting(lambda self, x: self.layer(x) * self.alpha)
    with Session(graph=True, active=3, repeat=1, output_dir=tmp_path, model=model) as session:
        for step in range(3):
            model.alpha = float(step)
            torch.testing.assert_close(model(X), model.layer(X) * step)
            session.step()


def test_a_branch_on_gradients_and_autocast_is_followed(tmp_path: Path) -> None:
    def forward(self: Counting, x: Tensor) -> Tensor:
        half = torch.get_autocast_dtype("cpu") == torch.float16
        return x * (2 if x.requires_grad else 3) * (5 if half else 1)

    model, x = Counting(forward), X.clone().requires_grad_()
    with Session(graph=True, active=1, output_dir=tmp_path, model=model):
        torch.testing.assert_close(model(X), X * 3)
        torch.testing.assert_close(model(x), x * 2)
        with torch.autocast("cpu", dtype=torch.float16):
            torch.testing.assert_close(model(X), X * 15)


def test_a_layer_replaced_between_windows_is_the_one_that_runs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with Session(graph=True, at_steps=[0, 2], active=1, output_dir=tmp_path, model=model) as session:
        for step in range(3):
            if step == 2:
                model[0] = nn.Linear(4, 4)
            torch.testing.assert_close(model(X), torch.relu(model[0](X)))
            session.step()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_within_is_refused(reentrant: bool) -> None:
    model = Counting(lambda self, x: checkpoint(self.layer, x, use_reentrant=reentrant))
    with pytest.raises(
        GraphError, match=r"packs what autograd saves \(checkpointing, offloading\), which no graph does"
    ):
        profile_graph(model, X.clone().requires_grad_())


def test_checkpointing_around_leaves_the_model_its_forward(tmp_path: Path, log: Log) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), X.clone().requires_grad_()
    for given in in_a_window(model, x, folder=tmp_path, call=lambda x: checkpoint(model, x, use_reentrant=False)):
        given.sum().backward()  # which fails where the forward's second run saves other tensors
    assert any("is called where saved tensors are packed" in line for line in log.at("WARNING"))


def test_other_threads_and_copies_run_their_own_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, nodes = Counting(), []
    run = NodeInterpreter.run_timed
    monkeypatch.setattr(NodeInterpreter, "run_timed", lambda self, values: nodes.append(1) or run(self, values))
    with Session(graph=True, active=1, output_dir=tmp_path, model=model):
        model(X)
        nodes.clear()
        model(X)
        assert nodes == [1]
        thread = Thread(target=model, args=(X,))
        thread.start()
        thread.join()
        twin, replica = copy.deepcopy(model), model._replicate_for_data_parallel()
        assert nodes == [1]
        assert "forward" in vars(model)
        assert not {"forward", "__getstate__"} & {*vars(twin), *vars(replica)}
    assert not {"forward", "__getstate__", "_replicate_for_data_parallel"} & {*vars(model)}


def hook_a_module(model: nn.Module, hook: Forward) -> None:
    model.layer.register_forward_hook(hook)


def hook_a_parameter(model: nn.Module, hook: Forward) -> None:
    model.layer.weight.register_hook(hook)


@pytest.mark.parametrize("attach", [hook_a_module, hook_a_parameter])
def test_hooks_see_each_call_once(attach: Forward, tmp_path: Path, log: Log) -> None:
    model, seen = Counting(), []
    attach(model, lambda *_: seen.append(1))
    for given in in_a_window(model, X, folder=tmp_path):
        given.sum().backward()
    assert len(seen) == 2
    assert any("would see the runs that capturing takes" in line for line in log.at("WARNING"))


def test_an_error_of_the_model_comes_from_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    with Session(graph=True, active=1, output_dir=tmp_path, model=model):
        model(X)
        monkeypatch.setattr(nn.Linear, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X)
        assert model[0].num_batches_tracked == 2


def test_a_run_keeps_nothing() -> None:
    profiler = NodeProfiler(Counting())
    for _ in range(2):
        assert profiler.run(X).requires_grad
    captured = profiler._captured
    assert not captured.interpreter.env
    assert not captured.inspection.env
    assert not profiler.profile().outputs.requires_grad


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)), torch.arange(3)),
        (Counting(lambda self, x: (self.layer(x) * float("nan"), float("nan"))), X),
        (Counting(lambda self, x: torch.sparse.mm(self.n, self.layer(x))), X),
    ],
)
def test_sparse_tensors_and_nan_are_compared(model: nn.Module, x: Tensor) -> None:
    if isinstance(model, Counting):
        model.n = torch.eye(3).to_sparse()
    assert profile_graph(model, x, runs=1, warmup=0).how == "torch.fx.symbolic_trace"


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        mean = model[1].running_mean.clone()
        profile_graph(model, X, runs=1, warmup=0)
        assert torch.equal(model[1].running_mean, mean)


def test_what_cannot_be_put_back_keeps_nothing_else_from_it() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    overlapping = torch.zeros(1).expand(3)  # no tensor to copy into

    def write() -> None:
        with unchanged(model, overlapping):
            model(X)
            overlapping[:1] = 1

    with pytest.raises(GraphError, match="1 tensors that the model writes to could not be put back"):
        write()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
