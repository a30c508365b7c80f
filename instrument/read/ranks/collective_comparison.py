"""Compare the ranks' collectives: transfer time, waiting time, and the rank that arrived last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np

from instrument.read.facts.groupby import Groups, at, cells, distinct, groupby
from instrument.read.facts.schema import Schema, schema
from instrument.read.ranks.clock_skew import Clocks
from instrument.read.ranks.matched_collectives import MatchedCollectives
from instrument.read.ranks.rank_summary import RankSummary
from instrument.read.trace.columns import BEYOND_NS
from instrument.read.trace.events import Flags, Ints
from instrument.read.views.collectives import OF_GROUP, bandwidths
from instrument.read.views.table import Table

# The links of a group are slow below this fraction of the median of at least so many groups.
_SLOW, _LEAST_ALIKE = 0.5, 4

RANK_COLLECTIVES: Schema = schema(
    kind="all_reduce, all_gather, reduce_scatter, all_to_all or barrier",
    process_group="torch's name for the process group; None if it is not recorded",
    description="what the process group is for, such as default_pg",
    ranks="the ranks of the group, as Kineto writes them. If they are not recorded, the value is "
    "None, and all ranks count as one group",
    group_size="how many ranks the group has",
    runs_on="device, or CPU for gloo and MPI",
    recorded_ranks="how many ranks recorded the collectives",
    calls="the number of collectives that two or more ranks recorded; of more than 512 "
    "collectives of a rank, only the last 384 and 128 early ones are compared",
    bytes="the sizes of the messages as NCCL counts them, summed over the calls whose size is "
    "known",
    duration_ns="the total time of all calls, averaged over the ranks",
    transfer_ns="the part of `duration_ns` that is transfer. For each call, this is the shortest "
    "time of any rank, because that rank waited least",
    waiting_ns="the rest of `duration_ns`: waiting for other ranks, averaged over the ranks",
    waiting_share="`waiting_ns` divided by `duration_ns`",
    skew_ns="the mean time between the arrivals of the first and the last rank, on one clock (see "
    "`Ranks.clocks`); None if the clocks cannot be compared",
    max_skew_ns="the longest time between the arrivals of the first and the last rank",
    last_rank="the rank that caused the most waiting by arriving last; None if the clocks cannot "
    "be compared",
    last_share="the share of the calls at which `last_rank` arrived last",
    last_waiting_ns="the part of `waiting_ns` that `last_rank` caused by arriving last",
    algorithm_bytes_per_second="bytes divided by the time of the transfer, over the calls whose "
    "size is known",
    bus_bytes_per_second="`algorithm_bytes_per_second` times NCCL's factor for `kind` and "
    "`group_size`. Compare this column with the rate of the link",
    usual_bus_bytes_per_second="the median of `bus_bytes_per_second` over the groups of the same "
    "kind, description and size whose messages are alike, to a power of two; None if they are "
    "fewer than four. With less than half of it, the links of a group are slow",
)


def collectives(
    summaries: Sequence[RankSummary], found: MatchedCollectives, clocks: Clocks
) -> Table:
    """Return one row for each process group and kind of collective; see `RANK_COLLECTIVES`.

    The row with the longest waiting time comes first. The rank that arrives last does not wait, so
    its time is the shortest, and is taken as the time of the transfer; an upper bound, if not all
    ranks of a process group recorded. The order of two arrivals is uncertain if they are closer
    than the uncertainty of the clocks.

    The table has only collectives that no rank can leave before the others arrive: no broadcasts,
    reduces, gathers, scatters and transfers between two ranks.
    """
    several = np.bincount(found.key)[found.key] > 1
    owner, group = found.owner[several], found.group[several]
    duration = (found.end_ns - found.start_ns)[several]
    calls = groupby(found.key[several])[1]
    first = calls.min(np.arange(len(owner)))
    shortest = calls.min(duration)
    # No call is empty; `calls.sum` takes several times as long.
    ordered, start = duration[calls.in_order.order], calls.in_order.start
    mean = np.add.reduceat(ordered, start) // calls.size
    size = -calls.min(-found.bytes[several])
    # `groups` groups the collectives by process group and kind.
    present, groups = groupby(group[first])
    chosen = [found.groups[k] for k in present.tolist()]
    arrival = clocks.corrected_ns(owner, found.start_ns[several])
    # `corrected_ns` clips impossible times to the limit, so a time at the limit is unknown.
    known = clocks.known[owner] & (np.abs(arrival) < BEYOND_NS)
    is_known = calls.number(~known) == 0
    latest = -calls.min(-arrival)
    skew = latest - calls.min(arrival)
    last = calls.min(np.where(arrival == latest[calls.of], owner, found.ranks))
    sized = size >= 0
    sums = zip(groups.sums(size, sized), groups.sums(shortest, sized))
    kind, count = (OF_GROUP.index(name) for name in ("kind", "group_size"))
    rates = [bandwidths(each[kind], each[count], *both) for each, both in zip(chosen, sums)]
    waiting, whole = groups.sum(mean - shortest).tolist(), groups.sum(mean).tolist()
    pairs = distinct(group * found.ranks + owner)
    recorded = np.bincount(pairs // max(found.ranks, 1), minlength=len(found.groups))[present]
    clocked = groups.number(is_known)
    skews = groups.sum(skew, is_known)
    columns: dict[str, list[Any]] = {
        **{name: [each[k] for each in chosen] for k, name in enumerate(OF_GROUP)},
        "recorded_ranks": recorded.tolist(),
        "calls": groups.size.tolist(),
        "bytes": groups.sums(size, sized),
        "duration_ns": whole,
        "transfer_ns": groups.sum(shortest).tolist(),
        "waiting_ns": waiting,
        "waiting_share": [
            part / all_ns if all_ns else None for part, all_ns in zip(waiting, whole)
        ],
        "skew_ns": cells(skews // np.maximum(clocked, 1), clocked > 0),
        "max_skew_ns": cells(-groups.min(np.where(is_known, -skew, 0)), clocked > 0),
        **_last(summaries, groups, last, mean - shortest, is_known),
        "algorithm_bytes_per_second": [rate for rate, _ in rates],
        "bus_bytes_per_second": [rate for _, rate in rates],
    }
    columns["usual_bus_bytes_per_second"] = _usual(columns)
    return Table.of(RANK_COLLECTIVES, columns).sort("waiting_ns")


def slow_groups(table: Table) -> list[Any]:
    """The rows of groups with less than half of the usual bus bandwidth, the slowest first.

    Their links are slow, or one of them is.
    """
    slow = table.where(f"bus_bytes_per_second < {_SLOW} * usual_bus_bytes_per_second")
    return sorted(slow, key=lambda row: row.bus_bytes_per_second / row.usual_bus_bytes_per_second)


def _usual(columns: Mapping[str, Sequence[Any]]) -> list[int | None]:
    """The median bus bandwidth of the groups that are like each group."""
    names = ("kind", "description", "group_size", "runs_on", "bytes", "calls")
    rates = columns["bus_bytes_per_second"]
    keys = [
        (*about, (size // calls).bit_length()) if size and rate else None
        for *about, size, calls, rate in zip(*(columns[name] for name in names), rates)
    ]
    alike: dict[Any, list[int]] = {}
    for key, rate in zip(keys, rates):
        alike.setdefault(key, []).append(rate)
    usual = {k: median_low(each) for k, each in alike.items() if k and len(each) >= _LEAST_ALIKE}
    return [usual.get(key) for key in keys]


def _last(
    summaries: Sequence[RankSummary], groups: Groups, last: Ints, waiting: Ints, known: Flags
) -> dict[str, list[Any]]:
    """The columns `last_…`: the rank that caused the most waiting because it came last."""
    pair, each = groupby(groups.of[known] * len(summaries) + last[known])
    times, caused = each.size, each.sum(waiting[known])
    most = Groups(pair // len(summaries), groups.count).sorted_by(caused, times).row(100)
    owner, calls = at(pair % len(summaries), most), groups.number(known).tolist()
    return {
        "last_rank": [None if k is None else summaries[k].rank for k in owner],
        "last_share": [n if n is None else n / of for n, of in zip(at(times, most), calls)],
        "last_waiting_ns": at(caused, most),
    }
