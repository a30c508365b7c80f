"""Finds steps outside windows that take much longer than usual, such as those that evaluate.

Also finds that steps get slower while the program runs, and that the recorded ones are not like the
others.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from instrument.base.step_times import counting
from instrument.base.units import duration, percent

#: The durations of so many steps are kept, with 8 bytes for each.
MOST_KEPT = 2**18
#: A bit of a duration; see `no_times`.
EXPORTING = 2**62
# The first steps may compile code, start workers and fill caches.
_FIRST, _LEAST_STEPS = 10, 20
# Steps of more than 3 times the median matter if they take 10 % of the time together.
_LEAST_FACTOR, _LEAST_SHARE = 3, 0.1
# Steps get slower if the median of each third of them exceeds that of the third before by this, and
# if the last third exceeds the first as by chance in 1 of 200 cases (Mann and Whitney's test).
_LEAST_GROWTH, _LEAST_DEVIATIONS = 1.15, 2.58
# The recorded steps are not like the others if the means differ by this factor.
_UNLIKE = 1.2


def no_times() -> array[int]:
    """The durations in ns by the number of the step: negative if recorded, and 0 if not timed.

    `EXPORTING` is set in the durations of steps during which a window was exported.
    """
    return array("q", bytes(8 * MOST_KEPT))


def _others(ns: NDArray[np.int64], *, exporting: bool) -> NDArray[np.int64]:
    """The numbers of the steps outside windows, also of those during an export if `exporting`."""
    steps = np.flatnonzero((ns > 0) & (exporting | (ns < EXPORTING)))
    return steps[steps >= _FIRST]


def long_steps(times: array[int]) -> Iterator[tuple[float, str, str]]:
    """Yield for steps that get slower, then for long steps: a share, a sentence, and options.

    The share is what the later thirds take beyond the first, by medians, or what the long steps
    take. The options record two steps. There must be two long steps, and none may be recorded.
    """
    ns = np.array(times)
    steps = _others(ns, exporting=False)
    if len(steps) < _LEAST_STEPS:
        return
    first, middle, last = np.array_split(ns[steps], 3)
    first_ns, middle_ns, last_ns = map(float, map(np.median, (first, middle, last)))
    grows = middle_ns >= _LEAST_GROWTH * first_ns and last_ns >= _LEAST_GROWTH * middle_ns
    exceed, size = np.searchsorted(np.sort(first), last).mean() / len(first), len(first)
    if grows and exceed >= 0.5 + _LEAST_DEVIATIONS * math.sqrt((2 * size + 1) / 12) / size:
        sentence = (
            f"Steps get slower: in the first third of {len(steps)} steps, the median one takes "
            f"{duration(first_ns)}, in the last third {duration(last_ns)}. Perhaps something "
            "grows, such as a metric over all batches. To record an early and a late step, which "
            "`instrument diff` compares, write before the script:"
        )
        share = 1 - 3 * first_ns / (first_ns + middle_ns + last_ns)
        yield share, sentence, f"profiler.active=1 'profiler.at_steps=[{steps[0]},{steps[-2]}]'"
    usual_ns = float(np.median(ns[steps]))
    long = steps[ns[steps] > _LEAST_FACTOR * usual_ns]
    share = float(ns[long].sum() / ns[steps].sum())
    if share < _LEAST_SHARE:
        return
    # Most of this time is in steps of at least half of the mean that is weighted with the time.
    least_ns = float(np.average(ns[long], weights=ns[long])) / 2
    at = long[ns[long] >= least_ns][:2].tolist()
    if len(at) < 2 or (-ns >= least_ns).any():
        return
    longest = int(long[ns[long].argmax()])
    sentence = (
        f"Outside the windows, {len(long)} of {len(steps)} steps take {percent(share)} of the "
        f"time; the longest one, step {longest}, takes {duration(int(ns[longest]))} instead of "
        f"{duration(usual_ns)}. To record two such steps, write before the script:"
    )
    yield share, sentence, f"profiler.active=1 'profiler.at_steps=[{at[0]},{at[1]}]'"


def unlike_window(times: array[int], first: int, active: int) -> tuple[str, str] | None:
    """A sentence and options if the steps of a window are not like those outside of windows.

    The window has `active` steps from `first` on.
    """
    ns = np.array(times)
    steps, own = _others(ns, exporting=False), -ns[first : first + active]
    is_short = len(steps) < _LEAST_STEPS
    if is_short:  # a short script: an export takes a second
        steps = _others(ns, exporting=True)
        ns[steps] &= EXPORTING - 1
    if len(steps) < _LEAST_STEPS or not len(own) or own.min() <= 0:
        return None
    own_ns, usual_ns = float(own[counting(own.tolist())].mean()), float(ns[steps].mean())
    if max(own_ns, usual_ns) <= _UNLIKE * min(own_ns, usual_ns):
        return None
    # The steps in a row whose mean is nearest to that of all.
    means_ns = np.convolve(ns[steps], np.full(active, 1 / active), "valid")
    in_row = steps[active - 1 :] - steps[: len(means_ns)] == active - 1
    if not in_row.any():
        return None
    at = int(steps[np.where(in_row, abs(means_ns - usual_ns), np.inf).argmin()])
    cause = ", because of recording or of other work" if own_ns > usual_ns else ""
    if own_ns < usual_ns and is_short:
        cause = ", perhaps because a window was exported meanwhile"
    sentence = (
        f"The recorded steps are not like the run: they take {duration(own_ns)} on average, and "
        f"{len(steps)} others {duration(usual_ns)}{cause}. To record steps that are like most "
        "others, write before the script:"
    )
    return sentence, f"profiler.active={active} 'profiler.at_steps=[{at}]'"
