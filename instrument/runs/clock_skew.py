"""Measure how far each rank's clock is ahead of the clock of the lowest rank.

A collective that synchronises the ranks ends at about the same moment on all ranks. So the clocks
are compared at the ends of these collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

import numpy as np

from instrument.analysis.collectives import DEVICE
from instrument.analysis.schema import Schema, schema
from instrument.analysis.table import Table
from instrument.links.groupby import Groups
from instrument.runs.matched_collectives import MatchedCollectives
from instrument.runs.rank_summary import OF_COLLECTIVE_GROUP, RankSummary
from instrument.trace.columns import BEYOND_NS
from instrument.trace.events import Ints

# At most this many collectives of a rank are compared.
_MOST = 128

CLOCKS: Schema = schema(
    rank="the rank",
    offset_ns="how far the rank's clock is ahead of the lowest rank's clock: the median difference "
    "at the ends of the compared collectives",
    uncertainty_ns="the median distance of these differences from `offset_ns`. If the rank has no "
    "collective in common with the lowest rank, its clock is compared with the clocks of other "
    "ranks, and the largest `uncertainty_ns` of these ranks is added. None if only one collective "
    "was compared, or if `uncertainty_ns` of one of these ranks is None",
    matched="how many collectives were compared",
)
_Ends = dict[int, int]


class Clock(NamedTuple):
    """How far a rank's clock is ahead of the lowest rank's clock; see the columns of `CLOCKS`."""

    offset_ns: int
    uncertainty_ns: int | None
    matched: int

    def corrected_ns(self, times_ns: Ints) -> Ints:
        """Convert times to the lowest rank's clock, limited to ±`BEYOND_NS`."""
        shifted = np.clip(times_ns, -BEYOND_NS, BEYOND_NS) - self.offset_ns
        return np.clip(shifted, -BEYOND_NS, BEYOND_NS)


# By the key of a collective: when the collective ended on the lowest rank's clock, and the clock
# from which this time was converted.
_Aligned = dict[int, tuple[int, Clock]]


def measure(collectives: MatchedCollectives) -> list[Clock | None]:
    """Return the clock of each rank, measured at the ends of collectives; None if not possible.

    A rank without a collective in common with the lowest rank is compared with ranks whose clocks
    are already measured; the largest of their uncertainties is added to its own. Only the last 128
    collectives of each rank are compared, and those on the CPU only if none are on the device.
    """
    ends = _ends(collectives)
    found: dict[int, Clock | None] = {0: Clock(0, 0, len(ends[0]))} if ends else {}
    aligned: _Aligned = {}
    reached = list(found)
    while reached:
        for k in reached:
            clock = found[k]
            if clock is not None:
                for key, end_ns in ends[k].items():
                    aligned.setdefault(key, (end_ns - clock.offset_ns, clock))
        reached = [
            k for k in range(len(ends)) if k not in found and not aligned.keys().isdisjoint(ends[k])
        ]
        found |= {k: _clock(ends[k], aligned) for k in reached}
    return [found.get(k) for k in range(len(ends))]


def clocks(summaries: Sequence[RankSummary], measured: Sequence[Clock | None]) -> Table:
    """Return one row for each summary; see `CLOCKS`."""
    rows = [(each.rank, *(clock or (None, None, 0))) for each, clock in zip(summaries, measured)]
    return Table.of_rows(CLOCKS, rows)


def _ends(found: MatchedCollectives) -> list[_Ends]:
    """Return the ends of each rank's last collectives, in Unix time on the rank's own clock."""
    runs_on = OF_COLLECTIVE_GROUP.index("runs_on")
    on_device = np.array([group[runs_on] == DEVICE for group in found.groups], np.bool_)
    chosen = on_device[found.group]
    is_time = np.abs(found.end_ns) < BEYOND_NS
    ends = []
    for rows in Groups(found.owner, found.ranks).rows():
        rows = rows[is_time[rows]]
        used = rows[chosen[rows]] if chosen[rows].any() else rows
        last = used[np.argsort(found.end_ns[used], kind="stable")][-_MOST:]
        ends.append(dict(zip(found.key[last].tolist(), found.end_ns[last].tolist())))
    return ends


def _clock(ends: _Ends, aligned: _Aligned) -> Clock | None:
    shared = [(end_ns, *aligned[key]) for key, end_ns in ends.items() if key in aligned]
    ahead = [end_ns - aligned_ns for end_ns, aligned_ns, _ in shared]
    offset_ns = median_low(ahead)
    if abs(offset_ns) > BEYOND_NS:
        return None
    before_ns = [clock.uncertainty_ns for _, _, clock in shared]
    known_ns = [each for each in before_ns if each is not None]
    if len(ahead) == 1 or len(known_ns) < len(before_ns):
        return Clock(offset_ns, None, len(ahead))
    apart = sorted(abs(each - offset_ns) for each in ahead)[len(ahead) // 2]
    return Clock(offset_ns, max(known_ns) + apart, len(ahead))
