"""Measure how far each rank's clock is ahead of the clock of the lowest rank, and how it drifts.

A collective that synchronises the ranks ends at about the same moment on all ranks. So the clocks
are compared at the ends of these collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.read.facts.collective_records import DEVICE
from instrument.read.facts.groupby import cells
from instrument.read.facts.schema import Schema, schema
from instrument.read.ranks.matched_collectives import MatchedCollectives
from instrument.read.ranks.rank_summary import RankSummary
from instrument.read.trace.columns import BEYOND_NS
from instrument.read.trace.events import Flags, Ints
from instrument.read.views.collectives import OF_GROUP
from instrument.read.views.table import Table

# At most this many collectives of a rank are compared; they are spread over the window.
_MOST = 128
# With fewer collectives, a drift cannot be distinguished from jitter. NTP slews a clock by at most
# 500 ppm, so a larger drift is an effect of the program.
_FEWEST_FOR_DRIFT, _LARGEST_DRIFT = 24, 500e-6
_FALSE_DRIFT = 0.01  # the probability that one of all clocks is said to drift, but none does
# A rank is compared with the lowest rank over fewer than so many other ranks.
_FARTHEST = 16
_LAST = np.iinfo(np.int64).max

CLOCKS: Schema = schema(
    rank="the rank",
    offset_ns="how far the rank's clock is ahead of the lowest rank's clock at `at_ns`: the median "
    "difference at the ends of the compared collectives, without the effect of the drift",
    drift_ppm="how many µs the clock gains on the lowest rank's clock in each second. None if no "
    "drift can be distinguished from the jitter of the collectives",
    at_ns="the middle of the compared collectives, in Unix time on the rank's clock; None if "
    "`drift_ppm` is None, because `offset_ns` then holds at all times",
    uncertainty_ns="the median distance of the differences from those that `offset_ns` and "
    "`drift_ppm` give; with a drift, plus the error of the drift over half of the window. If the "
    "rank has no collective in common with the lowest rank, its clock is compared with the clocks "
    "of other ranks, and the largest `uncertainty_ns` of these ranks is added. None if only one "
    "collective was compared, or if `uncertainty_ns` of one of these ranks is None",
    matched="how many collectives were compared",
)
_Floats = NDArray[np.float64]


class Clocks(NamedTuple):
    """How far each rank's clock is ahead of the lowest rank's clock; one element for each rank.

    See `CLOCKS`. `drift` is a ratio, and an unknown `uncertainty_ns` is -1. All values of a clock
    that could not be measured are 0.
    """

    known: Flags
    offset_ns: Ints
    drift: _Floats
    at_ns: Ints
    uncertainty_ns: Ints
    matched: Ints

    def corrected_ns(self, rank: Ints, times_ns: Ints) -> Ints:
        """Convert times to the lowest rank's clock, limited to ±`BEYOND_NS`; their order stays.

        `rank` is the index of the summary for each time. A clock that is not known is not moved.
        """
        times_ns = np.clip(times_ns, -BEYOND_NS, BEYOND_NS)
        gained = np.rint(self.drift[rank] * (times_ns - self.at_ns[rank])).astype(np.int64)
        ahead = np.clip(self.offset_ns[rank] + gained, -BEYOND_NS, BEYOND_NS)
        corrected: Ints = np.clip(times_ns - ahead, -BEYOND_NS, BEYOND_NS)
        return corrected


def measure(found: MatchedCollectives) -> Clocks:
    """Measure the clock of each rank, which has an offset and a drift, at the ends of collectives.

    Messages only bound the difference of two clocks, so LTTng searches a line between the convex
    hulls of these bounds (Duda et al., Estimating global time in distributed systems, 1987). A
    collective ends at one moment on all ranks, so here a line is fitted to the differences: Tukey's
    resistant line (Exploratory Data Analysis, 1977), through the medians of the first and the last
    third. Many ends may be late; a step of a clock within the window, as by NTP, is not modelled.

    A rank without a collective in common with the lowest rank is compared with ranks whose clocks
    are already measured. Collectives on the CPU are compared only if none are on the device.

    Cost: linear in the number of collectives.
    """
    types: tuple[Any, ...] = (np.bool_, np.int64, np.float64, np.int64, np.int64, np.int64)
    clocks = Clocks(*(np.zeros(found.ranks, each) for each in types))
    new, left = np.arange(found.ranks) == 0, _comparable(found)
    clocks.known[:1], clocks.matched[:1] = True, min(int(new[found.owner[left]].sum()), _MOST)
    # By the key of a collective: when it ended on the lowest rank's clock, and the uncertainty of
    # the clock from which this time was converted; -2 if there is none yet.
    aligned_ns = np.zeros(found.key.max(initial=-1) + 1, np.int64)
    unsure_ns = np.full(len(aligned_ns), -2)
    for _ in range(_FARTHEST):
        is_new = new[found.owner[left]]
        reached, left = left[is_new][::-1], left[~is_new]  # the lowest rank is written last
        owner, key = found.owner[reached], found.key[reached]
        ends_ns = clocks.corrected_ns(owner, found.end_ns[reached])
        used = clocks.known[owner] & (np.abs(ends_ns) < BEYOND_NS) & (unsure_ns[key] == -2)
        aligned_ns[key[used]] = ends_ns[used]
        unsure_ns[key[used]] = clocks.uncertainty_ns[owner[used]]
        shared = left[unsure_ns[found.key[left]] > -2]
        if not len(shared):
            break
        every = np.bincount(found.owner[shared], minlength=found.ranks)
        new = every > 0
        start, size = (np.cumsum(every) - every)[new, None], every[new, None]
        width = min(_MOST, size.max())
        place = np.arange(width) * np.maximum(size, width) // width
        row = shared[start + np.minimum(place, size - 1)]
        key, ends_ns, within = found.key[row], found.end_ns[row], place < size
        offset_ns, drift, at_ns, apart_ns = _fit(ends_ns, ends_ns - aligned_ns[key], within)
        before_ns, known = unsure_ns[key], np.abs(offset_ns) <= BEYOND_NS
        is_sure = (before_ns.min(axis=1) >= 0) & (every[new] > 1)
        unsure = np.where(is_sure, before_ns.max(axis=1) + apart_ns, -1)
        values = (known, offset_ns, drift, at_ns, unsure, within.sum(axis=1))
        for column, value in zip(clocks, values):
            column[new] = np.where(known, value, 0)
    return clocks


def clocks(summaries: Sequence[RankSummary], found: Clocks) -> Table:
    """Return one row for each summary; see `CLOCKS`."""
    columns = {
        "rank": [each.rank for each in summaries],
        "offset_ns": cells(found.offset_ns, found.known),
        "drift_ppm": [ppm or None for ppm in (found.drift * 1e6).tolist()],
        "at_ns": cells(found.at_ns, found.drift != 0),
        "uncertainty_ns": cells(found.uncertainty_ns, found.known & (found.uncertainty_ns >= 0)),
        "matched": found.matched.tolist(),
    }
    return Table.of(CLOCKS, columns)


def _comparable(found: MatchedCollectives) -> Ints:
    """The rows with a valid end; of a rank with collectives on the device, only these."""
    runs_on = OF_GROUP.index("runs_on")
    of_device = np.array([group[runs_on] == DEVICE for group in found.groups], np.bool_)
    is_time = np.abs(found.end_ns) < BEYOND_NS
    on_device = of_device[found.group] & is_time
    without = np.bincount(found.owner[on_device], minlength=found.ranks) == 0
    return np.flatnonzero(on_device | (is_time & without[found.owner]))


def _fit(times_ns: Ints, ahead_ns: Ints, within: Flags) -> tuple[Ints, _Floats, Ints, Ints]:
    """Fit a line to each row of differences: its offset, drift, middle and uncertainty.

    A median of n/3 values has the standard error 1.2533 σ √(3/n), the difference of two √2 of it,
    and a median distance is σ/1.4826: so over the time between the thirds, a drift has the error of
    4.55/√n median distances. It is used if its effect, over half of the window, exceeds the
    uncertainty and is significant among all ranks; by simulation, z (1 + z²/n) is the limit. If the
    jitter of neighbouring collectives is alike, a drift as large as the jitter may be found.
    """
    order = np.argsort(np.where(within, times_ns, _LAST), axis=1)
    times_ns, ahead_ns = (np.take_along_axis(each, order, 1) for each in (times_ns, ahead_ns))
    count, place = within.sum(axis=1, keepdims=True), np.arange(within.shape[1])
    within, third = place < count, (count // 3 - 1) | 1  # the median of an odd number is a value
    first, last = place < third, within & (place >= count - third)
    passed_ns, at_ns = _median(times_ns, last) - _median(times_ns, first), _median(times_ns, within)
    half_ns = (np.take_along_axis(times_ns, count - 1, 1) - times_ns[:, :1]) / 2
    # A line through collectives that are close together would be extended far beyond them.
    unknown = (count < _FEWEST_FOR_DRIFT) | (passed_ns < np.maximum(half_ns, 1))
    drift, line_ns = np.zeros(count.shape), ahead_ns
    for _ in range(3):  # the medians of a steep line are those of few values
        drift += (_median(line_ns, last) - _median(line_ns, first)) / np.maximum(passed_ns, 1)
        drift[unknown | (np.abs(drift) > _LARGEST_DRIFT)] = 0
        line_ns = ahead_ns - np.rint(drift * (times_ns - at_ns)).astype(np.int64)
    distance_ns = _distance(line_ns, within)
    error_ns = distance_ns * 4.55 / np.sqrt(count) * half_ns / np.maximum(passed_ns, 1)
    unsure_ns = np.ceil(distance_ns + error_ns)
    z = NormalDist().inv_cdf(1 - _FALSE_DRIFT / 2 / max(len(count), 1))
    drift[np.abs(drift) * half_ns <= np.maximum(unsure_ns, z * (1 + z**2 / count) * error_ns)] = 0
    line_ns = np.where(drift == 0, ahead_ns, line_ns)
    apart_ns = np.where(drift == 0, _distance(line_ns, within), np.minimum(unsure_ns, BEYOND_NS))
    offset_ns = _median(line_ns, within)
    return offset_ns[:, 0], drift[:, 0], at_ns[:, 0], apart_ns[:, 0].astype(np.int64)


def _distance(values: Ints, within: Flags) -> Ints:
    """The median distance of each row's values from their median."""
    return _median(np.abs(values - _median(values, within)), within, upper=1)


def _median(values: Ints, within: Flags, upper: int = 0) -> Ints:
    """The median of each row's values where `within` is True: the lower of two middle values."""
    ordered = np.sort(np.where(within, values, _LAST), axis=1)
    at = np.maximum(within.sum(axis=1, keepdims=True) - 1 + upper, 0) // 2
    found: Ints = np.take_along_axis(ordered, at, 1)
    return found
