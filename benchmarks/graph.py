"""What running a model node by node costs, beside the tutorial's interpreter; run by `make bench`."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import Row, medians, report
from torch import fx, nn

from instrument.graph import profile_graph
from instrument.graph.graph_capture import capture_graph
from instrument.graph.interpreter import NodeInterpreter

RESNET = Path(__file__).parents[1] / "examples" / "resnet_inference.py"
NODES = 300


class Tutorial(fx.Interpreter):
    """As in PyTorch's tutorial on profiling with an interpreter: each node between two looks at the clock."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(fx.symbolic_trace(model))
        self.total_s: list[float] = []
        self.node_s: dict[fx.Node, list[float]] = {}

    def run(self, *args: Any) -> Any:
        start = time.time()
        result = super().run(*args)
        self.total_s.append(time.time() - start)
        return result

    def run_node(self, n: fx.Node) -> Any:
        start = time.time()
        result = super().run_node(n)
        self.node_s.setdefault(n, []).append(time.time() - start)
        return result


class Chain(nn.Module):
    """Many nodes that do next to nothing, so that what runs them is most of the time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NODES):
            x = torch.neg(x)
        return x


def overhead() -> list[Row]:
    """What each node costs on top of the model run as it is, and what of that its own time shows."""
    model, x = Chain(), torch.ones(1)
    theirs = Tutorial(model)
    with torch.no_grad():
        ours = NodeInterpreter(capture_graph(model, ((x,), {})).module)
        took = medians(
            {
                "bare": lambda: model(x),
                "ours": lambda: ours.run_timed([x]),
                "theirs": lambda: theirs.run(x),
            },
            calls=20,
        )
        nodes = profile_graph(model, x, runs=20).nodes.where(op="call_function")
    mine = sorted(nodes.column("median_ns"))[NODES // 2]
    shown = list(theirs.node_s.values())[1:-1]
    other = sorted(sorted(values)[len(values) // 2] for values in shown)[NODES // 2] * 1e9
    per_node = {name: (value - took["bare"]) / NODES for name, value in took.items()}
    peer = "the tutorial's interpreter"
    return [
        Row(
            "a node run by its interpreter, over the bare call",
            per_node["ours"],
            peer,
            per_node["theirs"],
            1.0,
        ),
        Row("the time shown of a node that negates one number", mine, peer, other, 1.0),
    ]


def sums() -> list[Row]:
    """How far the sum of the nodes' times is from the time of the model run as it is."""
    torch.set_num_threads(1)  # what else runs here then disturbs less
    model, x = runpy.run_path(str(RESNET))["ResNet18"]().eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        found = profile_graph(model, x, runs=51, warmup=3)
    model_ns = float(np.median(found.model_ns))
    off = abs(np.median(found.times_ns.sum(axis=1) / found.model_ns) - 1) * model_ns
    return [Row("ResNet-18, sum of nodes, off by", off, "the model as it is", model_ns, 0.05)]


def main() -> int:
    title = f"Graphs: torch {torch.__version__}, Python {sys.version.split()[0]}, medians of interleaved rounds"
    return 0 if report(title, [*overhead(), *sums()]) else 1


if __name__ == "__main__":
    sys.exit(main())
