"""What `profile_graph` tells of a model's nodes, each figure beside one from elsewhere."""

from __future__ import annotations

import copy
import pickle
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from instrument.base.errors import ConfigError
from instrument.graph import GraphProfile, profile_graph
from instrument.graph.node_table import grouped, node_table
from instrument.read.views.table import Table

EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet_inference.py"


class Small(nn.Module):
    """A module that trains with dropout and running statistics, reshapes, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(
        self, x: Tensor, scale: Tensor | None = None, *, mask: Tensor | None = None
    ) -> dict[str, Any]:
        x = functional.relu(self.norm(self.conv(x)), inplace=True)
        x = functional.dropout(x, 0.5, self.training).mean((2, 3))
        if mask is not None:
            x = x * mask
        y = self.head(x.view(-1, 8))
        return {"logits": y if scale is None else y * scale, "pooled": (x, "pooled")}


class Attention(nn.Module):
    """A transformer's block of matrix products, which torch's counter knows each of."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + functional.softmax(q @ k.transpose(1, 2) / 4, dim=-1) @ v
        return x + self.down(functional.gelu(self.up(x)))


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, Tensor, GraphProfile]:
    model = runpy.run_path(str(EXAMPLE))["ResNet18"]().eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        return model, x, profile_graph(model, x, runs=3, warmup=0)


def test_table_of_a_resnet(resnet: tuple[nn.Module, Tensor, GraphProfile]) -> None:
    nodes = resnet[2].nodes
    assert (nodes[0].op, nodes[0].name) == ("placeholder", "x")
    assert (nodes[-1].op, nodes[-1].name, nodes[-1].inputs) == ("output", "output", "fc")
    (conv,) = nodes.where(name="layer1_0_conv1")
    assert (conv.op, conv.target) == ("call_module", "layer1.0.conv1")
    assert (conv.module_path, conv.module_type) == ("layer1.0.conv1", "Conv2d")
    file, _, line = conv.source.rpartition(":")
    assert file == str(EXAMPLE)
    assert "self.conv1(x)" in EXAMPLE.read_text().splitlines()[int(line) - 1]
    (add,) = nodes.where(name="add")
    assert (add.op, add.target) == ("call_function", "operator.add")
    assert add.inputs == "layer1_0_bn2, layer1_0_shortcut"
    assert (add.module_path, add.module_type) == ("layer1.0", "BasicBlock")
    assert resnet[2].how == "torch.fx.symbolic_trace"


def test_shapes_and_bytes_as_hooks_see_them(resnet: tuple[nn.Module, Tensor, GraphProfile]) -> None:
    model, x, profile = resnet
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 21
    for name, out in seen.items():
        (row,) = profile.nodes.where(target=name)
        assert (row.output_shape, row.output_dtype) == (str(list(out.shape)), "float32")
        assert row.output_bytes == row.new_bytes == out.nbytes
        (taken,) = profile.nodes.where(name=row.inputs)
        weights = sum(parameter.nbytes for parameter in model.get_submodule(name).parameters())
        assert row.moved_bytes == taken.output_bytes + weights + out.nbytes
        assert row.intensity == row.flops / row.moved_bytes


def test_flops_are_those_of_torchs_counter(resnet: tuple[nn.Module, Tensor, GraphProfile]) -> None:
    model, x, profile = resnet
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    known = [row for row in profile.nodes if row.flops is not None]
    assert sum(row.flops for row in known) == counter.get_total_flops()
    assert {row.module_type for row in known} == {"Conv2d", "Linear"}
    (row,) = profile.nodes.where(target="layer1.0.conv1")
    by_module = counter.get_flop_counts()
    (counted,) = (by_module[name] for name in by_module if name.endswith("layer1.0.conv1"))
    assert row.flops == sum(counted.values())
    assert row.flops_per_second == row.flops * 10**9 // row.median_ns


def test_flops_of_attention() -> None:
    model, x = Attention(), torch.randn(2, 6, 16)
    with FlopCounterMode(display=False) as counter:
        model(x)
    profile = profile_graph(model, x, runs=1, warmup=0)
    assert sum(filter(None, profile.nodes.column("flops"))) == counter.get_total_flops()
    products = profile.nodes.where(target="operator.matmul").column("flops")
    assert products == [2 * 2 * 6 * 16 * 6] * 2
    (softmax,) = profile.nodes.where(name="softmax")
    assert (softmax.flops, softmax.flops_per_second, softmax.intensity) == (None, None, None)


