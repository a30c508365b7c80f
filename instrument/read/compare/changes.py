"""The rows of two sides matched: the change of each quantity of a mean step, with its interval.

The mean step is the total time of the steps divided by their number, rounded down to nanoseconds.
The parts are divided in the same way, and the missing nanoseconds are added to those with the
largest remainders. So the parts of each side sum to its step exactly, and their changes to its
change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from instrument.read.compare.counters import KIND, OF_WHOLE_STEP
from instrument.read.compare.statistics import shifts
from instrument.read.compare.sums import KEYS, Samples, Sums, summed
from instrument.read.facts.kernel_names import kernel_label
from instrument.read.facts.schema import Schema, schema
from instrument.read.views.table import Table

_STATUS = "added, removed, changed (another number of calls) or same (the same number of calls)"
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
_OF_KERNELS = _CALLS | {"device_ns": "device time", "bytes": "the bytes that copies moved"}
_TILE = re.compile(r" \d+(?:×\d+)+")
# The columns that name the rows of each table, and the quantities that are compared.
_TABLES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "ranges": ({"range": "the path of the range"}, _OF_RANGES),
    "operators": ({"name": "the operator or runtime call"}, _OF_OPERATORS),
    "shapes": ({"name": "the operator", "input_shapes": "its input shapes"}, _OF_OPERATORS),
    "kernels": (
        {
            "name": "the kernel, copy or memset; the label of kernels that are matched by it, "
            "because only their template arguments or tiles differ",
            "kind": "kernel, communication or copy; a memset is a copy",
            "before_full_name": "the whole name before the change, of several kernels joined by "
            "` + `; None if there is none",
            "after_full_name": "the same after the change",
        },
        _OF_KERNELS,
    ),
}


def _schema(keys: Mapping[str, str], quantities: Mapping[str, str]) -> Schema:
    columns = {**keys, "status": _STATUS}
    for name, doc in quantities.items():
        columns[f"before_{name}"] = f"in a mean step before the change: {doc}"
        columns[f"after_{name}"] = f"in a mean step after the change: {doc}"
        columns[f"change_{name}"] = f"`after_{name}` minus `before_{name}`"
        if name.endswith("_ns"):
            columns[f"low_{name}"] = f"the lower end of the 90 % interval of `change_{name}`; None "
            columns[f"low_{name}"] += "without three captures on each side"
            columns[f"high_{name}"] = "the upper end of this interval"
    return schema(**columns)


SCHEMAS = {name: _schema(*columns) for name, columns in _TABLES.items()} | {
    "counters": schema(
        range="the path of the range; None for whole steps. The counter of a range includes the "
        "ranges inside it",
        counter="the counter; docs/ci.md describes each",
        before="the counter's value in a mean step before the change. For peak_bytes, the highest "
        "value of all steps; for graph_breaks and recompilations, the sum over the windows. None "
        "if it is not known",
        after="the same value after the change",
        change="`after` minus `before`; None if one of them is not known",
    ),
    "parts": schema(
        range="the path of the range; (no range) outside of all ranges; (no launch) for device "
        "work whose launch is not in the trace",
        kind="compute, exposed communication, copy, waiting for data, launch, CPU operators, "
        "Python or idle; see `instrument.read.facts.segments`",
        before_ns="in a mean step before the change: the time that counts for this range and kind",
        after_ns="the same after the change",
        change_ns="`after_ns` minus `before_ns`",
        low_ns="the lower end of the 90 % interval of `change_ns`; None if there are too few "
        "captures: three on each side are enough",
        high_ns="the upper end of this interval",
    ),
}  # fmt: skip


def parts_compared(before: Samples, after: Samples) -> Table:
    """Compare the parts of the mean step, the largest change first."""
    joined = _joined(_mean_parts(before.all), _mean_parts(after.all), "parts")
    frame = _with_intervals(joined, "parts", before, after)
    order = [pl.col("change_ns").abs(), "after_ns", "range", "kind"]
    frame = frame.sort(order, descending=[True, True, False, False])
    return Table.of(SCHEMAS["parts"], frame.drop("was_here", "is_here"))


def compared(what: str, before: Samples, after: Samples, parts: Table) -> Table:
    """Compare the ranges, operators, shapes or kernels; the largest change of a time comes first.

    The columns `…_step_ns` of ranges are sums of `parts`, so that each adds up to the mean step.
    """
    if what == "kernels":
        before, after = _matched_by_label(before, after)
    was, now = (_means(side.all[what], side.all.steps) for side in (before, after))
    if what == "ranges":
        was, now = (_with_step(was, parts, "before_ns"), _with_step(now, parts, "after_ns"))
    frame = _with_intervals(_joined(was, now, what), what, before, after)
    largest = pl.max_horizontal(pl.col("^change_.*_ns$").abs()).fill_null(0)
    frame = frame.with_columns(status=_status()).sort(largest, descending=True, maintain_order=True)
    return Table.of(SCHEMAS[what], frame.drop("was_here", "is_here"))


def _with_step(ranges: pl.DataFrame, parts: Table, side: str) -> pl.DataFrame:
    step = parts.frame.group_by("range").agg(step_ns=pl.sum(side))
    joined = ranges.drop("step_ns").join(step, "range", "left", maintain_order="left")
    return joined.with_columns(pl.col("step_ns").fill_null(0))


def counters_compared(before: Sums, after: Sums) -> Table:
    """Compare all counters of the whole step, and each counter that differs in a range."""
    frame = _joined(_counters_per_step(before), _counters_per_step(after), "counters")
    whole = pl.col("range").is_null()
    family = pl.col("counter").str.replace(f"^{KIND}.*", KIND[:-1])
    for name, is_there in (("before", "was_here"), ("after", "is_here")):
        value = pl.col(f"{name}_value")
        known = frame.filter(whole, is_there, value.is_not_null())["counter"].to_list()
        # A range that has none of a counter has no row.
        cells = pl.when(is_there).then(value).when(family.is_in(known)).then(0)
        frame = frame.with_columns(cells.alias(name))
    frame = frame.filter(whole | pl.col("before").ne_missing(pl.col("after")))
    change = pl.col("after") - pl.col("before")
    return Table(frame.select("range", "counter", "before", "after", change=change))


def _counters_per_step(side: Sums) -> pl.DataFrame:
    steps = max(side.counter_steps, 1)

    def mean(name: str, total: int | None) -> float | None:
        if total is None or name in OF_WHOLE_STEP:
            return total
        if name.endswith("bytes") or total % steps == 0:
            return (2 * total + steps) // (2 * steps)
        return total / steps

    rows = side["counters"].select("counter", "value").iter_rows()
    return side["counters"].with_columns(
        value=pl.Series([mean(*row) for row in rows], strict=False)
    )


def _joined(was: pl.DataFrame, now: pl.DataFrame, what: str) -> pl.DataFrame:
    """An outer join, with the change of each quantity.

    Where a side lacks a row, its quantities are 0, or null if they are unknown in all its rows. The
    columns `was_here` and `is_here` say which sides have a row.
    """
    keys, sides = list(KEYS[what]), {"before": was, "after": now}
    quantities = [name for name in was.columns if was[name].dtype.is_numeric()]
    renamed = [
        frame.rename({name: f"{side}_{name}" for name in frame.columns if name not in keys})
        for side, frame in sides.items()
    ]
    joined = renamed[0].with_columns(was_here=True).join(
        renamed[1].with_columns(is_here=True), keys, "full", coalesce=True,
        nulls_equal=True, maintain_order="left_right",
    ).with_columns(pl.col("was_here", "is_here").fill_null(False))  # fmt: skip
    for (side, frame), is_here in zip(sides.items(), ("was_here", "is_here")):
        joined = joined.with_columns(
            pl.when(is_here).then(f"{side}_{name}").otherwise(absent).alias(f"{side}_{name}")
            for name in quantities
            for absent in [0 if frame[name].count() or what == "parts" else None]
        )
    return joined.with_columns(
        (pl.col(f"after_{name}") - pl.col(f"before_{name}")).alias(f"change_{name}")
        for name in quantities
    )


def _status() -> pl.Expr:
    same = pl.col("before_calls").eq_missing(pl.col("after_calls"))
    return (
        pl.when(~pl.col("was_here")).then(pl.lit("added"))
        .when(~pl.col("is_here")).then(pl.lit("removed"))
        .when(same).then(pl.lit("same")).otherwise(pl.lit("changed"))
    )  # fmt: skip


def _means(frame: pl.DataFrame, steps: int) -> pl.DataFrame:
    """Divide quantities by the number of steps. Times and bytes are rounded to integers."""

    def mean(name: str) -> pl.Expr | pl.Series:
        if name.endswith(("_ns", "bytes")) or not (frame[name] % steps).sum():
            return (2 * pl.col(name) + steps) // (2 * steps)
        # polars multiplies by the inverse, so that 6 / 5 would not be 1.2
        return pl.Series([None if total is None else total / steps for total in frame[name]])

    names = [name for name in frame.columns if frame.schema[name] == pl.Int64]
    return frame.with_columns(mean(name).alias(name) for name in names)


def _mean_parts(side: Sums) -> pl.DataFrame:
    """The parts of the mean step, in whole ns that sum exactly to it."""
    every = side["parts"]["ns"].to_list()
    means = divided(every, side.steps, sum(every) // side.steps)
    return side["parts"].with_columns(ns=pl.Series(means, dtype=pl.Int64))


def divided(values: Sequence[int], divisor: int, whole: int) -> list[int]:
    """Divide integers by `divisor` so that the quotients are integers that sum to `whole`.

    `whole` must be the sum of the values divided by `divisor`, rounded up or down.
    """
    found = [value // divisor for value in values]
    order = sorted(range(len(values)), key=lambda k: -(values[k] % divisor))
    for k in order[: whole - sum(found)]:
        found[k] += 1
    return found


def _with_intervals(
    frame: pl.DataFrame, what: str, before: Samples, after: Samples
) -> pl.DataFrame:
    """Add the columns `low_…` and `high_…` of each time: the 90 % intervals of its changes.

    They are null if there are fewer than three samples on a side.
    """
    keys = list(KEYS[what])
    for change in [name for name in frame.columns if name.startswith("change_")]:
        name, times = change.removeprefix("change_"), []
        if not name.endswith("ns"):
            continue
        for side in (before, after):
            columns = [
                frame.select(keys)
                .join(each[what].select(*keys, ns=pl.col(name) / each.steps), keys, "left",
                      nulls_equal=True, maintain_order="left")["ns"].fill_null(0).to_numpy()
                for each in side.each if each[what][name].count()
            ]  # fmt: skip
            times.append(np.stack(columns, axis=1) if columns else np.zeros((len(frame), 0)))
        for end, found in zip(("low", "high"), shifts(*times)):
            cells = None if found is None else pl.lit(pl.Series(np.rint(found)).cast(pl.Int64))
            interval = pl.when(pl.col(change).is_not_null()).then(cells).cast(pl.Int64)
            frame = frame.with_columns(interval.alias(f"{end}_{name}"))
    return frame


def _matched_by_label(before: Samples, after: Samples) -> tuple[Samples, Samples]:
    """Match kernels by their names, those that are left by their labels, then without tiles."""
    names = [_kernels(side) for side in (before, after)]
    renamed: dict[str, str] = {}
    for short in (kernel_label, _without_tile):
        left = [names[k] - names[1 - k] - renamed.keys() for k in (0, 1)]
        labels = [{short(name): name for name in each} for each in left]
        common = labels[0].keys() & labels[1].keys() - names[0] - names[1] - {*renamed.values()}
        renamed |= {name: short(name) for each in left for name in each if short(name) in common}
    return _renamed(before, renamed), _renamed(after, renamed)


def _kernels(side: Samples) -> set[str]:
    return {*side.all["kernels"].filter(pl.col("kind") != "copy")["name"]}


def _without_tile(name: str) -> str:
    return _TILE.sub("", kernel_label(name))


def _renamed(side: Samples, names: Mapping[str, str]) -> Samples:
    def one(sums: Sums) -> Sums:
        frame = sums["kernels"].with_columns(pl.col("name").replace(names))
        return replace(sums, frames={**sums.frames, "kernels": summed("kernels", frame)})

    full = side.all["kernels"].select("kind", pl.col("name").replace(names), full_name="name")
    full = full.group_by(KEYS["kernels"]).agg(pl.col("full_name").sort().str.join(" + "))
    whole = one(side.all)
    kernels = whole["kernels"].join(full, KEYS["kernels"], "left", maintain_order="left")
    frames = {**whole.frames, "kernels": kernels}
    return Samples([one(each) for each in side.each], replace(whole, frames=frames))
