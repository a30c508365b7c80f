"""The section *Comparison*: what changed in a step since another run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from instrument.analysis.table import Table, known_columns, unit_of
from instrument.compare.diff import Difference, compare
from instrument.compare.difference_text import (
    TIMES,
    main_time,
    names,
    of_ranks,
    spread,
    statuses,
    summary,
    whole_as_dict,
)
from instrument.compare.rows import (
    COUNTERS_COMPARED,
    KERNELS_COMPARED,
    OPERATORS_COMPARED,
    RANGES_COMPARED,
    SHAPES_COMPARED,
)
from instrument.compare.side import Side
from instrument.compare.step_change import Whole
from instrument.errors import CaptureError
from instrument.report.page.tables import as_columns

# The page has a bar for each of the largest parts of the change, at most this many, and one bar for
# all other parts.
_MOST_PARTS = 10
_OTHERS = "(others)"
# The maximum number of rows of a table; the limit keeps the page small.
_MOST_ROWS = 500
_TABLES = {
    "ranges": ("Ranges", RANGES_COMPARED),
    "operators": ("Operators", OPERATORS_COMPARED),
    "kernels": ("Kernels and copies", KERNELS_COMPARED),
    "shapes": ("Input shapes", SHAPES_COMPARED),
}


def section(before: Side, after: Side) -> dict[str, Any]:
    """Return the comparison of two sides.

    The keys:

    - `name`: the name of the first side, `before`.
    - `refused`: whether the sides are too unlike to be compared. If so, the only other keys are
      `name` and `sentence`.
    - `sentence`: what changed most, or why the sides are not compared.
    - `what`, `unlike`: as in `instrument diff --json`.
    - `spread`: sentences on the median steps, and on how much the steps vary.
    - `step`: the first of `wholes` in `instrument diff --json`, without `parts`.
    - `parts`: the parts of the step that changed most, and a last entry that sums all other parts.
      The keys of an entry are `range`, `kind`, `before_ns`, `after_ns` and `change_ns`; `kind` is
      None in the last entry. The times sum exactly to those of `step`.
    - `by_kind`: an entry for each kind of time, with the same keys except `range`.
    - `ranks`: the table of the ranks, with the keys of `tables.as_columns`; None unless both sides
      have several ranks.
    - `tables`: the tables `ranges`, `operators`, `kernels` and `shapes` of `instrument diff --json`
      that have rows. The row with the largest change comes first. The keys of a table are those of
      `tables.as_columns`, and:
      - `name` and `title`.
      - `time`: the time whose change sorts the rows, such as "self_cpu_ns".
      - `statuses`: the number of rows by status, such as "2 added".
      - `left_out`: the number of rows that are left out.
    - `counters`: the table of the counters. It has `left_out` and the keys of `tables.as_columns`.
      Its key `cells` also holds a column `unit`, the unit of each counter.
    """
    try:
        found = compare(before, after)
        refusal = found.refusal
    except CaptureError as error:
        refusal = str(error)
    if refusal:
        return {"name": before.name, "refused": True, "sentence": refusal}
    step = found.step
    return {
        "name": names(found)[0],
        "refused": False,
        # Whole names, so that `redacted` finds them.
        "sentence": summary(found, longest=sys.maxsize),
        "what": found.what,
        "unlike": [each._asdict() for each in found.unlike],
        "spread": spread(step),
        "step": {key: value for key, value in whole_as_dict(step).items() if key != "parts"},
        "parts": _parts(step),
        "by_kind": _by_kind(step),
        "ranks": as_columns(of_ranks(found)) if len(found.wholes) > 1 else None,
        "tables": [_table(found, name) for name in _TABLES if len(getattr(found, name))],
        "counters": _counters(found.counters),
    }


def _parts(step: Whole) -> list[dict[str, Any]]:
    changed = len(step.parts.where(change_ns=bool))
    most = min(changed, _MOST_PARTS)
    found = step.parts.to_dicts()
    if others := found[most:]:
        found[most:] = [{"range": _OTHERS, "kind": None, **_sums(others)}]
    return found


def _by_kind(step: Whole) -> list[dict[str, Any]]:
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for row in step.parts.to_dicts():
        of_kind.setdefault(row["kind"], []).append(row)
    found = [{"kind": kind, **_sums(rows)} for kind, rows in of_kind.items()]
    return sorted(found, key=lambda row: -abs(row["change_ns"]))


def _sums(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    listed = list(rows)
    return {
        name: sum(row[name] for row in listed) for name in ("before_ns", "after_ns", "change_ns")
    }


def _counters(counters: Table) -> dict[str, Any]:
    shown = as_columns(counters.head(_MOST_ROWS), COUNTERS_COMPARED)
    shown["cells"]["unit"] = [unit_of(name) for name in shown["cells"]["counter"]]
    return {"left_out": max(len(counters) - _MOST_ROWS, 0), **shown}


def _table(found: Difference, name: str) -> dict[str, Any]:
    title, columns = _TABLES[name]
    table: Table = getattr(found, name)
    time = main_time(table)
    changes = table.column(f"change_{time}")
    order = sorted(range(len(table)), key=lambda row: -abs(changes[row] or 0))[:_MOST_ROWS]
    shown = Table({each: [table.column(each)[row] for row in order] for each in table.columns})
    return {
        "name": name,
        "title": f"{title} by {TIMES[time]}",
        "time": time,
        "statuses": statuses(table),
        "left_out": len(table) - len(order),
        **as_columns(shown.select(known_columns(shown)), columns),
    }
