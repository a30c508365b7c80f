"""The state of a run that goes on: its ranks, ranges and newest captures, by its timings files.

In synchronous training, all steps take equally long, because each rank waits for the slowest. So
ranks are compared by range. While ranks wait for a slow one, their ranges take longer, too; but
they are the majority, and so the median. Of two equal halves, each could wait for the other. Then
the median is between them, both deviate equally much from it, and neither is named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from instrument.base import files, storage
from instrument.base.errors import CaptureError
from instrument.base.range_names import STEP
from instrument.base.units import duration
from instrument.read.ranks.rank_comparison import straggler_limit
from instrument.read.trace.capture_json import unix_time
from instrument.read.views.find_captures import Place, captures_at, kind_of, timings_at
from instrument.read.views.section import Section
from instrument.read.views.table import Table, known_columns
from instrument.read.views.timings_file import read_line

# How many lines of a file count; how many bytes of its end are read, until there are enough lines;
# how many names of ranges are shown, each on the CPU and on the device.
_LINES, _TAILS, _MOST_NAMES = 3, (16 << 10, 256 << 10, 4 << 20), 2_005
# A rank falls behind by the rule for stragglers and by this share of a step. Of ranges inside each
# other, whose excess is about the same, the shortest is named.
_LEAST_RANKS, _LEAST_OF_STEP, _ALIKE = 3, 0.03, 0.8
# A rank is silent if it has not written for so long, and for so many of its intervals.
_SILENT_S, _SILENT_INTERVALS = 30, 3
_TIMINGS = re.compile(r"(?:.*/)?timings_rank(0|[1-9][0-9]{0,6})\.jsonl", re.DOTALL)
# The rank that takes longest in such a range has waited for the others.
_COMMUNICATES = re.compile("all.?(reduce|gather|to.?all)|reduce.?scatter|broadcast|barrier", re.I)
_OF_STEPS = ("p50_ns", "p95_ns", "mean_ns")
_KINDS = (("CPU", "calls", "mean_ns"), ("device", "device_calls", "device_mean_ns"))
_RANKS = ("rank", "state", "last_step", "written_ago_ns", "excess_ns", "range", "on")
_RANGES = ("name", "on", "median_ns", "share", "max_ns", "slowest")
_ROWS, _CAPTURES, _CAPTURES_EVERY_S = 6, 3, 20


class RankNow(NamedTuple):
    """What the last `lines` of a rank say: the medians of times per step, by range and kind."""

    step: int | None
    written_s: float
    longest_gap_s: float
    lines: int
    ns: dict[tuple[str, str], float]


def rank_now(end: bytes) -> RankNow | None:
    """Read the last lines in the end of a timings file; None if they tell of no steps.

    The first line of a process, whose steps include the warm-up, counts only if it is the last.
    """
    found: list[tuple[dict[tuple[str, str], float], float, int | None]] = []
    first = 0
    for text in end.split(b"\n")[-_LINES - 1 : -1]:
        with suppress(ValueError, LookupError, ZeroDivisionError, RecursionError):  # a bad line
            line = read_line(text)
            since, written_s = line.ranges[STEP].since, unix_time(line.time) or 0.0
            ns = {(STEP, key): float(since[key]) for key in _OF_STEPS}
            for name, entry in line.ranges.items() if min(ns.values()) > 0 else ():
                for kind, calls, mean_ns in _KINDS:
                    if calls in entry.since:
                        times = entry.since[calls] / since["calls"]
                        ns[name, kind] = times * entry.since[mean_ns]
            if line.ranges[STEP].run["calls"] == since["calls"]:
                found, first = [], 1
            found += [(ns, written_s, line.step)] if len(ns) > len(_OF_STEPS) else []
    if not found:
        return None
    gaps_s = [last - one for (_, one, _), (_, last, _) in pairwise(found)]
    lines = [ns for ns, _, _ in found[first:] or found]
    middle = (len(lines) - 1) // 2
    keys = dict.fromkeys(key for ns in lines for key in ns)
    medians = {key: sorted([ns.get(key, 0.0) for ns in lines])[middle] for key in keys}
    return RankNow(found[-1][2], found[-1][1], max(gaps_s, default=np.inf), len(lines), medians)


class LiveRun:
    """What was read of a run at a path, or at the URL of its folder."""

    def __init__(self, place: Place) -> None:
        self.place = self.folder = place
        self.captures: list[Place] = []
        self._listed_s = -np.inf
        self._read: dict[str, tuple[int, RankNow | None]] = {}

    def refresh(self, now_s: float) -> None:
        """Read the end of each file that has changed; look for new captures after 20 s.

        Raises:
            CaptureError, OSError: there are no timings, or they cannot be read.
        """
        if storage.is_url(self.place):
            sizes = storage.sizes(self.place)
        elif kind_of(Path(self.place)):
            paths = timings_at(self.place)
            self.folder = paths[-1].parent
            sizes = {str(each): each.stat().st_size for each in paths if each.parent == self.folder}
        sizes = {place: size for place, size in sizes.items() if _TIMINGS.fullmatch(place)}
        self._read = {place: its for place, its in self._read.items() if place in sizes}
        for tail in _TAILS:
            new = [
                place for place, size in sizes.items() if self._read.get(place, (-1,))[0] != size
            ]
            for place, end in _ends(new, tail):
                if end.count(b"\n") > _LINES or len(end) < tail or tail == _TAILS[-1]:
                    self._read[place] = (sizes[place], rank_now(end))
        if now_s - self._listed_s >= _CAPTURES_EVERY_S:
            self._listed_s = now_s
            with suppress(CaptureError):  # none is finished
                places = captures_at(self.folder)
                one_of = {re.sub(r"_rank\d+", "", str(each)): each for each in reversed(places)}
                self.captures = [*one_of.values()][:_CAPTURES]

    def parts(self, now_s: float) -> list[Any]:
        """Compare the ranks at a Unix time; return the state as text and tables.

        Raises:
            CaptureError: no line tells of steps.
        """
        found = {
            int(_TIMINGS.findall(place)[0]): its
            for place, (_, its) in sorted(self._read.items())
            if its
        }
        if not found:
            raise CaptureError(f"{self.folder} holds no timings of steps yet.")
        ago_s = {rank: max(now_s - found[rank].written_s, 0.0) for rank in sorted(found)}
        limits_s = {rank: _SILENT_INTERVALS * its.longest_gap_s for rank, its in found.items()}
        silent = [rank for rank in ago_s if ago_s[rank] > max(_SILENT_S, limits_s[rank])]
        states = dict.fromkeys(silent, "silent")
        ranks = [rank for rank in ago_s if rank not in states] or silent
        keys = dict.fromkeys(key for rank in ranks for key in found[rank].ns)
        names = [*keys][:_MOST_NAMES]
        ns = np.array([[found[rank].ns.get(key, np.nan) for key in names] for rank in ranks])
        median, slowest = _median(ns), np.where(np.isnan(ns), -1, ns).argmax(0)
        step_ns, p95_ns, mean_ns = (median[names.index((STEP, key))] for key in _OF_STEPS)
        settled = np.where([[found[rank].lines > 1] for rank in ranks], ns, np.nan)
        usual, known = _median(settled), (~np.isnan(settled)).sum(0)
        limit = straggler_limit(usual, _median(np.abs(settled - usual)))
        limit = np.maximum(limit, usual + _LEAST_OF_STEP * step_ns)
        ours = [not _COMMUNICATES.search(name) and kind not in _OF_STEPS for name, kind in names]
        above = np.where(ours & (known >= _LEAST_RANKS) & (settled > limit), settled - usual, 0)
        behind: dict[int, tuple[Any, ...]] = {}
        for row in np.flatnonzero(above.any(1)).tolist():
            alike = np.flatnonzero(above[row] >= _ALIKE * above[row].max())
            at = alike[usual[alike].argmin()]
            behind[ranks[row]] = (above[row, at], *names[at])
            states.setdefault(ranks[row], "behind")
        rows = [
            (rank, states.get(rank), found[rank].step, each_s * 1e9, *behind.get(rank, [None] * 3))
            for rank, each_s in ago_s.items()
        ]
        rows.sort(key=lambda row: (row[1] is None, row[1] == "behind", -(row[4] or 0)))
        ranges = [
            (*names[at], median[at], median[at] / mean_ns, ns[row, at], ranks[row])
            for at, row in sorted(enumerate(slowest), key=lambda each: -median[each[0]])
            if names[at][1] not in _OF_STEPS
        ]
        is_compared = sum(found[rank].lines > 1 for rank in ranks) >= _LEAST_RANKS
        late = f"{len(behind)} behind" if is_compared else "not compared yet"
        return [
            f"{self.folder}: a step takes {duration(step_ns)} (median), {duration(p95_ns)} (95th "
            "percentile)",
            _section(_RANKS, rows, f"Ranks: {len(rows):,}, {late}, {len(silent):,} silent"),
            _section(_RANGES, ranges, f"Ranges: {len(ranges):,}, time per step"),
        ]


def _section(columns: Sequence[str], rows: list[Any], title: str) -> Section:
    table = Table({name: [row[k] for row in rows[:_ROWS]] for k, name in enumerate(columns)})
    return Section(table, known_columns(table), title, all_columns="", of_cost=True)


def _ends(places: list[str], most: int) -> Iterator[tuple[str, bytes]]:
    if places and storage.is_url(places[0]):
        yield from storage.contents(places, bytes, last=most).items()
        return
    for place in places:
        with suppress(OSError), files.open_regular(Path(place)) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - most, 0))
            yield place, file.read(most)


def _median(values: Any) -> Any:
    known, ordered, at = (~np.isnan(values)).sum(0), np.sort(values, 0), range(values.shape[1])
    return (ordered[(known - 1) // 2, at] + ordered[known // 2, at]) / 2
