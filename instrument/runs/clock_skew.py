"""Measure how far each rank's clock is ahead of the clock of the lowest rank.

A collective that synchronises the ranks ends at about the same moment on all ranks. So the clocks
are compared at the ends of these collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from instrument.analysis.collectives import DEVICE
from instrument.analysis.schema import Schema, schema
from instrument.analysis.table import Table
from instrument.runs.matched_collectives import MatchedCollectives
from instrument.runs.rank_summary import OF_COLLECTIVE_GROUP, RankSummary
from instrument.trace.columns import BEYOND_NS
from instrument.trace.events import Ints

# At most this many collectives of a rank are compared. The time to compute the drift grows with the
# square of their number.
_MOST = 128
# With fewer collectives a drift cannot be distinguished from jitter.
_FEWEST_FOR_DRIFT = 8
# A drift is used only if it explains the measured differences between two clocks. The median
# distance of the differences from a line with this slope must be at most this fraction of their
# median distance from a constant.
_UNEXPLAINED = 0.5

CLOCKS: Schema = schema(
    rank="the rank",
    offset_ns="how far the rank's clock is ahead of the lowest rank's clock in the middle of the "
    "window",
    drift_ppm="how many µs the clock gains on the lowest rank's clock in each second; None if it "
    "is not known",
    uncertainty_ns="the median error of `offset_ns` and `drift_ppm`. Each compared collective "
    "gives a measured difference between the two clocks. The error is how far this difference is "
    "from the difference that `offset_ns` and `drift_ppm` give. If the rank has no collective in "
    "common with the lowest rank, its clock is compared with the clocks of other ranks, and the "
    "largest `uncertainty_ns` of these ranks is added. None if only one collective was compared, "
    "or if `uncertainty_ns` of one of these ranks is None",
    matched="how many collectives were compared",
)
_Ends = dict[int, int]


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a rank's clock is ahead of the lowest rank's clock, and how fast this changes.

    When the rank's clock shows `at_ns`, it is ahead by `offset_ns`. For the other fields, see the
    columns of `CLOCKS`.
    """

    offset_ns: int
    uncertainty_ns: int | None
    matched: int
    drift_ppm: float | None = None
    at_ns: int = 0

    def ahead_ns(self, time_ns: int) -> int:
        """How far this clock is ahead of the lowest rank's clock, at `time_ns` of this clock."""
        return self.offset_ns + _gained_ns(self.drift_ppm or 0.0, time_ns - self.at_ns)

    def corrected_ns(self, times_ns: Ints) -> Ints:
        """Convert times to the lowest rank's clock, limited to ±`BEYOND_NS`."""
        times_ns = np.clip(times_ns, -BEYOND_NS, BEYOND_NS)
        shifted = times_ns - self.offset_ns
        gained = np.rint((self.drift_ppm or 0.0) / 1e6 * (times_ns - self.at_ns))
        about = shifted - gained  # computed in floats, which do not overflow
        exact = shifted - np.clip(gained, -2 * BEYOND_NS, 2 * BEYOND_NS).astype(np.int64)
        limits = np.where(about < 0, -BEYOND_NS, BEYOND_NS)
        corrected: Ints = np.where(np.abs(about) < BEYOND_NS, exact, limits)
        return corrected


# By the key of a collective: when the collective ended on the lowest rank's clock, and the clock
# from which this time was converted.
_Aligned = dict[int, tuple[int, Clock]]


