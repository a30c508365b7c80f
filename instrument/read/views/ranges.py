"""The range tree: annotations, nested by time on each thread and summed by path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from instrument.base.range_names import RECOMPUTED, REGION, RESUMED
from instrument.read.facts import memory_attribution
from instrument.read.facts.autograd import (
    ACCUMULATE,
    BACKWARD,
    FORWARD,
    KINDS,
    OPTIMIZER,
    RECOMPUTE,
    UNATTRIBUTED,
    kinds_of_scopes,
)
from instrument.read.facts.call_tree import outermost
from instrument.read.facts.facts import nullable
from instrument.read.facts.groupby import Groups, distinct, intern, isin
from instrument.read.facts.intervals import merged, merged_in_groups, within
from instrument.read.facts.links import Links
from instrument.read.facts.paths import NO_LAUNCH, NO_RANGE, NO_RANGES_BACKWARD, Paths
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import Ints, flags
from instrument.read.views.table import Table, known_sum, shares

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

#: The kinds of work that a range itself does, on its own thread.
DIRECT = (FORWARD, RECOMPUTE, OPTIMIZER)
_OF_BACKWARD = (BACKWARD, ACCUMULATE, UNATTRIBUTED)
# The columns of `work` that are sums of columns of the table of events.
_SUMS = {
    "cpu_ns": "own_ns", "counted_cpu_ns": "counted_own_ns", "device_ns": "own_device_ns",
    "counted_device_ns": "counted_own_device_ns", "flops": "flops",
}  # fmt: skip
_AT_ONCE = 1024  # items whose paths are followed upwards at once, to save memory


def work(capture: Views) -> pl.DataFrame:
    """Return the time and FLOPs of all work that the CPU did or launched, by range and kind.

    Each nanosecond of a thread counts for the innermost range or backward node that is open then.
    `path` is the range that the work belongs to, and `around` is the range in which it ran, which
    differs in the backward. Both are indices into `links.scopes.paths`; -1 is no range. `kind` is
    an index into `KINDS`. Device work whose launch is not in the trace is left out.
    """
    return capture.once("work by range", lambda: _work(capture))


def _work(capture: Views) -> pl.DataFrame:
    links, scopes = capture.links, capture.links.scopes
    nodes = capture.facts.events(*_SUMS.values())[links.call_tree.index]
    sums = [known_sum(pl.col(column)).alias(name) for name, column in _SUMS.items()]
    by_scope = nodes.with_columns(scope=scopes.innermost).group_by("scope").agg(sums)
    scope = by_scope["scope"].to_numpy()
    keys = {
        "path": np.append(scopes.attributed, -1)[scope],
        "around": np.append(scopes.enclosing, -1)[scope],
        "kind": np.append(kinds_of_scopes(links.events, scopes), FORWARD)[scope],
    }
    rows = by_scope.drop("scope").with_columns(**keys).group_by([*keys])
    return rows.agg(known_sum(pl.col(*_SUMS))).sort([*keys])


def _unlaunched_ns(capture: Views) -> dict[str, int]:
    """The time of the device work whose launch is not in the trace, as in `work`."""
    device = capture.facts.events("operator", "duration_ns", "counted")[capture.work.event]
    every = device.filter(pl.col("operator").is_null())
    counted = every.filter("counted")
    times = (int(rows["duration_ns"].sum()) for rows in (every, counted))
    return dict(zip(("device_ns", "counted_device_ns"), times))


def shared_ns(capture: Views) -> int:
    """Return the CPU time in ns that a `share` of 1 stands for."""
    return int(work(capture)["counted_cpu_ns"].sum())


def _with_shares(capture: Views, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the columns `share` and `device_share` to sums of rows of `work`."""
    name = "counted_device_ns"
    device_ns = int(work(capture)[name].sum()) + _unlaunched_ns(capture)[name]
    return rows.with_columns(
        share=shares(rows["counted_cpu_ns"], shared_ns(capture)),
        device_share=shares(rows[name], device_ns),
    )


