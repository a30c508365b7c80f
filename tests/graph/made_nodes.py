"""Tables of nodes written by hand, with the columns that the rooms under test read."""

from __future__ import annotations

from typing import Any

from instrument.read.views.table import Table

DEFAULTS: dict[str, Any] = {
    "op": "call_function", "name": "", "target": "operator.add", "module_path": "",
    "module_type": None, "source": None, "inputs": "", "median_ns": 1000, "share": None,
    "output_shape": "[2, 3]", "output_dtype": "float32", "moved_bytes": 0, "flops": None,
    "intensity": None,
}  # fmt: skip


def nodes(*rows: dict[str, Any]) -> Table:
    """One node for each of these; a share that is not given is that of its time."""
    whole = sum(row.get("median_ns", 1000) or 0 for row in rows)
    full = [{**DEFAULTS, **row} for row in rows]
    for row in full:
        row["share"] = row["median_ns"] / whole if row["median_ns"] is not None else None
    return Table({name: [row[name] for row in full] for name in DEFAULTS})
