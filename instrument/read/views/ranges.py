"""The range tree: annotations, nested by time on each thread and summed by path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.base.range_names import RECOMPUTED, REGION, RESUMED
from instrument.read.facts import memory_attribution
from instrument.read.facts.attribution import (
    ACCUMULATE,
    BACKWARD,
    FORWARD,
    KINDS,
    OPTIMIZER,
    RECOMPUTE,
    UNATTRIBUTED,
    AttributedWork,
    attributed_work,
)
from instrument.read.facts.call_tree import CallTree
from instrument.read.facts.groupby import Groups, cells, groupby, intern
from instrument.read.facts.intervals import Intervals, concatenated, merged, within
from instrument.read.facts.links import Links
from instrument.read.facts.paths import NO_LAUNCH, NO_RANGE, NO_RANGES_BACKWARD, Paths
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import (
    Events,
    Flags,
    Ints,
    flags,
)
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

RANGES: Schema = schema(
    path="the names of the ranges around this range on the same thread, and the name of this "
    "range, joined by /; in a path longer than 2,000 characters, a hash replaces the middle. "
    "Ranges inside 1,000 other ranges are left out",
    name="the range's name",
    module_type="the class of the submodule that has the range's name; None if the session had no "
    "such submodule",
    depth="the number of ranges around this range; 0 for an outermost range",
    calls="the number of calls that began in the window; 0 if all calls began before the window "
    "and were only resumed in it",
    slices="the number of uninterrupted parts of calls. A call that is suspended and resumed (a "
    "coroutine, a generator) has several slices",
    cpu_ns="CPU time between start and end",
    cpu_ns_per_step="the part of `cpu_ns` in the steps that count (all finished ones but the "
    "first), divided by their number; None if no step is finished",
    share="`self_total_ns` as a fraction of the CPU time of all threads. Only time in the steps "
    "that count is taken; if no step is finished, all time",
    device_share="the device time of the work that the range and its backward launched, as a "
    "fraction of all device time. Work that was launched by the ranges inside this range, or by "
    "their backward, is not part of the share. Only work that was launched in the steps that count "
    "is taken, or, if its launch is not in the trace, work that started in them. If no step is "
    "finished, all work",
    self_cpu_ns="`cpu_ns` without the time of the ranges directly inside this range",
    self_total_ns="`total_ns` without the `total_ns` of the ranges inside this range",
    total_ns="all CPU time that the range caused: forward, backward, accumulate, recompute and "
    "optimizer together, with each nanosecond counted once",
    forward_ns="the part of `cpu_ns` that is neither backward, recompute nor optimizer",
    backward_ns="time of the autograd nodes, on any thread, whose forward operator ran inside the "
    "range; None if the trace has no autograd nodes",
    accumulate_ns="time of autograd's AccumulateGrad nodes, which add gradients to `.grad`. They "
    "have no forward operator. So their time counts for the range of the autograd node before "
    "them, which is a guess",
    recompute_ns="the part of `cpu_ns` in ranges that activation checkpointing opens again during "
    "the backward",
    optimizer_ns="the part of `cpu_ns` in the ranges `Optimizer.step#…`, which torch opens. If the "
    "step calls a closure, the closure's forward and backward do not count",
    device_ns="device time of the events that were launched inside the range or by its backward, "
    "including the AccumulateGrad nodes of `accumulate_ns`. Each event counts once. None if the "
    "trace has no device events",
    device_ns_per_step="the part of `device_ns` that was launched in the steps that count, divided "
    "by their number",
    self_device_ns="device time of the events launched directly inside the range",
    device_busy_ns="time in which at least one of the device events of `device_ns` ran",
    device_idle_ns="the part of `cpu_ns` in which no device event of the whole trace ran",
    allocated_bytes="memory allocated by the range's own thread between start and end, on the CPU "
    "and devices together",
    bytes="memory allocated minus memory freed by the range's own thread between start and end, on "
    "the CPU and devices together",
    device_allocated_bytes="the part of `allocated_bytes` on devices",
    device_bytes="the part of `bytes` on devices",
    flops="floating-point operations inside the range and of its backward, by torch's formulas; "
    "None if no formula applied",
    flops_per_second="`flops` divided by `device_busy_ns`; if no device was recorded, divided by "
    "the CPU time of the range and its backward",
    min_ns="`cpu_ns` of the shortest call; None if calls were suspended, because the trace does "
    "not show which slice belongs to which call",
    median_ns="the median of `cpu_ns` over the calls, without interpolation (nearest rank)",
    p95_ns="the 95th percentile of `cpu_ns` over the calls, without interpolation (nearest rank)",
    max_ns="`cpu_ns` of the longest call",
)
_QUANTITIES = names_of(RANGES)[4:]
RANGES_BY_NAME: Schema = tuple(each for each in RANGES if each.name in ("name", *_QUANTITIES))
RANGES_ATTRIBUTION: Schema = schema(
    path="the path of the range; (no range) for time outside of all ranges",
    kind="backward, accumulate (AccumulateGrad nodes, whose range is a guess), optimizer, "
    "recompute, unattributed (backward nodes whose forward operator is not in the trace), or "
    "forward (all other time)",
    cpu_ns="CPU time; each nanosecond that a thread spent in CPU events is in exactly one row",
    device_ns="device time of the work that was launched during `cpu_ns`; None if the trace has no "
    "device events",
)
RANGES_REST: Schema = schema(
    name="(no range) for time outside of all ranges; (backward of no range) for the backward of "
    "operators that ran outside of all ranges or before the window; (no launch) for device work "
    "whose launch is not in the trace",
    self_cpu_ns="CPU time of the work in this row",
    self_total_ns="the same as `self_cpu_ns`",
    self_device_ns="device time of the work in this row",
    share="CPU time in the steps that count as a share; see `share` of `ranges`",
    device_share="device time of the steps that count as a share; see `device_share` of `ranges`",
)

COMPILED_RANGES: Schema = schema(
    name="the name of the range, which was called but cannot be timed",
    region="the compiled region that contains the range, as torch names the region",
)


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices, uninterrupted parts of calls, of all ranges, as parallel columns.

    Attributes:
        nodes: the slices as a tree, with their times.
        path: the path of each slice's range.
        resumed: whether the slice resumes a suspended call.
        spans: by column name, the quantities that are measured from start to end of a slice.
    """

    nodes: CallTree
    path: Ints
    resumed: Flags
    spans: dict[str, Ints | None]


