"""`instrument report`: write what captures show as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from instrument.cli.arguments import path_or_url

HELP = "write what a capture or a run shows as one HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Write one HTML page with all that the captures show: where the time goes, what to change, "
        "ranges, timeline, flame graphs, memory, kernels. The page needs no other file."
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        type=path_or_url,
        nargs="+",
        help="a capture, a Chrome trace, a folder that holds captures, or a URL",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="the file to write (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> str:
    """Write the page, and return a sentence with its path and size.

    Raises:
        CaptureError: there is no capture, or one cannot be read.
    """
    from instrument import files
    from instrument.capture import Capture
    from instrument.cli.paths import captures_at
    from instrument.report.page.page import page, payload
    from instrument.units import size

    found = [Capture.load(each) for path in arguments.paths for each in captures_at(path)]
    text = page(payload(found))
    files.write(arguments.output, text)
    return f"Wrote {arguments.output} ({size(len(text))})."
