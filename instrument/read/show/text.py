"""A capture as text: for the log, for table.txt, and for the command line.

The text is made of parts. A part is a paragraph, or a `Section`, which holds a table.
`views.layout` writes parts as plain text, `show.terminal` draws them on a terminal,
`show.notebook` shows them as HTML.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from instrument.base.errors import CaptureError, ConfigError, did_you_mean
from instrument.base.printable import printable
from instrument.base.prose import wrapped
from instrument.read.facts.kernel_names import kernel_labels
from instrument.read.facts.schema import Grouping, names_of
from instrument.read.show.outline import (
    OWN_COLUMNS,
    costliest_by,
    folded,
    leading,
    leading_ranges,
    outline,
    share_of,
    without_ranges,
)
from instrument.read.show.remarks import (
    cost,
    heading,
    incomplete,
    not_recorded,
    not_timed,
    operators_title,
    ranges_title,
)
from instrument.read.show.verdict import first_parts
from instrument.read.views.coverage import losses, range_advice
from instrument.read.views.json_text import json_text
from instrument.read.views.layout import plain, text
from instrument.read.views.operators import OPERATORS
from instrument.read.views.ranges import RANGES
from instrument.read.views.section import Part, Section, is_every_column, lines_of, shown_of
from instrument.read.views.table import ALL, DEVICE_KINDS, TORCH_NAMES, Table, known_columns
from instrument.read.views.table_text import heading as column_title
from instrument.read.views.views import Views, rows_of

By = Literal["name", Grouping]

OPERATOR_COLUMNS = tuple(name for name in names_of(OPERATORS) if name != "kind")
RANGE_COLUMNS = tuple(name for name in names_of(RANGES) if name not in ("path", "depth"))
_SORTED_RANGES = names_of(RANGES)
# For each sort key of torch, our name of the column. The keys are torch's columns and averages.
SORT_NAMES = TORCH_NAMES | {
    "cpu_time": "cpu_ns_per_call",
    **{f"{kind}_time": "device_ns_per_call" for kind in DEVICE_KINDS},
}

# Columns shown only on request, because a reader can compute them from columns that are shown.
_ON_REQUEST = frozenset({"device_ns_per_call"})
# If the table of operators is too wide, these columns are left out first.
_MISSABLE = ("cpu_bytes", "device_bytes", "share", "device_share", "cpu_ns_per_call")
# The default columns of the ranges, and the columns that are added if there was a backward.
_USUAL_OF_RANGES = (
    "calls",
    "cpu_ns",
    "cpu_ns_per_step",
    "share",
    "device_share",
    "self_total_ns",
    "device_ns",
)
_WHERE_BACKWARD = ("total_ns", "forward_ns", "backward_ns")
# The views in which kernels are shown by their labels, and the column that holds their names.
_KERNELS_IN = {"kernels": "name", "cuda_graph_nodes": "kernel"}
# The text in this column of `capture.coverage` is shown below each row.
_REASON = "why"
# Groupings that are shown as a column. Other groupings are shown in lines below each row.
_BESIDE = frozenset({"overload", "thread", "step", "device", "layer"})
_NO_MEMORY = "not recorded; profile_memory=true records memory"
# The text for a view without rows.
_WITHOUT = {
    "memory_devices": _NO_MEMORY,
    "memory_steps": "no step with recorded memory; session.step() marks steps, and "
    "profile_memory=true records memory",
    "memory_events": _NO_MEMORY,
    "lines": "no samples; profiler.lines=true writes them into lines_rank*.json beside captures",
    "memory_categories": "not recorded; profiler.memory_categories=true records them",
    "moments": "no moment was marked",
    "efficiency": "no operator with known FLOPs; profiler.record_shapes=true records input shapes",
    "efficiency_steps": "no finished step with known FLOPs; session.step() marks steps, and "
    "profiler.record_shapes=true records input shapes",
    "interruptions": "the trace holds no interruptions",
}
# The most lines of the log of a capture.
_LOG_LINES = 40
_OVERLOADS = "profiler.experimental_config={capture_overload_names: true}"
# What each grouping needs in the trace, and how to record it. Grouping by thread needs nothing.
_GROUPED_BY = {
    "input_shapes": ("input shapes", "record it with profiler.record_shapes=true"),
    "input_types": ("input types", "record it with profiler.record_shapes=true"),
    "stack": ("stacks", "record it with profiler.with_stack=true"),
    "overload": ("overloads", f"record it with {_OVERLOADS}"),
    "step": ("steps", "call session.step() after each step"),
    "device": ("device work", "record it with a device among profiler.activities"),
    "range": ("ranges", "mark code with @profiled"),
    "layer": ("layers", "give the session the model, or record with_stack=true"),
}


def check_sort(sort: str) -> str:
    """Return the column by which a sort key sorts the operator table.

    The key is the name of the column, or torch's name for it, such as "self_cpu_time_total".

    Raises:
        ConfigError: the operator table has no such column.
    """
    known = SORT_NAMES.get(sort, sort)
    if known not in OPERATOR_COLUMNS:
        hint = did_you_mean(sort, [*OPERATOR_COLUMNS, *SORT_NAMES])
        raise ConfigError(f"The table cannot be sorted by {sort!r}{hint}")
    return known


def check_columns(columns: Sequence[str] | None) -> list[str] | None:
    """Replace torch's names of columns by those of this package; keep None and `["all"]`.

    Raises:
        ConfigError: neither the operators nor the ranges have such a column.
    """
    if columns is None or is_every_column(columns):
        return None if columns is None else [*columns]
    for column in columns:
        if SORT_NAMES.get(column, column) not in {*OPERATOR_COLUMNS, *RANGE_COLUMNS}:
            hint = did_you_mean(
                column, dict.fromkeys([*OPERATOR_COLUMNS, *RANGE_COLUMNS, *SORT_NAMES])
            )
            raise ConfigError(f"The table has no column {column!r}{hint}")
    return [SORT_NAMES.get(column, column) for column in columns]


def render(capture: Views, **options: Any) -> str:
    """Return the capture as plain text; `options` and errors are those of `capture_parts`.

    Before the ranges and operators, the text says what slows a step and what to change first. If
    something is missing from the capture, the last line says so.
    """
    views = [name for name in ("ranges", "operators") if options.get(name, True)]
    tables = capture_parts(capture, **options)
    first = first_parts(capture) if len(views) == 2 else []
    return plain([*first, *tables, *missing_part(capture, views)])


def missing_part(capture: Views, views: Sequence[str]) -> list[Part]:
    """Return what is missing from these views as a paragraph, if anything is."""
    missing = incomplete(capture, views)
    return [wrapped(missing)] if missing else []


def log_block(capture: Views, rest: Path, width: int, **options: Any) -> str:
    """Return the first 40 lines of the text of `render`, for a log whose lines have `width`.

    The tables have as many rows as there is room for, and the columns that fit into a line. The
    last line names `rest`, the file with the whole text. `options` are those of `render`.
    """
    views = [name for name in ("ranges", "operators") if options.get(name, True)]
    first = first_parts(capture) if len(views) == 2 else []
    last, most = f"All of it: {printable(str(rest))}", options.get("rows", ALL)
    for rows in (20, 15, 12, 10, 8, 6, 4, 3, 2, 1):
        if rows > 1 and most != ALL and rows > most:
            continue
        parts = capture_parts(capture, **{**options, "rows": rows})
        tables = [part for part in parts if isinstance(part, Section)]
        without_path = heading(capture)[:-1]
        shown = [*first, without_path, *tables, *missing_part(capture, views)]
        blocks = [_narrow(part, width) for part in shown]
        if len("\n\n".join([*blocks, last]).split("\n")) <= _LOG_LINES:
            break
    while len(blocks) > 1 and len("\n\n".join([*blocks, last]).split("\n")) > _LOG_LINES:
        del blocks[-1]
    return "\n\n".join([*blocks, last])


def _narrow(part: Part, width: int) -> str:
    if isinstance(part, Section):
        return text(replace(part, all_columns=""), width)
    return "\n".join(_wrapped(part))


def capture_parts(
    capture: Views,
    *,
    rows: int = 15,
    sort: str | None = None,
    columns: Sequence[str] | None = None,
    by: By = "name",
    stack_depth: int = 5,
    ranges: bool = True,
    operators: bool = True,
    sort_ranges: str | None = None,
) -> list[Part]:
    """Return a capture as text and tables: heading, range tree, costliest operators, remarks.

    Args:
        capture: the capture.
        rows: the maximum number of rows in each table; -1 means all rows.
        sort: the column by which operators are sorted.
        columns: the columns to show; None shows the usual ones, ["all"] all columns with values.
        by: the property by which operators are grouped, in addition to their name.
        stack_depth: how many frames a stack has, for `by="stack"`.
        ranges: whether the range tree is shown.
        operators: whether the operators are shown.
        sort_ranges: the column by which a list of ranges is sorted; None shows ranges as a tree.

    Raises:
        ConfigError: `sort` or one of `columns` does not exist.
        CaptureError: the trace does not hold the property `by`.
        TraceError: the trace cannot be read.
    """
    sort, chosen = None if sort is None else check_sort(sort), check_columns(columns)
    usual = chosen is None or is_every_column(chosen)
    rows = sys.maxsize if rows == ALL else rows
    parts: list[Part] = [heading(capture)]
    if ranges:
        parts += [_range_part(capture, rows, chosen, sort_ranges), not_timed(capture)]
    if operators:
        table = _grouped(capture, by, stack_depth)
        parts.append(_operator_part(capture, table, rows, sort, chosen, by))
        parts.append(not_recorded(capture, table) if usual else "")
    parts.append(cost(capture) if usual else "")
    first, *others = (part for part in parts if part)
    return [first, *(part if isinstance(part, Section) else _wrapped(part) for part in others)]


def _wrapped(paragraph: str | list[str]) -> list[str]:
    return [line for each in lines_of(paragraph) for line in wrapped(each)]


def view_part(
    view: str,
    table: Table,
    *,
    rows: int,
    sort: str | None = None,
    columns: Sequence[str] | None = None,
) -> str | Section:
    """Return the first `rows` rows of a view's table, sorted by `sort` if it is given.

    Raises:
        ConfigError: the table has no such column.
    """
    chosen = () if columns is None or is_every_column(columns) else columns
    _check_known(view, table, filter(None, [sort, *chosen]))
    title, first = (
        view.capitalize().replace("_", " ").replace("Cuda", "CUDA"),
        (table.sort(sort) if sort else table).head(rows),
    )
    names = [TORCH_NAMES.get(name, name) for name in chosen] or known_columns(table)
    below: list[list[str]] = []
    if _REASON in names and not chosen:
        names.remove(_REASON)
        below = [[why] if why else [] for why in first.column(_REASON)]
    if not len(table):
        return f"{title}: {_WITHOUT.get(view, 'there are none')}."
    if not names:
        return (
            f"{title}: nothing was recorded; "
            "device columns need a device among profiler.activities."
        )
    return Section(
        first,
        _name_first(first, names),
        f"{title}{shown_of(len(first), len(table))}",
        chosen=bool(columns),
        key=sort and TORCH_NAMES.get(sort, sort),
        below=below,
        sentences=True,
        texts=label_texts(view, table),
    )


def label_texts(view: str, table: Table) -> dict[str, Callable[[Any], str]]:
    """Return the function that gives the label of a kernel, for the column with kernels' names."""
    column = _KERNELS_IN.get(view)
    if column is None:
        return {}
    labels = kernel_labels(name for name in table.column(column) if name is not None)
    return {column: lambda name: printable(labels[name])}


