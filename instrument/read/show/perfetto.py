"""Serve one trace file on this machine, so that the Perfetto UI can open it.

The content security policy of the UI allows local traces only from port 9001. The URL of the
trace is in the fragment of the UI's URL, after "#". Browsers do not send the fragment to any
server, but the UI itself reports its whole URL to Google Analytics. Source:
docs/visualization/deep-linking-to-perfetto-ui.md, tools/open_trace_in_ui and
ui/src/core/analytics_impl.ts in github.com/google/perfetto.

The server listens on 127.0.0.1. It answers a request only if three conditions hold:

- The path contains a random token.
- The header `Host` names the server itself. This stops DNS rebinding.
- The header `Origin` names the Perfetto UI.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import quote, urlencode

from instrument.base.errors import CaptureError
from instrument.read.advise.finding import Finding
from instrument.read.views.views import Views

UI = "https://ui.perfetto.dev"
PORT = 9001
# A connection that sends nothing is closed after this time.
_IDLE_S = 30
# The time shown on both sides of an event is as long as the event, but at least this long.
_LEAST_MARGIN_NS = 50_000
# The UI reads times as floating-point numbers. In traces whose times count from 1970, as older
# versions of torch write them, this moves each time by up to 256 ns.
_ROUNDING_NS = 256


@contextmanager
def serving(trace: Path) -> Iterator[TraceServer]:
    """Serve a trace file at port 9001 of this machine while the block runs.

    Raises:
        CaptureError: another program uses the port.
    """
    try:
        server = TraceServer(trace)
    except OSError as error:
        raise CaptureError(
            f"The port {PORT} of this machine cannot be used ({error.strerror}): end the program "
            "that uses it, because the Perfetto UI loads local traces only from this port."
        ) from None
    thread = Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class TraceServer(ThreadingHTTPServer):
    """An HTTP server for one file.

    Attributes:
        sent: a `threading.Event` that is set when the whole file has been sent.
    """

    daemon_threads = True

    def __init__(self, trace: Path) -> None:
        super().__init__(("127.0.0.1", PORT), _Handler)
        self.trace, self.sent = trace, Event()
        suffix = ".json.gz" if trace.suffix == ".gz" else ".json"
        # The UI shows this name and reports it, so it is the same for all traces.
        self.path = f"/{secrets.token_urlsafe(16)}/trace{suffix}"

    @property
    def address(self) -> str:
        """The URL at which this server offers the trace file."""
        return f"http://127.0.0.1:{PORT}{self.path}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection; the UI shows the error."""


class _Handler(BaseHTTPRequestHandler):
    server: TraceServer
    timeout = _IDLE_S

    def do_GET(self) -> None:
        """Send the file."""
        if not self._is_allowed():
            return
        with self.server.trace.open("rb") as file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.send_header("Access-Control-Allow-Origin", UI)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, 1 << 20)
        self.server.sent.set()

    def _is_allowed(self) -> bool:
        """Return whether the request is for the file and from the UI; if not, answer with 404."""
        allowed = (
            secrets.compare_digest(self.path.encode(), self.server.path.encode())
            and self.headers.get("Host") == f"127.0.0.1:{PORT}"
            and self.headers.get("Origin") == UI
        )
        if not allowed:
            self.send_error(HTTPStatus.NOT_FOUND)
        return allowed

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def ui_address(trace_address: str, view: Mapping[str, int] | None = None) -> str:
    """Return a URL that opens the Perfetto UI in a browser and loads the trace into the UI.

    Args:
        trace_address: the URL of the trace.
        view: a result of `finding_view`; None shows the whole trace.
    """
    parameters = {"url": trace_address} | dict(view or {})
    return f"{UI}/#!/?{urlencode(parameters, safe='', quote_via=quote)}"


def finding_view(capture: Views, finding: Finding) -> dict[str, int]:
    """Return parameters for the UI's URL, so that the UI shows a finding.

    The items of evidence are tried in order, up to the first one whose longest event is in the
    trace. `ts` and `dur` select this event; the UI scrolls to it. `visStart` and `visEnd` zoom to
    the event, with some time before and after it. All values are in ns on the trace's own clock.
    The result is empty if the trace has none of the events.
    """
    events = capture.events
    for span in finding.spans_in(capture.name):
        if span is not None:
            start_ns, end_ns = span
            margin_ns = max(end_ns - start_ns, _LEAST_MARGIN_NS)
            # The UI ignores a zoom that begins before its first event or ends after its last one.
            first_ns = int(events.start_ns.min()) + _ROUNDING_NS
            last_ns = int(events.end_ns.max()) - _ROUNDING_NS
            begin_ns = max(start_ns - margin_ns, first_ns)
            stop_ns = min(end_ns + margin_ns, last_ns)
            # A trace that is shorter than the rounding needs no zoom.
            zoom = {"visStart": begin_ns, "visEnd": stop_ns} if begin_ns < stop_ns else {}
            return {"ts": start_ns, "dur": end_ns - start_ns, **zoom}
    return {}
