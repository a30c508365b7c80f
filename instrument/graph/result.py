"""`GraphProfile`: the measurements of a model's graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from instrument.base.printable import printable_lines
from instrument.base.units import duration
from instrument.graph import roofline
from instrument.graph.dot import dot
from instrument.graph.groupings import Grouping
from instrument.graph.node_table import grouped
from instrument.graph.roofline import Machine, measured
from instrument.read.trace.events import Ints
from instrument.read.views.table import Table

#: The columns of the nodes that a printed profile shows.
SHOWN = [
    *("op", "name", "target", "mean_ns", "median_ns", "p95_ns", "share", "calls"),
    *("output_shape", "flops"),
]


@dataclass(frozen=True)
class Overhead:
    """How the times of the nodes add up: medians over the runs, in nanoseconds.

    Attributes:
        model_ns: the time of a run of the model without its graph.
        nodes_ns: the sum of the times of the nodes in a run.
        node_ns: the time that measuring adds to each node, measured with nodes that do nothing.
        nodes: the number of nodes.
        of_model: the time of the nodes, without the time that measuring adds, divided by the time
            of the model in the neighbouring run, because other work on the machine slows both. The
            value is the median of these ratios.
        quartiles: the first and third quartile of these ratios; None for a single run.
    """

    model_ns: int
    nodes_ns: int
    node_ns: int
    nodes: int
    of_model: float
    quartiles: tuple[float, float] | None

    def __str__(self) -> str:
        added, each = duration(self.nodes * self.node_ns), duration(self.node_ns)
        spread = ""
        if self.quartiles is not None:
            spread = f" ({100 * self.quartiles[0]:.1f}–{self.quartiles[1]:.1%})"
        return (
            f"{self.nodes} nodes take {duration(self.nodes_ns)} in a run; measuring adds {added} "
            f"({each} for each node). Without the time for measuring, the nodes take "
            f"{self.of_model:.1%}{spread} of the {duration(self.model_ns)} that the model itself "
            "takes."
        )


@dataclass(frozen=True, repr=False)
class GraphProfile:
    """The result of `profile_graph`.

    Attributes:
        nodes: a row for each node; docs/fx.md describes the columns.
        times_ns: the times of the nodes, of shape (runs, nodes).
        how: the tool that captured the graph, as text. If `torch.fx` tracing failed, the text gives
            the reason.
        overhead: the cost of running node by node.
        outputs: the result of the model in the first run, detached.
        device: the kind of device that the model or its inputs are on, such as `cuda` or `cpu`.
        model: the name of the model's class.
        module_types: the class of each module whose call runs nodes, by the module's path.
    """

    nodes: Table
    times_ns: Ints
    how: str
    overhead: Overhead
    outputs: Any
    device: str
    model: str
    module_types: dict[str, str]

    def __str__(self) -> str:
        return f"{self.nodes.select(SHOWN)}\n\n{printable_lines(*self.foot)}"

    __repr__ = __str__

    @property
    def foot(self) -> list[str]:
        """Lines below a table of nodes: how the graph was captured, and the overhead."""
        return [f"Captured by {self.how}.", str(self.overhead)]

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
        return measured(self.device, self.nodes)

    def roofline(self, machine: Machine | None = None) -> Table:
        """A row for each node: what limits the node on a machine, and its time at that limit.

        See `instrument.graph.roofline`. Without `machine`, the rates of this machine apply.
        """
        return roofline.roofline(self.nodes, machine or self.machine)

    def save_dot(self, path: str | Path) -> Path:
        """Write the graph in Graphviz's DOT language and return the path; see `graph.dot`.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        text = dot(self.nodes, self.module_types)
        path.write_text(text, encoding="utf-8", errors="replace")
        return path
