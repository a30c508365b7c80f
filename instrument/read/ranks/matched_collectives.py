"""Match the collectives of all ranks: find the records of the same collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from instrument.read.facts.groupby import group_rows, intern
from instrument.read.ranks.rank_summary import UNKNOWN, RankSummary, column_of_all
from instrument.read.trace.columns import BEYOND_NS
from instrument.read.trace.events import Flags, Ints
from instrument.read.views.collectives import OF_GROUP


class MatchedCollectives(NamedTuple):
    """The recorded collectives of all ranks, one rank after the other.

    `owner` to `bytes` have one element for each collective that a rank recorded.

    Attributes:
        owner: the rank, as the index of its summary.
        key: elements of different ranks with the same key are records of the same collective.
        group: the process group and kind, as an index into `groups`.
        start_ns, end_ns: the start and the end in Unix time, on the rank's own clock.
        bytes: the size of the message; -1 if it is not known.
        groups: the distinct values of the columns `OF_GROUP`.
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
    every = [summary.collectives for summary in summaries]
    owner = np.repeat(np.arange(len(every)), [len(each) for each in every])
    listed = [_groups(summary) for summary in summaries]
    own = np.cumsum([0, *map(len, listed)])[owner] + column_of_all(every, "group")
    unnamed, groups = intern(each[1:] for groups in listed for each in groups)
    group, number = unnamed[own], column_of_all(every, "number")
    numbered = number >= 0
    keys: list[Ints | Flags] = [group, number]
    if not numbered.all():
        named, _ = intern(each for groups in listed for each in groups)
        keys = [
            numbered,
            np.where(numbered, group, named[own]),
            np.where(numbered, number, column_of_all(every, "step")),
            np.where(numbered, 0, column_of_all(every, "ordinal")),
        ]
    key = group_rows(*keys).of
    start, end = column_of_all(every, "start_ns"), column_of_all(every, "end_ns")
    own_keys = np.sort(owner * (key.max(initial=0) + 1) + key)
    if (own_keys[1:] == own_keys[:-1]).any():  # coalesced collectives have the same number
        nth = group_rows(owner, key).sorted_by(start).ordinals()
        key = group_rows(key, np.where(numbered, nth, 0)).of
    base = np.array([each.base_ns for each in summaries], np.int64)[owner]
    start, end = (np.clip(times, -BEYOND_NS, BEYOND_NS) + base for times in (start, end))
    size = column_of_all(every, "bytes")
    return MatchedCollectives(owner, key, group, start, end, size, groups, len(summaries))


def _groups(summary: RankSummary) -> list[tuple[Any, ...]]:
    """The name and the values of `OF_GROUP` of each group of a rank's collectives."""
    columns = [getattr(summary.collective_groups, name) for name in ("name", *OF_GROUP)]
    return [tuple(None if cell == UNKNOWN else cell for cell in row) for row in zip(*columns)]