def sort_keys(sort: str | None, *, ranges: bool, operators: bool) -> tuple[str | None, str | None]:
    """Return the sort keys of the operators and of the ranges; one of them is None.

    If both tables have the column `sort`, it is the key of the operators.

    Raises:
        ConfigError: no table that is shown has such a column.
    """
    if sort is None:
        return None, None
    known = SORT_NAMES.get(sort, sort)
    if operators and known in OPERATOR_COLUMNS:
        return known, None
    if ranges and known in _SORTED_RANGES:
        return None, known
    if operators:
        return check_sort(sort), None
    hint = did_you_mean(sort, [*_SORTED_RANGES, *TORCH_NAMES])
    raise ConfigError(f"The ranges cannot be sorted by {sort!r}{hint}")


def as_json(
    capture: Views,
    views: Sequence[str],
    *,
    rows: int = ALL,
    sort: str | None = None,
    by: By = "name",
    stack_depth: int = 5,
) -> str:
    """Return views of the capture as JSON: its name, and the rows of each view with all columns.

    A view without the column `sort` is not sorted. If data is missing from these views, the JSON
    key "incomplete" holds the rows of `capture.coverage` that say what is missing.

    Raises:
        CaptureError: the trace does not hold the property `by`.
        ConfigError: none of the views has the column `sort`.
        TraceError: the trace cannot be read.
    """
    ordered = _ordered(capture, views, sort, by, stack_depth)
    tables = {view: table.head(rows).to_dicts() for view, table in ordered.items()}
    missing = losses(capture, rows_of(views))
    more = {"incomplete": missing} if missing else {}
    return json_text({"name": capture.name, **tables, **more})


