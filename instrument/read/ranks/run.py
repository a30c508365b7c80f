"""The captures of a run, grouped by window.

A window is a series of consecutive steps that were recorded. Each rank writes one capture of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from instrument.base.errors import CaptureError
from instrument.base.printable import printable
from instrument.base.units import few
from instrument.read.facts.schema import Schema
from instrument.read.ranks import (
    clock_skew,
    collective_comparison,
    rank_comparison,
    rank_summary,
    shards,
)
from instrument.read.ranks.matched_collectives import MatchedCollectives, match
from instrument.read.ranks.rank_summary import RankSummary
from instrument.read.trace.capture_json import unix_time
from instrument.read.views.find_captures import TOGETHER_S, Place, captures_at, place_of
from instrument.read.views.table import Table

#: The columns of each table of `Ranks`, by its name.
SCHEMAS: dict[str, Schema] = {
    "ranks": rank_comparison.RANKS,
    "breakdown": rank_comparison.RANK_BREAKDOWN,
    "stragglers": rank_comparison.STRAGGLERS,
    "ranges": rank_comparison.RANK_RANGES,
    "collectives": collective_comparison.RANK_COLLECTIVES,
    "clocks": clock_skew.CLOCKS,
}
_Found = tuple[Place, RankSummary]
_ReadAll = Callable[[Sequence[Place]], dict[Place, RankSummary | str]]


class Run:
    """The captures of a run, grouped by window.

    Attributes:
        windows: one `Ranks` for each window, in the order in which they were recorded. The
            captures in each element of `together` are one window.
        unread: a sentence for each capture or trace that could not be read.
    """

    def __init__(
        self,
        found: Iterable[_Found],
        unread: Sequence[str] = (),
        together: Iterable[Sequence[_Found]] = (),
    ) -> None:
        self.windows = _windows(found, together)
        self.unread = list(unread)

    @classmethod
    def load(cls, *paths: str | PathLike[str], read_all: _ReadAll = rank_summary.read_all) -> Run:
        """Read captures and traces, or all captures below a folder or URL.

        If a folder holds no captures, the traces in this folder are read. Of a capture with a
        summary, only the summary is read or downloaded. Shards in a folder (`runs.shards`) are read
        too. `read_all` reads all others, such as `on_ray.read_all` in tasks of Ray.

        Several captures or traces that are named themselves are the ranks of one window if they do
        not say otherwise, and if no folder or shard is named: see `_as_ranks`.

        Cost: 0.2 to 2 ms for a capture with a summary, depending on its number of ranges.

        Raises:
            CaptureError: a path does not exist or holds no captures or traces, or no capture or
                trace can be read.
        """
        chosen: list[Place] = []
        named: list[Place] = []
        files: list[Path] = []
        for place in map(place_of, paths):
            of_place = shards.files_at(place)
            files += of_place
            with suppress(*[CaptureError][: len(of_place)]):
                chosen += (captures := captures_at(place, or_traces=True))
                named += {place}.intersection(captures)
        unread, every = shards.missing(files), read_all([*{*chosen}.difference(files)])
        for file in files:
            summaries, sentences = shards.read(file)
            every |= summaries
            unread += sentences
        answers = sorted(every.items(), key=lambda answer: str(answer[0]))
        unread += [answer for _, answer in answers if isinstance(answer, str)]
        found = [(path, answer) for path, answer in answers if isinstance(answer, RankSummary)]
        if not found:
            unread = unread or ["The shards hold no capture: give --shard another path."]
            others = f" This is the first of {len(unread)} paths that cannot be read."
            raise CaptureError(f"{unread[0]}{others if len(unread) > 1 else ''}")
        known, together = dict(found), list[list[_Found]]()
        if known.keys() <= {*named}:
            together = _as_ranks([(path, known[path]) for path in named if path in known])
        ranks = {path for window in together for path, _ in window}
        return cls([each for each in found if each[0] not in ranks], unread, together)

    @property
    def name(self) -> str:
        """The names of the first and the last window."""
        names = [window.name for window in self.windows]
        return " to ".join([*names[:1], *names[1:][-1:]])

    @property
    def paths(self) -> list[Place]:
        """The captures of all windows."""
        return [path for window in self.windows for path in window.paths]

    def window(self, name: str) -> Ranks:
        """Return a window by its name, or by folder and name, as in `run2/steps_000010-000012`.

        If several windows match, the newest is returned.

        Raises:
            CaptureError: no window has this name; the message lists the windows that exist.
        """
        found = [window for window in self.windows if name in (window.name, window.where)]
        if not found:
            names = ", ".join(dict.fromkeys(window.where for window in self.windows))
            raise CaptureError(f"There is no window {name!r}; the windows are {names}.")
        return found[-1]

    def __repr__(self) -> str:
        return f"<Run: {', '.join(map(repr, self.windows))}>"


class Ranks:
    """One window, with the summaries of all ranks that recorded it.

    Attributes:
        name: the phase and steps of the window, such as "steps_000010-000012" or
            "validation_steps_000003-000004". If a folder holds several windows of the same phase
            and steps, the later ones get a number, as in "steps_000010-000012-2".
        summaries: the summary of each rank, in order of rank. The tables are made from summaries.
        paths: the path of each rank's capture or trace, in order of rank; a URL is a string.
        world_size: how many ranks the job had; None if no capture records it.
    """

    def __init__(self, found: Iterable[_Found]) -> None:
        found = sorted(found, key=lambda each: -1 if each[1].rank is None else each[1].rank)
        self.paths = [path for path, _ in found]
        self.summaries = [summary for _, summary in found]
        self.world_size = max(
            (s.world_size for s in self.summaries if s.world_size is not None), default=None
        )
        self.name = _name(rank_comparison.whole(self.summaries)[0])

    @cached_property
    def ranks(self) -> Table:
        """The mean times of the steps on each rank; see `rank_comparison.RANKS`."""
        return rank_comparison.per_rank(self.summaries)

    @cached_property
    def ranges(self) -> Table:
        """The times of each range on all ranks; see `rank_comparison.RANK_RANGES`."""
        return rank_comparison.ranges(self.summaries)

    @cached_property
    def breakdown(self) -> Table:
        """The parts of each rank's device time: a row of `capture.breakdown` for each rank."""
        return rank_comparison.breakdown(self.summaries)

    @cached_property
    def stragglers(self) -> Table:
        """The slow ranks for which other ranks wait; see `rank_comparison.stragglers`."""
        return rank_comparison.stragglers(self.summaries)

    @cached_property
    def collectives(self) -> Table:
        """The ranks' transfer and waiting time in collectives; see `collective_comparison`."""
        return collective_comparison.collectives(self.summaries, self.matched, self.measured_clocks)

    @cached_property
    def clocks(self) -> Table:
        """How far each rank's clock is ahead of the lowest rank's clock; see `clock_skew`."""
        return clock_skew.clocks(self.summaries, self.measured_clocks)

    @cached_property
    def measured_clocks(self) -> clock_skew.Clocks:
        """The clock of each rank, in the order of `summaries`."""
        return clock_skew.measure(self.matched)

    @cached_property
    def matched(self) -> MatchedCollectives:
        """The collectives of all ranks; records of the same collective have the same key."""
        return match(self.summaries)

    @property
    def where(self) -> str:
        """FOLDER/NAME: the folder or URL of the lowest rank's capture, and the window's name."""
        return f"{str(self.paths[0]).rpartition('/')[0]}/{self.name}"

    @property
    def missing(self) -> list[int]:
        """The ranks that should have recorded but have no capture."""
        return rank_comparison.missing(self.summaries, self.world_size)

    @property
    def notes(self) -> list[str]:
        """Sentences on missing ranks, cut or partial recordings, and differences of the ranks."""
        every = self.summaries
        whole = rank_comparison.whole(every)
        counts = [*map(rank_comparison.steps_of, every)]
        cut = [
            f"{s.rank} ({n} of {max(counts)} steps)" if n < max(counts) else s.rank
            for s, n in zip(every, counts) if s.cut_short
        ]  # fmt: skip
        left_out = ", and its figures are left out of medians" if len(whole) < len(every) else ""
        about: dict[str, list[Any]] = {
            "The window was cut short on rank {}.": [s.rank for s in every if s.truncated],
            f"The trace file of rank {{}} is cut short{left_out}: copy or record it again.": cut,
            "Only the ranges with the most CPU time are known for rank {}.": [
                s.rank for s in every if s.ranges_left_out
            ],
        }
        missing = f"Of {self.world_size} ranks, captures are missing for rank {few(self.missing)}."
        notes = [missing] if self.missing else []
        notes += [text.format(few(map(str, ranks))) for text, ranks in about.items() if ranks]
        differing = {
            "steps": {s.rank: f"{s.first_step}–{s.last_step}" for s in every},
            "devices": {s.rank: ", ".join(s.devices or ()) for s in every},
            **{
                package: {s.rank: s.versions.get(package) or "?" for s in every}
                for package in sorted({name for s in every for name in s.versions})
            },
        }
        notes += [_differing(what, values) for what, values in differing.items()]
        return [printable(note) for note in notes if note]

    def __repr__(self) -> str:
        of = f"{len(self.summaries)} of {self.world_size or '?'}"
        return printable(f"<Ranks: {self.name!r} on {of} ranks>")


