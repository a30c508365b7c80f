"""`profile_graph`: time each node of the graph of a model; `GraphProfile`: its result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from instrument.base.errors import ConfigError
from instrument.base.printable import printable_lines
from instrument.base.units import duration, percent
from instrument.graph import Grouping, roofline
from instrument.graph.dot import dot
from instrument.graph.graph_capture import (
    Inputs,
    capture_graph,
    inputs_copy,
    model_copy,
    rng_restored,
)
from instrument.graph.interpreter import NodeInterpreter
from instrument.graph.node_table import grouped, node_labels, node_table
from instrument.graph.node_work import node_work
from instrument.graph.roofline import Machine
from instrument.read.trace.events import Ints
from instrument.read.views.table import Table

#: The columns of the nodes that a printed profile shows.
SHOWN = [
    *("op", "name", "target", "mean_ns", "median_ns", "p95_ns", "share", "calls"),
    *("output_shape", "flops"),
]


@dataclass(frozen=True, repr=False)
class GraphProfile:
    """The result of `profile_graph`.

    Attributes:
        nodes: a row for each node; docs/graph.md describes the columns.
        times_ns: the times of the nodes, of shape (runs, nodes).
        model_ns: the time of the model without its graph, before each of these runs.
        how: the tool that captured the graph, as text. If `torch.fx` tracing failed, the text gives
            the reason.
        device: the kind of device that the model or its inputs are on, such as `cuda` or `cpu`.
    """

    nodes: Table
    times_ns: Ints
    model_ns: Ints
    how: str
    device: str

    def __str__(self) -> str:
        return f"{self.nodes.select(SHOWN)}\n\n{printable_lines(*self.foot)}"

    __repr__ = __str__

    @property
    def foot(self) -> list[str]:
        """Lines below a table of nodes: how the graph was captured, and its time in all.

        The ratio is the median over pairs of neighbouring runs, because other work on the machine
        slows both.
        """
        sums = self.times_ns.sum(axis=1)
        nodes_ns, model_ns = (round(np.median(times)) for times in (sums, self.model_ns))
        of_model = float(np.median(sums / self.model_ns))
        return [
            f"Captured by {self.how}.",
            f"{len(self.nodes)} nodes take {duration(nodes_ns)} in a run, "
            f"{percent(of_model)} of the {duration(model_ns)} that the model itself takes.",
        ]

    def by(self, what: Grouping, *, depth: int | None = None) -> Table:
        """Group the nodes: one row for each group, in the order of the groups' first nodes.

        The column `nodes` is the number of nodes in a group. The time of a group in a run is the
        sum of the times of its nodes; `mean_ns median_ns p95_ns` are statistics over the runs.

        Args:
            what: the column to group by.
            depth: with `module_path`, nodes of deeper modules count for the module around them at
                this depth. The direct submodules of the model have depth 1.

        Raises:
            ConfigError: there is no such grouping.
        """
        return grouped(self.nodes, self.times_ns, what, depth)

    @cached_property
    def machine(self) -> Machine:
        """How fast this machine copies memory, and multiplies matrices in the types of the nodes.

        Cost: the first use measures these rates, which takes a second or two.
        """
        return roofline.measured(self.device, self.nodes)

    def roofline(self, machine: Machine | None = None) -> Table:
        """A row for each node: what limits the node on a machine, and its time at that limit.

        Without `machine`, the rates of this machine apply.
        """
        return roofline.roofline(self.nodes, machine or self.machine)

    def save_dot(self, path: str | Path) -> Path:
        """Write the graph in Graphviz's DOT language and return the path.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.write_text(dot(self.nodes), encoding="utf-8", errors="replace")
        return path


def profile_graph(
    model: nn.Module, *inputs: Any, runs: int = 10, warmup: int = 2, **kwargs: Any
) -> GraphProfile:
    """Run the graph of a model, node by node; return the times, sizes and FLOPs of its nodes.

        print(profile_graph(model, x).nodes.sort("mean_ns").head(10))

    Copies of the model run, which share its parameters, on copies of the inputs, and torch's random
    number generators are restored. Hooks see every run.

    If the forward pass waits for other ranks, all ranks must make the same call. For inference,
    call `model.eval()` first, and call this function under `torch.no_grad()`. Before each run of
    the graph, the model also runs without it, so that both times can be compared.

    Args:
        model: the module whose forward pass runs.
        inputs: positional arguments of the forward pass. The graph takes tensors, also those in
            dicts, lists and tuples; all else is constant in it.
        runs: the number of timed runs.
        warmup: the number of runs before the timed runs.
        kwargs: keyword arguments of the forward pass.

    Cost: the model runs at most `2 * (runs + warmup) + 4` times. At most four copies of what the
    model holds besides its parameters are in memory.

    Raises:
        GraphError: neither `torch.fx` nor `torch.export` can capture the model, it has compiled
            code, or it cannot be copied. Errors of the model itself are not caught.
        ConfigError: `runs` is not positive, or `warmup` is negative.
    """
    if runs < 1 or warmup < 0:
        raise ConfigError(
            f"profile_graph was given runs={runs}, warmup={warmup}: runs must be at least 1, and "
            "warmup at least 0."
        )
    captured, device = capture_graph(model, (inputs, kwargs)), _device(model, (inputs, kwargs))
    interpreter, untraced = NodeInterpreter(captured.module, device), model_copy(model)
    wait = getattr(torch, device or "cpu").synchronize
    model_ns, by_run = [], []
    with rng_restored(model):
        work = node_work(captured.module, captured.values(inputs_copy((inputs, kwargs))))
        for _ in range(warmup + runs):
            call, again = (inputs_copy((inputs, kwargs)) for _ in range(2))
            wait()
            start_ns = perf_counter_ns()
            untraced(*call[0], **call[1])
            wait()
            model_ns.append(perf_counter_ns() - start_ns)
            interpreter.run_timed(captured.values(again))
            by_run.append(interpreter.times_ns)
    times_ns = np.array(by_run[warmup:], np.int64)
    return GraphProfile(
        nodes=node_table(node_labels(captured.module.graph, model), times_ns, work),
        times_ns=times_ns,
        model_ns=np.array(model_ns[warmup:], np.int64),
        how=captured.how,
        device=device or "cpu",
    )


def _device(model: nn.Module, inputs: Inputs) -> str | None:
    """The kind of the device that the model or its inputs are on; None if it is the CPU."""
    for leaf in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)):
        kind = leaf.device.type if isinstance(leaf, Tensor) else "cpu"
        if kind != "cpu" and hasattr(getattr(torch, kind, None), "Event"):
            return kind
    return None
