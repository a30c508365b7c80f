"""The captures of a run, grouped by window.

A window is a series of consecutive steps that were recorded. Each rank writes one capture of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from instrument.read.ranks import clock_skew, collective_comparison, rank_comparison, shards
from instrument.read.ranks.matched_collectives import MatchedCollectives, match
from instrument.read.ranks.rank_summary import RankSummary, read_all
from instrument.read.trace.capture_json import unix_time
from instrument.read.views.find_captures import TOGETHER_S, Place, captures_at, place_of
from instrument.read.views.table import Table

#: The columns of each table of `Ranks`, by its name.
SCHEMAS: dict[str, Schema] = {
    "ranks": rank_comparison.RANKS,
    "stragglers": rank_comparison.STRAGGLERS,
    "ranges": rank_comparison.RANK_RANGES,
    "collectives": collective_comparison.RANK_COLLECTIVES,
    "clocks": clock_skew.CLOCKS,
}
_Found = tuple[Place, RankSummary]


class Run:
    """The captures of a run, grouped by window.

    Attributes:
        windows: one `Ranks` for each window, in the order in which they were recorded.
        unread: a sentence for each capture or trace that could not be read.
    """

    def __init__(
        self, found: Iterable[_Found], unread: Sequence[str] = (), named: Iterable[Ranks] = ()
    ) -> None:
        self.windows = _in_order([*_windows(found), *named])
        self.unread = list(unread)

    @classmethod
    def load(cls, *paths: str | PathLike[str]) -> Run:
        """Read captures and traces, or all captures below a folder or URL.

        If a folder holds no captures, the traces in this folder are read. Of a capture with a
        summary, only the summary is read or downloaded. Shards in a folder (`ranks.shards`) are
        read too.

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
        found = {path: answer for path, answer in answers if isinstance(answer, RankSummary)}
        if not found:
            unread = unread or ["The shards hold no capture: give --shard another path."]
            others = f" This is the first of {len(unread)} paths that cannot be read."
            raise CaptureError(f"{unread[0]}{others if len(unread) > 1 else ''}")
        windows = []
        if found.keys() <= {*named}:
            windows = _as_ranks({path: found[path] for path in named if path in found})
        for path in (path for window in windows for path in window.paths):
            del found[path]
        return cls(found.items(), unread, windows)

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

    def __init__(self, found: Iterable[_Found], numbered: str = "") -> None:
        self._numbered = numbered  # a sentence on ranks that the captures do not name
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
    def stragglers(self) -> Table:
        """The slow ranks for which other ranks wait; see `rank_comparison.stragglers`."""
        return rank_comparison.stragglers(self.summaries, self.ranks)

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
        counts = [len(summary.steps) for summary in every]
        of_steps = [f" ({n} of {max(counts)} steps)" if n < max(counts) else "" for n in counts]
        cut = [f"{s.rank}{said}" for s, said in zip(every, of_steps) if s.cut_short]
        left_out = ", and its figures are left out of medians" if len(whole) < len(every) else ""
        limited = [s.rank for s in every if s.ranges_left_out]
        about: dict[str, list[Any]] = {
            f"Of {self.world_size} ranks, captures are missing for rank {{}}.": self.missing,
            "The window was cut short on rank {}.": [s.rank for s in every if s.truncated],
            f"The trace file of rank {{}} is cut short{left_out}: copy or record it again.": cut,
            "Only the ranges with the most CPU time are known for rank {}.": limited,
        }
        notes = [self._numbered]
        notes += [text.format(few(ranks)) for text, ranks in about.items() if ranks]
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


def free_rank(rank: int | None, taken: Container[int | None], known: Container[int | None]) -> int:
    """A rank if it is not taken, else the lowest one that is neither taken nor known of another."""
    if rank is not None and rank not in taken:
        return rank
    return next(each for each in count() if each not in taken and each not in known)


def _as_ranks(named: Mapping[Place, RankSummary]) -> list[Ranks]:
    """The windows whose ranks a user has named one by one, so that none of them is left out.

    If the captures are of different steps, they are one window, unless a rank recorded several of
    them. Captures of the same rank of several, as of two jobs, are not put together.
    """
    steps: dict[Any, dict[Place, RankSummary]] = {}
    for path, summary in named.items():
        steps.setdefault((summary.phase or "train", summary.first_step), {})[path] = summary
    known = [summary.rank for summary in named.values() if summary.rank is not None]
    if min(map(len, steps.values()), default=0) == 1 and len(known) == len({*known}):
        steps = {None: {**named}}
    windows = []
    for found in steps.values():
        of_jobs = [each.rank for each in found.values() if (each.world_size or 1) > 1]
        ranks = [rank for rank in of_jobs if rank is not None]
        if len(found) > 1 and len(ranks) == len({*ranks}):
            windows.append(_numbered(found))
    return windows


def _numbered(found: Mapping[Place, RankSummary]) -> Ranks:
    """Give the lowest free rank to each capture that names none, or that of an earlier one."""
    every, taken = {summary.rank for summary in found.values()}, dict[int | None, Place]()
    numbered: list[_Found] = []
    for path, summary in found.items():
        rank = free_rank(summary.rank, taken, every)
        taken[rank] = path
        numbered.append((path, msgspec.structs.replace(summary, rank=rank)))
    if len(every - {None}) == len(found):
        return Ranks(numbered)
    listed = few(f"{rank} is {path}" for rank, path in taken.items())
    return Ranks(numbered, f"Some files name no rank, or that of another file: rank {listed}.")


@dataclass
class _Window:
    of_rank: dict[int | None, _Found] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    began_s: float | None = None


def _windows(found: Iterable[_Found]) -> list[Ranks]:
    """Group captures into windows; a window has at most one capture of each rank.

    The captures of a window have the same phase and first step, and began at most `TOGETHER_S`
    seconds apart, but may be in different folders. Captures of different runs can have the same
    phase and first step too. So a capture belongs to a window with a capture in the same folder,
    if there is one without its rank, and else to the window that began nearest in time. If a start
    is not known, the distance in time counts as 0.
    """
    groups: dict[Any, list[_Window]] = {}
    placed = [(Path(path).parent, path, summary) for path, summary in found]
    placed.sort(key=lambda each: (each[0], each[2].started_at or ""))
    for folder, path, summary in placed:
        began_s = unix_time(summary.started_at)
        windows = groups.setdefault((summary.phase or "train", summary.first_step), [])
        near = []
        for number, window in enumerate(windows):
            unknown = None in (began_s, window.began_s)
            apart_s = 0.0 if unknown else abs((began_s or 0) - (window.began_s or 0))
            if summary.rank not in window.of_rank and apart_s <= TOGETHER_S:
                near.append((folder not in window.folders, apart_s, number))
        if not near:
            windows.append(_Window())
        chosen = windows[min(near)[2] if near else -1]
        chosen.of_rank[summary.rank] = path, summary
        chosen.folders.add(folder)
        chosen.began_s = began_s if chosen.began_s is None else chosen.began_s
    return [Ranks(each.of_rank.values()) for windows in groups.values() for each in windows]


def _in_order(windows: list[Ranks]) -> list[Ranks]:
    """Sort windows by their start, and give a number to later ones of the same name."""
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
    if first is None:
        return "no_steps"
    return f"{prefix}steps_{first:06d}-{first if last is None else last:06d}"


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
