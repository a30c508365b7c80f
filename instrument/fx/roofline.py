"""Each node under the machine's roof: what limits it, and how long it would take at the limit.

The roofline model (Williams, Waterman, Patterson 2009): nothing computes faster than the machine multiplies matrices,
or moves its bytes faster than the machine copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from instrument.analysis.table import Table
from instrument.fx.machine import MEASURED, Machine

Bound = Literal["compute", "bandwidth"]


def roofline(nodes: Table, machine: Machine) -> Table:
    """A row for each node: `name median_ns flops moved_bytes intensity bound roof_ns of_roof`.

    - `roof_ns`: the longer of `flops` at the machine's rate for the type of what the node gives, and `moved_bytes` at
      its bandwidth. As `moved_bytes` is the least that must move, so is this the least time, from memory.
    - `bound`: which of both is longer: `compute`, also where they are equal, or `bandwidth`. Operators
      whose FLOPs no rule counts do little for each byte (elementwise ones, norms, pooling) and stand as `bandwidth`;
      one that computes much all the same, as an FFT or a kernel of one's own, is wrongly placed, though its `roof_ns`
      is still a time it cannot beat. None where the type's rate is not known, or nothing moves.
    - `of_roof`: `roof_ns` over `median_ns`: 0.5 is half as fast as could be. Above 1 where data was still in a cache.
    """
    rows = [_placed(row, machine) for row in nodes]
    same = ("name", "median_ns", "flops", "moved_bytes", "intensity")
    placed = {name: [row[name] for row in rows] for name in ("bound", "roof_ns", "of_roof")}
    return Table({**{name: nodes.column(name) for name in same}, **placed})


def dtypes(nodes: Table) -> list[str]:
    """The types that nodes with FLOPs give, of those whose rate can be measured."""
    found = (dtype_of(row) for row in nodes if row.flops)
    return sorted({dtype for dtype in found if dtype is not None})


def dtype_of(row: Any) -> str | None:
    """The first type of what a node gives that is measured."""
    return next(
        (dtype for dtype in (row.output_dtype or "").split(", ") if dtype in MEASURED), None
    )


def _placed(row: Any, machine: Machine) -> Mapping[str, Any]:
    rate = machine.flops_per_second.get(dtype_of(row) or "")
    moving_ns = (row.moved_bytes or 0) * 1e9 / machine.bytes_per_second
    computing_ns = row.flops * 1e9 / rate if row.flops and rate else 0.0
    roof_ns = max(moving_ns, computing_ns)
    bound: Bound | None = "compute" if computing_ns >= moving_ns else "bandwidth"
    if not roof_ns or (row.flops and not rate):
        bound = None
    return {
        "bound": bound,
        "roof_ns": round(roof_ns) if roof_ns else None,
        "of_roof": roof_ns / row.median_ns if roof_ns and row.median_ns else None,
    }
