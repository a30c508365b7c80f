"""The tables that compare two sides: their ranges, operators, input shapes, kernels, counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instrument.analysis.schema import Schema, schema
from instrument.analysis.table import Table
from instrument.compare.counters import KIND, OF_WHOLE_STEP
from instrument.compare.step_change import Whole
from instrument.compare.totals import Quantities, Rows, Totals

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
RANGES_COMPARED, OPERATORS_COMPARED, SHAPES_COMPARED, KERNELS_COMPARED = (
    _schema(keys, quantities) for keys, quantities in _TABLES.values()
)

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


_Row = dict[str, Any]


def compared(what: str, before: Totals, after: Totals, step: Whole | None = None) -> Table:
    """Compare the ranges, operators, shapes or kernels; the largest change of a time comes first.

    With `step`, the columns `…_step_ns` are sums of its parts, so that each adds up to the mean
    step of its side.
    """
    labels, quantities = _TABLES[what]
    keys = [*(getattr(before, what) | getattr(after, what))]
    sides = [_means(getattr(side, what), keys, len(side.steps_ns)) for side in (before, after)]
    if step is not None:
        for rows, column in zip(sides, ("before_ns", "after_ns")):
            _take_parts(dict(zip(keys, rows)), step.parts, column)
    names = [[key] for key in keys] if len(labels) == 1 else keys
    cells: dict[str, list[Any]] = {
        label: [each[k] for each in names] for k, label in enumerate(labels)
    }
    cells["status"] = [_status(*rows) for rows in zip(*sides)]
    for name in quantities:
        was, now = (_cells(side, name) for side in sides)
        cells[f"before_{name}"], cells[f"after_{name}"] = was, now
        cells[f"change_{name}"] = [
            None if one is None or other is None else other - one for one, other in zip(was, now)
        ]
    changes = [cells[name] for name in cells if name.startswith("change_") and name.endswith("_ns")]
    sizes = [max(abs(cell or 0) for cell in row) for row in zip(*changes)]
    return Table(cells).take(sorted(range(len(sizes)), key=lambda k: -sizes[k]))


def _means(rows: Rows, keys: Iterable[Any], steps: int) -> list[_Row | None]:
    return [
        {
            name: None if total is None else _divided(name, total, max(steps, 1))
            for name, total in rows[key].items()
        }
        if key in rows
        else None
        for key in keys
    ]


def _divided(name: str, total: int, steps: int) -> float:
    """A total divided by the number of steps. Times and bytes are rounded to integers."""
    if name.endswith(("_ns", "bytes")) or total % steps == 0:
        return (2 * total + steps) // (2 * steps)
    return total / steps


def _take_parts(rows: Mapping[str, _Row | None], parts: Table, column: str) -> None:
    for row in filter(None, rows.values()):
        row["step_ns"] = 0
    for path, part_ns in zip(parts.column("range"), parts.column(column)):
        if of_path := rows.get(path):
            of_path["step_ns"] += part_ns


def _cells(rows: Sequence[_Row | None], name: str) -> list[Any]:
    """A quantity of all rows: 0 where the side lacks the row, None if it was never recorded."""
    absent = 0 if any(row and row.get(name) is not None for row in rows) else None
    return [absent if row is None else row.get(name) for row in rows]


def _status(before: _Row | None, after: _Row | None) -> str:
    if before is None or after is None:
        return "added" if before is None else "removed"
    return "same" if before.get("calls") == after.get("calls") else "changed"
