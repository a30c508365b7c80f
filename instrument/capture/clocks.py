"""How far each rank's clock is from the lowest rank's, by the ends of collectives."""

from __future__ import annotations

from collections.abc import Sequence

from instrument.capture.rank import RankSummary
from instrument.capture.table import Table

_Ends = dict[tuple[object, ...], int]


def clocks(summaries: Sequence[RankSummary]) -> Table:
    """One row for each summary, in their order: `rank offset_ns uncertainty_ns matched`.

    A collective that synchronises ends at about the same moment on all ranks. `offset_ns` is by how much a rank's clock
    is ahead of the first summary's: the median over the `matched` collectives that both have, told by name, group, step
    and place in the step. `uncertainty_ns` is the median distance from it, None of a single match. A rank that has
    none in common with the first is compared with those that do, whose largest uncertainty is added. Where there is
    nothing to go by, offset and uncertainty are None.

    Lost: that clocks drift within a window.
    """
    ends = [_ends(summary) for summary in summaries]
    found: dict[int, tuple[int, int | None, int]] = {0: (0, 0, len(ends[0]))} if ends else {}
    aligned, reached, before_ns = dict(ends[0]) if ends else {}, [0], 0
    while reached:
        reached = [k for k in range(len(ends)) if k not in found and not aligned.keys().isdisjoint(ends[k])]
        found |= {k: _offset(ends[k], aligned, before_ns) for k in reached}
        for k in reached:
            for key, end_ns in ends[k].items():
                aligned.setdefault(key, end_ns - found[k][0])
        before_ns = max([before_ns, *(found[k][1] or 0 for k in reached)])
    columns = [found.get(k, (None, None, 0)) for k in range(len(ends))]
    names = ("offset_ns", "uncertainty_ns", "matched")
    return Table(
        {
            "rank": [summary.rank for summary in summaries],
            **{name: [row[at] for row in columns] for at, name in enumerate(names)},
        }
    )


def _ends(summary: RankSummary) -> _Ends:
    """When each collective ended, in Unix time as that rank's clock has it."""
    columns = summary.collectives
    ends = columns.get("end_ns") or []
    keys = zip(*(columns.get(name) or [None] * len(ends) for name in ("name", "group", "step", "ordinal")))
    return {key: end_ns + summary.base_ns for key, end_ns in zip(keys, ends)}


def _offset(ends: _Ends, aligned: _Ends, before_ns: int) -> tuple[int, int | None, int]:
    ahead = [end_ns - aligned[key] for key, end_ns in ends.items() if key in aligned]
    offset_ns = median(ahead)
    if len(ahead) == 1:
        return offset_ns, None, 1
    distances = sorted(abs(each - offset_ns) for each in ahead)
    return offset_ns, before_ns + distances[len(ahead) // 2], len(ahead)


def median(values: Sequence[int]) -> int:
    """The middle one, of two the lower: a value that some rank has."""
    return sorted(values)[(len(values) - 1) // 2]
