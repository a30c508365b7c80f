"""The operator table: the columns of torch's `key_averages()`, from the trace file alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.base.errors import ConfigError
from instrument.base.range_names import STEP_PREFIX
from instrument.read.facts import memory_attribution
from instrument.read.facts.call_tree import CallTree
from instrument.read.facts.flops import UNKNOWN, has_rule, nodes_without_flops
from instrument.read.facts.groupby import groupby, intern
from instrument.read.facts.intervals import interval_at
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    Events,
    Flags,
    Ints,
    flags,
    is_loader,
    is_moment,
    is_runtime,
    is_step,
    is_wait,
    split_overload,
)
from instrument.read.views.operator_keys import (
    GROUPINGS,
    KINDS,
    Calls,
    Grouping,
    Outside,
    Quantities,
    Row,
)
from instrument.read.views.table import Table

MEMORY_ROW, UNLAUNCHED_ROW = "[memory]", "[no launch]"
_MEMORY, _UNLAUNCHED = (MEMORY_ROW, "memory"), (UNLAUNCHED_ROW, "unlaunched")
_TOTALS = frozenset({"cpu_ns", "device_ns", "cpu_bytes", "device_bytes"})
_NOTHING = Outside(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64))
_OF_UNLAUNCHED = frozenset({"device_ns", "self_device_ns"})
# For each share, the quantity of whose total it is a fraction.
_SHARES = {
    "share": "self_cpu_ns",
    "total_share": "cpu_ns",
    "device_share": "self_device_ns",
    "device_total_share": "device_ns",
}


OPERATORS: Schema = schema(
    name="the name of the operator, range or runtime call; [memory] for allocations and frees "
    "outside of calls; [no launch] for device work whose launch is not in the trace",
    calls="the number of calls",
    self_cpu_ns="CPU time of the calls without the calls inside them",
    share="`self_cpu_ns` as a fraction of the CPU time of all calls of all threads. Only time in "
    "the steps that count (all finished ones but the first) is taken; if no step is finished, all "
    "time",
    device_share="`self_device_ns` as a fraction of all device time. Only work that was launched "
    "in the steps that count is taken; if no step is finished, all work",
    total_share="like `share`, but with `cpu_ns` in place of `self_cpu_ns`: torch's CPU total %",
    device_total_share="like `device_share`, but with `device_ns` in place of `self_device_ns`: "
    "torch's CUDA total %",
    cpu_ns="CPU time of the calls, including the calls inside them",
    cpu_ns_per_call="`cpu_ns` divided by `calls`",
    self_device_ns="device time of the work that the calls themselves launched; None if the trace "
    "has no device events",
    device_ns="device time of the work that the calls and the calls inside them launched; None if "
    "the trace has no device events",
    device_ns_per_call="`device_ns` divided by `calls`",
    self_cpu_bytes="memory that the calls themselves allocated on the CPU, minus memory that they "
    "freed there; None if the trace has no memory events",
    cpu_bytes="memory that the calls and the calls inside them allocated on the CPU, minus memory "
    "that they freed there; None if the trace has no memory events",
    self_device_bytes="memory that the calls themselves allocated on devices, minus memory that "
    "they freed there; None if the trace has no memory events of a device",
    device_bytes="memory that the calls and the calls inside them allocated on devices, minus "
    "memory that they freed there; None if the trace has no memory events of a device",
    flops="floating-point operations of the calls without the calls inside them, by torch's "
    "formulas; None if they are not known",
    kind="operator, range, step, mark, loader, runtime call, wait (a call in which the CPU "
    "waits for the device), memory or unlaunched",
)
OPERATORS_WITHOUT_FLOPS: Schema = schema(
    name="the operator",
    has_rule="False if FLOPs have no formula, neither for the operator nor for an operator that it "
    "called. True if a formula exists, but its arguments were not recorded or not understood",
    calls="the number of calls",
    cpu_ns="CPU time of the calls, including the calls inside them",
    device_ns="device time of the work that the calls and the calls inside them launched; None if "
    "the trace has no device events",
)


def operators(operator_calls: Calls) -> Table:
    """Return one row for each name of an operator, annotation or runtime call; see `OPERATORS`.

    The rows are ordered by first call. The columns `share` and `device_share` each sum to 1, of the
    same totals as in `ranges`. docs/getting-started.md says how the table differs from torch's own.
    """
    return Table.of(OPERATORS, _rows(operator_calls))


def operators_by(links: Links, calls: Calls, what: str, depth: int = 5) -> Table:
    """Return one row for each name and value of a property; see `Views.operators_by`."""
    if what not in GROUPINGS:
        *most, last = GROUPINGS
        raise ConfigError(
            f"Operators cannot be grouped by {what!r}; choose {', '.join(most)} or {last}."
        )
    cells = _rows(calls, what, GROUPINGS[what](links, calls, depth))
    first, *others = names_of(OPERATORS)
    return Table({name: cells[name] for name in (first, what, *others)})


def during(calls: Calls, start_ns: Ints, end_ns: Ints) -> Calls:
    """Return the calls that began within spans of time, which are sorted and do not overlap."""
    return _only(calls, interval_at((start_ns, end_ns), calls.start_ns) >= 0)


def _only(calls: Calls, kept: Flags) -> Calls:
    inside = np.flatnonzero(kept)

    def chosen(columns: Mapping[str, Ints | None]) -> dict[str, Any]:
        return {name: None if c is None else c[inside] for name, c in columns.items()}

    return replace(
        calls,
        node=calls.node[inside],
        after=calls.after[inside],
        row=calls.row[inside],
        quantities=chosen(calls.quantities),
        counted=chosen(calls.counted),
    )


def operators_without_flops(links: Links) -> Table:
    """Return the operators whose FLOPs are not counted; see `OPERATORS_WITHOUT_FLOPS`.

    The longest device time, or else CPU time, comes first. A call is listed if no formula gives
    FLOPs for it, for a call inside it, or for a call around it; of nested calls, only the
    outermost.
    """
    events, call_tree = links.events, links.call_tree
    nodes = np.flatnonzero(nodes_without_flops(events, call_tree, links.flops))
    rows, row = _rows_of_nodes(events, call_tree)
    device = links.device_own_ns
    keys, groups = groupby(row[nodes])
    totals = None if device is None else call_tree.with_descendants(device)[nodes]
    ruled = events.named(has_rule)[call_tree.index].astype(np.int64)
    columns: dict[str, Any] = {
        "name": [rows[k][0] for k in keys.tolist()],
        "has_rule": groups.sum(call_tree.with_descendants(ruled)[nodes]) > 0,
        "calls": groups.size,
        "cpu_ns": groups.sums(call_tree.total_ns[nodes]),
        "device_ns": groups.sums(totals),
    }
    return Table.of(OPERATORS_WITHOUT_FLOPS, columns).sort(
        "cpu_ns" if device is None else "device_ns"
    )


def operator_calls(links: Links, chosen: Flags | None = None) -> Calls:
    """Return the calls that the operator table sums, of the chosen events if a mask is given.

    Cost: about 0.1 µs per event.
    """
    events, call_tree = links.events, links.call_tree
    rows, row = _rows_of_nodes(events, call_tree)
    names, _ = intern([name for name, _ in rows])
    kept = _kept(call_tree, names[row])
    cpu_ns, self_cpu_ns = call_tree.total_ns[kept], _folded(links.own_ns, kept)
    device = links.device_own_ns
    quantities: Quantities = {
        "cpu_ns": cpu_ns,
        "self_cpu_ns": self_cpu_ns,
        "device_ns": None if device is None else call_tree.with_descendants(device)[kept],
        "self_device_ns": None if device is None else _folded(device, kept),
        **_bytes(events, call_tree, kept),
        "flops": _flops(links.flops, kept),
    }
    # If all time counts, these columns are those of the quantities, and are not summed again.
    own, total = links.counted_own_ns, links.counted_ns
    counted = {
        "share": self_cpu_ns if own is links.own_ns else _folded(own, kept),
        "total_share": cpu_ns if total is call_tree.total_ns else total[kept],
    }
    if (in_steps := links.counted_device_own_ns) is not None:
        counted["device_share"] = _folded(in_steps, kept)
        counted["device_total_share"] = call_tree.with_descendants(in_steps)[kept]
    calls = Calls(
        tree=call_tree,
        outside=_NOTHING,
        node=kept,
        after=call_tree.until[kept],
        row=row[kept],
        rows=rows,
        quantities=quantities,
        counted=counted,
    )
    calls = _with_outside(calls, links)
    if chosen is None:
        return calls
    event = calls.event
    return _only(calls, (event >= 0) & chosen[event])


def _rows_of_nodes(events: Events, call_tree: CallTree) -> tuple[list[Row], Ints]:
    """The rows of the table, and for each node of the call tree the index of its row.

    The row depends only on an event's category and name, and is found once for each pair of them.
    """
    shown = [
        f"{STEP_PREFIX[:-1]}*" if name.startswith(STEP_PREFIX) else name for name in events.names
    ]
    plain = [split_overload(name)[0] for name in shown]
    others = (_MEMORY, _UNLAUNCHED)
    codes, names = intern([*shown, *plain, *(name for name, _ in others)])
    of_shown, of_plain, of_others = np.split(codes, [len(shown), 2 * len(shown)])
    # An array with a row for each role of a category, and a column for each name.
    operator, annotation, call, other = range(4)
    name, kind = np.tile(of_shown, (4, 1)), np.zeros((4, len(shown)), np.int64)
    name[operator] = of_plain
    kind[annotation] = KINDS.index("range")
    for what, test in (("step", is_step), ("mark", is_moment), ("loader", is_loader)):
        kind[:, flags(test, events.names)] = KINDS.index(what)
    kind[call] = KINDS.index("runtime")
    kind[call, flags(is_wait, events.names)] = KINDS.index("wait")
    kinds_of_others = np.array([KINDS.index(what) for _, what in others])
    keys, groups = groupby(
        np.append(name * len(KINDS) + kind, of_others * len(KINDS) + kinds_of_others)
    )
    rows = [(names[k // len(KINDS)], KINDS[k % len(KINDS)]) for k in keys.tolist()]
    role = np.full(len(events.categories), other, np.int32)
    role[flags(OPERATOR.__contains__, events.categories)] = operator
    role[flags(ANNOTATION.__contains__, events.categories)] = annotation
    role[flags(is_runtime, events.categories)] = call
    index = call_tree.index
    return rows, groups.of[(role * len(shown))[events.category[index]] + events.name[index]]


def _kept(call_tree: CallTree, name: Ints) -> Ints:
    """The nodes that remain when a child without siblings joins its parent of the same name.

    torch merges the same nodes, one pair after the other.
    """
    # A child directly follows its parent. If it is the only child, both have the same last
    # descendant; no other node has the same last descendant as the node before it.
    stays = np.ones(len(call_tree), np.bool_)
    np.not_equal(call_tree.until[1:], call_tree.until[:-1], out=stays[1:])
    stays[1:] |= name[1:] != name[:-1]
    return np.flatnonzero(stays)


def _folded(values: Ints, kept: Ints) -> Ints:
    """For each remaining node, the sum over the node and the nodes that are merged into it."""
    found: Ints = np.add.reduceat(values, kept)
    return found


def _bytes(events: Events, call_tree: CallTree, kept: Ints) -> Quantities:
    found: Quantities = {}
    for where, size in memory_attribution.sizes(events.memory).items():
        total = None if size is None else memory_attribution.within(call_tree, events.memory, size)
        found[f"{where}_bytes"] = None if total is None else total[kept]
        found[f"self_{where}_bytes"] = (
            None if total is None else _folded(call_tree.own(total), kept)
        )
    return found


def _flops(own: Ints | None, kept: Ints) -> Ints | None:
    if own is None:
        return None
    known = _folded((own != UNKNOWN).astype(np.int64), kept) > 0
    return np.where(known, _folded(np.maximum(own, 0), kept), UNKNOWN)


def _with_outside(calls: Calls, links: Links) -> Calls:
    """Add a call for each allocation outside of calls, and for device work without a launch."""
    events, memory, (device, node) = links.events, links.events.memory, links.launched
    bare, work = memory_attribution.uncovered(calls.tree, memory), device[node < 0]
    count = len(bare) + len(work)
    if not count:
        return calls
    sizes = memory_attribution.sizes(memory)

    def quantity(name: str, values: Ints | None) -> Ints | None:
        if values is None:
            return None
        size = sizes.get(name.removeprefix("self_").removesuffix("_bytes"))
        nothing = np.full(len(bare), UNKNOWN if name == "flops" else 0)
        is_known = name in _OF_UNLAUNCHED
        ran = events.duration_ns[work] if is_known else np.full(len(work), UNKNOWN)
        return np.concatenate([values, nothing if size is None else size[bare], ran])

    def counted(name: str, values: Ints) -> Ints:
        ran = links.counted_device_ns[node < 0] if name.startswith("device") else 0 * work
        return np.concatenate([values, 0 * bare, ran])

    kinds = [calls.rows.index(_MEMORY)] * len(bare) + [calls.rows.index(_UNLAUNCHED)] * len(work)
    number = len(calls.tree) + np.arange(count, dtype=np.int32)
    return replace(
        calls,
        outside=Outside(
            event=np.append(np.full(len(bare), -1), work),
            thread=np.append(memory.thread[bare], events.thread[work]),
            start_ns=np.append(memory.time_ns[bare], events.start_ns[work]),
        ),
        node=np.append(calls.node, number),
        after=np.append(calls.after, number + 1),
        row=np.append(calls.row, kinds),
        quantities={name: quantity(name, each) for name, each in calls.quantities.items()},
        counted={name: counted(name, each) for name, each in calls.counted.items()},
    )


def _rows(calls: Calls, what: str = "", grouping: Grouping | None = None) -> dict[str, list[Any]]:
    """The cells of the table, with the rows in the order of their first calls.

    If the table is grouped by the column `what`, `grouping` is an index for each call, and the
    values.
    """
    codes, labels = grouping or (0, [None])
    keys, groups = groupby(calls.row * len(labels) + codes)
    order = np.argsort(groups.min(calls.start_ns), kind="stable")
    rows = [calls.rows[k] for k in (keys[order] // len(labels)).tolist()]
    columns: dict[str, list[Any]] = {"name": [name for name, _ in rows]}
    if what:
        columns[what] = [labels[k] for k in (keys[order] % len(labels)).tolist()]
    columns["calls"] = groups.size[order].tolist()
    launched = np.array([name != UNLAUNCHED_ROW for name, _ in rows], np.bool_)
    outer = calls.outermost(groups)

    def sums(name: str, values: Ints | None) -> list[int | None]:
        where = outer if name in _TOTALS else None
        known = np.full(len(rows), True) if name in _OF_UNLAUNCHED else launched
        if name == "flops" and values is not None:
            where = values != UNKNOWN
            known = launched & (groups.number(where)[order] > 0)
        return groups.cells(None if values is None else groups.sum(values, where)[order], known)

    for name, quantity in calls.quantities.items():
        columns[name] = sums(name, quantity)
    for share, name in _SHARES.items():
        values = calls.counted.get(share)
        own = calls.counted.get(share.replace("total_", ""))
        whole = 0 if own is None else int(own.sum())
        parts = columns[name] if values is calls.quantities[name] else sums(name, values)
        columns[share] = [part / whole if part is not None and whole else None for part in parts]
    for of in ("cpu", "device"):
        pairs = zip(columns[f"{of}_ns"], columns["calls"])
        columns[f"{of}_ns_per_call"] = [
            None if time is None else time / calls for time, calls in pairs
        ]
    columns["kind"] = [kind for _, kind in rows]
    return columns
