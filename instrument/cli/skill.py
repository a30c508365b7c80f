"""`instrument skill`: print how an agent makes a training script faster with `instrument`."""

from __future__ import annotations

import argparse
from importlib.resources import files

from instrument.cli.output import Written

HELP = "print the skill file for coding agents: record, diagnose, try, prove"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the text of this command's help."""
    parser.description = (
        "Print SKILL.md, which tells a coding agent how to record, diagnose, try and prove, what "
        "each answer costs in tokens, and which keys of the JSON to read."
    )


def run(_: argparse.Namespace) -> Written:
    """Return the skill file."""
    return Written(files("instrument").joinpath("SKILL.md").read_text("utf-8").rstrip("\n"))
