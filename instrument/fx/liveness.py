"""Which activations are alive after each node, and which nodes hold memory at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from instrument.analysis.table import Table
from instrument.units import size


@dataclass(frozen=True, repr=False)
class Liveness:
    """The memory of the activations of a graph in one run, node by node.

    A value is freed after its last use, as in the interpreter. The result and unused values live to
    the end of the run. A view, an item of a tuple, and the result of a write in place have no
    memory of their own: they keep the memory of another value alive. Sizes are the bytes that
    tensors request; an allocator may use more.

    These do not count as activations:

    - parameters and buffers; see `model_bytes`.
    - the inputs, because the caller holds them; see `input_bytes`.
    - memory that a node allocates and frees while it runs, such as workspaces.
    - tensors that autograd keeps for the backward pass.

    Attributes:
        nodes: a row for each node. `new_bytes` is the memory that the node allocates. `alive_bytes`
            is the memory that is alive when the node returns. Of this memory, `freed_bytes` is
            freed afterwards, because the node is its last use.
        peak_bytes: the maximum of `alive_bytes`; 0 for a graph that allocates nothing.
        peak_node: the first node at which `alive_bytes` has its maximum.
        at_peak: the nodes whose values are alive at the peak, the largest first. The columns are
            `name alive_bytes last_use`; `last_use` is None for values that live to the end.
        input_bytes: the memory of the inputs.
        model_bytes: the memory of the parameters and buffers.
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
            f"Activations take up to {size(self.peak_bytes)}, at the node {self.peak_node}"
            f"{f' (the largest are {held})' if held else ''}, plus {size(self.input_bytes)} of "
            f"inputs and {size(self.model_bytes)} of parameters and buffers. Not counted: memory "
            "that a node frees before it returns, and tensors that autograd keeps."
        )

    __repr__ = __str__


@dataclass
class _Storage:
    """A piece of memory: its size in bytes, and the row of the node that allocates it.

    `freed` is the row of the last use; None for memory that lives to the end.
    """

    size: int
    made: int
    freed: int | None = None


def liveness(
    nodes: Table, storages: Sequence[Sequence[tuple[int, int]]], model_bytes: int = 0
) -> Liveness:
    """Find which memory is alive after each node.

    Args:
        nodes: a table with the columns `name op inputs`; a node comes after its inputs.
        storages: for each row, the memory of the node's tensors, as pairs (id, bytes). Tensors in
            the same memory have the same id.
        model_bytes: the memory of the parameters and buffers.
    """
    names, ops = nodes.column("name"), nodes.column("op")
    last_use = _last_uses(nodes)
    known: dict[int, _Storage] = {}
    for at, given in enumerate(storages):
        for number, size_bytes in given:
            storage = known.setdefault(number, _Storage(size_bytes, at, at))
            used = last_use[at]
            stays = used is None or storage.freed is None
            storage.freed = None if stays else max(storage.freed, used)  # type: ignore[type-var]
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
    """For each row, the last row that uses its value; None for the result and unused values."""
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
