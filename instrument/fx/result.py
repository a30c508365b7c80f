"""`GraphProfile`: what was measured of a model's graph."""

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
from instrument.templates import render
from instrument.units import duration

#: The columns that the whole profile shows, of the nodes'.
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
# Quartiles further apart than this say that something else took the time of some runs.
_UNEQUAL = 0.2


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
        quartiles: the first and third over the same pairs; None for fewer than two.
    """

    model_ns: int | None
    interpreted_ns: int
    nodes_ns: int
    node_ns: int
    nodes: int
    of_model: float | None = None
    quartiles: tuple[float, float] | None = None

    def __str__(self) -> str:
        added = f"{duration(self.nodes * self.node_ns)} are what measuring adds ({duration(self.node_ns)} a node)"
        text = f"{self.nodes} nodes take {duration(self.nodes_ns)} in a run of {duration(self.interpreted_ns)}; {added}."
        if self.model_ns is None or self.of_model is None:
            return text
        spread, doubt = "", ""
        if self.quartiles is not None:
            low, high = self.quartiles
            spread = f" ({100 * low:.1f}–{high:.1%})"
            doubt = ", but the runs are too unequal to tell" if high - low > _UNEQUAL else ""
        model = f"the {duration(self.model_ns)} of the model as it is"
        return f"{text} Less that, they are {self.of_model:.1%}{spread} of {model}{doubt}."


@dataclass(frozen=True, repr=False)
class GraphProfile:
    """What `profile_graph` gives.

    Attributes:
        nodes: a row for each node; see `NodeTable`.
        how: what captured the graph, and why not `torch.fx` tracing where that was not it.
        overhead: what running node by node costs.
        outputs: the model's result in the first run, without its gradients' history.
        storages: for each node, the memory that its tensors lie in, as (number, bytes); not that of parameters and
            buffers. A view has the number of what it was made from.
        model_bytes: the memory of the model's parameters and buffers.
        device: `cuda` where the model or its inputs are on one, else `cpu`.
        model: the name of its class.
    """

    nodes: NodeTable
    how: str
    overhead: Overhead
    outputs: Any
    storages: list[Storages]
    model_bytes: int
    device: str
    model: str

    def __str__(self) -> str:
        return f"{to_text(self.nodes.select(SHOWN))}\n\n{self.foot}"

    __repr__ = __str__

    @property
    def foot(self) -> str:
        """What belongs under any table of the nodes: how they were captured, what is overhead, the memory they take."""
        return f"Captured by {self.how}.\n{self.overhead}\n{self.memory}"

    @cached_property
    def memory(self) -> Liveness:
        """Which activations live after each node, the peak, and who holds it."""
        return liveness(self.nodes, self.storages, self.model_bytes)

    def roofline(self, machine: Machine | None = None) -> Table:
        """A row for each node: what limits it on this machine, and the time it would take at the limit.

        See `instrument.fx.roofline`. Without `machine`, what this one can do is measured at the first time, which
        takes a second or two, and remembered (`instrument.fx.machine.measured`).
        """
        return roofline.roofline(self.nodes, machine or self.machine())

    def machine(self, *, refresh: bool = False) -> Machine:
        """What this machine can do with the types that the nodes compute; with `refresh` measured anew."""
        return measured(self.device, roofline.dtypes(self.nodes), refresh=refresh)

    def to_html(self, machine: Machine | None = None) -> str:
        """The graph as a page with its picture, and a row for each node with its memory and its place under the roof.

        The page needs nothing from anywhere, and shows the same for the same profile. `machine` as for `roofline`.
        """
        return self._page(machine or self.machine())

    def save_html(self, path: str | Path, machine: Machine | None = None) -> Path:
        """Write what `to_html` gives, and return where.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        path.write_text(self.to_html(machine), encoding="utf-8", errors="replace")
        return path

    def _repr_html_(self) -> str:
        """What a notebook shows: the page in a frame, without the roof, for which the machine would be measured."""
        return render("fx/draw/frame.html", page=self._page())

    def _page(self, machine: Machine | None = None) -> str:
        columns = {name: self.nodes.column(name) for name in self.nodes.columns}
        columns |= {name: self.memory.nodes.column(name) for name in ("alive_bytes", "freed_bytes")}
        notes = self.foot.splitlines()
        if machine is not None:
            roof = self.roofline(machine)
            columns |= {name: roof.column(name) for name in ("bound", "roof_ns", "of_roof")}
            notes.append(f"The roof is that of {machine}.")
        return page(Table(columns), self.model, notes)
