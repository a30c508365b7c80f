"""The section *Ranges*: the tree of ranges, and the phases and steps of each range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from instrument.base.units import duration
from instrument.read.facts.groupby import intern
from instrument.read.show.outline import with_largest_shares
from instrument.read.show.page.parts import (
    choice,
    column,
    columns_of,
    left_out,
    section,
    table,
    text,
)
from instrument.read.trace.events import Ints
from instrument.read.views.ranges import total_ns_per_step
from instrument.read.views.table import Table, known_columns
from instrument.read.views.views import VIEWS, Views

# The maximum numbers of ranges and of steps on a page; they keep the page small.
_MOST_ROWS, _MOST_STEPS = 2000, 100
_PHASES = ("forward", "backward", "accumulate", "recompute", "optimizer")
_COLUMNS = (
    "self_total_ns", "share", "device_ns", "device_share", "calls", "median_ns", "p95_ns",
    "device_idle_ns", "allocated_bytes", "flops_per_second",
)  # fmt: skip
_ABOUT = (
    "The CPU time that each range caused, on all threads and in all steps: its forward, the "
    "backward of its operators, and the optimizer steps inside it."
)


def ranges(capture: Views) -> dict[str, Any] | None:
    """Return the ranges by path and by name, each with its phases and steps; None without ranges.

    The last rows are those of `ranges_rest`, the time outside of all ranges.
    """
    every = capture.ranges
    if not len(every):
        return None
    kept = with_largest_shares(every, _MOST_ROWS)
    rest = [None] * len(capture.ranges_rest)
    module_type, depth = every.column("module_type"), every.column("depth")
    types = [*(module_type[row] for row in kept), *rest]
    depths = [*(depth[row] for row in kept), *(0 for _ in rest)]
    by_name, (number, _) = capture.ranges_by_name, intern(every.column("name"))
    total_ns = by_name.column("total_ns")
    costliest = sorted(range(len(by_name)), key=lambda row: -total_ns[row])[:_MOST_ROWS]
    more = {"has_filter": True, "shown": 40}
    paths = _columns(every, kept, np.arange(len(every)), capture)
    paths[0]["notes"] = [
        kind if kind and not name.endswith(kind) else None
        for name, kind in zip(paths[0]["values"], types)
    ]
    names = _columns(by_name, costliest, number, capture)
    return section(
        "Ranges",
        text(_ABOUT, "soft"),
        choice(
            "Grouping",
            {
                "By path": [table("Ranges by path", paths, depths=depths, **more)],
                "By name": [table("Ranges by name", names, sort="total_ns", **more)],
            },
            legend=["forward", "backward", "optimizer"],
        ),
        left_out(len(every) - len(kept), "more ranges"),
    )


def _columns(found: Table, rows: Sequence[int], group: Ints, capture: Views) -> list[Any]:
    """Return the columns of ranges or of groups of ranges, and of the time outside of all ranges.

    `rows` are the rows of `found` to show. For each range in `capture.ranges`, `group` holds the
    index of its row in `found`.
    """
    rest, docs = capture.ranges_rest, VIEWS["ranges"].schema

    def values(name: str) -> list[Any]:
        more = rest.column(name) if name in rest.columns else [None] * len(rest)
        cells = found.column(name)
        return [*(cells[row] for row in rows), *more]

    names = values("name")
    total_ns = [*values("total_ns")[: len(rows)], *rest.column("self_total_ns")]
    spent = {phase: values(f"{phase}_ns") for phase in _PHASES}
    known = {phase: [ns or 0 for ns in column] for phase, column in spent.items() if any(column)}
    phases = [*zip(*known.values())] or [()] * len(names)
    labels = [
        ", ".join(f"{phase} {duration(ns)}" for phase, ns in zip(known, parts) if ns)
        or f"{name} {duration(whole or 0)}"
        for name, whole, parts in zip(names, total_ns, phases)
    ]
    known["idle"] = [0 if any(parts) else ns or 0 for ns, parts in zip(total_ns, phases)]
    columns = [
        column("name", names, title="range", kind="range"),
        column("phases_ns", total_ns, title="forward, backward, optimizer", kind="bar",
               texts=labels, parts=known),
        column("total_ns", total_ns, title="CPU time", doc="all CPU time that the range caused"),
    ]  # fmt: skip
    numbers = capture.steps.column("number")[-_MOST_STEPS:]
    if len(numbers) > 1:
        in_steps = total_ns_per_step(capture.links, group, len(found), _MOST_STEPS)
        charts = [*in_steps[[*rows]].tolist(), *([None] * len(rest))]
        most = [chart and max(chart) for chart in charts]
        columns.append(
            column("steps_ns", most, title="CPU time by step", kind="steps", numbers=numbers,
                   charts=charts, doc="the CPU time that the range caused in each step")
        )  # fmt: skip
    shown = Table({name: values(name) for name in _COLUMNS})
    return columns + columns_of(shown.select(known_columns(shown)), docs)
