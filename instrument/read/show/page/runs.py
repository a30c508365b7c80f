"""The section *Run*: the step times, slow ranks and clocks of several windows and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from instrument.base.units import duration
from instrument.read.ranks.rank_summary import RankSummary
from instrument.read.ranks.run import SCHEMAS, Ranks, Run
from instrument.read.show.page.parts import Part, column, columns_of, section, table, text
from instrument.read.views.table import Table, known_columns

_TABLES = {
    "stragglers": "Slow ranks that other ranks wait for",
    "collectives": "Collectives: transfer and waiting time",
    "clocks": "Clocks: how far the clock of each rank is ahead",
}
_KINDS = {
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed communication",
    "exposed_copy_ns": "copy",
    "idle_ns": "idle",
}


def run(found: Sequence[tuple[Path | str, RankSummary]]) -> dict[str, Any]:
    """Return the step times of a run, and what differs between the ranks of each window."""
    windows = Run(found).windows
    parts = [part for window in windows for part in _window(window)]
    return section("Run", *_steps(windows), *parts)


def _steps(windows: Sequence[Ranks]) -> Iterator[Part | None]:
    """Yield a chart for each rank, with a column for each step of all windows, on one scale."""
    found: dict[str, dict[tuple[int, int | None], int]] = {}
    for at, window in enumerate(windows):
        for summary in window.summaries:
            for number, ns in zip(summary.steps.number, summary.steps.duration_ns):
                found.setdefault(_rank(summary), {})[at, number] = ns
    if not found:
        return
    every = {step for times in found.values() for step in times}
    steps = sorted(every, key=lambda step: (step[0], step[1] or 0))
    longest = [max(times.values()) for times in found.values()]
    yield text("Step times over the run", "h3")
    charts = [[times.get(step) for step in steps] for times in found.values()]
    yield table(
        "Step times over the run",
        [
            column("rank", [*found]),
            column("steps_ns", longest, title="time of each step", kind="steps", width=800,
                   numbers=[number for _, number in steps], charts=charts, most=max(longest)),
            column("longest_ns", longest, title="longest"),
        ],
    )  # fmt: skip


def _rank(summary: RankSummary) -> str:
    return "rank unknown" if summary.rank is None else f"rank {summary.rank}"


def _window(window: Ranks) -> Iterator[Part | None]:
    """Yield what the ranks of a window differ in; of one rank, only the notes."""
    notes = [text(note, "soft") for note in window.notes]
    has_ranks = len(window.summaries) > 1
    if notes or has_ranks:
        yield text(window.name, "h3")
    yield from notes
    if not has_ranks:
        return
    yield table(f"Ranks: {window.name}", _ranks(window.ranks))
    for name, title in _TABLES.items():
        if rows := getattr(window, name):
            known = rows.select(known_columns(rows))
            yield text(title, "h4")
            yield table(f"{title}: {window.name}", columns_of(known, SCHEMAS[name]))


def _ranks(ranks: Table) -> list[Any]:
    """Return the columns of the table of ranks, with a bar that splits the step, if it is known."""
    known = known_columns(ranks)
    columns = columns_of(ranks.select(known), SCHEMAS["ranks"])
    kinds = {
        kind: [ns or 0 for ns in ranks.column(name)]
        for name, kind in _KINDS.items()
        if name in known
    }
    if kinds and "step_ns" in known:
        labels = [
            ", ".join(f"{kind} {duration(ns)}" for kind, ns in zip(kinds, parts))
            for parts in zip(*kinds.values())
        ]
        bar = column("parts_ns", ranks.column("step_ns"), title="mean step, by kind of time",
                     kind="bar", texts=labels, parts=kinds)  # fmt: skip
        columns.insert(1, bar)
    return columns
