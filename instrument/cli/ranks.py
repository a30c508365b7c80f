"""`instrument ranks`: compare the ranks of a run, and merge their traces."""

from __future__ import annotations

import argparse
from pathlib import Path

from instrument.cli.arguments import ROWS, column_names, path_or_url, row_count
from instrument.cli.output import Parts, Written, say, writing
from instrument.cli.paths import chosen_window

HELP = "compare the ranks of a run, and merge their traces"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Compare the ranks of a run's newest window: the step times of each rank, the stragglers, "
        "and the ranges over all ranks. Captures or traces of several ranks can be given instead "
        "of a folder; torch.profiler may have recorded the traces. With --shard, many machines "
        "read a part each."
    )
    add = parser.add_argument
    of = "a folder of captures, a capture or trace of each rank, or a URL"
    add("paths", metavar="RUN_FOLDER", type=path_or_url, nargs="+", help=of)
    add(
        "--window",
        metavar="NAME",
        help="a window other than the newest, such as steps_000010-000012",
    )
    add(
        "--rows",
        metavar="N",
        type=row_count,
        default=ROWS,
        help="rows of each table to show; -1 for all (default: %(default)s)",
    )
    add("--sort", metavar="KEY", help="column to sort the ranges by")
    add(
        "--columns",
        metavar="A,B",
        type=column_names,
        help="columns of the ranges to show; all: every column with values",
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument(
        "--json", action="store_true", help="print all tables as JSON, with times in nanoseconds"
    )
    formats.add_argument(
        "--csv",
        metavar="TABLE",
        help="print one table as CSV, with times in nanoseconds: ranks, stragglers, ranges, "
        "collectives or clocks",
    )
    add(
        "--trace",
        metavar="FILE",
        type=Path,
        help="also merge the ranks' traces into this file, for Perfetto; the file is compressed "
        "if its name ends in .gz",
    )
    add(
        "--shard",
        metavar="K/N",
        help="only summarize part K of N parts of the captures, K from 0 to N - 1, and write it "
        "into the folder --to; auto in an array of Slurm, /N in an indexed job of Kubernetes",
    )
    add(
        "--to",
        metavar="FOLDER",
        type=Path,
        default=Path("shards"),
        help="the folder for --shard (default: %(default)s); `instrument ranks FOLDER` compares "
        "the ranks of all shards in it",
    )


def run(arguments: argparse.Namespace) -> str | Parts:
    """Return the tables that compare the ranks of one window, as text, JSON or CSV."""
    from instrument.read.ranks import merge_traces, shards
    from instrument.read.show import ranks as text

    if arguments.shard:
        shard = shards.Shard.parse(arguments.shard)
        with writing(arguments.to):
            target, unread = shards.make(arguments.paths, shard, arguments.to)
        for sentence in unread:
            say(f"Left out: {sentence}")
        return f"Part {shard.number} of {shard.parts} is in {target}"
    ranks = chosen_window(arguments.paths, arguments.window)
    if arguments.trace:
        with writing(arguments.trace):
            merged = merge_traces.merge(ranks, arguments.trace)
        say(f"The traces of {merged} of {len(ranks.paths)} ranks are in {arguments.trace}")
    if arguments.json:
        return Written(text.as_json(ranks))
    if arguments.csv:
        for note in ranks.notes:
            say(note)
        return Written(text.as_csv(ranks, arguments.csv).rstrip("\n"))
    return text.parts(ranks, rows=arguments.rows, sort=arguments.sort, columns=arguments.columns)
