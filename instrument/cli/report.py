"""`instrument report`: write one HTML page about captures."""

from __future__ import annotations

import argparse
from pathlib import Path

from instrument.base.errors import ConfigError
from instrument.cli.arguments import (
    CAPTURES,
    add_ignore,
    add_steps,
    chosen_steps,
    path_or_url,
    scoped,
)
from instrument.cli.output import Written, writing
from instrument.read.views.json_text import json_text

HELP = "write one HTML page about a capture or a run"

_FILE = Path("report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Write one HTML page: where the time goes, what to change and what the change saves, "
        "ranges, timeline, flame graphs, memory, kernels. The page is one file and loads nothing "
        "else, so it can be sent to others. If there are several captures, such as the windows and "
        "ranks below a folder, the page compares them. All other sections show the newest capture. "
        "Of a folder with several runs, the page shows only the newest run. With --before, the "
        "page shows what changed since another run."
    )
    add = parser.add_argument
    add("paths", metavar="PATH", type=path_or_url, nargs="+", help=CAPTURES)
    add("-o", "--output", metavar="FILE", type=Path, help=f"the file to write (default: {_FILE})")
    add(
        "--before",
        metavar="PATH",
        type=path_or_url,
        help="show what changed since this capture or run, like `instrument diff`",
    )
    add_ignore(parser)
    add_steps(parser)
    add("--open", action="store_true", help="open the page in the browser")
    add(
        "--redact",
        action="store_true",
        help="leave out the names of files, users and hosts; names of ranges and functions stay",
    )
    add(
        "--json",
        action="store_true",
        help="print the content of the page as JSON, with numbers as text",
    )


def run(arguments: argparse.Namespace) -> str:
    """Write the page and return a sentence about the file; with --json, only return JSON."""
    from instrument.base import files
    from instrument.base.units import size
    from instrument.cli.paths import readable_captures
    from instrument.read.advise.diagnose import Diagnosing
    from instrument.read.advise.settings import read_settings
    from instrument.read.show.page.page import page, payload

    if arguments.json and (arguments.output or arguments.open):
        raise ConfigError("--json prints on stdout: leave out --open; use > FILE instead of -o.")
    before = arguments.before
    if before is not None:
        from instrument.read.compare.side import load

        before = load(before, chosen_steps(arguments))
    captures = (scoped(each, arguments) for each in readable_captures(arguments.paths))
    seen = Diagnosing(settings=read_settings(arguments.ignore))
    content = payload(captures, before=before, redact=arguments.redact, diagnosing=seen)
    if arguments.json:
        return Written(json_text(content))
    target = arguments.output or _FILE
    with writing(target):
        files.write(target, page(content).html)
    if arguments.open:
        import webbrowser

        webbrowser.open(target.absolute().as_uri())
    return f"Wrote {target} ({size(target.stat().st_size)})."
