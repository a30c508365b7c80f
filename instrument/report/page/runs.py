"""The section *Run*: the step times, slow ranks and clocks of several windows and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instrument.analysis.table import Table, known_columns
from instrument.report.page.tables import as_columns
from instrument.runs.rank_summary import RankSummary
from instrument.runs.run import SCHEMAS, Ranks, Run

_TABLES = ("ranks", "stragglers", "collectives", "clocks")


def section(found: Sequence[tuple[Path | str, RankSummary]]) -> dict[str, Any] | None:
    """Return the windows and ranks of a run; None for a single capture.

    The keys:

    - `windows`: for each window, in the order of recording: its `name`; `notes`, a list of
      sentences; and the tables `ranks`, `stragglers`, `collectives` and `clocks` of `instrument
      ranks`, with the keys of `tables.as_columns`. A table without rows is None.
    - `steps`: for each capture its `window` (an index into `windows`), its `rank`, and the
      `numbers` and `duration_ns` of its finished steps.
    """
    if len(found) < 2:
        return None
    windows = Run(found).windows
    return {
        "windows": [_window(window) for window in windows],
        "steps": [
            {
                "window": index,
                "rank": summary.rank,
                "numbers": summary.steps.get("number") or [],
                "duration_ns": summary.steps.get("duration_ns") or [],
            }
            for index, window in enumerate(windows)
            for summary in window.summaries
        ],
    }


def _window(window: Ranks) -> dict[str, Any]:
    tables = {name: getattr(window, name) for name in _TABLES}
    return {
        "name": window.name,
        "notes": window.notes,
        **{name: _known(table, name) for name, table in tables.items()},
    }


def _known(table: Table, name: str) -> dict[str, Any] | None:
    if not len(table):
        return None
    return as_columns(table.select(known_columns(table)), SCHEMAS[name])