def ranges(capture: Views) -> Table:
    """Return one row for each path of ranges; see `RANGES`.

    A range comes before the ranges inside it, and siblings are sorted by their first start.
    docs/cli.md says what counts.

    Cost: about 0.4 µs per event; the time of a device event is processed once for each range that
    the event counts for.
    """
    paths, module_types = capture.links.scopes.paths, capture.module_types
    labels = {
        "path": paths.texts,
        "name": paths.names,
        "module_type": [module_types.get(name.removesuffix(RECOMPUTED)) for name in paths.names],
        "depth": paths.depths,
    }
    numbers = _quantities(capture, np.arange(len(paths.names)), len(paths.names))
    return Table.of(RANGES, labels | numbers.to_dict())


def ranges_by_name(capture: Views) -> Table:
    """Return the ranges grouped by name, in the order of the tree; see `RANGES_BY_NAME`.

    If a range is inside another range of the same name, `calls` counts both, and all else the outer
    one.
    """
    group, names = intern(capture.links.scopes.paths.names)
    numbers = _quantities(capture, group, len(names))
    return Table.of(RANGES_BY_NAME, {"name": names} | numbers.to_dict())


def _quantities(capture: Views, group: Ints, count: int) -> pl.DataFrame:
    """The columns of numbers, with a row for each group; `group` holds the group of each path."""
    rows, paths, has_device = work(capture), capture.links.scopes.paths, len(capture.work.event) > 0
    path, around, kind = (rows[name].to_numpy() for name in ("path", "around", "kind"))
    is_known = pl.col("flops").is_not_null().cast(pl.Int64)
    sums = rows.select(pl.col(*_SUMS).fill_null(0), is_known.alias("operations")).to_numpy()
    cpu_ns, counted_ns, device_ns, counted_device_ns, *_ = sums.T
    by_kind = np.where(kind[:, None] == np.arange(len(KINDS)), cpu_ns[:, None], 0)
    caused = sums_below(paths, group, count, by_kind, path)
    both = sums_below(paths, group, count, sums, path, around).T
    both_ns, _, both_device_ns, both_counted_ns, flops, operations = both
    at_path, at_around = (Groups(np.append(group, -1)[side], count) for side in (path, around))
    has_backward = np.isin(kind, _OF_BACKWARD).any()

    def known(values: Ints, is_known: Any) -> pl.Series:
        return nullable(values, np.full(count, is_known))

    found = _of_slices(capture, group).with_columns(
        self_cpu_ns=at_around.sum(cpu_ns),
        self_total_ns=at_path.sum(cpu_ns),
        total_ns=caused.sum(axis=1),
        forward_ns=caused[:, FORWARD],
        optimizer_ns=caused[:, OPTIMIZER],
        backward_ns=known(caused[:, BACKWARD], has_backward),
        accumulate_ns=known(caused[:, ACCUMULATE], has_backward),
        recompute_ns=known(caused[:, RECOMPUTE], has_backward),
        device_ns=known(both_device_ns, has_device),
        self_device_ns=known(at_around.sum(device_ns, np.isin(kind, DIRECT)), has_device),
        device_busy_ns=known(_busy_ns(capture, group, count), has_device),
        flops=nullable(flops, operations > 0),
        time_ns=both_ns,
        counted_cpu_ns=at_path.sum(counted_ns),
        counted_device_ns=known(at_path.sum(counted_device_ns), has_device),
        stepped_device_ns=known(both_counted_ns, has_device),
    )
    steps = pl.lit(capture.links.counted_steps.count, pl.Int64)
    steps = steps if len(capture.links.steps) else pl.lit(None, pl.Int64)
    time_ns = pl.coalesce("device_busy_ns", "time_ns")
    rate = pl.col("flops").cast(pl.Int128) * 10**9 // time_ns
    return (
        _with_shares(capture, found)
        .with_columns(
            cpu_ns_per_step=pl.col("stepped_ns") // steps,
            device_ns_per_step=pl.col("stepped_device_ns") // steps,
            flops_per_second=pl.when(time_ns > 0).then(rate).cast(pl.Int64, strict=False),
        )
        .select(_QUANTITIES)
    )


