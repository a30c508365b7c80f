"""`instrument trigger`: have a run that goes on record its next steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from instrument.cli.arguments import positive

HELP = "have a run that goes on record its next steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Have the runs in or below a folder record their next steps, from another shell or node. They must have been "
        "started with the file trigger: 'profiler/triggers=[file]'. Every rank that listens there records."
    )
    add = parser.add_argument
    add(
        "folder",
        metavar="RUN_FOLDER",
        type=Path,
        help="a folder for captures, or one above it, such as Hydra's",
    )
    add(
        "--steps",
        metavar="N",
        type=positive,
        help="steps to record (as many as profiler.active says)",
    )


def run(arguments: argparse.Namespace) -> str:
    """Return which runs were asked.

    Raises:
        CaptureError: no run there listens.
    """
    from instrument.triggers.file import ask

    folders = ask(arguments.folder, arguments.steps)
    how_many = f"the next {arguments.steps} steps" if arguments.steps else "the next window"
    return f"Asked for {how_many} in {', '.join(map(str, folders))}; the run looks there every half second."
