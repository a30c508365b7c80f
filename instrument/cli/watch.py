"""`instrument watch`: show in the terminal how a run goes on."""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.base.errors import InstrumentError
from instrument.base.printable import is_terminal
from instrument.base.storage import is_url
from instrument.cli import trigger
from instrument.cli.arguments import path_or_url
from instrument.cli.output import Parts

if TYPE_CHECKING:
    from instrument.read.show.live import LiveRun

HELP = "watch a running job: its steps, slow ranks, costly ranges and captures"

KEYS = "r asks for a window, q ends."
_REFRESH_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Show how a run with profiler.timings goes on: the time of a step, the ranks that fall "
        "behind or are silent, the costliest ranges, and the newest captures with the verdict. In "
        "a terminal, this is shown anew every 2 s; the key r asks for a window as `instrument "
        "trigger` does, and q ends the command. Otherwise, it is printed once."
    )
    of = "the folder of a run, or a folder above it; or the URL of the folder with the timings"
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=path_or_url, help=of)
    parser.add_argument("--once", action="store_true", help="print the state once and end")


def run(arguments: argparse.Namespace) -> Parts:
    """Return the state of a run, or show it until the user ends the command."""
    from instrument.read.show.live import LiveRun

    run = LiveRun(arguments.run_folder)
    if arguments.once or not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        return state(run, time.time())
    import termios
    import tty

    from rich.live import Live
    from rich.text import Text

    from instrument.read.show.terminal import draw

    def key_within(seconds: float) -> str:
        ready = select.select([sys.stdin], [], [], seconds)[0]
        return os.read(sys.stdin.fileno(), 99).decode(errors="replace") or "q" if ready else ""

    def show(parts: Parts) -> None:
        live.update(Text.from_ansi(draw(parts)), refresh=True)

    live, before = Live(screen=True, auto_refresh=False), termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with live, suppress(KeyboardInterrupt):
            watch(run, show, key_within, time.time)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
    return []


def watch(
    run: LiveRun,
    show: Callable[[Parts], object],
    key_within: Callable[[float], str],
    clock: Callable[[], float],
) -> None:
    """Show the state of a run every two seconds until the key q is pressed."""
    message, key = KEYS, ""
    show([f"Reading {run.place} …"])
    while key != "q":
        try:
            show([message, *state(run, clock())])
        except (InstrumentError, OSError) as error:  # perhaps the run has just begun
            show([message, str(error)])
        if key := key_within(_REFRESH_S):
            message = _ask(run) if key == "r" else KEYS


def _ask(run: LiveRun) -> str:
    if is_url(run.folder):
        return "A URL takes no requests: run `instrument trigger` where the run has its folder."
    try:
        return trigger.request(Path(run.folder))
    except (InstrumentError, OSError) as error:
        return str(error)


def state(run: LiveRun, now_s: float) -> Parts:
    """Read what is new in a run, and return its state; the verdict of a capture is made once."""
    from instrument.read.show.capture_list import CAPTURES, sections
    from instrument.read.views.table import Table

    run.refresh(now_s)
    rows = [_row(place, place == run.captures[0]) for place in run.captures]
    steps, ranks, ranges = run.parts(now_s)
    return [steps, ranks, *sections(Table.of_dicts(CAPTURES, rows)), ranges]


@cache
def _row(place: Path | str, verdict: bool) -> dict[str, Any]:
    from instrument.read.show.capture_list import capture_row

    return capture_row(place, verdict=verdict)
