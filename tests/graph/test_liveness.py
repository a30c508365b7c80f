"""Which activations live: against counts by hand, and against what torch's allocator tells."""

from __future__ import annotations

from pathlib import Path

import torch
from made_nodes import nodes
from torch import Tensor, nn

from instrument import Session
from instrument.analysis.table import Table
from instrument.fx import GraphProfile, profile_graph
from instrument.fx.graph_capture import trace
from instrument.fx.interpreter import NodeInterpreter
from instrument.fx.liveness import liveness

KIB = 1024


def profiled(model: nn.Module, *inputs: Tensor) -> GraphProfile:
    with torch.no_grad():
        return profile_graph(model, *inputs, runs=1, warmup=0)


def rows(profile: GraphProfile) -> dict[str, tuple[int, int, int]]:
    return {row.name: (row.new_bytes, row.alive_bytes, row.freed_bytes) for row in profile.nodes}


class Chain(nn.Module):
    """Each layer makes a KiB more than the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Linear(64, 256),
            nn.Linear(256, 512),
            nn.Linear(512, 768),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x)))


def test_a_chain_by_hand() -> None:
    profile = profiled(Chain(), torch.randn(1, 64))
    assert rows(profile) == {
        "x": (0, 0, 0),
        "one": (KIB, KIB, 0),
        "two": (2 * KIB, 3 * KIB, KIB),
        "three": (3 * KIB, 5 * KIB, 2 * KIB),
        "output": (0, 3 * KIB, 0),
    }
    memory = profile.memory
    assert (memory.peak_bytes, memory.peak_node, memory.input_bytes) == (5 * KIB, "three", 256)
    assert [tuple(row) for row in memory.at_peak] == [
        ("three", 3 * KIB, None),
        ("two", 2 * KIB, "three"),
    ]
    assert memory.model_bytes == 4 * sum(parameter.numel() for parameter in Chain().parameters())
    assert str(memory) == (
        "Activations take up to 5.00 KiB, at the node three (the largest are three 3.00 KiB, two "
        "2.00 KiB), plus 256 B of inputs and 2.07 MiB of parameters and buffers. Not counted: "
        "memory that a node frees before it returns, and tensors that autograd keeps."
    )
    assert str(profile).endswith(f"\n{memory}")


class Shared(nn.Module):
    """What makes no memory of its own: views, writing in place, pieces of a tuple, inputs and parameters passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256))
        self.register_buffer("kept", torch.randn(256))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = x * 2
        flat = made.flatten().view(256)
        left, right = flat.relu_().chunk(2)
        return left + right, x[0], self.weight.view(16, 16), self.kept


def test_what_shares_memory_is_counted_once() -> None:
    found = rows(profiled(Shared(), torch.randn(1, 256)))
    assert found.pop("mul") == (KIB, KIB, 0)
    assert found.pop("add") == (KIB // 2, KIB + KIB // 2, KIB), "the last view of the product dies"
    assert found.pop("output") == (0, KIB // 2, 0)
    assert {name: (new, freed) for name, (new, _, freed) in found.items()} == dict.fromkeys(
        found, (0, 0)
    )
    assert {"relu_", "flatten", "view", "chunk", "getitem"} <= set(found)


def test_a_residual_is_held_until_it_is_added() -> None:
    table = nodes(
        {"name": "x", "op": "placeholder"},
        {"name": "table", "op": "get_attr"},
        {"name": "stem", "inputs": "x, table"},
        {"name": "one", "inputs": "stem"},
        {"name": "two", "inputs": "one"},
        {"name": "add", "inputs": "two, stem"},
        {"name": "unused", "inputs": "add"},
        {"name": "output", "op": "output", "inputs": "add"},
    )
    nodes_then, memory = liveness(
        table,
        [[(0, 7)], [(6, 5)], [(1, 10)], [(2, 20)], [(3, 40)], [(4, 80)], [(5, 160)], [(4, 80)]],
    )
    assert nodes_then.column("alive_bytes") == [0, 0, 10, 30, 70, 130, 240, 240]
    assert nodes_then.column("freed_bytes") == [0, 0, 0, 0, 20, 50, 0, 0]
    assert [row.last_use for row in memory.at_peak] == [None, None]
    assert memory.input_bytes == 7


class Simple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = x + 1
        deep = (kept * 3).view(-1, 64).repeat(3, 1)
        return (deep.sigmoid()[: x.shape[0]] + kept).exp()


def test_the_peak_is_the_allocators(tmp_path: Path) -> None:
    model, x = Simple(), torch.randn(500, 64)
    with torch.no_grad():
        profile = profile_graph(model, x, runs=1, warmup=0)
        traced = trace(model, ((x,), {}))
        interpreter = NodeInterpreter(model, traced.graph, traced.constants)
        interpreter.run_timed([x])
        with Session(
            "memory", wait=0, warmup=0, active=1, output_dir=str(tmp_path), export="inline"
        ) as session:
            held = interpreter.run_timed([x])
            session.step()
    assert held.nbytes == 4 * x.numel()
    (device,) = session.captures[0].memory_devices
    assert profile.memory.peak_bytes == device.peak_net_bytes > 4 * 4 * x.numel()
    assert profile.nodes.column("alive_bytes")[-1] == device.net_bytes
    assert sum(profile.nodes.column("new_bytes")) <= device.allocated_bytes, (
        "nodes have scratch memory besides"
    )


def test_memory_that_the_result_lies_in_is_kept_whoever_else_takes_a_part_of_it() -> None:
    nodes = Table(
        {
            "name": ["x", "made", "part", "last"],
            "op": ["placeholder", "call_function", "call_function", "call_function"],
            "inputs": ["", "x", "x", "part"],
        }
    )
    found, _ = liveness(nodes, [[(0, 8)], [(1, 64)], [(1, 64)], [(2, 4)]])
    assert found.column("freed_bytes") == [0, 0, 0, 0], "`made` is a result, and `part` lies in it"
    assert found.column("alive_bytes") == [0, 64, 64, 68]
