"""`instrument diff`: what changed from one capture or run to another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.base.errors import ConfigError
from instrument.cli.arguments import (
    ROWS,
    add_formats,
    add_steps,
    chosen_steps,
    path_or_url,
    row_count,
)
from instrument.cli.output import Parts, Result, Written, say
from instrument.read.views.json_text import json_text

if TYPE_CHECKING:
    from instrument.read.compare.diff import Difference
    from instrument.read.compare.limits import Verdict

HELP = "compare two captures or runs: how much slower or faster a step is, and where"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.usage = (
        "instrument diff [options] BEFORE AFTER\n"
        "       instrument diff [options] BEFORE1 BEFORE2 BEFORE3 AFTER1 AFTER2 AFTER3"
    )
    parser.description = (
        "Compare two captures, runs or traces. The change of the mean step is split into parts, by "
        "range and by what the time is spent on: compute, exposed communication, copy, waiting for "
        "data, launch, CPU operators, Python, idle. The parts sum to the change. Below are the "
        "operators, kernels and counters that changed. Of a folder with several runs, only the "
        "newest run is compared."
    )
    add = parser.add_argument
    add(
        "paths",
        metavar="CAPTURE",
        type=path_or_url,
        nargs="+",
        help="BEFORE and AFTER: captures, Chrome traces, folders of runs, or URLs; with --fail-on, "
        "also files that `instrument baseline` wrote. Of more than two, the first half is before "
        "the change and the second half after it; three on each side give intervals",
    )
    add(
        "--by",
        choices=("range", "operator", "kernel", "shape"),
        help="in the text output, show this one table after the parts of the step, instead of the "
        "operators, kernels and counters",
    )
    add(
        "--rows",
        metavar="N",
        type=row_count,
        default=ROWS,
        help="rows of each table to show; -1 for all (default: %(default)s)",
    )
    add_steps(parser)
    add(
        "--force",
        action="store_true",
        help="also compare captures that are too unlike, such as captures of different devices",
    )
    add(
        "--fail-on",
        metavar="CONDITION",
        action="append",
        default=[],
        help="a condition on a counter, a time or the answer to a query, such as 'syncs>0', "
        "'operators>+5%%', 'range:attention.total>5%%' or '(select …)>0'; can be given several "
        "times. The exit status is 1 if a condition is true, and 3 if none is true but at least "
        "one is undecided",
    )
    add_formats(
        parser,
        json="print JSON, with all rows and times in nanoseconds",
        markdown="print Markdown, for a comment on a pull request",
    )


def run(arguments: argparse.Namespace) -> Result:
    """Return the comparison as text, JSON or Markdown; the conditions decide the exit status."""
    from instrument.read.compare import limits
    from instrument.read.compare.baseline import is_baseline, read
    from instrument.read.compare.diff import diff
    from instrument.read.compare.side import load

    conditions = [limits.parse(text) for text in arguments.fail_on]
    paths = arguments.paths
    if len(paths) % 2:
        raise ConfigError(
            f"The paths are {', '.join(map(str, paths))}: give the same number of captures before "
            "and after the change, first those before it."
        )
    halves = paths[: len(paths) // 2], paths[len(paths) // 2 :]
    baselines = [path for path in paths if isinstance(path, Path) and is_baseline(path)]
    if baselines and (not conditions or len(paths) > 2):
        raise ConfigError(
            f"{baselines[0]} is a baseline, which holds only counters: give it and one capture, "
            "and add a condition, such as --fail-on 'operators>+0'."
        )
    steps = chosen_steps(arguments)
    sides = [None if {*half} & {*baselines} else load(half, steps, conditions) for half in halves]
    was, now = sides
    found = None
    if was is not None and now is not None:
        found = diff(was, now, force=arguments.force)
    else:
        for side in sides:
            say(*(side.notes if side else ()))
    verdicts = []
    if conditions:
        windows = [
            side.judged if side else [limits.Window(read(half[0]))]
            for side, half in zip(sides, halves)
        ]
        verdicts = [limits.judge(condition, *windows) for condition in conditions]
    return Result(_shown(arguments, found, verdicts), limits.exit_status(verdicts))


def _shown(
    arguments: argparse.Namespace, found: Difference | None, verdicts: Sequence[Verdict]
) -> str | Parts:
    """Return the verdicts, and the comparison; `found` is None if a side is a baseline."""
    from instrument.read.compare import limits
    from instrument.read.compare.diff import as_dict
    from instrument.read.compare.text import as_markdown, parts

    if arguments.json:
        content = {} if found is None else as_dict(found)
        conditions = {"conditions": limits.as_dicts(verdicts)} if verdicts else {}
        return Written(json_text({**content, **conditions}))
    if arguments.markdown:
        text = [] if found is None else [as_markdown(found, rows=arguments.rows)]
        return Written("\n\n".join([*([limits.as_markdown(verdicts)] if verdicts else []), *text]))
    tables = [] if found is None else parts(found, rows=arguments.rows, by=arguments.by)
    lines = [line for verdict in verdicts for line in limits.as_lines(verdict)]
    return [*([lines] if lines else []), *tables]
