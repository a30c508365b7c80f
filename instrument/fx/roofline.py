"""Find what limits each node on a machine, and the time that the node would take at this limit.

See `instrument.analysis.peak_rates` for the roofline model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from instrument.analysis.peak_rates import roof
from instrument.analysis.table import Table
from instrument.fx.machine import MEASURED, Machine

#: The columns that `roofline` adds.
COLUMNS = ("bound_by", "bound_ns", "bound_share")


def roofline(nodes: Table, machine: Machine) -> Table:
    """A row for each node: what limits the node on a machine, and its time at that limit.

    The columns are `name median_ns flops moved_bytes intensity bound_by bound_ns bound_share`:

    - `bound_ns`: the shortest possible time of the node. It is the longer of two times: the time to
      compute `flops` at the machine's rate for the type of the result, and the time to move
      `moved_bytes` at the machine's bandwidth. If a rate is not known, its time counts as 0.
      `bound_ns` is None if both times are 0.
    - `bound_by`: which of these two times is longer: `compute` or `bandwidth`. If both are equal,
      it is `compute`. Operators without a formula for FLOPs (elementwise operators, norms, pooling)
      get `bandwidth`, because they compute little for each byte. For operators that compute much,
      such as an FFT or a custom kernel, `bandwidth` may be wrong, but `bound_ns` is still a lower
      limit of their time. `bound_by` is None if the node has FLOPs and the rate for their type is
      not known, or if the node has no FLOPs and moves no bytes.
    - `bound_share`: `bound_ns` divided by `median_ns`; 0.5 means that half the time would be
      enough. `bound_share` is above 1 if the data was in a cache.
    """
    rows = [_bound(row, machine) for row in nodes]
    kept = ("name", "median_ns", "flops", "moved_bytes", "intensity")
    bounds = {name: [row[name] for row in rows] for name in COLUMNS}
    return Table({**{name: nodes.column(name) for name in kept}, **bounds})


def dtypes(nodes: Table) -> list[str]:
    """The element types whose rates `roofline` needs: the types of the results of nodes with FLOPs.

    Only types in `machine.MEASURED` are included.
    """
    found = (dtype_of(row) for row in nodes if row.flops)
    return sorted({dtype for dtype in found if dtype is not None})


def dtype_of(row: Any) -> str | None:
    """The first type in `machine.MEASURED` among the element types of a node's result."""
    given = (row.output_dtype or "").split(", ")
    return next((dtype for dtype in given if dtype in MEASURED), None)


def _bound(row: Any, machine: Machine) -> Mapping[str, Any]:
    rate = machine.flops_per_second.get(dtype_of(row) or "")
    bound_by, bound_ns = roof(row.flops or 0, row.moved_bytes or 0, rate, machine.bytes_per_second)
    return {
        "bound_by": bound_by,
        "bound_ns": round(bound_ns) if bound_ns else None,
        "bound_share": bound_ns / row.median_ns if bound_ns and row.median_ns else None,
    }