def as_csv(
    capture: Views,
    view: str,
    *,
    rows: int = ALL,
    sort: str | None = None,
    columns: Sequence[str] | None = None,
    by: By = "name",
    stack_depth: int = 5,
) -> str:
    """Return a view of the capture as CSV; see `Table.to_csv`, and `capture_parts` for the options.

    Raises:
        CaptureError: the trace does not hold the property `by`.
        ConfigError: the view has no such column.
        TraceError: the trace cannot be read.
    """
    (table,) = _ordered(capture, [view], sort, by, stack_depth).values()
    return chosen_columns(view, table.head(rows), columns).to_csv()


def chosen_columns(view: str, table: Table, columns: Sequence[str] | None) -> Table:
    """Return a table with the columns that a user chose; None or ["all"] means all columns.

    Raises:
        ConfigError: the table has no such column.
    """
    if columns is None or is_every_column(columns):
        return table
    _check_known(view, table, columns)
    return table.select(columns)


def _check_known(view: str, table: Table, columns: Iterable[str]) -> None:
    for name in columns:
        if TORCH_NAMES.get(name, name) not in table.columns:
            raise ConfigError(
                f"The view {view} has no column {name!r}{did_you_mean(name, table.columns)}"
            )


def _ordered(
    capture: Views, views: Sequence[str], sort: str | None, by: By, stack_depth: int
) -> dict[str, Table]:
    """Return the table of each view, sorted by the column `sort` if the table has it."""
    found = {view: getattr(capture, view) for view in dict.fromkeys(views)}
    if "operators" in found:
        found["operators"] = _grouped(capture, by, stack_depth)
    if "kernels" in found and by == "layer":
        found["kernels"] = capture.kernels_by_layer()
    key = SORT_NAMES.get(sort, sort) if sort else None
    if key and not any(key in table.columns for table in found.values()):
        columns = dict.fromkeys(name for table in found.values() for name in table.columns)
        raise ConfigError(f"The views cannot be sorted by {sort!r}{did_you_mean(sort, columns)}")
    return {
        view: table.sort(key) if key in table.columns else table for view, table in found.items()
    }