@dataclass(frozen=True)
class RangeTree:
    """The ranges of a trace, and all work, from which the tables of ranges are made.

    `work` is the CPU and device time by range and kind. `steps` is the number of steps that count;
    0 if no step is finished.
    """

    paths: Paths
    slices: Slices
    work: AttributedWork
    steps: int

    @property
    def shared_ns(self) -> int:
        """The CPU time in ns that a `share` of 1 stands for."""
        return int(self.work.counted_cpu_ns.sum())

    @property
    def device_whole_ns(self) -> int:
        """The device time in ns that a `device_share` of 1 stands for."""
        launched = self.work.counted_device_ns
        return 0 if launched is None else int(launched.sum()) + self.work.counted_unlaunched_ns

    def shares(self, groups: Groups) -> dict[str, list[float | None]]:
        """The columns `share` and `device_share` of groups of work."""
        work = self.work
        return {
            name: [None] * groups.count
            if values is None or not whole
            else [part / whole for part in groups.sum(values).tolist()]
            for name, values, whole in (
                ("share", work.counted_cpu_ns, self.shared_ns),
                ("device_share", work.counted_device_ns, self.device_whole_ns),
            )
        }

    def quantities(self, groups: Groups) -> dict[str, Sequence[Any]]:
        """All columns of numbers, with a value for each group of paths."""
        spans, work = self._spans(groups), self.work
        stepped = spans.pop("stepped_ns")
        columns: dict[str, Sequence[Any]] = {
            **self._calls(groups),
            **self._on_cpu(groups),
            **self._device_and_flops(groups),
            **spans,
            **self.shares(_work_groups(groups, work.attributed)),
            "cpu_ns_per_step": [ns // self.steps if self.steps else None for ns in stepped],
        }
        return {name: columns[name] for name in _QUANTITIES}

    def _calls(self, groups: Groups) -> dict[str, list[Any]]:
        """The columns with numbers of calls and slices, and with percentiles of a call's time."""
        slices, total_ns = self.slices, self.slices.nodes.total_ns
        opened = Groups(groups.of[slices.path], groups.count)
        resumed, by_time = opened.number(slices.resumed), opened.sorted_by(total_ns)
        columns: dict[str, list[Any]] = {
            "calls": (opened.size - resumed).tolist(),
            "slices": opened.size.tolist(),
        }
        for name, percent in (("min_ns", 0), ("median_ns", 50), ("p95_ns", 95), ("max_ns", 100)):
            columns[name] = cells(total_ns[by_time.row(percent)], resumed == 0)
        return columns

    def _on_cpu(self, groups: Groups) -> dict[str, list[Any]]:
        """The columns of CPU time by kind of work."""
        work = self.work
        by_kind = {
            f"{KINDS[kind]}_ns": np.where(work.kind == kind, work.cpu_ns, 0)
            for kind in (FORWARD, BACKWARD, ACCUMULATE, RECOMPUTE, OPTIMIZER)
        }
        columns = {
            name: self.paths.summed(values, groups.of, groups.count, work.attributed).tolist()
            for name, values in (by_kind | {"total_ns": work.cpu_ns}).items()
        }
        for name, path in (("self_cpu_ns", work.enclosing), ("self_total_ns", work.attributed)):
            columns[name] = _work_groups(groups, path).sum(work.cpu_ns).tolist()
        if not np.isin(work.kind, (BACKWARD, ACCUMULATE, UNATTRIBUTED)).any():
            columns |= dict.fromkeys(
                ("backward_ns", "accumulate_ns", "recompute_ns"), [None] * groups.count
            )
        return columns

    def _device_and_flops(self, groups: Groups) -> dict[str, list[Any]]:
        """Device time and FLOPs of each group of ranges; `self_device_ns` excludes the backward."""
        work = self.work

        def of_both(values: Ints | None) -> Ints | None:
            if values is None:
                return None
            return self.paths.summed(
                values, groups.of, groups.count, work.enclosing, work.attributed
            )

        own = busy = None
        if work.device_ns is not None:
            direct = np.isin(work.kind, (FORWARD, RECOMPUTE, OPTIMIZER))
            own = _work_groups(groups, work.enclosing).sum(work.device_ns, direct)
            busy = self._busy(groups)
        stepped = of_both(work.counted_device_ns) if self.steps else None
        known = of_both(work.operations)
        flops = groups.cells(of_both(work.flops), None if known is None else known > 0)
        time = groups.cells(of_both(work.cpu_ns) if busy is None else busy)
        return {
            "device_ns": groups.cells(of_both(work.device_ns)),
            "self_device_ns": groups.cells(own),
            "device_busy_ns": groups.cells(busy),
            "device_ns_per_step": groups.cells(None if stepped is None else stepped // self.steps),
            "flops": flops,
            "flops_per_second": [
                n * 10**9 // ns if n is not None and ns else None for n, ns in zip(flops, time)
            ],
        }

    def _spans(self, groups: Groups) -> dict[str, list[Any]]:
        """The columns of `Slices.spans`; a range inside another one of its group does not count."""
        slices = self.slices
        chosen = self.paths.outermost(groups.of)[slices.path]
        opened = Groups(groups.of[slices.path[chosen]], groups.count)
        return {
            name: opened.sums(None if values is None else values[chosen])
            for name, values in slices.spans.items()
        }

    def _busy(self, groups: Groups) -> Ints:
        """For each group, the time in which any of its device events ran.

        From the innermost path outwards, the intervals of a path are added to those of its parent.
        """
        busy = np.zeros(groups.count, np.int64)
        group, top = groups.of, self.paths.outermost(groups.of)
        alone = groups.number(top) == 1
        waiting = self._device_intervals()
        of_group: dict[int, list[Intervals]] = {}
        for path in range(len(group) - 1, -1, -1):
            if not (parts := waiting.pop(path, [])):
                continue
            whole = parts[0] if len(parts) == 1 else merged(*concatenated(parts))
            if (above := int(self.paths.above[path])) >= 0:
                waiting.setdefault(above, []).append(whole)
            if top[path]:
                of_group.setdefault(int(group[path]), []).append(whole)
                if alone[group[path]]:
                    start, end = of_group.pop(int(group[path]))[0]
                    busy[group[path]] = (end - start).sum()
        for number, parts in of_group.items():
            start, end = merged(*concatenated(parts))
            busy[number] = (end - start).sum()
        return busy

    def _device_intervals(self) -> dict[int, list[Intervals]]:
        place, start, end = self.work.device
        enclosing, attributed = self.work.enclosing[place], self.work.attributed[place]
        path, event = np.concatenate([enclosing, attributed]), np.tile(np.arange(len(place)), 2)
        event, path = event[path >= 0], path[path >= 0]
        of_paths = Groups(path, len(self.paths.names)).rows()
        parts = {number: event[rows] for number, rows in enumerate(of_paths) if len(rows)}
        return {number: [merged(start[k], end[k])] for number, k in parts.items()}


def _work_groups(groups: Groups, path: Ints) -> Groups:
    """The work in the groups of its paths; work without a path (-1) is in no group."""
    return Groups(np.append(groups.of, -1)[path], groups.count)


def range_tree(capture: Views) -> RangeTree:
    """Return the ranges of a trace and all its work.

    Cost: about 0.4 µs per event, at any depth of nesting. The call tree takes half of this time.
    """
    return capture.once("range tree", lambda: _range_tree(capture.links))


def _range_tree(links: Links) -> RangeTree:
    events, scopes = links.events, links.scopes
    resumed = flags(lambda name: name.endswith(RESUMED), events.names)[
        events.name[scopes.ranges.index]
    ]
    slices = Slices(scopes.ranges, scopes.opened, resumed, _spans(links, scopes.ranges))
    steps = links.counted_steps.count if len(links.steps) else 0
    return RangeTree(scopes.paths, slices, attributed_work(links), steps)


def ranges(capture: Views) -> Table:
    """Return one row for each path of ranges; see `RANGES`.

    A range comes before the ranges inside it, and siblings are sorted by their first start.
    docs/cli.md says what counts.

    Cost: the time of a device event is processed once for each range that the event counts for.
    """
    tree, module_types = range_tree(capture), capture.module_types
    paths = tree.paths
    labels: dict[str, Sequence[Any]] = {
        "path": paths.texts,
        "name": paths.names,
        "module_type": [module_types.get(name.removesuffix(RECOMPUTED)) for name in paths.names],
        "depth": paths.depths,
    }
    each = Groups(np.arange(len(paths.names)), len(paths.names))
    return Table.of(RANGES, labels | tree.quantities(each))


def ranges_by_name(capture: Views) -> Table:
    """Return the ranges grouped by name, in the order of the tree; see `RANGES_BY_NAME`.

    If a range is inside another range of the same name, `calls` counts both, and all else the outer
    one.
    """
    tree = range_tree(capture)
    number, names = intern(tree.paths.names)
    columns = {"name": names, **tree.quantities(Groups(number, len(names)))}
    return Table.of(RANGES_BY_NAME, columns)


def ranges_attribution(capture: Views) -> Table:
    """Return all CPU time, summed by range and kind of work; see `RANGES_ATTRIBUTION`."""
    tree = range_tree(capture)
    work = tree.work
    key, groups = groupby((work.attributed + 1) * len(KINDS) + work.kind)
    texts = [NO_RANGE, *tree.paths.texts]
    return Table.of(
        RANGES_ATTRIBUTION,
        {
            "path": [texts[k] for k in (key // len(KINDS)).tolist()],
            "kind": [KINDS[k] for k in (key % len(KINDS)).tolist()],
            "cpu_ns": groups.sums(work.cpu_ns),
            "device_ns": groups.sums(work.device_ns),
        },
    )


def ranges_rest(capture: Views) -> Table:
    """Return the work outside of all ranges; see `RANGES_REST`. Rows without work are left out."""
    tree = range_tree(capture)
    work = tree.work
    backward = np.isin(work.kind, (BACKWARD, ACCUMULATE, UNATTRIBUTED))
    rows: list[dict[str, Any]] = []
    for name, chosen in ((NO_RANGES_BACKWARD, backward), (NO_RANGE, ~backward)):
        part = chosen & (work.attributed < 0)
        cpu_ns = int(work.cpu_ns[part].sum())
        device_ns = None if work.device_ns is None else int(work.device_ns[part].sum())
        if cpu_ns or device_ns:
            shares = tree.shares(Groups(np.where(part, 0, -1), 1))
            own = {"self_cpu_ns": cpu_ns, "self_total_ns": cpu_ns, "self_device_ns": device_ns}
            rows.append({"name": name, **own, **{key: each[0] for key, each in shares.items()}})
    if work.unlaunched_ns:
        whole = tree.device_whole_ns
        share = work.counted_unlaunched_ns / whole if whole else None
        rows.append(
            {"name": NO_LAUNCH, "self_device_ns": work.unlaunched_ns, "device_share": share}
        )
    return Table.of_dicts(RANGES_REST, rows)


def compiled_ranges(capture: Views) -> Table:
    """Return the ranges inside the compiled regions that ran; see `COMPILED_RANGES`."""
    ran = {name.removeprefix(REGION) for name in capture.events.names if name.startswith(REGION)}
    here = [entry for entry in capture.about.compiled_ranges if entry.region in ran]
    return Table.of_rows(COMPILED_RANGES, [(entry.range, entry.region) for entry in here])


def total_ns_per_step(links: Links, groups: Groups, most: int) -> Ints:
    """Return `total_ns` by step: a row for each group, a column for each of the last `most` steps.

    Autograd nodes and calls of ranges count for the step in which they began. Cost: for each step,
    a pass over them.
    """
    scopes, steps = links.scopes, len(links.steps)
    spent = scopes.nodes.own(links.spent_ns[links.call_tree.nodes_of(scopes.nodes.index)])
    step = step_at(links.events, links.steps, scopes.nodes.start_ns)
    found = [np.zeros((groups.count, 0), np.int64)]
    for number in range(max(steps - most, 0), steps):
        here = step == number
        total = scopes.paths.summed(spent[here], groups.of, groups.count, scopes.attributed[here])
        found.append(total[:, None])
    return np.concatenate(found, axis=1)


def _spans(links: Links, opened: CallTree) -> dict[str, Ints | None]:
    """For each slice: CPU time, the devices' idle time, its thread's memory, and time in steps."""
    events, device = links.events, links.launches.device
    found: dict[str, Ints | None] = {"cpu_ns": opened.total_ns}
    found["device_idle_ns"] = _idle_ns(events, device, opened) if len(device) else None
    sizes = memory_attribution.sizes(events.memory)
    everywhere = events.memory.size_bytes if len(events.memory) else None
    for prefix, size in (("", everywhere), ("device_", sizes["device"])):
        for name, part in (
            ("bytes", size),
            ("allocated_bytes", None if size is None else np.maximum(size, 0)),
        ):
            total = None if part is None else memory_attribution.within(opened, events.memory, part)
            found[f"{prefix}{name}"] = total
    found["stepped_ns"] = links.counted_steps.within(opened.start_ns, opened.end_ns)
    return found


def _idle_ns(events: Events, device: Ints, opened: CallTree) -> Ints:
    busy = merged(events.start_ns[device], events.end_ns[device])
    return opened.total_ns - within(busy, opened.start_ns, opened.end_ns)
