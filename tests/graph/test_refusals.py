"""Calls that no graph can represent are refused, and each call leaves the model as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instrument.base.errors import GraphError
from instrument.graph import profile_graph

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

    def __init__(self) -> None:
        self.x = X.clone()


def test_objects_among_the_inputs_are_constants_and_stay_as_they_are() -> None:
    def forward(self: Counting, data: Data) -> Tensor:
        data.seen = True  # type: ignore[attr-defined]
        return self.layer(data.x)

    data = Data()
    nodes = profile_graph(Counting(forward), data, runs=1, warmup=0).nodes
    assert nodes.column("op") == ["get_attr", "call_module", "output"]
    assert vars(data).keys() == {"x"}


def test_a_dict_that_the_model_empties_stays_full() -> None:
    batch = {"x": X, "y": 1}
    model = Counting(lambda self, batch: self.layer(batch.pop("x")))
    assert len(profile_graph(model, batch, runs=2, warmup=0).nodes) == 3
    assert batch == {"x": X, "y": 1}


def counts_in_place(self: Counting, x: Tensor) -> Tensor:
    self.n += 1
    return self.layer(x)


def test_a_buffer_written_in_place_needs_export_and_is_put_back() -> None:
    model = Counting(counts_in_place)
    how = profile_graph(model, X, runs=1, warmup=0).how
    assert how.startswith("torch.export, because torch.fx.symbolic_trace gives other numbers")
    assert model.n.item() == 0


def test_attributes_that_a_call_changes_are_put_back() -> None:
    def forward(self: Counting, x: Tensor) -> Tensor:
        self.alpha += 1
        self.last = self.layer(x)
        return self.last

    model = Counting(forward)
    profile_graph(model, X, runs=1, warmup=0)
    assert (model.alpha, model.last) == (1, None)


@pytest.mark.parametrize(("gradients", "half"), [(False, False), (True, False), (False, True)])
def test_a_branch_on_gradients_and_autocast_is_followed(gradients: bool, half: bool) -> None:
    def forward(self: Counting, x: Tensor) -> Tensor:
        y = x.sin() if x.requires_grad else x.cos()
        return y.tan() if torch.get_autocast_dtype("cpu") == torch.float16 else y

    x = X.clone().requires_grad_(gradients)
    with torch.autocast("cpu", dtype=torch.float16) if half else nullcontext():
        nodes = profile_graph(Counting(forward), x, runs=1).nodes
    names = ["sin" if gradients else "cos", *(["tan"] if half else [])]
    assert nodes.where("op like 'call%'").column("name") == names


def test_a_model_that_checkpoints_is_profiled_without() -> None:
    model = Counting(lambda self, x: checkpoint(self.layer, x, use_reentrant=False))
    profile = profile_graph(model, X.clone().requires_grad_(), runs=1)
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


def test_what_cannot_be_copied_is_refused_and_what_autograd_made_is_shared() -> None:
    model = Counting()
    model.last = model.layer.weight * 2  # as torch.nn.utils.weight_norm leaves it
    profile_graph(model, X, runs=1, warmup=0)
    model.last = [threading.Lock()]
    with pytest.raises(GraphError, match=r"^Counting cannot be copied \(TypeError: cannot pickle "):
        profile_graph(model, X)
