"""The section *Ranges*: the tree of ranges, and the phases and steps of each range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from instrument.analysis.ranges import total_ns_per_step
from instrument.analysis.table import Table, known_columns
from instrument.analysis.views import VIEWS, Views
from instrument.links.groupby import Groups, intern
from instrument.report.notebook import recomputed, unmarked, with_largest_shares
from instrument.report.page.tables import as_columns
from instrument.trace.events import Ints

# The maximum numbers of ranges and of steps on a page; they keep the page small.
_MOST_ROWS, _MOST_STEPS = 2000, 100
_COLUMNS = (
    "name", "total_ns", "share", "self_total_ns", "forward_ns", "backward_ns", "accumulate_ns",
    "recompute_ns", "optimizer_ns", "device_ns", "device_share", "self_device_ns", "device_idle_ns",
    "calls", "min_ns", "median_ns", "p95_ns", "max_ns", "allocated_bytes", "bytes", "flops",
    "flops_per_second",
)  # fmt: skip


def section(capture: Views) -> dict[str, Any] | None:
    """Return the ranges; None if the capture has none.

    The keys:

    - `by_path`: the ranges in the order of the tree, with the keys of `tables.as_columns`. `cells`
      also has `depth`, `module_type` and `steps`. In `cells.steps`, each range has a list of its
      CPU times, one for each step in the section's key `steps`. The last rows are those of
      `ranges.rest`, the time outside of all ranges.
    - `by_name`: the same for ranges grouped by name, without `depth` and `module_type`. The name
      with the most CPU time comes first.
    - `steps`: the numbers of the last finished steps, at most 100.
    - `left_out`: the number of ranges that `by_path` leaves out, because a page has at most 2000.
    - `notes`: sentences on the time outside of all ranges, and on activation checkpointing.
    """
    ranges = capture.ranges
    if not len(ranges):
        return None
    kept = with_largest_shares(ranges, _MOST_ROWS)
    by_path = _columns(ranges, kept, np.arange(len(ranges)), capture)
    by_path["cells"] |= {
        name: [*(ranges.column(name)[row] for row in kept), *([fill] * len(ranges.rest))]
        for name, fill in (("depth", 0), ("module_type", None))
    }
    by_name, (number, _) = ranges.by("name"), intern(ranges.column("name"))
    total_ns = by_name.column("total_ns")
    costliest = sorted(range(len(by_name)), key=lambda row: -total_ns[row])[:_MOST_ROWS]
    return {
        "by_path": by_path,
        "by_name": _columns(by_name, costliest, number, capture),
        "steps": capture.steps.column("number")[-_MOST_STEPS:],
        "left_out": len(ranges) - len(kept),
        "notes": [note for note in (unmarked(capture), recomputed(capture)) if note],
    }


def _columns(table: Table, rows: Sequence[int], group: Ints, capture: Views) -> dict[str, Any]:
    """Return columns for the page. The last rows hold the time outside of all ranges.

    The rows before them are rows of `table`. `table` holds ranges or groups of ranges, and `rows`
    the indices of the rows to return. For each range in `capture.ranges`, `group` holds the index
    of its row in `table`.
    """
    rest = capture.ranges.rest
    cells = {
        name: [
            *(table.column(name)[row] for row in rows),
            *(rest.column(name) if name in rest.columns else [None] * len(rest)),
        ]
        for name in _COLUMNS
    }
    cells["total_ns"][len(rows) :] = rest.column("self_total_ns")
    shown = Table(cells)
    found = as_columns(shown.select(known_columns(shown)), VIEWS["ranges"].schema)
    in_steps = total_ns_per_step(capture.links, Groups(group, len(table)), _MOST_STEPS)[[*rows]]
    found["cells"]["steps"] = [*in_steps.tolist(), *([None] * len(rest))]
    return found