def lowest_free(taken: Collection[int | None]) -> int:
    """The lowest rank that is not taken."""
    return next(rank for rank in count() if rank not in taken)


def _as_ranks(named: Iterable[_Found]) -> list[list[_Found]]:
    """The windows whose ranks a user has named one by one, so that none of them is left out.

    A capture that names no rank, or the rank of an earlier one, gets the lowest free rank. If the
    captures are of different steps, they are one window, unless a rank recorded several of them.
    Captures of the same rank of several, as of two jobs, are not put together.
    """
    steps: dict[Any, list[_Found]] = {}
    every = [*dict(named).items()]
    for path, summary in every:
        steps.setdefault((summary.phase or "train", summary.first_step), []).append((path, summary))
    known = Counter(summary.rank for _, summary in every if summary.rank is not None)
    if min(map(len, steps.values()), default=0) == 1 and max(known.values(), default=1) == 1:
        steps = {None: every}
    return [_numbered(ranks) for ranks in steps.values() if len(ranks) > 1 and not _repeats(ranks)]


def _repeats(found: Sequence[_Found]) -> bool:
    """Whether a rank of a job of several ranks recorded more than one of the captures."""
    of_several = [summary.rank for _, summary in found if (summary.world_size or 1) > 1]
    return len({*of_several} - {None}) < len(of_several) - of_several.count(None)


