"""`instrument trigger`: ask a running job to record its next steps."""

from __future__ import annotations

import argparse
from pathlib import Path

from instrument.cli.arguments import positive

HELP = "ask a running job to record its next steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Ask the runs in or below a folder to record their next steps. This works from another "
        "shell, or from another machine that has the folder. The runs must have been started with "
        "the trigger 'file': 'profiler/triggers=[file]'. Every rank with this trigger records."
    )
    add = parser.add_argument
    add(
        "folder",
        metavar="RUN_FOLDER",
        type=Path,
        help="the folder of a run's captures, or a folder above it, such as Hydra's output folder",
    )
    add("--steps", metavar="N", type=positive, help="steps to record (default: profiler.active)")


def run(arguments: argparse.Namespace) -> str:
    """Request a window from runs, and return a sentence that names the folders of these runs."""
    return request(arguments.folder, arguments.steps)


def request(folder: Path, steps: int | None = None) -> str:
    """Request a window from the runs in or below a folder; return what `run` returns."""
    from instrument.record.triggers.file import ask

    folders = ask(folder, steps)
    how_many = f"the next {steps} steps" if steps else "the next window"
    listed = ", ".join(map(str, folders))
    return f"Asked for {how_many} in {listed}; a run looks for requests every half second."
