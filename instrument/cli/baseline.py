"""`instrument baseline`: write the counters of a capture to a small file, for reviews and CI."""

from __future__ import annotations

import argparse
from pathlib import Path

from instrument.cli.arguments import CAPTURE, path_or_url
from instrument.cli.output import Written, writing
from instrument.cli.paths import newest_capture

HELP = "write the counters of a capture to a small JSON file, to keep in the repository"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Write the counters of a capture, such as the operators and syncs of a step, to a small "
        "JSON file. Keep the file in the repository, and compare new captures with it."
    )
    parser.add_argument("path", metavar="CAPTURE", type=path_or_url, help=CAPTURE)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the file to write, such as perf.json (default: print the content)",
    )


def run(arguments: argparse.Namespace) -> str:
    """Write the file and return a sentence about it; without --output, return the content."""
    from instrument.base import files
    from instrument.read.compare.baseline import as_text
    from instrument.read.compare.counters import counters

    counted = counters(newest_capture(arguments.path))
    content = as_text(counted)
    if arguments.output is None:
        return Written(content.rstrip("\n"))
    with writing(arguments.output):
        files.write(arguments.output, content)
    known = sum(count is not None for count in counted.counts.values())
    return f"Wrote {known} counters of {counted.steps} steps to {arguments.output}."