def _numbered(found: Sequence[_Found]) -> list[_Found]:
    """Give the lowest free rank to each capture that names none, or that of an earlier one."""
    every, taken, numbered = {summary.rank for _, summary in found}, set[int | None](), []
    for path, summary in found:
        if summary.rank in {None, *taken}:
            summary = msgspec.structs.replace(summary, rank=lowest_free(every | taken))
        taken.add(summary.rank)
        numbered.append((path, summary))
    return numbered


class _Captures:
    """The captures of one window; their folders and first start are at hand for `_windows`."""

    def __init__(self) -> None:
        self.of_rank: dict[int | None, _Found] = {}
        self.folders: set[Path] = set()
        self.began_s: float | None = None

    def add(self, folder: Path, began_s: float | None, path: Place, summary: RankSummary) -> None:
        self.of_rank[summary.rank] = path, summary
        self.folders.add(folder)
        self.began_s = began_s if self.began_s is None else self.began_s

    def apart(self, folder: Path, began_s: float | None) -> tuple[bool, float]:
        """Whether a capture is in another folder, and how many seconds apart it began."""
        known_s = [each for each in (self.began_s, began_s) if each is not None]
        return folder not in self.folders, max(known_s, default=0.0) - min(known_s, default=0.0)


def _windows(found: Iterable[_Found], together: Iterable[Sequence[_Found]]) -> list[Ranks]:
    """Group captures into windows; a window has at most one capture of each rank.

    The captures of a window have the same phase and first step, but may be in different folders,
    and captures of different runs can have the same phase and first step too. So a capture belongs
    to the window without its rank that has a capture in the same folder, if there is one, and else
    to the window that began nearest in time, but at most `TOGETHER_S` seconds apart. If a start is
    not known, the distance in time counts as 0.
    """
    groups: dict[Any, list[_Captures]] = {}
    placed = [(Path(path).parent, path, summary) for path, summary in found]
    placed.sort(key=lambda each: (each[0], each[2].started_at or ""))
    for folder, path, summary in placed:
        began_s = unix_time(summary.started_at)
        steps = groups.setdefault((summary.phase or "train", summary.first_step), [])
        beside = [each for each in steps if summary.rank not in each.of_rank]
        candidates = [(*each.apart(folder, began_s), k) for k, each in enumerate(beside)]
        _, seconds, nearest = min(candidates, default=(True, 0.0, -1))
        if nearest < 0 or seconds > TOGETHER_S:
            steps.append(_Captures())
            beside, nearest = steps, -1
        beside[nearest].add(folder, began_s, path, summary)
    windows = [Ranks(each.of_rank.values()) for steps in groups.values() for each in steps]
    windows += map(Ranks, together)
    windows.sort(key=lambda window: (window.summaries[0].started_at or "", window.name))
    seen: Counter[str] = Counter()
    for window in windows:
        where = window.where
        seen[where] += 1
        window.name += f"-{seen[where]}" if seen[where] > 1 else ""
    return windows


def _name(summary: RankSummary) -> str:
    prefix = "" if summary.phase in (None, "train") else f"{summary.phase}_"
    first, last = summary.first_step, summary.last_step
    return (
        "no_steps"
        if first is None
        else f"{prefix}steps_{first:06d}-{first if last is None else last:06d}"
    )


def _differing(what: str, values: dict[int | None, str]) -> str:
    """A sentence with the values of the ranks, the most frequent first; "" if all are the same."""
    by_value: dict[str, list[str]] = {}
    for number, value in values.items():
        by_value.setdefault(value or "none", []).append(str(number))
    if len(by_value) < 2:
        return ""
    parts = sorted(by_value.items(), key=lambda item: -len(item[1]))
    listed = "; ".join(f"{value} on rank {few(ranks)}" for value, ranks in parts)
    return f"The ranks differ in {what}: {listed}."
