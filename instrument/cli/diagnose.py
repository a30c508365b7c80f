"""`instrument diagnose`: say what slows a run, what to change, and what the change saves."""

from __future__ import annotations

import argparse

from instrument.cli.arguments import (
    CAPTURES,
    add_formats,
    add_ignore,
    add_steps,
    path_or_url,
    scoped,
)
from instrument.cli.output import Written

HELP = "say what slows a run, what to change, and what the change saves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Say what slows a run, what to change, and how long a step would take after the change. "
        "Several captures, such as the windows and ranks below a folder, are diagnosed as one run. "
        "Of a folder with several runs, only the newest run is diagnosed."
    )
    parser.add_argument("paths", metavar="PATH", type=path_or_url, nargs="+", help=CAPTURES)
    add_ignore(parser)
    add_steps(parser)
    add_formats(
        parser,
        json="print JSON, with all evidence and times in nanoseconds",
        markdown="print Markdown of at most 2,000 tokens, for a pull request or a coding agent",
    )


def run(arguments: argparse.Namespace) -> str:
    """Return the diagnosis of the captures as text, JSON or Markdown."""
    from instrument.cli.paths import readable_captures
    from instrument.read.advise.diagnose import Diagnosing
    from instrument.read.advise.diagnosis import as_json, as_markdown, as_text
    from instrument.read.advise.settings import read_settings

    seen = Diagnosing(settings=read_settings(arguments.ignore))
    for capture in readable_captures(arguments.paths):
        seen.add(scoped(capture, arguments))
    write = as_json if arguments.json else as_markdown if arguments.markdown else as_text
    return Written(write(seen.diagnosis))
