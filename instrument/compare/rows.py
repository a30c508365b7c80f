"""The tables that compare two sides: their ranges, operators, input shapes, kernels, counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instrument.analysis.schema import Schema, names_of, schema
from instrument.analysis.table import Table
from instrument.compare.counters import KIND, OF_WHOLE_STEP
from instrument.compare.step_change import Whole
from instrument.compare.totals import Quantities, Rows, Totals

_STATUS = "added, removed, changed (another number of calls) or same (the same number of calls)"


def _compared(status: str, keys: Mapping[str, str], quantities: Mapping[str, str]) -> Schema:
    columns = {**keys, "status": status}
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
RANGES_COMPARED = _compared(_STATUS, {"range": "the path of the range"}, _OF_RANGES)
OPERATORS_COMPARED = _compared(_STATUS, {"name": "the operator or runtime call"}, _OF_OPERATORS)
SHAPES_COMPARED = _compared(
    _STATUS, {"name": "the operator", "input_shapes": "its input shapes"}, _OF_OPERATORS
)
KERNELS_COMPARED = _compared(
    _STATUS,
    {
        "name": "the kernel, copy or memset",
        "kind": "kernel, communication or copy; a memset is a copy",
    },
    _OF_KERNELS,
)

COUNTERS_COMPARED: Schema = schema(
    range="the path of the range; None for whole steps. The counter of a range includes the ranges "
    "inside it",
    counter="the counter; see `instrument.compare.counters.COUNTERS`",
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


def operators_compared(before: Totals, after: Totals) -> Table:
    """Compare operators, and runtime calls such as `cudaLaunchKernel`; see `OPERATORS_COMPARED`."""
    keys, sides = _aligned(before, before.operators, after, after.operators)
    return _table(OPERATORS_COMPARED, {"name": keys}, sides, _OF_OPERATORS)


def shapes_compared(before: Totals, after: Totals) -> Table:
    """Compare operators by their input shapes; see `SHAPES_COMPARED`."""
    keys, sides = _aligned(before, before.shapes, after, after.shapes)
    labels = {"name": [name for name, _ in keys], "input_shapes": [shapes for _, shapes in keys]}
    return _table(SHAPES_COMPARED, labels, sides, _OF_OPERATORS)


def kernels_compared(before: Totals, after: Totals) -> Table:
    """Compare kernels and copies; see `KERNELS_COMPARED`."""
    keys, sides = _aligned(before, before.kernels, after, after.kernels)
    labels = {"name": [name for name, _ in keys], "kind": [kind for _, kind in keys]}
    return _table(KERNELS_COMPARED, labels, sides, _OF_KERNELS)


def ranges_compared(before: Totals, after: Totals, step: Whole) -> Table:
    """Compare ranges; see `RANGES_COMPARED`.

    The columns `…_step_ns` are sums of `step.parts`, so each adds up to the mean step of its side.
    """
    keys, sides = _aligned(before, before.ranges, after, after.ranges)
    for side, rows in zip(("before_ns", "after_ns"), sides):
        of_range: dict[str, int] = {}
        for path, part_ns in zip(step.parts.column("range"), step.parts.column(side)):
            of_range[path] = of_range.get(path, 0) + part_ns
        for path, row in zip(keys, rows):
            if row is not None:
                row["step_ns"] = of_range.get(path, 0)
    return _table(RANGES_COMPARED, {"range": keys}, sides, _OF_RANGES)


_Row = dict[str, Any]


def _aligned(
    before: Totals, old: Rows, after: Totals, new: Rows
) -> tuple[list[Any], tuple[list[_Row | None], list[_Row | None]]]:
    """Return the keys of both sides, and for each side and key the quantities of a mean step.

    If a side lacks a key, the entry is None.
    """
    keys = [*(old | new)]
    sides = []
    for totals, rows in ((before, old), (after, new)):
        steps = max(len(totals.steps_ns), 1)
        sides.append([_mean(rows[key], steps) if key in rows else None for key in keys])
    return keys, (sides[0], sides[1])


def _mean(row: Quantities, steps: int) -> _Row:
    return {
        name: None if total is None else _divided(name, total, steps) for name, total in row.items()
    }


def _divided(name: str, total: int, steps: int) -> float:
    """A total divided by the number of steps. Times and bytes are rounded to integers."""
    if name.endswith(("_ns", "bytes")) or total % steps == 0:
        return (2 * total + steps) // (2 * steps)
    return total / steps


def _table(
    columns: Schema,
    labels: Mapping[str, Sequence[Any]],
    sides: tuple[list[_Row | None], list[_Row | None]],
    quantities: Mapping[str, str],
) -> Table:
    """The table with a row for each key. The row in which a time changed most comes first."""
    cells: dict[str, list[Any]] = {name: [*values] for name, values in labels.items()}
    recorded = [
        {name for row in side if row for name, value in row.items() if value is not None}
        for side in sides
    ]
    for name in quantities:
        known = [name in names for names in recorded]
        was, now = (
            [_cell(row, name, is_known) for row in side] for side, is_known in zip(sides, known)
        )
        cells[f"before_{name}"], cells[f"after_{name}"] = was, now
        cells[f"change_{name}"] = [
            None if one is None or other is None else other - one for one, other in zip(was, now)
        ]
    cells["status"] = [_status(*rows) for rows in zip(*sides)]
    changes = [cells[name] for name in cells if name.startswith("change_") and name.endswith("_ns")]
    sizes = [max((abs(cell or 0) for cell in row), default=0) for row in zip(*changes)]
    order = sorted(range(len(sizes)), key=lambda k: -sizes[k])
    return Table.of(columns, {name: [cells[name][k] for k in order] for name in names_of(columns)})


def _cell(row: _Row | None, name: str, is_known: bool) -> Any:
    if row is None:
        return 0 if is_known else None
    return row.get(name)


def _status(before: _Row | None, after: _Row | None) -> str:
    if before is None or after is None:
        return "added" if before is None else "removed"
    return "same" if before.get("calls") == after.get("calls") else "changed"