def _range_part(
    capture: Views, rows: int, columns: list[str] | None, sort: str | None
) -> str | Section:
    """Return the tree of ranges; if it has more rows than `rows`, or with `sort`, a list."""
    table = capture.ranges
    if not len(table):
        return f"No ranges: {range_advice(capture)}"
    if is_every_column(columns):
        columns = known_columns(table, RANGE_COLUMNS)
    if sort is None and columns is None:
        table = folded(table)
    if sort is None and len(table) > rows:
        sort = share_of(table)
    has_backward = any(table.column("backward_ns"))
    usual = {*_USUAL_OF_RANGES, *(_WHERE_BACKWARD if has_backward else ()), sort}
    usual |= {"recompute_ns"} if any(table.column("recompute_ns")) else set()
    rest = capture.ranges_rest.to_dicts()
    shown = outline(table, rest) if sort is None else leading_ranges(table, rest, sort, rows)
    names = columns or known_columns(table, (name for name in RANGE_COLUMNS if name in usual))
    return Section(
        shown,
        _name_first(shown, names),
        ranges_title(capture, min(rows, len(table)), len(table), sort),
        chosen=columns is not None,
        key=sort,
        is_tree=sort is None,
        of_cost=True,
        rest=len(shown) - min(rows, len(table)),
    )


