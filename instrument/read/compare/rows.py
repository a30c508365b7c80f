"""The tables that compare two sides: their ranges, operators, input shapes, kernels, counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from instrument.read.compare.counters import KIND, OF_WHOLE_STEP
from instrument.read.compare.step_change import Whole
from instrument.read.compare.totals import Quantities, Rows, Totals
from instrument.read.facts.schema import Schema, schema
from instrument.read.views.table import Table

# The quantities of one side in a mean step.
_Row = dict[str, Any]

_STATUS = "added, removed, changed (another number of calls) or same (the same number of calls)"


def _schema(keys: Mapping[str, str], quantities: Mapping[str, str]) -> Schema:
    columns = {**keys, "status": _STATUS}
    for name, doc in quantities.items():
        columns[f"before_{name}"] = f"in a mean step before the change: {doc}"
        columns[f"after_{name}"] = f"in a mean step after the change: {doc}"
        columns[f"change_{name}"] = f"`after_{name}` minus `before_{name}`"
    return schema(**columns)


_CALLS = {"calls": "the number of calls"}
_OF_OPERATORS = _CALLS | {
    "self_cpu_ns": "CPU time of the calls, without the calls inside them",
    "self_device_ns": "device time of the work that the calls themselves launched",
    "self_cpu_bytes": "memory that the calls themselves allocated on the CPU, minus memory that "
    "they freed there",
    "self_device_bytes": "memory that the calls themselves allocated on devices, minus memory that "
    "they freed there",
    "flops": "floating-point operations of the calls, without the calls inside them",
}
_OF_RANGES = _CALLS | {
    "step_ns": "the part of the step's time that counts for this range, without the ranges inside "
    "it",
    "self_cpu_ns": "CPU time of the range and its backward, without the ranges inside it",
    "self_device_ns": "device time of the work that the range and its backward launched, without "
    "the ranges inside it",
    "flops": "floating-point operations of the range and its backward, without the ranges inside "
    "it",
}
_OF_KERNELS = _CALLS | {
    "device_ns": "device time",
    "launch_ns": "CPU time of the calls that launched the kernel; None for copies",
    "bytes": "the bytes that the copies moved; None for kernels",
}
# The name of each table, the columns that name its rows, and the quantities that are compared.
_TABLES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "ranges": ({"range": "the path of the range"}, _OF_RANGES),
    "operators": ({"name": "the operator or runtime call"}, _OF_OPERATORS),
    "shapes": ({"name": "the operator", "input_shapes": "its input shapes"}, _OF_OPERATORS),
    "kernels": (
        {
            "name": "the kernel, copy or memset",
            "kind": "kernel, communication or copy; a memset is a copy",
        },
        _OF_KERNELS,
    ),
}
_SCHEMAS = {what: _schema(*columns) for what, columns in _TABLES.items()}
RANGES_COMPARED, OPERATORS_COMPARED, SHAPES_COMPARED, KERNELS_COMPARED = _SCHEMAS.values()

COUNTERS_COMPARED: Schema = schema(
    range="the path of the range; None for whole steps. The counter of a range includes the ranges "
    "inside it",
    counter="the counter; docs/ci.md describes each",
    before="the counter's value in a mean step before the change. For peak_bytes, the highest "
    "value of all steps; for graph_breaks and recompilations, the sum over the windows. None if it "
    "is not known",
    after="the same value after the change",
    change="`after` minus `before`; None if one of them is not known",
)


def counters_compared(before: Totals, after: Totals) -> Table:
    """Compare all counters of the whole step, and each counter that differs in a range."""
    rows = []
    for path in before.counters | after.counters:
        sides = [(each, each.counters.get(path)) for each in (before, after)]
        names = dict.fromkeys(name for _, row in sides for name in row or ())
        for name in names:
            was, now = (_counter(totals, row, name) for totals, row in sides)
            if path is not None and was == now:
                continue
            change = None if was is None or now is None else now - was
            rows.append((path, name, was, now, change))
    return Table.of_rows(COUNTERS_COMPARED, rows)


def _counter(totals: Totals, row: Quantities | None, name: str) -> float | None:
    """A counter of the step or of a range: None if it was not recorded, 0 if not in `row`."""
    whole = totals.counters.get(None, {})
    known = whole.get("collectives" if name.startswith(KIND) else name) is not None
    total = (row or {}).get(name)
    if total is None:
        return 0 if known else None
    return total if name in OF_WHOLE_STEP else _divided(name, total, max(totals.counted_steps, 1))


def compared(what: str, before: Totals, after: Totals, step: Whole | None = None) -> Table:
    """Compare the ranges, operators, shapes or kernels; the largest change of a time comes first.

    With `step`, the columns `…_step_ns` are sums of its parts, so that each adds up to the mean
    step of its side.
    """
    labels, quantities = _TABLES[what]
    sides = [_means(getattr(side, what), len(side.steps_ns)) for side in (before, after)]
    if step is not None:
        for means, column in zip(sides, ("before_ns", "after_ns")):
            _take_parts(means, step.parts, column)
    # A quantity of a row that a side lacks is 0, or None if the side never recorded the quantity.
    recorded = [
        {name for row in side.values() for name in row if row[name] is not None} for side in sides
    ]
    rows = []
    for key in sides[0] | sides[1]:
        pair = [side.get(key) for side in sides]
        cells = dict(zip(labels, [key] if len(labels) == 1 else key), status=_status(*pair))
        for name in quantities:
            was, now = (
                row.get(name) if row is not None else 0 if name in known else None
                for row, known in zip(pair, recorded)
            )
            change = None if was is None or now is None else now - was
            cells |= {f"before_{name}": was, f"after_{name}": now, f"change_{name}": change}
        rows.append(cells)
    times = [f"change_{name}" for name in quantities if name.endswith("_ns")]
    rows.sort(key=lambda row: max(abs(row[name] or 0) for name in times), reverse=True)
    return Table.of_dicts(_SCHEMAS[what], rows)


def _means(rows: Rows, steps: int) -> dict[Any, _Row]:
    return {
        key: {
            name: None if total is None else _divided(name, total, max(steps, 1))
            for name, total in row.items()
        }
        for key, row in rows.items()
    }


def _divided(name: str, total: int, steps: int) -> float:
    """A total divided by the number of steps. Times and bytes are rounded to integers."""
    if name.endswith(("_ns", "bytes")) or total % steps == 0:
        return (2 * total + steps) // (2 * steps)
    return total / steps


def _take_parts(rows: Mapping[str, _Row], parts: Table, column: str) -> None:
    for row in rows.values():
        row["step_ns"] = 0
    for path, part_ns in zip(parts.column("range"), parts.column(column)):
        if of_path := rows.get(path):
            of_path["step_ns"] += part_ns


def _status(before: _Row | None, after: _Row | None) -> str:
    if before is None or after is None:
        return "added" if before is None else "removed"
    return "same" if before.get("calls") == after.get("calls") else "changed"
