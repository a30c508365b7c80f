"""`GraphProfile`: what was measured of a model's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from instrument.capture.table import duration, to_text
from instrument.graph.inspection import Storages
from instrument.graph.nodes import NodeTable

#: The columns that the whole profile shows, of the nodes'.
SHOWN = ["op", "name", "target", "mean_ns", "median_ns", "p95_ns", "share", "calls", "output_shape", "flops"]


@dataclass(frozen=True)
class Overhead:
    """What running a model node by node costs. Medians over the runs, in nanoseconds.

    Attributes:
        model_ns: the model run as it is, in turns with the others; None where that was not measured.
        interpreted_ns: its graph run node by node, all in all.
        nodes_ns: the sum of the nodes' times in one run.
        node_ns: what measuring adds to the time of each node, seen at nodes that do nothing.
        nodes: how many there are.
        of_model: the sum of the nodes' times less what measuring adds, as a fraction of the model's run beside it; the
            median over such pairs, so that what else the machine does meanwhile is in both.
    """

    model_ns: int | None
    interpreted_ns: int
    nodes_ns: int
    node_ns: int
    nodes: int
    of_model: float | None = None

    def __str__(self) -> str:
        added = f"{duration(self.nodes * self.node_ns)} are what measuring adds ({duration(self.node_ns)} a node)"
        text = (
            f"{self.nodes} nodes take {duration(self.nodes_ns)} in a run of {duration(self.interpreted_ns)}; {added}."
        )
        if self.model_ns is None or self.of_model is None:
            return text
        return f"{text} Less that, they are {self.of_model:.1%} of the {duration(self.model_ns)} of the model as it is."


@dataclass(frozen=True, repr=False)
class GraphProfile:
    """What `profile_graph` gives.

    Attributes:
        nodes: a row for each node; see `NodeTable`.
        how: what captured the graph, and why not `torch.fx` tracing where that was not it.
        overhead: what running node by node costs.
        outputs: the model's result in the first run.
        storages: for each node, the memory that its tensors lie in, as (number, bytes); not that of parameters and
            buffers. A view has the number of what it was made from.
    """

    nodes: NodeTable
    how: str
    overhead: Overhead
    outputs: Any
    storages: list[Storages]

    def __str__(self) -> str:
        return f"{to_text(self.nodes.select(SHOWN))}\n\n{self.foot}"

    @property
    def foot(self) -> str:
        """What belongs under any table of the nodes: how they were captured, and what of their times is overhead."""
        return f"Captured by {self.how}.\n{self.overhead}"

    __repr__ = __str__