def _operator_part(
    capture: Views, table: Table, rows: int, sort: str | None, columns: list[str] | None, by: By
) -> str | Section:
    if not len(table):
        return "No operators."
    sort, note = sort or costliest_by(table), ""
    if not known_columns(table, [sort]):
        note, sort = f"; {column_title(sort)} was not recorded", "self_cpu_ns"
    every, table = table, without_ranges(table)
    if not len(table):
        return "No operators."
    if is_every_column(columns):
        columns = known_columns(table, OPERATOR_COLUMNS)
    has_sums = columns is None or any(name in OWN_COLUMNS for name in columns)
    shown = _with_waits(leading(every, sort, rows) if has_sums else table.sort(sort).head(rows))
    usual = (name for name in OPERATOR_COLUMNS if name == sort or name not in _ON_REQUEST)
    beside = [by] if by in _BESIDE else []
    key_share = "device_share" if sort == "self_device_ns" else "share"
    return Section(
        shown,
        _name_first(shown, [*beside, *(columns or known_columns(table, usual))]),
        operators_title(capture, rows, len(table), f"{column_title(sort)}{note}"),
        chosen=columns is not None,
        # the share of the time by which the operators are sorted stays
        missable=[name for name in _MISSABLE if name not in (sort, key_share)],
        key=sort,
        below=[_below(group) for group in shown.column(by)] if by != "name" and not beside else (),
        of_cost=True,
        rest=len(shown) - min(rows, len(table)),
    )


def _with_waits(table: Table) -> Table:
    """Add "(waiting)" to the names of calls in which the CPU only waits."""
    columns = {name: table.column(name) for name in table.columns}
    pairs = zip(columns["name"], columns["kind"])
    return Table(
        columns
        | {"name": [f"{name} (waiting)" if kind == "wait" else name for name, kind in pairs]}
    )


def _below(group: str | None) -> list[str]:
    """Return the lines to show below a row: the value of its group, such as a stack."""
    return [] if group in (None, "[]") else group.split(";")


def _grouped(capture: Views, by: By, depth: int) -> Table:
    if by == "name":
        return capture.operators
    table = capture.operators_by(by, depth=depth)
    if not known_columns(table, [by]):
        what, remedy = _GROUPED_BY[by]
        raise CaptureError(f"{capture.name} holds no {what} to group operators by: {remedy}.")
    return table


def _name_first(table: Table, columns: Iterable[str]) -> list[str]:
    """Return "name" and then the given columns, without the columns that the table lacks."""
    return [*dict.fromkeys(name for name in ("name", *columns) if name in table.columns)]
