"""`instrument open`: show a trace in the Perfetto UI."""

from __future__ import annotations

import argparse
import webbrowser
from typing import TYPE_CHECKING

from instrument.base.errors import CaptureError, ConfigError, did_you_mean
from instrument.cli.arguments import CAPTURE, path_or_url
from instrument.cli.output import say
from instrument.cli.paths import newest_capture

if TYPE_CHECKING:
    from instrument.read.advise.finding import Finding
    from instrument.read.capture import Capture

HELP = "show a trace in the Perfetto UI, at the time of a finding"

# The server waits this long for the UI to load the trace.
_TIMEOUT_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments and the text of its help."""
    parser.description = (
        "Open ui.perfetto.dev in the browser with the trace of a capture. The browser gets the "
        "trace from this command through port 9001 of this machine; the trace is not sent to "
        "another machine. The command ends when the trace is loaded, after five minutes, or with "
        "Ctrl-C."
    )
    add = parser.add_argument
    add("path", metavar="PATH", type=path_or_url, help=CAPTURE)
    add(
        "--finding",
        metavar="CODE",
        help="show the time of this finding's longest event; `instrument diagnose --json` lists "
        "the codes",
    )
    add("--no-browser", action="store_true", help="print the address, and do not open a browser")


def run(arguments: argparse.Namespace) -> str:
    """Serve the trace until the UI has loaded it, and return a sentence that says so."""
    from instrument.read.show.perfetto import finding_view, serving, ui_address

    capture = newest_capture(arguments.path)
    trace = capture.require_trace()
    view = None
    if arguments.finding is not None:
        view = finding_view(capture, _finding(capture, arguments.finding))
        if not view:
            say(f"The finding {arguments.finding} names no event, so the whole trace is shown.")
    with serving(trace) as server:
        address = ui_address(server.address, view)
        say(
            "If the browser asks whether ui.perfetto.dev may access other apps and services on "
            "this device, allow it: the browser loads the trace from this command."
        )
        if arguments.no_browser or not webbrowser.open(address):
            say(
                "This address shows the trace in the Perfetto UI: open it in a browser on this "
                "machine, or on a machine that forwards its port 9001 to this machine.",
                f"The address works once, in the next {_TIMEOUT_S // 60} minutes; to stop, press "
                "Ctrl-C.",
            )
            print(address, flush=True)
        try:
            loaded = server.sent.wait(_TIMEOUT_S)
        except KeyboardInterrupt:
            return "Stopped before the trace was loaded."
    if not loaded:
        raise CaptureError(
            f"The Perfetto UI did not load the trace within {_TIMEOUT_S // 60} minutes: open the "
            "address in a browser on this machine, and allow ui.perfetto.dev to access other apps "
            "and services on this device."
        )
    return f"The Perfetto UI has loaded the trace of {capture.name}."


def _finding(capture: Capture, code: str) -> Finding:
    findings = {finding.code: finding for finding in reversed(capture.diagnose().findings)}
    if code not in findings:
        raise ConfigError(
            f"{capture.name} has no finding {code!r}{did_you_mean(code, sorted(findings))}"
        )
    return findings[code]
