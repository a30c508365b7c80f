"""The list of captures that `instrument ls` and `instrument watch` print."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from instrument.base import storage
from instrument.base.errors import InstrumentError
from instrument.base.units import counted
from instrument.read.advise.diagnose import diagnose
from instrument.read.advise.verdict import verdict as verdict_of
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.trace.capture_json import unix_time
from instrument.read.views.section import Section
from instrument.read.views.table import Table, known_columns
from instrument.read.views.views import Views

#: The columns of the list of captures.
CAPTURES: Schema = schema(
    run="the folder that the run recorded into",
    name="the name of the capture; of a window in parts, that of the first part",
    parts="how many captures hold the window; more than one with `max_stall_ms`",
    started_at="when the recording began, in this machine's time zone; None if it is not known",
    phase="the phase of the window, such as train; None if it is not recorded",
    first_step="the number of the first recorded step",
    last_step="the number of the last step that was recorded completely",
    rank="the rank that recorded",
    trigger="the trigger that fired, and why; None if the schedule planned the window",
    step_ns="the simulated time of a typical step, as in `instrument diagnose`; None if no step "
    "could be simulated",
    verdict="what slows the run most, or why the capture cannot be read",
)


def capture_row(place: Path | str, *more: Path | str, verdict: bool) -> dict[str, Any]:
    """The cells of a window, whose parts may be several captures.

    The verdict of an unreadable capture is the error.
    """
    row: dict[str, Any] = dict.fromkeys(names_of(CAPTURES)) | {"parts": 1 + len(more)}
    if isinstance(place, str):
        row["run"], _, row["name"] = place.rpartition("/")
    else:
        row["run"], row["name"] = str(place.parent), place.name
    try:
        capture, *others = map(Views.load, (place, *more))
        about, window = capture.about, capture.about.window
        started_s = unix_time(about.started_at)
        if started_s is not None:
            row["started_at"] = datetime.fromtimestamp(started_s).isoformat(" ", "seconds")
        last = [capture, *others][-1].about.window.last_step
        row |= {"first_step": window.first_step, "last_step": last}
        row |= {"phase": window.phase, "rank": about.rank}
        row["trigger"] = ": ".join(filter(None, (window.trigger, window.trigger_reason))) or None
        if verdict:
            diagnosis = diagnose([capture, *others])
            row |= {"step_ns": diagnosis.step_ns, "verdict": verdict_of(diagnosis)}
    except InstrumentError as error:
        row["verdict"] = str(error)
    finally:
        for each in (place, *more):
            storage.release(str(each))
    return row


def sections(table: Table) -> Iterator[Section]:
    """A table for each run; a phase or rank that all its captures share is in the title."""
    for run in dict.fromkeys(table.column("run")):
        captures = table.where(run=run)
        values = {name: captures.column(name) for name in ("phase", "rank")}
        common = {name: each[0] for name, each in values.items() if len({*each}) == 1}
        title = [run, counted(sum(captures.column("parts")), "capture")]
        title += [f"{name} {value}" for name, value in common.items() if value is not None]
        shown = Table(
            {
                **{name: captures.column(name) for name in ("name", "started_at")},
                **{name: each for name, each in values.items() if name not in common},
                "parts": [row.parts if row.parts > 1 else None for row in captures],
                "steps": [_steps(row) for row in captures],
                "trigger": captures.column("trigger"),
                "step_ns": captures.column("step_ns"),
            }
        )
        verdicts = captures.column("verdict")
        yield Section(
            shown,
            known_columns(shown),
            ", ".join(title),
            missable=("phase", "rank", "parts", "trigger"),
            below=[[text] if text else [] for text in verdicts],
            sentences=True,
            all_columns="--json",
        )


def _steps(capture: Any) -> str | None:
    numbers = [each for each in (capture.first_step, capture.last_step) if each is not None]
    return "–".join(map(str, dict.fromkeys(numbers))) or None
