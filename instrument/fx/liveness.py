"""Which activations are alive after each node, and which nodes hold memory at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from instrument.analysis.table import Table
from instrument.base.units import size


@dataclass(frozen=True, repr=False)
class Liveness:
    """The memory of the activations of a graph in one run, node by node.

    A value is freed after its last use. The result and unused values live to the end of the run.
    Views and results of writes in place keep the memory of another value alive. Sizes are the bytes
    that tensors request; an allocator may use more. The inputs, the parameters, the memory that a
    node frees before it returns, and tensors that autograd keeps are no activations.

    Attributes:
        peak_bytes: the maximum of `alive_bytes`; 0 for a graph that allocates nothing.
        peak_node: the first node at which `alive_bytes` has its maximum.
        at_peak: the nodes whose values are alive at the peak, the largest first. The columns are
            `name alive_bytes last_use`; `last_use` is None for values that live to the end.
        input_bytes: the memory of the inputs.
        model_bytes: the memory of the parameters and buffers.
    """

    peak_bytes: int
    peak_node: str
    at_peak: Table
    input_bytes: int
    model_bytes: int

    def __str__(self) -> str:
        most = self.at_peak.head(3)
        held = ", ".join(f"{row.name} {size(row.alive_bytes)}" for row in most)
        return (
            f"Activations take up to {size(self.peak_bytes)}, at the node {self.peak_node}"
            f"{f' (the largest are {held})' if held else ''}, plus {size(self.input_bytes)} of "
            f"inputs and {size(self.model_bytes)} of parameters and buffers. Not counted: memory "
            "that a node frees before it returns, and tensors that autograd keeps."
        )

    __repr__ = __str__


def liveness(
    nodes: Table, storages: Sequence[Sequence[tuple[int, int]]], model_bytes: int = 0
) -> tuple[Table, Liveness]:
    """Return the nodes with the columns `alive_bytes` and `freed_bytes`, and the peak of memory.

    Args:
        nodes: a table with the columns `name op inputs`; a node comes after its inputs.
        storages: for each row, the memory of the node's tensors, as pairs (id, bytes). Tensors in
            the same memory have the same id.
        model_bytes: the memory of the parameters and buffers.
    """
    names, ops, end = nodes.column("name"), nodes.column("op"), len(nodes)
    last_use = _last_uses(nodes)
    # By id of a storage: its bytes, the row that allocates it, and the row of its last use.
    sizes: dict[int, int] = {}
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for at, given in enumerate(storages):
        for number, size_bytes in given:
            sizes.setdefault(number, size_bytes)
            made.setdefault(number, at)
            freed[number] = max(freed.get(number, at), last_use[at])
    inputs = [number for number, at in made.items() if ops[at] == "placeholder"]
    own = [n for n, at in made.items() if ops[at] not in ("placeholder", "get_attr")]
    new_bytes, freed_bytes = [0] * end, [0] * (end + 1)
    for number in own:
        new_bytes[made[number]] += sizes[number]
        freed_bytes[freed[number]] += sizes[number]
    gone = accumulate([0, *freed_bytes])
    alive = [total - less for total, less in zip(accumulate(new_bytes), gone)]
    peak = max(range(end), key=alive.__getitem__)
    held: dict[tuple[str, str | None], int] = {}
    for number in own:
        if made[number] <= peak <= freed[number]:
            last = freed[number]
            key = names[made[number]], names[last] if last < end else None
            held[key] = held.get(key, 0) + sizes[number]
    at_peak: dict[str, Sequence[Any]] = {
        "name": [name for name, _ in held],
        "alive_bytes": list(held.values()),
        "last_use": [last_name for _, last_name in held],
    }
    columns = {name: nodes.column(name) for name in nodes.columns}
    columns |= {"alive_bytes": alive, "freed_bytes": freed_bytes[:end]}
    return Table(columns), Liveness(
        peak_bytes=alive[peak],
        peak_node=names[peak],
        at_peak=Table(at_peak).sort("alive_bytes"),
        input_bytes=sum(sizes[number] for number in inputs),
        model_bytes=model_bytes,
    )


def _last_uses(nodes: Table) -> list[int]:
    """For each row, the last row that uses its value; `len(nodes)` if no row uses it."""
    index = {name: at for at, name in enumerate(nodes.column("name"))}
    last = [len(nodes)] * len(nodes)
    for at, inputs in enumerate(nodes.column("inputs")):
        for name in filter(None, inputs.split(", ")):
            last[index[name]] = at
    return last
