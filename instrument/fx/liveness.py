"""Which activations live after each node, and who holds the most memory at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from instrument.analysis.table import Table
from instrument.units import size


@dataclass(frozen=True, repr=False)
class Liveness:
    """The memory of a graph's activations in one run, node by node.

    A value dies after its last use, as the interpreter has it; the result, and what nothing takes, live to the end. A
    view, a piece of a tuple or what is written in place is no memory of its own: it keeps alive what it was made from.
    Bytes are those that the tensors ask for, before any allocator's rounding.

    Not in it: parameters and buffers (`model_bytes`); the inputs, which the caller holds (`input_bytes`); what a node
    allocates and frees again, such as a workspace or what is inside a module that the graph holds as one node; and with
    gradients on, what autograd keeps for the backward pass.

    Attributes:
        nodes: `name`; `new_bytes`, what the node made; `alive_bytes`, what lives when it returns, with all that it
            took; `freed_bytes`, what dies then.
        peak_bytes: the most that was alive; 0 for a graph that makes nothing.
        peak_node: the first node at which it was.
        at_peak: who made what was alive there, the largest first: `name alive_bytes last_use`; None as the last use
            of what lives to the end.
        input_bytes: the memory behind the graph's inputs.
        model_bytes: that of the model's parameters and buffers.
    """

    nodes: Table
    peak_bytes: int
    peak_node: str
    at_peak: Table
    input_bytes: int
    model_bytes: int

    def __str__(self) -> str:
        most = self.at_peak.head(3)
        held = ", ".join(f"{row.name} {size(row.alive_bytes)}" for row in most)
        return (
            f"Activations take {size(self.peak_bytes)} at the most, at {self.peak_node}"
            f"{f' (held by {held})' if held else ''}, besides {size(self.input_bytes)} of inputs and "
            f"{size(self.model_bytes)} of parameters and buffers. Not counted: what "
            "a node needs only while it runs, and what autograd keeps."
        )

    __repr__ = __str__


@dataclass
class _Storage:
    """One piece of memory: the nodes that make it and that take it last."""

    size: int
    made: int
    freed: int | None = None


def liveness(
    nodes: Table, storages: Sequence[Sequence[tuple[int, int]]], model_bytes: int = 0
) -> Liveness:
    """What lives when, of a graph whose nodes have these storages: for each row pairs of a number and bytes.

    Tensors that lie in the same memory have the same number. `nodes` has the columns `name op inputs`, inputs first.
    """
    names, ops = nodes.column("name"), nodes.column("op")
    last_use = _last_uses(nodes)
    known: dict[int, _Storage] = {}
    for at, given in enumerate(storages):
        for number, size_bytes in given:
            storage = known.setdefault(number, _Storage(size_bytes, at, at))
            kept = last_use[at] is None or storage.freed is None
            storage.freed = None if kept else max(storage.freed, last_use[at])  # type: ignore[type-var]
    inputs = [storage for storage in known.values() if ops[storage.made] == "placeholder"]
    made = [
        storage
        for storage in known.values()
        if ops[storage.made] not in ("placeholder", "get_attr")
    ]
    new, freed = [0] * len(nodes), [0] * len(nodes)
    for storage in made:
        new[storage.made] += storage.size
        if storage.freed is not None:
            freed[storage.freed] += storage.size
    alive = [total - gone for total, gone in zip(accumulate(new), accumulate([0, *freed]))]
    peak = max(range(len(nodes)), key=alive.__getitem__)
    return Liveness(
        Table({"name": names, "new_bytes": new, "alive_bytes": alive, "freed_bytes": freed}),
        alive[peak],
        names[peak],
        _holders(made, peak, names),
        sum(storage.size for storage in inputs),
        model_bytes,
    )


def _last_uses(nodes: Table) -> list[int | None]:
    """For each row the last that takes it; None for the result, and for what no row takes."""
    index = {name: at for at, name in enumerate(nodes.column("name"))}
    last: list[int | None] = [None] * len(nodes)
    for at, inputs in enumerate(nodes.column("inputs")):
        for name in filter(None, inputs.split(", ")):
            last[index[name]] = at
    return last


def _holders(made: Sequence[_Storage], peak: int, names: Sequence[str]) -> Table:
    held: dict[tuple[str, Any], int] = {}
    for storage in made:
        if storage.made <= peak and (storage.freed is None or storage.freed >= peak):
            key = names[storage.made], None if storage.freed is None else names[storage.freed]
            held[key] = held.get(key, 0) + storage.size
    columns: dict[str, Sequence[Any]] = {
        "name": [name for name, _ in held],
        "alive_bytes": list(held.values()),
        "last_use": [last for _, last in held],
    }
    return Table(columns).sort("alive_bytes")
