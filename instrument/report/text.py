"""Captures as plain text, as the table sink writes it and `instrument show` prints it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal

from instrument.analysis.operators import By as Grouping
from instrument.analysis.table import ALL, DEVICE_KINDS, TORCH_NAMES, Table, to_text
from instrument.capture import Capture
from instrument.config.options import did_you_mean
from instrument.errors import CaptureError, ConfigError
from instrument.printable import printable
from instrument.report.notebook import (
    cost,
    costliest_by,
    device,
    heading,
    inside_compiled,
    not_recorded,
    operators_title,
    outline,
    ranges_title,
    recomputed,
    unlaunched,
    unmarked,
    with_type,
    without_ranges,
)

By = Literal["name", Grouping]

OPERATOR_COLUMNS = (
    "name",
    "calls",
    "self_cpu_ns",
    "share",
    "device_share",
    "total_share",
    "device_total_share",
    "cpu_ns",
    "cpu_ns_per_call",
    "self_device_ns",
    "device_ns",
    "device_ns_per_call",
    "self_cpu_bytes",
    "cpu_bytes",
    "self_device_bytes",
    "device_bytes",
    "flops",
)
RANGE_COLUMNS = (
    "name",
    "module_type",
    "calls",
    "slices",
    "cpu_ns",
    "cpu_ns_per_step",
    "share",
    "device_share",
    "self_cpu_ns",
    "self_total_ns",
    "total_ns",
    "forward_ns",
    "backward_ns",
    "accumulate_ns",
    "recompute_ns",
    "optimizer_ns",
    "device_ns",
    "device_ns_per_step",
    "self_device_ns",
    "device_busy_ns",
    "device_idle_ns",
    "allocated_bytes",
    "bytes",
    "device_allocated_bytes",
    "device_bytes",
    "flops",
    "flops_per_second",
    "min_ns",
    "median_ns",
    "p95_ns",
    "max_ns",
)
# The averages that torch sorts by; the other names of torch's are the capture's own.
SORT_NAMES = TORCH_NAMES | {
    "cpu_time": "cpu_ns_per_call",
    **{f"{kind}_time": "device_ns_per_call" for kind in DEVICE_KINDS},
}

# Shown only when asked for: derived from two columns that are shown already.
_ON_REQUEST = frozenset({"device_ns_per_call", "total_share", "device_total_share"})
# Of the ranges these are shown unasked; those of the second line where there was any backward.
_USUAL_OF_RANGES = ("calls", "cpu_ns", "cpu_ns_per_step", "share", "device_share", "self_total_ns", "device_ns")
_WHERE_BACKWARD = ("total_ns", "forward_ns", "backward_ns")
# What goes first where the usual columns are too wide: device and memory together are.
_LEAST_MISSED = ("cpu_bytes", "device_bytes", "device_share", "cpu_ns_per_call")
_LEAST_MISSED_OF_KERNELS = ("occupancy_covered", "block", "grid", "blocks_per_sm")
_WIDTH, _NARROWEST_NAME = 140, 28
# What is short enough for a column; the others are shown below their row.
_BESIDE = frozenset({"overload", "thread", "step", "device"})
# What a grouping needs, and how to get it where the capture holds none; threads are always known.
# What a view without rows says.
_WITHOUT = {
    "memory.devices": "not recorded; profile_memory=true records it",
    "memory_categories": "not recorded; profiler.memory_categories=true has torch tell them",
    "moments": "none were marked",
}
_GROUPED_BY = {
    "input_shapes": ("input shapes", "record it with profiler.record_shapes=true"),
    "stack": ("stacks", "record it with profiler.with_stack=true"),
    "overload": ("overloads", "record it with profiler.capture_overload_names=true"),
    "step": ("steps", "call session.step() after each of them"),
    "device": ("device work", "record it with a device among profiler.activities"),
    "range": ("ranges", "mark code with @profiled"),
}


def check_sort(sort: str) -> str:
    """The capture's own name of a sort key.

    Raises:
        ConfigError: the operator table has no such column.
    """
    known = SORT_NAMES.get(sort, sort)
    if known not in OPERATOR_COLUMNS:
        hint = did_you_mean(sort, [*OPERATOR_COLUMNS, *SORT_NAMES])
        raise ConfigError(f"The table cannot be sorted by {sort!r}{hint}")
    return known


def check_columns(columns: Sequence[str] | None) -> list[str] | None:
    """The capture's own names of columns to show.

    Raises:
        ConfigError: neither the operators nor the ranges have such a column.
    """
    if columns is None:
        return None
    for column in columns:
        if SORT_NAMES.get(column, column) not in {*OPERATOR_COLUMNS, *RANGE_COLUMNS}:
            hint = did_you_mean(column, dict.fromkeys([*OPERATOR_COLUMNS, *RANGE_COLUMNS, *SORT_NAMES]))
            raise ConfigError(f"The table has no column {column!r}{hint}")
    return [SORT_NAMES.get(column, column) for column in columns]


def render(
    capture: Capture,
    *,
    rows: int = 15,
    sort: str | None = None,
    columns: Sequence[str] | None = None,
    by: By = "name",
    stack_depth: int = 5,
    ranges: bool = True,
    operators: bool = True,
    sort_ranges: str | None = None,
) -> str:
    """The capture as text: what it is of, the range tree, the costliest operators, what is missing.

    The arguments are the options of `TableSink`; with `sort_ranges`, one of their columns, the ranges are no tree but
    in that order, by their paths. In the tree those that caused the most CPU time are kept; the others and what is in
    no range have a row each. Longer names keep their head and tail; a line has about 140 characters at most.

    Raises:
        ConfigError: `sort` or one of `columns` does not exist.
        CaptureError: the trace holds nothing of what to group by.
        TraceError: the trace cannot be read.
    """
    sort, chosen = None if sort is None else check_sort(sort), check_columns(columns)
    rows = sys.maxsize if rows == ALL else rows
    parts = [heading(capture), device(capture) if chosen is None and (ranges or operators) else ""]
    if ranges:
        parts += [_range_part(capture, rows, chosen, sort_ranges), unmarked(capture), recomputed(capture)]
        parts.append(inside_compiled(capture))
    if operators:
        table = _with_averages(_grouped(capture, by, stack_depth))
        parts.append(_operator_part(capture, table, rows, sort, chosen, by))
        parts.append(unlaunched(capture))
    if operators and chosen is None:
        parts.append(not_recorded(capture, table))
    if chosen is None:
        parts.append(cost(capture))
    return "\n\n".join(filter(None, parts))


def render_view(
    capture: Capture, view: str, *, rows: int = 15, sort: str | None = None, columns: Sequence[str] | None = None
) -> str:
    """A view of the capture as text: its first rows, as they stand or sorted.

    `view` names an attribute that is a table, such as "steps"; dots lead further in.

    Raises:
        ConfigError: the view has no such column.
        TraceError: the trace cannot be read.
    """
    return view_text(view, attrgetter(view)(capture), rows=rows, sort=sort, columns=columns)


def view_text(view: str, table: Table, *, rows: int, sort: str | None, columns: Sequence[str] | None) -> str:
    """The first rows of a table, as they stand or sorted, under the name of the view that it is.

    Raises:
        ConfigError: it has no such column.
    """
    for name in filter(None, [sort, *(columns or ())]):
        if TORCH_NAMES.get(name, name) not in table.columns:
            raise ConfigError(f"The view {view} has no column {name!r}{did_you_mean(name, table.columns)}")
    title, first = view.split(".")[0].capitalize().replace("_", " "), (table.sort(sort) if sort else table).head(rows)
    names = [TORCH_NAMES.get(name, name) for name in columns or ()] or _known_columns(table, table.columns)
    few = "" if len(first) == len(table) else f", {len(first)} of {len(table)}"
    if not len(table):
        return f"{title}: {_WITHOUT.get(view, 'there are none')}."
    if not names:
        return f"{title}: nothing of it was recorded; device columns need a device among profiler.activities."
    text, left_out = _text(first, names, () if columns else _LEAST_MISSED_OF_KERNELS)
    return f"{title}{few}\n{text}{_too_wide(left_out)}"


def sort_keys(sort: str | None, *, ranges: bool, operators: bool) -> tuple[str | None, str | None]:
    """What the operators and the ranges are sorted by, where one key was given for what is shown of them.

    Raises:
        ConfigError: nothing that is shown has such a column.
    """
    if sort is None:
        return None, None
    known = SORT_NAMES.get(sort, sort)
    if operators and known in OPERATOR_COLUMNS:
        return known, None
    if ranges and known in RANGE_COLUMNS:
        return None, known
    if operators:
        return check_sort(sort), None
    hint = did_you_mean(sort, [*RANGE_COLUMNS, *TORCH_NAMES])
    raise ConfigError(f"The ranges cannot be sorted by {sort!r}{hint}")


def as_json(
    capture: Capture,
    views: Sequence[str],
    *,
    rows: int = ALL,
    sort: str | None = None,
    by: By = "name",
    stack_depth: int = 5,
) -> str:
    """Views of the capture as JSON: its name, and each view's rows under the first part of its name, with all columns.

    A view is sorted by `sort` where it has that column.

    Raises:
        CaptureError: the trace holds nothing of what to group by.
        ConfigError: no view has the column.
        TraceError: the trace cannot be read.
    """
    found = {view: attrgetter(view)(capture) for view in dict.fromkeys(views)}
    if "operators" in found:
        found["operators"] = _grouped(capture, by, stack_depth)
    key = SORT_NAMES.get(sort, sort) if sort else None
    if key and not any(key in table.columns for table in found.values()):
        columns = dict.fromkeys(name for table in found.values() for name in table.columns)
        raise ConfigError(f"The views cannot be sorted by {sort!r}{did_you_mean(sort, columns)}")
    ordered = {view: table.sort(key) if key in table.columns else table for view, table in found.items()}
    tables = {view.split(".")[0]: [row._asdict() for row in table.head(rows)] for view, table in ordered.items()}
    return json.dumps({"name": capture.name, **tables}, indent=2)


def _sorted_ranges(table: Table, rows: int, columns: list[str] | None, sort: str) -> str:
    shown = table.sort(sort).head(rows)
    columns = columns or _known_columns(table, (name for name in RANGE_COLUMNS if name in {sort, *_USUAL_OF_RANGES}))
    paths = [with_type(row.path, row.module_type) for row in shown]
    named = Table({"name": paths, **{name: shown.column(name) for name in columns if name != "name"}})
    text, _ = _text(named, columns)
    return text


def _range_part(capture: Capture, rows: int, columns: list[str] | None, sort: str | None) -> str:
    table = capture.ranges
    if not len(table):
        return (
            "No ranges: INSTRUMENT_DISABLE was set in the environment."
            if capture.about.annotations_disabled
            else "No ranges: mark code with @profiled, or give the session a model."
        )
    if sort is not None:
        return f"{ranges_title(capture, rows, sort)}\n{_sorted_ranges(table, rows, columns, sort)}"
    shown = outline(table, rows)
    has_backward = _known(table, "backward_ns") and any(table.column("backward_ns"))
    usual = {*_USUAL_OF_RANGES, *(_WHERE_BACKWARD if has_backward else ())}
    usual |= {"recompute_ns"} if any(table.column("recompute_ns")) else set()
    text, _ = _text(shown, columns or _known_columns(table, (name for name in RANGE_COLUMNS if name in usual)))
    return f"{ranges_title(capture, rows)}\n{text}"


def _operator_part(
    capture: Capture, table: Table, rows: int, sort: str | None, columns: list[str] | None, by: By
) -> str:
    if not len(table):
        return "No operators."
    sort, note = sort or costliest_by(table), ""
    if not _known(table, sort):
        note, sort = f"; {sort} was not recorded", "self_cpu_ns"
    table = without_ranges(table)
    if not len(table):
        return "No operators."
    shown = _with_waits(table.sort(sort).head(rows))
    usual = (name for name in OPERATOR_COLUMNS if name == sort or name not in _ON_REQUEST)
    missable = [] if columns else [name for name in _LEAST_MISSED if name != sort]
    beside = [by] if by in _BESIDE else []
    text, left_out = _text(shown, [*beside, *(columns or _known_columns(table, usual))], missable)
    lines = text.splitlines()
    if by != "name" and not beside:
        lines = [*lines[:2], *(f"{line}{_below(group)}" for line, group in zip(lines[2:], shown.column(by)))]
    title = operators_title(capture, rows, len(table), f"{sort}{note}")
    return "\n".join([title, *lines]) + _too_wide(left_out)


def _with_waits(table: Table) -> Table:
    """The names of calls in which the CPU only waits say so."""
    columns = {name: table.column(name) for name in table.columns}
    pairs = zip(columns["name"], columns["kind"])
    return Table(columns | {"name": [f"{name} (waiting)" if kind == "wait" else name for name, kind in pairs]})


def _too_wide(left_out: Sequence[str]) -> str:
    return f"\nToo wide to show: {', '.join(left_out)}." if left_out else ""


def _below(group: str | None) -> str:
    """What a row is grouped by, on lines of its own."""
    parts = [] if group in (None, "[]") else group.split(";")
    return "".join(f"\n    {textwrap.shorten(printable(part), _WIDTH - 20, placeholder=' …')}" for part in parts)


def _grouped(capture: Capture, by: By, depth: int) -> Table:
    if by == "name":
        return capture.operators
    table = capture.operators.by(by, depth=depth)
    if len(table) and not _known(table, by):
        what, remedy = _GROUPED_BY[by]
        raise CaptureError(f"{capture.name} holds no {what} to group operators by: {remedy}.")
    return table


def _with_averages(table: Table) -> Table:
    """The operators with times per call."""
    columns = {name: table.column(name) for name in table.columns}
    for where in ("cpu", "device"):
        pairs = zip(columns[f"{where}_ns"], columns["calls"])
        columns[f"{where}_ns_per_call"] = [None if time is None else time / calls for time, calls in pairs]
    return Table(columns)


def _known_columns(table: Table, order: Iterable[str]) -> list[str]:
    return [name for name in order if _known(table, name)]


def _known(table: Table, column: str) -> bool:
    return column in table.columns and any(value is not None for value in table.column(column))


def _text(table: Table, columns: Sequence[str], missable: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The name and the columns as text, and those of the `missable` that were left out because they did not fit.

    Names are shortened first. A table without names has its columns alone.
    """
    shown = [*dict.fromkeys(name for name in ("name", *columns) if name in table.columns)]
    left_out = []
    for name in missable:
        if name in shown and _width(to_text(table.select(shown), name_width=_NARROWEST_NAME)) > _WIDTH:
            shown.remove(name)
            left_out.append(name)
    for width in range(60, _NARROWEST_NAME, -4):
        text = to_text(table.select(shown), name_width=width)
        if _width(text) <= _WIDTH:
            return text, left_out
    return to_text(table.select(shown), name_width=_NARROWEST_NAME), left_out


def _width(text: str) -> int:
    return max(map(len, text.splitlines()))