def sums_below(
    paths: Paths, group: Ints, count: int, values: Ints, path: Ints, around: Ints | None = None
) -> Ints:
    """Sum columns of values for each group of paths, in a row for each of `count` groups.

    A row of `values` counts for its path and all paths above it, once for each of their groups; so
    it does for a second path, which `around` holds. -1 is no path.

    Cost: linear; in rows with two different paths, also in the depth of these paths.
    """
    own = np.zeros((len(group) + 1, values.shape[1]), np.int64)  # the last row is for no path
    np.add.at(own, path, values)
    top = outermost(group, np.arange(len(group)), paths.after)
    sums = np.zeros((count, values.shape[1]), np.int64)
    np.add.at(sums, group[top], paths.with_descendants(own[:-1])[top])
    if around is None:
        return sums
    differs = np.flatnonzero(path != around)
    for begin in range(0, len(differs), _AT_ONCE):
        rows = differs[begin : begin + _AT_ONCE]
        pairs = (paths.at_or_above(side[rows]) for side in (around, path))
        found, counted = (row * count + group[above] for row, above in pairs)
        row, of = np.divmod(distinct(found[~isin(found, counted)]), count)
        np.add.at(sums, of, values[rows[row]])
    return sums


def _of_slices(capture: Views, group: Ints) -> pl.DataFrame:
    """Calls, slices and what is measured from their start to their end.

    A slice is an uninterrupted part of a call. The calls and their spread are of all slices; of the
    others, a range inside another one of its group does not count.
    """
    paths, path = capture.links.scopes.paths, capture.links.scopes.opened
    slices = capture.once("slices of ranges", lambda: _slices(capture.links))
    is_outer = outermost(group, np.arange(len(group)), paths.after)
    cpu_ns, size, resumed = pl.col("cpu_ns").sort(), pl.len().cast(pl.Int64), pl.sum("is_resumed")
    places = {"median_ns": (size - 1) // 2, "p95_ns": (95 * size + 99) // 100 - 1}
    places |= {"min_ns": pl.lit(0), "max_ns": size - 1}
    spread = {name: pl.when(resumed == 0).then(cpu_ns.get(at)) for name, at in places.items()}
    by_group = slices.with_columns(group=group[path], is_outer=is_outer[path]).group_by("group")
    return by_group.agg(
        known_sum(pl.exclude("is_resumed", "is_outer"), pl.col("is_outer")),
        calls=size - resumed,
        slices=size,
        **spread,
    ).sort("group")


def _slices(links: Links) -> pl.DataFrame:
    events, opened, device = links.events, links.scopes.ranges, links.launches.device
    is_resumed = flags(lambda name: name.endswith(RESUMED), events.names)
    found: dict[str, Any] = {
        "is_resumed": is_resumed[events.name[opened.index]],
        "cpu_ns": opened.total_ns,
        "stepped_ns": links.counted_steps.within(opened.start_ns, opened.end_ns),
        "device_idle_ns": None,
    }
    if len(device):
        busy = merged(events.start_ns[device], events.end_ns[device])
        found["device_idle_ns"] = opened.total_ns - within(busy, opened.start_ns, opened.end_ns)
    memory = events.memory
    everywhere = memory.size_bytes if len(memory) else None
    for prefix, size in ("", everywhere), ("device_", memory_attribution.sizes(memory)["device"]):
        parts = {"bytes": size, "allocated_bytes": None if size is None else np.maximum(size, 0)}
        for name, part in parts.items():
            total = None if part is None else memory_attribution.within(opened, memory, part)
            found[f"{prefix}{name}"] = total
    return pl.DataFrame(found).cast(pl.Int64)


def _busy_ns(capture: Views, group: Ints, count: int) -> Ints:
    """The time in which any of the device events ran that count for a range of the group.

    From the innermost paths outwards, the intervals of a path are added to those of its parent.
    """
    links, scopes, events = capture.links, capture.links.scopes, capture.events
    device, node = links.launched
    scope = np.append(scopes.innermost, -1)[node]
    path, around = (np.append(each, -1)[scope] for each in (scopes.attributed, scopes.enclosing))
    path = np.append(path, np.where(around == path, -1, around))
    start_ns, end_ns = (np.tile(side[device], 2) for side in (events.start_ns, events.end_ns))
    top = outermost(group, np.arange(len(group)), scopes.paths.after)
    is_alone = np.bincount(group[top], minlength=count) == 1
    busy_ns, depth = np.zeros(count, np.int64), np.array([*scopes.paths.depths, -1])
    several = [np.zeros((3, 0), np.int64)]  # the intervals of groups with several outermost paths
    for level in range(int(depth.max()), -1, -1):
        here = depth[path] == level
        at, begin_ns, until_ns = merged_in_groups(path[here], start_ns[here], end_ns[here])
        path = np.append(path[~here], scopes.paths.above[at])
        start_ns = np.append(start_ns[~here], begin_ns)
        end_ns = np.append(end_ns[~here], until_ns)
        of = np.where(top[at], group[at], -1)
        is_whole = np.append(is_alone, False)[of]
        np.add.at(busy_ns, of[is_whole], (until_ns - begin_ns)[is_whole])
        several.append(np.stack([of, begin_ns, until_ns])[:, (of >= 0) & ~is_whole])
    of, begin_ns, until_ns = merged_in_groups(*np.concatenate(several, axis=1))
    np.add.at(busy_ns, of, until_ns - begin_ns)
    return busy_ns


def ranges_attribution(capture: Views) -> Table:
    """Return all CPU time, summed by range and kind of work; see `RANGES_ATTRIBUTION`."""
    times = [known_sum(pl.col(name)) for name in ("cpu_ns", "device_ns")]
    found = work(capture).group_by("path", "kind").agg(times).sort("path", "kind")
    texts = pl.Series([*capture.links.scopes.paths.texts, NO_RANGE])
    labels = {"path": texts.gather(found["path"]), "kind": pl.Series(KINDS).gather(found["kind"])}
    return Table.of(RANGES_ATTRIBUTION, found.with_columns(**labels))


def ranges_rest(capture: Views) -> Table:
    """Return the work outside of all ranges; see `RANGES_REST`. Rows without work are left out."""
    rows, is_backward = work(capture).filter(pl.col("path") < 0), pl.col("kind").is_in(_OF_BACKWARD)
    names = pl.when(is_backward).then(pl.lit(NO_RANGES_BACKWARD)).otherwise(pl.lit(NO_RANGE))
    sums = rows.group_by(name=names).agg(known_sum(pl.col(*_SUMS)), self_total_ns=pl.sum("cpu_ns"))
    unlaunched = pl.DataFrame({"name": NO_LAUNCH, **_unlaunched_ns(capture)})
    found = pl.concat([sums.sort("name"), unlaunched], how="diagonal")
    found = found.filter((pl.col("cpu_ns") != 0) | (pl.col("device_ns") != 0))
    found = _with_shares(capture, found).rename(
        {"cpu_ns": "self_cpu_ns", "device_ns": "self_device_ns"}
    )
    return Table.of(RANGES_REST, found.select(names_of(RANGES_REST)))


def compiled_ranges(capture: Views) -> Table:
    """Return the ranges inside the compiled regions that ran; see `COMPILED_RANGES`."""
    ran = {name.removeprefix(REGION) for name in capture.events.names if name.startswith(REGION)}
    here = [entry for entry in capture.about.compiled_ranges if entry.region in ran]
    return Table.of_rows(COMPILED_RANGES, [(entry.range, entry.region) for entry in here])


def total_ns_per_step(links: Links, group: Ints, count: int, most: int) -> Ints:
    """Return `total_ns` by step: a row for each group, a column for each of the last `most` steps.

    `group` holds the group of each path. Autograd nodes and calls of ranges count for the step in
    which they began.
    """
    scopes, steps, paths = links.scopes, len(links.steps), links.scopes.paths
    spent = scopes.nodes.own(links.spent_ns[links.call_tree.nodes_of(scopes.nodes.index)])
    step = step_at(links.events, links.steps, scopes.nodes.start_ns)
    of_path = Groups(scopes.attributed, len(paths.names))
    own = [
        of_path.sum(spent, (step == number) & (scopes.attributed >= 0))
        for number in range(max(steps - most, 0), steps)
    ]
    return sums_below(paths, group, count, np.stack(own, axis=1), np.arange(len(paths.names)))
