"""`GraphProfile`: the measurements of a model's graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from instrument.analysis.table import Table, to_text
from instrument.fx import roofline
from instrument.fx.draw.html import page
from instrument.fx.liveness import Liveness, liveness
from instrument.fx.machine import Machine, measured
from instrument.fx.node_table import NodeTable
from instrument.fx.tensor_sizes import Storages
from instrument.printable import printable_lines
from instrument.templates import render
from instrument.units import duration

#: The columns of the nodes that a printed profile shows.
SHOWN = [
    "op",
    "name",
    "target",
    "mean_ns",
    "median_ns",
    "p95_ns",
    "share",
    "calls",
    "output_shape",
    "flops",
]
# If the quartiles of the ratios are further apart, other work on the machine slowed some runs.
_UNEQUAL = 0.2


@dataclass(frozen=True)
class Overhead:
    """The cost of running a model node by node: medians over the runs, in nanoseconds.

    Attributes:
        model_ns: the time of a run of the model without its graph; None if there was no such run.
        interpreted_ns: the time of a run of the graph node by node.
        nodes_ns: the sum of the times of the nodes in a run.
        node_ns: the time that measuring adds to each node, measured with nodes that do nothing.
        nodes: the number of nodes.
        of_model: the time of the nodes, without the time that measuring adds, divided by the time
            of the model; 1.0 means equally long. Each run with the graph is compared with the
            neighbouring run without the graph, because other work on the machine slows both. The
            value is the median of these ratios; None if the model never ran without its graph.
        quartiles: the first and third quartile of these ratios; None for fewer than two ratios.
    """

    model_ns: int | None
    interpreted_ns: int
    nodes_ns: int
    node_ns: int
    nodes: int
    of_model: float | None = None
    quartiles: tuple[float, float] | None = None

    def __str__(self) -> str:
        added, each = duration(self.nodes * self.node_ns), duration(self.node_ns)
        text = (
            f"{self.nodes} nodes take {duration(self.nodes_ns)} in a run of "
            f"{duration(self.interpreted_ns)}; measuring adds {added} ({each} for each node)."
        )
        if self.model_ns is None or self.of_model is None:
            return text
        spread, doubt = "", ""
        if self.quartiles is not None:
            low, high = self.quartiles
            spread = f" ({100 * low:.1f}–{high:.1%})"
            doubt = ", but the runs vary too much for a conclusion" if high - low > _UNEQUAL else ""
        share, model = f"{self.of_model:.1%}{spread}", duration(self.model_ns)
        return (
            f"{text} Without the time for measuring, the nodes take {share} of the {model} that "
            f"the model itself takes{doubt}."
        )


@dataclass(frozen=True, repr=False)
class GraphProfile:
    """The result of `profile_graph`.

    Attributes:
        nodes: a row for each node; see `NodeTable`.
        how: the tool that captured the graph, as text. If `torch.fx` tracing failed, the text gives
            the reason.
        overhead: the cost of running node by node.
        outputs: the result of the model in the first run, detached.
        storages: for each node, the memory of its tensors, except parameters and buffers, as pairs
            (id, bytes). Tensors in the same memory, such as a view and its base, have the same id.
        model_bytes: the memory of the parameters and buffers.
        device: the kind of device that the model or its inputs are on, such as `cuda` or `cpu`.
        model: the name of the model's class.
        module_types: the class of each module whose call runs nodes, by the module's path.
    """

    nodes: NodeTable
    how: str
    overhead: Overhead
    outputs: Any
    storages: list[Storages]
    model_bytes: int
    device: str
    model: str
    module_types: dict[str, str]

    def __str__(self) -> str:
        return f"{to_text(self.nodes.select(SHOWN))}\n\n{printable_lines(*self.foot)}"

    __repr__ = __str__

    @property
    def foot(self) -> list[str]:
        """Lines below a table of nodes: how the graph was captured, the overhead, the memory."""
        return [f"Captured by {self.how}.", str(self.overhead), str(self.memory)]

    @cached_property
    def memory(self) -> Liveness:
        """Which activations are alive after each node, and which nodes hold memory at the peak."""
        return liveness(self.nodes, self.storages, self.model_bytes)

    def roofline(self, machine: Machine | None = None) -> Table:
        """A row for each node: what limits the node on a machine, and its time at that limit.

        See `instrument.fx.roofline`. Without `machine`, the rates of this machine apply.
        """
        return roofline.roofline(self.nodes, machine or self.machine)

    @cached_property
    def machine(self) -> Machine:
        """How fast this machine copies memory, and multiplies matrices in the dtypes of the nodes.

        Cost: the first use measures these rates, which takes a second or two.
        """
        return measured(self.device, roofline.dtypes(self.nodes))

    def to_html(self, machine: Machine | None = None) -> str:
        """An HTML page with a picture of the graph and a table of the nodes.

        The table also has columns for the memory of each node, and for its shortest possible time
        on `machine` (see `roofline`). The page loads no other files. The same profile gives the
        same page.
        """
        return self._page(machine or self.machine)

    def save_html(self, path: str | Path, machine: Machine | None = None) -> Path:
        """Write the page of `to_html` and return its path.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.write_text(self.to_html(machine), encoding="utf-8", errors="replace")
        return path

    def _repr_html_(self) -> str:
        """The page of `to_html` as an iframe, for a notebook.

        Here, the table lacks the columns `bound_by`, `bound_ns` and `bound_share`, because they
        would need a measurement of the machine.
        """
        return render("report/templates/frame.html", page=self._page())

    def _page(self, machine: Machine | None = None) -> str:
        columns = {name: self.nodes.column(name) for name in self.nodes.columns}
        columns |= {name: self.memory.nodes.column(name) for name in ("alive_bytes", "freed_bytes")}
        notes = self.foot
        if machine is not None:
            bounds = self.roofline(machine)
            columns |= {name: bounds.column(name) for name in roofline.COLUMNS}
            notes.append(f"The bounds are computed from the rates of {machine}.")
        return page(Table(columns), self.model, self.module_types, notes)
