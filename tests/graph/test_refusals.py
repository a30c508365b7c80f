"""Which calls no graph stands for: refused before the model runs once more, or by what the graph leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instrument.base.errors import GraphError
from instrument.graph import profile_graph
from instrument.graph.side_effects import unchanged

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Forward = Callable[..., Any]


class Counting(nn.Module):
    """A model whose forward is given."""

    def __init__(self, forward: Forward = lambda self, x: self.layer(x)) -> None:
        super().__init__()
        self.layer, self.do = nn.Linear(4, 4), forward
        self.alpha, self.last = 1.0, None
        self.register_buffer("n", torch.zeros(()))

    def forward(self, *args: Any) -> Any:
        return self.do(self, *args)


class Data:
    """An object that pytree does not know."""


def test_objects_among_the_inputs_are_refused_before_any_run() -> None:
    runs = []
    model = Counting(lambda self, data: runs.append(data))
    with pytest.raises(
        GraphError,
        match=r"^Counting takes a Data, and a graph cannot read its content: pass ",
    ):
        profile_graph(model, Data())
    assert not runs


def test_a_dict_that_the_model_empties_is_refused_and_stays_full() -> None:
    batch = {"x": X, "y": 1}
    with pytest.raises(
        GraphError, match="changes the dicts or lists that it is given; a graph cannot represent"
    ):
        profile_graph(Counting(lambda self, batch: self.layer(batch.pop("x"))), batch)
    assert batch == {"x": X, "y": 1}


def counts_in_place(self: Counting, x: Tensor) -> Tensor:
    self.n += 1
    return self.layer(x)


def test_a_buffer_written_in_place_needs_export_and_is_put_back() -> None:
    model = Counting(counts_in_place)
    how = profile_graph(model, X, runs=1, warmup=0).how
    assert how.startswith("torch.export, because torch.fx.symbolic_trace changes buffers")
    assert model.n.item() == 0


def test_attributes_that_a_call_changes_are_put_back() -> None:
    def forward(self: Counting, x: Tensor) -> Tensor:
        self.alpha += 1
        self.last = self.layer(x)
        return self.last

    model = Counting(forward)
    profile_graph(model, X, runs=1, warmup=0)
    assert (model.alpha, model.last) == (1, None)


def test_a_branch_on_gradients_and_autocast_is_followed() -> None:
    def forward(self: Counting, x: Tensor) -> Tensor:
        half = torch.get_autocast_dtype("cpu") == torch.float16
        return x * (2 if x.requires_grad else 3) * (5 if half else 1)

    model, x = Counting(forward), X.clone().requires_grad_()
    torch.testing.assert_close(profile_graph(model, X, runs=1).outputs, X * 3)
    torch.testing.assert_close(profile_graph(model, x, runs=1).outputs, X * 2)
    with torch.autocast("cpu", dtype=torch.float16):
        torch.testing.assert_close(profile_graph(model, X, runs=1).outputs, X * 15)


def test_a_model_that_checkpoints_is_profiled_without() -> None:
    model = Counting(lambda self, x: checkpoint(self.layer, x, use_reentrant=False))
    profile = profile_graph(model, X.clone().requires_grad_(), runs=1)
    torch.testing.assert_close(profile.outputs, model.layer(X))
    assert "layer" in profile.nodes.column("name")


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

    with pytest.raises(GraphError, match="The model changed 1 tensors that could not be restored"):
        write()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
