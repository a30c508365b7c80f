"""Sums over the steps of a capture, by range, operator, kernel and input shapes.

The sums of several captures, such as the windows of a run, can be added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import numpy as np

from instrument.read.compare.counters import Counters
from instrument.read.facts.device_work import COPY, KINDS, launched_ns
from instrument.read.facts.flops import UNKNOWN
from instrument.read.facts.groupby import Groups
from instrument.read.facts.segments import plain_path, step_parts
from instrument.read.facts.step_index import CountedSteps
from instrument.read.views.table import Table
from instrument.read.views.views import Views

#: The quantities of one range, operator or kernel, by name; None if a quantity is not known.
Quantities = dict[str, int | None]
Rows = dict[Any, Quantities]

_OF_OPERATORS = (
    "calls",
    "self_cpu_ns",
    "self_device_ns",
    "self_cpu_bytes",
    "self_device_bytes",
    "flops",
)
# The counter that is a maximum, and not a sum.
_PEAK = "peak_bytes"
# These kinds of rows in the table of operators are not operators.


@dataclass(frozen=True)
class Totals:
    """Sums over the steps that count of one or several captures; see `CountedSteps`.

    Attributes:
        captures: the names of the captures.
        what: "step", or "recording" if a capture has no finished steps, so that its whole recording
            is summed.
        steps_ns: the duration of each step.
        parts: the time of the steps by range and kind; see `instrument.read.facts.segments`.
        ranges: the quantities of each range, by its path.
        operators: the quantities of each operator and each call of the device's runtime, by name.
        shapes: the quantities of operators by name and input shapes; empty if no shapes were
            recorded.
        kernels: the quantities of kernels and copies, by name and kind.
        counters: the counters of each range and the ranges inside it, by its path. The key None
            holds the counters of whole steps. See `instrument.read.compare.counters`.
        counted_steps: the number of steps over which `counters` are summed.
    """

    captures: tuple[str, ...]
    what: Literal["step", "recording"]
    steps_ns: tuple[int, ...]
    parts: dict[tuple[str, str], int]
    ranges: Rows
    operators: Rows
    shapes: Rows
    kernels: Rows
    counters: Rows
    counted_steps: int


def totals(capture: Views, counted: Counters) -> Totals:
    """Return the sums over the counted steps of a capture.

    Raises:
        CaptureError: the capture holds no trace.
        TraceError: the trace cannot be read.
    """
    span = capture.links.counted_steps
    parts = step_parts(capture)
    part = capture.during(where="counted")
    of_operators, shapes = part.operators, part.operators_by("input_shapes")
    has_shapes = any(shapes.column("input_shapes"))
    return Totals(
        captures=(capture.name,),
        what=span.what,
        steps_ns=tuple((span.end_ns - span.start_ns).tolist()),
        parts=parts,
        ranges=_ranges(capture, span, parts),
        operators=_summed(_called(of_operators), _OF_OPERATORS, lambda row: plain_path(row.name)),
        shapes=_summed(_called(shapes), _OF_OPERATORS, lambda row: (row.name, row.input_shapes))
        if has_shapes
        else {},
        kernels=_kernels(part),
        counters=_counters(counted),
        counted_steps=counted.steps,
    )


def added(every: Iterable[Totals]) -> Totals:
    """Add the sums of several captures."""
    return reduce(_add, every)


def _add(one: Totals, other: Totals) -> Totals:
    tables = ("ranges", "operators", "shapes", "kernels", "counters")
    rows = {name: _add_rows(getattr(one, name), getattr(other, name)) for name in tables}
    peaks = [each.counters[None].get(_PEAK) for each in (one, other)]
    rows["counters"][None][_PEAK] = max((peak for peak in peaks if peak is not None), default=None)
    parts = Counter(one.parts)
    parts.update(other.parts)
    return Totals(
        captures=one.captures + other.captures,
        what=one.what if one.what == other.what else "recording",
        steps_ns=one.steps_ns + other.steps_ns,
        parts=parts,
        counted_steps=one.counted_steps + other.counted_steps,
        **rows,
    )


def _add_rows(one: Rows, other: Rows) -> Rows:
    return {key: plus(one.get(key, {}), other.get(key, {})) for key in one | other}


def plus(one: Mapping[str, int | None], other: Mapping[str, int | None]) -> Quantities:
    """Add the quantities of two rows by name. A quantity that only one row knows is kept."""
    found: Quantities = {}
    for name in {**one, **other}:
        pair = [each for each in (one.get(name), other.get(name)) if each is not None]
        found[name] = sum(pair) if pair else None
    return found


def _called(table: Table) -> Table:
    return table.where("kind not in ('range', 'step', 'mark')")


def _summed(table: Table, names: Iterable[str], key: Callable[[Any], Any]) -> Rows:
    found: Rows = {}
    for row in table:
        own = {name: getattr(row, name) for name in names}
        found[key(row)] = plus(found.get(key(row), {}), own)
    return found


def _kernels(part: Views) -> Rows:
    """The quantities of the kernels and copies that the steps launched, by name and kind."""
    names = ("calls", "device_ns", "launch_ns")
    found = _summed(part.kernels, names, lambda row: (row.name, row.kind))
    names = ("calls", "device_ns", "bytes")
    moved = _summed(part.copies, names, lambda row: (row.name, KINDS[COPY]))
    return _add_rows(found, moved)


def _ranges(capture: Views, span: CountedSteps, parts: Mapping[tuple[str, str], int]) -> Rows:
    """The quantities of each range that ran in the steps, by its path."""
    columns = _columns_of_ranges(capture, span)
    step_ns: dict[str, int] = {}
    for (text, _), total in parts.items():
        step_ns[text] = step_ns.get(text, 0) + total
    found: Rows = {}
    for k, text in enumerate(map(plain_path, capture.links.scopes.paths.texts)):
        own: Quantities = {name: cells[k] for name, cells in columns.items()}
        own["step_ns"] = step_ns.pop(text, 0)
        if any(own.values()):
            found[text] = plus(found.get(text, {}), own)
    # The remaining time is in no range, in a loader outside all ranges, or has no known launch.
    for text, total in step_ns.items():
        found[text] = plus(found.get(text, {}), {"step_ns": total})
    return found


def _columns_of_ranges(capture: Views, span: CountedSteps) -> dict[str, list[int | None]]:
    """Quantities of each path: with the backward of its ranges, without the ranges inside them.

    `calls` counts the ranges that began in the steps. What was not recorded is None.
    """
    events, links = capture.events, capture.links
    tree, scopes, count = links.call_tree, links.scopes, len(links.scopes.paths.texts)
    path = scopes.path_of_node[:-1]
    of_nodes, counts = Groups(path, count), (span.holds(tree.start_ns) >= 0) & (path >= 0)
    device, node = links.launched
    of_work = scopes.path_of_node[node]
    launched = (span.holds(launched_ns(events, capture.work)) >= 0) & (of_work >= 0)
    device_ns = Groups(of_work, count).sum(events.duration_ns[device], launched)
    flops = None if links.flops is None else np.where(links.flops == UNKNOWN, 0, links.flops)
    return {
        "calls": Groups(scopes.opened, count)
        .number(span.holds(scopes.ranges.start_ns) >= 0)
        .tolist(),
        "self_cpu_ns": of_nodes.sum(tree.own(links.spent_ns), counts).tolist(),
        "self_device_ns": of_nodes.cells(device_ns if len(device) else None),
        "flops": of_nodes.cells(None if flops is None else of_nodes.sum(flops, counts)),
    }


def _counters(counted: Counters) -> Rows:
    found: Rows = {None: {name: count and count.total for name, count in counted.counts.items()}}
    for path, counts in counted.ranges.items():
        own = {name: count.total for name, count in counts.items()}
        found[plain_path(path)] = plus(found.get(plain_path(path), {}), own)
    return found
