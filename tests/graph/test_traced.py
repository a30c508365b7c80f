"""How graphs are captured, and which are not taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from instrument import instrument_model, profiled
from instrument.annotate.modules import forget
from instrument.base.errors import GraphError
from instrument.graph import profile_graph

X = torch.linspace(-1, 1, 12).reshape(3, 4)
TRACED = "torch.fx.symbolic_trace"
EXPORTED = f"torch.export, because {TRACED} "


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


@dataclass
class Named:
    value: Tensor


class Holder(nn.Module):
    """A model whose forward is given; `layer` is a Linear in a Sequential."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.do = forward
        self.register_buffer("offset", torch.ones(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.do(self, *args, **kwargs)


def how(forward: Callable[..., Any], *inputs: Any, **kwargs: Any) -> str:
    """What captures a model with this forward, which must not change."""
    model = Holder(forward)
    before = set(vars(model))
    profile = profile_graph(model, *inputs, runs=1, warmup=0, **kwargs)
    assert set(vars(model)) == before
    return profile.how


@pytest.mark.parametrize(
    ("forward", "inputs", "kwargs"),
    [
        (lambda self, x: self.layer(x) + self.offset, (X,), {}),
        (lambda self, *xs: xs[0] * xs[1], (X, X), {}),
        (lambda self, x, mask=None: x if mask is None else x * mask, (X,), {}),
        (lambda self, x, **rest: x + rest["b"] - rest["a"], (X,), {"b": X, "a": X * 2}),
        (lambda self, batch: batch["x"] + batch["pair"][1], ({"x": X, "pair": [X, X]},), {}),
        (lambda self, x, flag: x + 1 if flag else x, (X, True), {}),
        (lambda self, x: {"a": x, "b": [x + 1, 2]}, (X,), {}),
        (lambda self, x: Pair(x, x * 2), (X,), {}),
        (lambda self, x: Named(x * 2), (X,), {}),
        (lambda self, x: x + torch.ones(4), (X,), {}),
    ],
)
def test_followed_calls(forward: Callable[..., Any], inputs: tuple[Any, ...], kwargs: Any) -> None:
    assert how(forward, *inputs, **kwargs) == TRACED


def branch_on_shape(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) * 2 if x.shape[0] > 2 else self.layer(x)


def noise(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) + torch.rand(4)


def keywords(self: Any, x: Tensor, **rest: Tensor) -> Tensor:
    return x + rest["b"] - rest["a"] if x.shape[0] > 2 else x


@pytest.mark.parametrize(
    ("forward", "kwargs", "why"),
    [
        (
            branch_on_shape,
            {},
            "cannot follow {file}:{line} (TraceError: symbolically traced variables cannot be used",
        ),
        (keywords, {"b": X, "a": X * 2}, "cannot follow {file}:{line} (TraceError: "),
        (noise, {}, "gives other numbers than the model (Tensor-likes are not close!)"),
    ],
)
def test_export_captures_what_fx_cannot(forward: Callable[..., Any], kwargs: Any, why: str) -> None:
    line = forward.__code__.co_firstlineno + 1
    torch.manual_seed(0)
    model, generator = Holder(forward), torch.get_rng_state()
    profile = profile_graph(model, X, runs=1, warmup=0, **kwargs)
    assert profile.how.startswith(EXPORTED + why.format(file=__file__, line=line))
    assert torch.equal(torch.get_rng_state(), generator)


def test_an_exported_node_knows_its_module_and_line() -> None:
    nodes = profile_graph(Holder(branch_on_shape), X, runs=1, warmup=0).nodes
    (linear,) = nodes.where(target="aten.linear.default")
    assert (linear.module_path, linear.module_type) == ("layer.0", "Linear")
    assert linear.source == f"{__file__}:{Holder.forward.__code__.co_firstlineno + 1}"
    (weight,) = nodes.where(target="layer.0.weight")
    assert (weight.op, weight.module_path, weight.module_type) == ("get_attr", "layer.0", "Linear")


def branch_on_values(self: Any, x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def test_what_neither_captures_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GraphError) as raised:
        profile_graph(Holder(branch_on_values), X)
    at = f"cannot follow {__file__}:{branch_on_values.__code__.co_firstlineno + 1} ("
    said = str(raised.value)
    assert said.startswith(f"Holder cannot be captured as a graph: {TRACED} {at}TraceError: ")
    assert f"; torch.export {at}" in said
    assert said.endswith(
        ". Mark its submodules with instrument_model instead, or change the model's code."
    )
    assert "\n" not in said
    assert "def forward" not in capsys.readouterr().err


def test_hooks_that_change_results_are_in_the_graph() -> None:
    model = Holder(lambda self, x: self.layer(x))
    model.layer.register_forward_hook(lambda module, inputs, output: output + 1)
    model.layer[0].register_forward_hook(lambda module, inputs, output: output + 1)
    profile = profile_graph(model, X, runs=1, warmup=0)  # the graph calls the inner one only
    assert profile.how == TRACED
    assert profile.nodes.where(target="operator.add")


def test_compiled_parts_are_refused() -> None:
    model = Holder(lambda self, x: self.layer(x))
    model.layer.compile(backend="eager")
    with pytest.raises(GraphError, match=r"has code compiled by torch.compile in layer"):
        profile_graph(model, X)


def test_ranges_of_our_own_are_no_hindrance() -> None:
    model = Holder(profiled("marked")(lambda self, x: self.layer(x)))
    instrument_model(model)
    assert profile_graph(model, X, runs=1, warmup=0).how == TRACED
    forget(model)
