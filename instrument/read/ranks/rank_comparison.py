"""Compare the ranks of one window: each rank's steps, the ranges, and the stragglers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median_low
from typing import Any

import numpy as np
import polars as pl
from polars import selectors as cs

from instrument.base.step_times import counting
from instrument.read.facts.collective_records import is_collective
from instrument.read.facts.schema import Schema, schema
from instrument.read.ranks.rank_summary import UNKNOWN, Ranges, RankSummary, column_of_all
from instrument.read.trace.columns import Interned
from instrument.read.trace.events import Codes
from instrument.read.views.table import Table

# A rank is a straggler if its `own_ns` is above the median by more than 3 standard deviations, and
# by more than 0.1 of the median. The standard deviation is estimated as 1.4826 times the median
# absolute deviation, which is exact for a normal distribution.
_DEVIATIONS, _PER_DEVIATION, _LEAST_SHARE = 3, 1.4826, 0.1
_OF_STEPS = (
    "compute_ns",
    "communication_ns",
    "exposed_communication_ns",
    "exposed_copy_ns",
    "idle_ns",
)

RANKS: Schema = schema(
    rank="the rank",
    host="the name of the rank's machine",
    steps="how many steps ended in the window",
    trace="`cut short` if the trace file of the rank is cut short, so that steps may be missing; "
    "else None",
    step_ns="the mean duration of the steps that count; these columns are means over them",
    own_ns="mean per step: time in which the rank does not wait in communication. This is "
    "`step_ns` minus `exposed_communication_ns`",
    compute_ns="mean per step: time in which a memset, or a kernel that is not communication, ran",
    communication_ns="mean per step: time in which communication ran",
    exposed_communication_ns="mean per step: time in which communication ran, but no compute",
    exposed_copy_ns="mean per step: time in which copies ran, but no compute and no communication",
    idle_ns="mean per step: time in which nothing ran on the device",
    exposed_share="`exposed_communication_ns` divided by `step_ns`",
)
RANK_RANGES: Schema = schema(
    path="the path of the range",
    ranks="how many ranks recorded the range. Ranks whose trace is cut short count in no column",
    calls="the number of calls, summed over the ranks",
    cpu_min_ns="the lowest of the ranks' CPU times per step",
    cpu_median_ns="the median of the ranks' CPU times per step (the lower one of two middle "
    "values)",
    cpu_max_ns="the highest of the ranks' CPU times per step",
    slowest="the rank with the most CPU time; the lowest rank if several are equal",
    spread="the difference of `cpu_max_ns` and `cpu_min_ns`, divided by `cpu_median_ns`",
    device_min_ns="the lowest of the ranks' device times per step; None if there are no device "
    "events",
    device_median_ns="the median of the ranks' device times per step",
    device_max_ns="the highest of the ranks' device times per step",
)
STRAGGLERS: Schema = schema(
    rank="the rank that other ranks wait for",
    host="the name of the rank's machine",
    own_ns="mean per step: time in which the rank does not wait in communication",
    median_own_ns="the median of `own_ns` over all ranks whose trace is not cut short",
    excess="the fraction by which `own_ns` is above `median_own_ns`",
    exposed_communication_ns="how long the rank waits in communication per step",
    others_exposed_communication_ns="the median of `exposed_communication_ns` over the ranks that "
    "are not stragglers",
    idle_ns="how long the rank's device is idle per step",
    others_idle_ns="the median of `idle_ns` over the ranks that are not stragglers",
    range="the range that is slowest compared with other ranks: its self time in the steps that "
    "count is furthest above the median of the ranks that have this range, or above 0 if only "
    "stragglers have it",
    range_excess_ns="the self time of `range` on this rank, minus this median, per step",
)


def per_rank(summaries: Sequence[RankSummary]) -> Table:
    """Return one row for each rank, with the mean times of its steps; see `RANKS`.

    The times are None if no step of the rank ended.
    """
    rows = []
    for summary in summaries:
        kept = counting(summary.steps.duration_ns)
        step, *means = (_mean(summary, name, kept) for name in ("duration_ns", *_OF_STEPS))
        row = dict(zip(_OF_STEPS, means))
        exposed = row["exposed_communication_ns"]
        known = step is not None and exposed is not None
        row |= {"rank": summary.rank, "host": summary.host, "steps": len(summary.steps)}
        row["trace"] = "cut short" if summary.cut_short else None
        row |= {"step_ns": step, "own_ns": step - exposed if known else None}
        rows.append(row | {"exposed_share": exposed / step if known and step else None})
    return Table.of_dicts(RANKS, rows)


def whole(summaries: Sequence[RankSummary]) -> list[RankSummary]:
    """The ranks whose trace is not cut short: what the cut leaves out would move their figures.

    All ranks, if the traces of all are cut short.
    """
    return [each for each in summaries if not each.cut_short] or [*summaries]


def _mean(summary: RankSummary, name: str, kept: slice) -> Any:
    counted = getattr(summary.steps, name)[kept]
    return sum(counted) // len(counted) if counted and UNKNOWN not in counted else None


def missing(summaries: Sequence[RankSummary], world_size: int | None) -> list[int]:
    """Return the ranks that should have recorded but have no capture; [] if this is not known."""
    asked = summaries[0].ranks
    every = range(world_size or 0) if asked in ("all", "one_per_role") else []
    planned = {*asked} if isinstance(asked, list) else {*every}
    return sorted(planned - {summary.rank for summary in summaries if summary.rank is not None})


def _all_ranges(summaries: Sequence[RankSummary]) -> tuple[pl.DataFrame, list[str]]:
    """The ranges of all ranks, one rank after the other, and the texts of the column `path`.

    `owner` is the index of the rank's summary.
    """
    listed = [summary.ranges for summary in summaries]
    paths, codes = Interned(), dict[int, Codes]()
    for each in listed:
        if id(each.path) not in codes:  # most ranks share the list of another rank
            codes[id(each.path)] = paths.codes(each.path, len(each))
    columns = {name: column_of_all(listed, name) for name in Ranges.__struct_fields__[1:]}
    columns["path"] = np.concatenate([np.zeros(0, np.int32), *(codes[id(x.path)] for x in listed)])
    columns["owner"] = np.repeat(np.arange(len(listed)), [len(each) for each in listed])
    frame = pl.DataFrame(columns).with_columns(cs.ends_with("_ns", "calls").replace(UNKNOWN, None))
    return frame, [*paths]


def _median(name: str) -> pl.Expr:
    """The lower one of two middle values."""
    return pl.col(name).quantile(0.5, "lower").cast(pl.Int64)


def ranges(summaries: Sequence[RankSummary]) -> Table:
    """Return one row for each path of ranges; see `RANK_RANGES`.

    The paths of the first rank come first, in the order of its summary. Then come the paths that
    only other ranks have. Ranks whose trace is cut short are left out, unless all are.
    """
    summaries = whole(summaries)
    frame, paths = _all_ranges(summaries)
    rank = pl.Series("rank", [summary.rank for summary in summaries], pl.Int64)
    cpu, device, calls = pl.col("cpu_ns"), pl.col("device_ns"), pl.col("calls")
    rows = (
        frame.with_columns(rank=rank.gather(frame["owner"]))
        .group_by("path")
        .agg(
            ranks=pl.len().cast(pl.Int64),
            calls=calls.sum(),
            cpu_min_ns=cpu.min(),
            cpu_median_ns=_median("cpu_ns"),
            cpu_max_ns=cpu.max(),
            slowest=pl.col("rank").filter(cpu == cpu.max()).min(),
            device_min_ns=device.min(),
            device_median_ns=_median("device_ns"),
            device_max_ns=device.max(),
        )
        .sort("path")
    )
    apart, usual = pl.col("cpu_max_ns") - pl.col("cpu_min_ns"), pl.col("cpu_median_ns")
    spread = pl.when(usual > 0).then(apart / usual)
    texts = pl.Series("path", paths, pl.String).gather(rows["path"])
    return Table.of(RANK_RANGES, rows.with_columns(texts, spread=spread))


def stragglers(summaries: Sequence[RankSummary], ranks: Table) -> Table:
    """Return the slow ranks for which other ranks wait, the slowest first; `ranks` is `per_rank`.

    In synchronous training, the steps of all ranks take equally long, because each rank waits in
    the collectives for the slowest rank, which waits least. So ranks are compared by `own_ns`, the
    time of a step without waiting in collectives. A rank is a straggler if its `own_ns` is above
    the median by more than three robust standard deviations, and by more than a tenth.

    See `STRAGGLERS`. The table is empty if there is no straggler, or if the times of steps or of
    communication are not known. Ranks whose trace is cut short are left out, unless all are.
    """
    summaries = whole(summaries)
    table = ranks.where("own_ns is not null")
    if len(summaries) < len(ranks):
        table = table.where(trace=None)
    own = table.column("own_ns")
    usual = median_low(own) if own else 0
    deviation = median_low([abs(each - usual) for each in own]) if own else 0
    limit = straggler_limit(usual, deviation)
    slow = table.where(f"own_ns > {limit}").sort("own_ns")
    others = table.where(f"own_ns <= {limit}")
    common: dict[str, int | None] = {"median_own_ns": usual}
    for name in ("exposed_communication_ns", "idle_ns"):
        known = [cell for cell in others.column(name) if cell is not None]
        common[f"others_{name}"] = median_low(known) if known else None
    where = _most_above(summaries, {*slow.column("rank")}) if len(slow) else {}
    rows = []
    for row in slow:
        path, above_ns = where.get(row.rank, (None, None))
        excess = row.own_ns / usual - 1 if usual else None
        more = {"excess": excess, "range": path, "range_excess_ns": above_ns}
        rows.append(row._asdict() | common | more)
    return Table.of_dicts(STRAGGLERS, rows)


def straggler_limit(usual: Any, deviation: Any) -> Any:
    """Return above which time a rank is a straggler, by the median and the median deviation."""
    by_deviation = usual + _DEVIATIONS * _PER_DEVIATION * deviation
    return np.maximum(by_deviation, usual * (1 + _LEAST_SHARE))


def _most_above(
    summaries: Sequence[RankSummary], slow: Collection[int | None]
) -> dict[int | None, tuple[str, int]]:
    """The path of each rank's range that is slowest compared with other ranks, and by how many ns.

    Its self time, on the CPU or on the device, is furthest above the median of the ranks that have
    it: the stages of a pipeline differ. What only `slow` ranks have, such as a checkpoint, takes 0
    on the others. Ranges that a process group records, such as "nccl:all_reduce", are left out.
    """
    frame, paths = _all_ranges(summaries)
    ours = [k for k, path in enumerate(paths) if not is_collective(path.rpartition("/")[2])]
    is_slow = pl.col("owner").is_in([k for k, each in enumerate(summaries) if each.rank in slow])
    others = (~is_slow).any().over("path")
    above = [
        pl.col(name) - pl.when(others).then(_median(name).over("path")).otherwise(0)
        for name in ("self_cpu_ns", "self_device_ns")
    ]
    most = (
        frame.select("path", "owner", above=pl.max_horizontal(above))
        .filter(pl.col("above") > 0, pl.col("path").is_in(ours))
        .sort("above", descending=True, maintain_order=True)
        .unique("owner", keep="first")
    )
    rows = most.select("owner", "path", "above").iter_rows()
    return {summaries[owner].rank: (paths[path], above) for owner, path, above in rows}
