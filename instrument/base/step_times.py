"""Which steps count, and whether steps are of several kinds, such as long steps that accumulate.

Means, shares and savings are of the steps that count. So a step takes the mean of these, and this
is said with the kinds: "every fourth step takes 31 ms, the others 1 ms".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import median

from instrument.base.units import duration

# Between two kinds, no step lasts: the longer one takes 1.5 times as long or more, they differ by a
# quarter of the mean step, and by this many times as much (as a ratio) as steps of one kind.
_LEAST_RATIO, _LEAST_GAP, _LEAST_SPREADS = 1.5, 0.25, 2.5
# Fewer steps, or fewer turns, can seem to take turns by chance.
_LEAST_STEPS, _LEAST_TURNS = 8, 3
# Of so many steps of one kind, the shortest and the longest tenth may differ more.
_MANY = 10
# If the mean of steps of one kind differs from the usual step by more than this, a text says so.
_UNUSUAL = 0.2
# Of a kind of which fewer steps than this are expected in a window, the window may have none.
_EXPECTED = 1
_ORDINALS = ("", "", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


@dataclass(frozen=True, slots=True)
class StepKinds:
    """The kinds of some steps, by their durations.

    Attributes:
        of_step: the kind of each step; 0 for the shortest.
        usual_ns: the median duration of each kind.
        period: after how many steps the same kinds follow again, without an exception; 0 if they do
            not, or if all steps are of one kind.
    """

    of_step: list[int]
    usual_ns: list[int]
    period: int


def step_kinds(times_ns: Sequence[float]) -> StepKinds:
    """Find the kinds of consecutive steps; each has at least two steps.

    A single long step is no kind, nor do noise and steps that get slower make kinds.
    """
    order = sorted(range(len(times_ns)), key=lambda step: times_ns[step])
    ordered = [max(times_ns[step], 1.0) for step in order]
    groups = _taking_turns(times_ns, ordered) or _groups(ordered)
    of_step = [0] * len(order)
    for kind, (begin, end) in enumerate(groups):
        for step in order[begin:end]:
            of_step[step] = kind
    usual_ns = [int(median(ordered[begin:end])) for begin, end in groups]
    return StepKinds(of_step, usual_ns, _period(of_step) if len(groups) > 1 else 0)


def counting(times_ns: Sequence[float]) -> slice:
    """Which of the finished steps of a window count: all but the first; of one step, this step.

    The first step of a window does work that the others do not. If the kinds of the others repeat,
    whole periods count.
    """
    first = int(len(times_ns) > 1)
    others = times_ns[first:]
    period = step_kinds(others).period or 1
    return slice(first, first + len(others) // period * period)


def kinds_in_words(times_ns: Sequence[float]) -> str:
    """Say of steps that are not alike how they differ; "" for steps that are alike."""
    if not times_ns:
        return ""
    kinds = step_kinds(times_ns)
    period = kinds.of_step[: kinds.period or None]
    counts = [period.count(kind) for kind in range(len(kinds.usual_ns))]
    texts = [duration(ns) for ns in kinds.usual_ns]
    of = f"of each {kinds.period}" if kinds.period else f"of {len(times_ns)}"
    if len(counts) == 1:
        mean_ns, usual_ns = sum(times_ns) / len(times_ns), kinds.usual_ns[0]
        if abs(mean_ns - usual_ns) <= _UNUSUAL * usual_ns:
            return ""
        return (
            f"the shortest takes {duration(min(times_ns))}, the longest {duration(max(times_ns))}"
        )
    if len(counts) > 2:
        takes = [f"{n} take{'s' * (n == 1)} {text}" for n, text in zip(counts[::-1], texts[::-1])]
        return f"{of} steps, {', '.join(takes)}"
    rare = int(counts[1] <= counts[0])
    others = f"the others {texts[1 - rare]}"
    if kinds.period and counts[rare] == 1:
        ordinal = _ORDINALS[kinds.period] if kinds.period < len(_ORDINALS) else f"{kinds.period}th"
        return f"every {ordinal} step takes {texts[rare]}, {others}"
    return f"{counts[rare]} {of} steps take {texts[rare]}, {others}"


def like_for_like(
    recorded_ns: Sequence[float], others_ns: Sequence[float]
) -> tuple[int | None, int | None]:
    """The usual recorded step, and a step that is not recorded, of the same kinds.

    If steps are of several kinds, both are means of the kinds' medians, with as many steps of each
    kind as are recorded. The second is None if the kinds of the others are not known to be those of
    the recorded steps. Kinds that are so rare that few recorded steps need not have them are left
    out.
    """
    if not recorded_ns:
        return None, int(median(others_ns)) if others_ns else None
    recorded = step_kinds(recorded_ns)
    usual_ns = _mean([recorded.usual_ns[kind] for kind in recorded.of_step])
    if not others_ns:
        return usual_ns, None
    others = step_kinds(others_ns)
    counts = [others.of_step.count(kind) for kind in range(len(others.usual_ns))]
    expected = len(recorded_ns) / len(others_ns)
    frequent = [ns for ns, count in zip(others.usual_ns, counts) if count * expected >= _EXPECTED]
    found = others.usual_ns if len(counts) == len(recorded.usual_ns) else frequent
    if len(found) != len(recorded.usual_ns):
        return usual_ns, None
    return usual_ns, _mean([found[kind] for kind in recorded.of_step])


def _taking_turns(times_ns: Sequence[float], ordered: Sequence[float]) -> list[tuple[int, int]]:
    """The kinds of many steps that strictly take turns, however much those of one kind differ."""
    bounds = [0]
    for cut in _cuts(ordered) if len(ordered) >= _LEAST_STEPS else ():
        period = _period([int(each >= ordered[cut]) for each in times_ns])
        if 0 < _LEAST_TURNS * period <= len(ordered):
            bounds.append(cut)
    return [*pairwise([*bounds, len(ordered)])] if bounds[1:] else []


def _cuts(ordered: Sequence[float]) -> list[int]:
    """Where sorted durations have a gap."""
    least = _LEAST_GAP * sum(ordered) / max(len(ordered), 1)
    return [
        k
        for k in range(1, len(ordered))
        if ordered[k] - ordered[k - 1] >= least and ordered[k] >= _LEAST_RATIO * ordered[k - 1]
    ]


def _groups(ordered: Sequence[float]) -> list[tuple[int, int]]:
    """Where each kind begins and ends among sorted durations."""
    bounds = [0, *_cuts(ordered), len(ordered)]
    groups = [(begin, end) for begin, end in pairwise(bounds) if end - begin > 1]
    at = 0
    while at + 1 < len(groups):
        one, other = groups[at : at + 2]
        gap = log(ordered[other[0]] / ordered[one[1] - 1])
        if gap >= _LEAST_SPREADS * max(_spread(ordered[slice(*each)]) for each in (one, other)):
            at += 1
        else:
            groups[at : at + 2] = [(one[0], other[1])]
            at = max(at - 1, 0)
    # Single steps between two kinds, or beyond the last one, count for the nearest.
    for k in range(len(groups) - 1):
        middle = (ordered[groups[k][1] - 1] * ordered[groups[k + 1][0]]) ** 0.5
        cut = next(i for i in range(groups[k][1], groups[k + 1][0] + 1) if ordered[i] > middle)
        groups[k : k + 2] = [(groups[k][0], cut), (cut, groups[k + 1][1])]
    if not groups:
        return [(0, len(ordered))] if ordered else []
    groups[0], groups[-1] = (0, groups[0][1]), (groups[-1][0], len(ordered))
    return [(0, len(ordered))] if len(groups) == 1 else groups


def _spread(ordered: Sequence[float]) -> float:
    """The logarithm of how many times as long as the shortest the longest step takes."""
    left_out = len(ordered) // _MANY
    return log(ordered[-1 - left_out] / ordered[left_out])


def _period(of_step: Sequence[int]) -> int:
    """After how many steps the same kinds follow again, at least twice; 0 if they do not."""
    for period in range(2, len(of_step) // 2 + 1):
        if all(a == b for a, b in zip(of_step, of_step[period:])):
            return period
    return 0


def _mean(values: Sequence[int]) -> int:
    return sum(values) // len(values)
