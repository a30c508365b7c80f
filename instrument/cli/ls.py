"""`instrument ls`: list runs and captures, and what slows each of them most."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.base import storage
from instrument.base.errors import InstrumentError
from instrument.base.units import counted
from instrument.cli.arguments import ROWS, add_formats, path_or_url, row_count
from instrument.cli.output import Parts, Written
from instrument.read.facts.schema import Schema, names_of, schema

if TYPE_CHECKING:
    from instrument.read.views.section import Section
    from instrument.read.views.table import Table

HELP = "list runs and captures, and what slows each of them most"

#: The columns of the list of captures.
CAPTURES: Schema = schema(
    run="the folder that the run recorded into",
    name="the name of the capture",
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "List the captures below a folder by run, the newest first. Each capture has a verdict: "
        "the title of the largest finding of `instrument diagnose`. For the verdicts, the command "
        "reads the traces."
    )
    add = parser.add_argument
    of = "a folder that holds captures, a capture, a Chrome trace, or a URL (default: %(default)s)"
    add("path", metavar="PATH", type=path_or_url, nargs="?", default=Path(), help=of)
    add(
        "--rows",
        metavar="N",
        type=row_count,
        default=ROWS,
        help="list the N newest captures; -1 for all (default: %(default)s)",
    )
    add("--no-verdict", action="store_true", help="do not read the traces; list no verdicts")
    add_formats(parser, json="print the list as JSON", csv="print the list as CSV")


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the list of captures as text, JSON or CSV."""
    from instrument.read.views.find_captures import captures_at
    from instrument.read.views.table import Table

    found = captures_at(arguments.path)
    newest = found[::-1][: arguments.rows]
    rows = [row_of(place, not arguments.no_verdict) for place in newest]
    if arguments.json:
        return Written(json.dumps({"captures": rows}, indent=2))
    table = Table.of_dicts(CAPTURES, rows)
    if arguments.csv:
        return Written(table.to_csv().rstrip("\n"))
    left_out = len(found) - len(newest)
    are = "is" if left_out == 1 else "are"
    note = f"{counted(left_out, 'older capture')} {are} not listed; --rows -1 lists all."
    return [*parts(table), *([note] if left_out else [])]


def row_of(place: Path | str, verdicts: bool) -> dict[str, Any]:
    """The cells of a capture; the verdict of an unreadable capture is the error."""
    from instrument.read.advise.verdict import verdict
    from instrument.read.capture import Capture
    from instrument.read.trace.capture_json import unix_time

    row: dict[str, Any] = dict.fromkeys(names_of(CAPTURES))
    if isinstance(place, str):
        row["run"], _, row["name"] = place.rpartition("/")
    else:
        row["run"], row["name"] = str(place.parent), place.name
    try:
        capture = Capture.load(place)
        about, window = capture.about, capture.about.window
        started_s = unix_time(about.started_at)
        if started_s is not None:
            row["started_at"] = datetime.fromtimestamp(started_s).isoformat(" ", "seconds")
        row |= {"first_step": window.first_step, "last_step": window.last_step}
        row |= {"phase": window.phase, "rank": about.rank}
        row["trigger"] = ": ".join(filter(None, (window.trigger, window.trigger_reason))) or None
        if verdicts:
            diagnosis = capture.diagnose()
            row |= {"step_ns": diagnosis.step_ns, "verdict": verdict(diagnosis)}
    except InstrumentError as error:
        row["verdict"] = str(error)
    finally:
        storage.release(str(place))
    return row


def parts(table: Table) -> Iterator[Section]:
    """A table for each run; a phase or rank that all its captures share is in the title."""
    from instrument.read.views.section import Section
    from instrument.read.views.table import Table, known_columns

    for run in dict.fromkeys(table.column("run")):
        captures = table.where(run=run)
        values = {name: captures.column(name) for name in ("phase", "rank")}
        common = {name: each[0] for name, each in values.items() if len({*each}) == 1}
        title = [run, counted(len(captures), "capture")]
        title += [f"{name} {value}" for name, value in common.items() if value is not None]
        shown = Table(
            {
                **{name: captures.column(name) for name in ("name", "started_at")},
                **{name: each for name, each in values.items() if name not in common},
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
            missable=("phase", "rank", "trigger"),
            below=[[text] if text else [] for text in verdicts],
            sentences=True,
            all_columns="--json",
        )


def _steps(capture: Any) -> str | None:
    numbers = [each for each in (capture.first_step, capture.last_step) if each is not None]
    return "–".join(map(str, dict.fromkeys(numbers))) or None