def measure(collectives: MatchedCollectives) -> list[Clock | None]:
    """Return the clock of each rank, measured at the ends of collectives; None if not possible.

    A rank without a collective in common with the lowest rank is compared with ranks whose clocks
    are already measured; the largest of their uncertainties is added to its own. Only the last 128
    collectives of each rank are compared, and those on the CPU only if none are on the device.

    From the differences between the two clocks at the ends of the same collectives:

    - `drift_ppm` is the median slope between any two differences (Theil and Sen). A drift is used
      only if it makes `uncertainty_ns` at most half as large. Otherwise, and with fewer than eight
      collectives, `drift_ppm` is None.
    - `offset_ns` is the median difference. If a drift is used, the effect of the drift is
      subtracted from the differences first.
    - `uncertainty_ns` is the median error: how far a difference is from the difference that
      `offset_ns` and `drift_ppm` give. With only one collective, `uncertainty_ns` is None.
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
                    aligned.setdefault(key, (end_ns - clock.ahead_ns(end_ns), clock))
        reached = [
            k for k in range(len(ends)) if k not in found and not aligned.keys().isdisjoint(ends[k])
        ]
        found |= {k: _clock(ends[k], aligned) for k in reached}
    return [found.get(k) for k in range(len(ends))]


def clocks(summaries: Sequence[RankSummary], measured: Sequence[Clock | None]) -> Table:
    """Return one row for each summary; see `CLOCKS`."""
    return Table.of(
        CLOCKS,
        {
            "rank": [summary.rank for summary in summaries],
            **{
                name: [getattr(clock, name, None) for clock in measured]
                for name in ("offset_ns", "drift_ppm", "uncertainty_ns")
            },
            "matched": [0 if clock is None else clock.matched for clock in measured],
        },
    )


def _ends(found: MatchedCollectives) -> list[_Ends]:
    """Return the ends of each rank's last collectives, in Unix time on the rank's own clock."""
    runs_on = OF_COLLECTIVE_GROUP.index("runs_on")
    on_device = np.array([group[runs_on] == DEVICE for group in found.groups], np.bool_)
    chosen = on_device[found.group]
    is_time = np.abs(found.end_ns) < BEYOND_NS
    owned = np.split(
        np.arange(len(found.owner)), np.searchsorted(found.owner, np.arange(1, found.ranks))
    )
    ends = []
    for rows in owned[: found.ranks]:
        rows = rows[is_time[rows]]
        used = rows[chosen[rows]] if chosen[rows].any() else rows
        last = used[np.argsort(found.end_ns[used], kind="stable")][-_MOST:]
        ends.append(dict(zip(found.key[last].tolist(), found.end_ns[last].tolist())))
    return ends


def _clock(ends: _Ends, aligned: _Aligned) -> Clock | None:
    shared = [(end_ns, *aligned[key]) for key, end_ns in ends.items() if key in aligned]
    own = _compared(
        [end_ns for end_ns, _, _ in shared],
        [end_ns - aligned_ns for end_ns, aligned_ns, _ in shared],
    )
    if abs(own.offset_ns) > BEYOND_NS:
        return None
    before_ns = [clock.uncertainty_ns for _, _, clock in shared]
    known_ns = [each for each in before_ns if each is not None]
    if own.uncertainty_ns is None or len(known_ns) < len(before_ns):
        return replace(own, uncertainty_ns=None)
    return replace(own, uncertainty_ns=max(known_ns) + own.uncertainty_ns)


def _compared(times: Sequence[int], ahead: Sequence[int]) -> Clock:
    """Compute a clock that was ahead by `ahead[k]` when it showed `times[k]`."""
    offset_ns, at_ns = median(ahead), median(times)
    if len(ahead) == 1:
        return Clock(offset_ns, None, 1)
    apart = _median_distance([each - offset_ns for each in ahead])
    drift_ppm = _drift_ppm(times, ahead)
    if drift_ppm is not None:
        line = [
            each - _gained_ns(drift_ppm, time_ns - at_ns) for time_ns, each in zip(times, ahead)
        ]
        middle = median(line)
        unexplained = _median_distance([each - middle for each in line])
        if unexplained <= _UNEXPLAINED * apart:
            return Clock(middle, unexplained, len(ahead), drift_ppm, at_ns)
    return Clock(offset_ns, apart, len(ahead))


def _gained_ns(drift_ppm: float, elapsed_ns: int) -> int:
    return round(drift_ppm * elapsed_ns / 1e6)


def _drift_ppm(times_ns: Sequence[int], ahead_ns: Sequence[int]) -> float | None:
    """Return the median slope between any two points, in µs per second; None for too few points."""
    if len(times_ns) < _FEWEST_FOR_DRIFT:
        return None
    time, ahead = (
        np.array([each - values[0] for each in values], np.float64)
        for values in (times_ns, ahead_ns)
    )
    one, other = np.triu_indices(len(time), 1)
    later = time[other] - time[one]
    slopes = (ahead[other] - ahead[one])[later != 0] / later[later != 0]
    return float(np.median(slopes)) * 1e6 if len(slopes) else None


def _median_distance(distances: Sequence[int]) -> int:
    return sorted(abs(each) for each in distances)[len(distances) // 2]


def median(values: Sequence[int]) -> int:
    """Return the median, or the lower of two middle values, so that the result is in `values`."""
    return sorted(values)[(len(values) - 1) // 2]
