"""Match the collectives of all ranks: find the records of the same collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from instrument.read.facts.groupby import group_rows, intern
from instrument.read.ranks.rank_summary import OF_COLLECTIVE_GROUP, RankSummary, column_of_all
from instrument.read.trace.columns import BEYOND_NS
from instrument.read.trace.events import Flags, Ints


@dataclass(frozen=True, slots=True)
class MatchedCollectives:
    """The recorded collectives of all ranks, one rank after the other.

    The columns `owner` to `bytes` have one element for each collective that a rank recorded.

    Attributes:
        owner: the rank, as the index of its summary.
        key: the number of the collective. Elements of different ranks with the same key are records
            of the same collective.
        group: the process group and kind, as an index into `groups`.
        start_ns, end_ns: the start and the end in Unix time, on the rank's own clock.
        bytes: the size of the message; -1 if it is not known.
        groups: the distinct process groups and kinds of collectives. Each item is a tuple of the
            values of the columns `OF_COLLECTIVE_GROUP`.
        ranks: the number of summaries.
    """

    owner: Ints
    key: Ints
    group: Ints
    start_ns: Ints
    end_ns: Ints
    bytes: Ints
    groups: list[tuple[Any, ...]]
    ranks: int


def match(summaries: Sequence[RankSummary]) -> MatchedCollectives:
    """List the collectives of all ranks, with the same key for records of the same collective.

    - With torch's sequence numbers, records of different ranks match if they have the same process
      group, kind and sequence number. All ranks of a process group count its collectives in the
      same order. Coalesced collectives have the same number, and match in order of start.
    - Without sequence numbers, records match if they have the same name, process group, kind, step
      and ordinal. The ordinal counts the collectives of the same name and ranks in a step.

    If the process groups were not recorded, all ranks are treated as one process group.

    Cost: all collectives are sorted once.
    """
    sizes = [len(summary.collectives.get("end_ns") or ()) for summary in summaries]
    every = [summary.collectives for summary in summaries]
    owner = np.repeat(np.arange(len(summaries)), sizes)
    listed = [_groups(summary) for summary in summaries]
    own = np.cumsum([0, *map(len, listed)])[owner] + column_of_all(every, "group", sizes)
    unnamed, groups = intern(each[1:] for groups in listed for each in groups)
    group, number = unnamed[own], column_of_all(every, "number", sizes)
    numbered = number >= 0
    keys: list[Ints | Flags] = [group, number]
    if not numbered.all():
        named, _ = intern(each for groups in listed for each in groups)
        step, ordinal = (column_of_all(every, name, sizes) for name in ("step", "ordinal"))
        keys = [
            numbered,
            np.where(numbered, group, named[own]),
            np.where(numbered, number, step),
            np.where(numbered, 0, ordinal),
        ]
    key = group_rows(*keys).of
    start = column_of_all(every, "start_ns", sizes)
    own_keys = np.sort(owner * (key.max(initial=0) + 1) + key)
    if (own_keys[1:] == own_keys[:-1]).any():  # coalesced collectives have the same number
        nth = group_rows(owner, key).sorted_by(start).ordinals()
        key = group_rows(key, np.where(numbered, nth, 0)).of
    base = np.array([each.base_ns for each in summaries], np.int64)[owner]
    start, end = (
        np.clip(times, -BEYOND_NS, BEYOND_NS) + base
        for times in (start, column_of_all(every, "end_ns", sizes))
    )
    size = column_of_all(every, "bytes", sizes)
    return MatchedCollectives(owner, key, group, start, end, size, groups, len(summaries))


def _groups(summary: RankSummary) -> list[tuple[Any, ...]]:
    """The collectives' name and the values of `OF_COLLECTIVE_GROUP`, for each group."""
    columns = summary.collective_groups
    count = max((len(column or ()) for column in columns.values()), default=0)
    names = ("name", *OF_COLLECTIVE_GROUP)
    return [*zip(*(columns.get(name) or [None] * count for name in names))] if count else []