@pytest.mark.parametrize("inference", [True, False])
def test_flops_are_those_of_a_recording(inference: bool) -> None:
    """Of operators that torch's counter does not know on a CPU, and where operators come undivided."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(self.rnn(x)[0])[:, None]
            return functional.scaled_dot_product_attention(y, y, y)

    with torch.inference_mode(inference):
        nodes = profile_graph(Recurrent().eval(), torch.randn(2, 6, 8), runs=1, warmup=0).nodes
    flops = {row.name: row.flops for row in nodes if row.flops is not None}
    assert flops == {
        "rnn": 2 * 6 * 2 * 2 * (4 * 8) * 8,
        "head": 2 * 2 * 6 * 8 * 8,
        "scaled_dot_product_attention": 2 * 2 * 6 * 6 * (8 + 8),
    }


def test_all_nodes_beside_the_model_itself(resnet: tuple[nn.Module, Tensor, GraphProfile]) -> None:
    _, _, profile = resnet
    assert set(profile.nodes.column("calls")) == {3}
    assert sum(profile.nodes.column("share")) == pytest.approx(1)
    # A machine that was slow in the second run counts in both.
    known = replace(
        profile,
        nodes=profile.nodes.head(2),
        times_ns=np.array([[10, 90], [20, 180], [10, 90]]),
        model_ns=np.array([100, 200, 80]),
    )
    assert known.foot == [
        f"Captured by {profile.how}.",
        "2 nodes take 100 ns in a run, 100 % of the 100 ns that the model itself takes.",
    ]
    assert str(profile).endswith("\n".join(profile.foot))


def test_a_profile_can_be_kept(resnet: tuple[nn.Module, Tensor, GraphProfile]) -> None:
    _, _, profile = resnet
    again = pickle.loads(pickle.dumps(profile))
    assert str(again) == str(profile)
    assert list(again.by("module_type")) == list(profile.by("module_type"))


def table(times_ns: list[list[int]]) -> Table:
    """Four nodes that took these times, run by run."""
    labels = {
        "op": ["placeholder", "call_module", "call_module", "output"],
        "name": ["x", "a", "b_c", "output"],
        "target": ["x", "a", "b.c", "output"],
        "module_path": [None, "a", "b.c", None],
        "module_type": [None, "Linear", "Linear", None],
        "source": [None, "m.py:1", "m.py:1", None],
        "inputs": ["", "x", "a", "b_c"],
    }
    facts: dict[str, list[Any]] = dict.fromkeys(("output_shape", "output_dtype"), [None] * 4)
    facts |= {
        "output_bytes": [8, 8, 4, 4],
        "new_bytes": [0, 8, 4, 0],
        "moved_bytes": [0, 20, 10, 0],
    }
    return node_table(labels, np.array(times_ns), facts | {"flops": [None, 40, 20, None]})


TIMES_NS = [[0, 10, 100, 0], [0, 30, 100, 0], [0, 20, 400, 0]]


def test_the_statistics_of_known_times() -> None:
    nodes = table(TIMES_NS)
    assert nodes.column("mean_ns") == [0, 20, 200, 0]
    assert nodes.column("median_ns") == [0, 20, 100, 0]
    assert nodes.column("p95_ns") == [0, 30, 400, 0]
    assert nodes.column("share") == pytest.approx([0, 1 / 6, 5 / 6, 0])
    assert nodes.column("flops_per_second") == [None, 2 * 10**9, 2 * 10**8, None]
    assert nodes.column("intensity") == [None, 2.0, 2.0, None]


def test_groups_are_summed_in_each_run() -> None:
    nodes, times_ns = table(TIMES_NS), np.array(TIMES_NS)

    def by(what: Any, depth: int | None = None) -> Table:
        return grouped(nodes, times_ns, what, depth)

    (linear,) = by("module_type").where(module_type="Linear")
    found = [getattr(linear, name) for name in ("nodes", "calls", "mean_ns", "median_ns", "p95_ns")]
    assert found == [2, 3, 220, 130, 420]
    assert (linear.output_bytes, linear.new_bytes) == (12, 12)
    assert (linear.moved_bytes, linear.flops) == (30, 60)
    assert (linear.flops_per_second, linear.intensity) == (60 * 10**9 // 130, 2.0)
    assert by("op").column("op") == ["placeholder", "call_module", "output"]
    assert by("target").column("flops") == [None, 40, 20, None]
    assert by("source").column("source") == [None, "m.py:1"]
    assert by("module_path", depth=1).column("module_path") == [None, "a", "b"]
    with pytest.raises(
        ConfigError, match="cannot be grouped by 'name'; choose one of module_path, "
    ):
        by("name")


def test_keywords_and_what_was_left_out() -> None:
    x, mask = torch.randn(2, 3, 5, 5), torch.ones(2, 8)
    nodes = profile_graph(Small().eval(), x, mask=mask, runs=1, warmup=0).nodes
    assert nodes.where(op="placeholder").column("name") == ["x", "mask"]
    assert nodes.where(target="operator.mul").column("inputs") == ["mean, mask"]


@pytest.mark.parametrize("inference", [True, False])
def test_views_and_writes_in_place_make_no_memory(inference: bool) -> None:
    model = Small().eval()
    with torch.inference_mode(inference):
        profile = profile_graph(model, torch.randn(2, 3, 5, 5), runs=1, warmup=0)
    rows = {row.name: row for row in profile.nodes}
    assert rows["view"].new_bytes == rows["view"].moved_bytes == 0
    assert rows["view"].output_bytes == 2 * 8 * 4
    assert rows["relu"].new_bytes == 0
    assert rows["relu"].moved_bytes == 2 * rows["relu"].output_bytes


def test_what_is_read_is_read_once_and_no_more_than_is_picked() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            return (x + x)[ids]

    nodes = profile_graph(Picks(), torch.tensor([1, 0]), runs=1, warmup=0).nodes
    ids, rows = 2 * 8, 2 * 8 * 4
    moved = [0, ids + rows + rows, rows + rows, rows + ids + rows, 0]
    assert nodes.column("moved_bytes") == moved


def test_a_model_in_training_is_left_as_it_was() -> None:
    model, x = Small(), torch.ones(4, 3, 5, 5)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    profile = profile_graph(model, x, runs=2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(
        torch.equal(one, other) for one, other in zip(model.state_dict().values(), before.values())
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "dropout" in profile.nodes.column("name")


def test_inputs_that_a_model_writes_to_are_put_back() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1) * 2

    x = torch.zeros(3)
    profile_graph(Writes(), x, runs=2)
    assert x.tolist() == [0, 0, 0]


def test_runs_must_be_some() -> None:
    with pytest.raises(
        ConfigError, match="profile_graph was given runs=0, warmup=2: runs must be at least 1"
    ):
        profile_graph(Small(), torch.ones(1), runs=0)


def test_an_error_of_the_model_stays_its_own() -> None:
    with pytest.raises(RuntimeError, match="channels"):
        profile_graph(Small(), torch.ones(1, 2, 5, 5))
