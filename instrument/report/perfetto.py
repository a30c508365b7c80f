"""Serve one trace file on this machine, so that the Perfetto UI can open it.

The content security policy of the UI allows local traces only from port 9001. The address of the
trace is in the fragment of the UI's address, after "#". Browsers do not send the fragment to any
server. Source: docs/visualization/deep-linking-to-perfetto-ui.md and tools/open_trace_in_ui in
github.com/google/perfetto.

The server listens on 127.0.0.1. It answers a request only if three conditions hold:

- The path contains a random token.
- The header `Host` names the server itself. This stops DNS rebinding.
- The header `Origin` names the Perfetto UI.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import quote

from instrument.analysis.views import Views
from instrument.errors import CaptureError
from instrument.findings.finding import Finding
from instrument.findings.places import evidence_span

UI = "https://ui.perfetto.dev"
PORT = 9001
# A connection that sends nothing is closed after this time.
_IDLE_S = 30
# The time shown on both sides of an event is as long as the event, but at least this long.
_LEAST_MARGIN_NS = 50_000


@contextmanager
def serving(trace: Path, name: str) -> Iterator[TraceServer]:
    """Serve a trace file at port 9001 of this machine while the block runs.

    Args:
        trace: the file.
        name: the title that the UI shows.

    Raises:
        CaptureError: another program uses the port.
    """
    try:
        server = TraceServer(trace, name)
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

    def __init__(self, trace: Path, name: str) -> None:
        super().__init__(("127.0.0.1", PORT), _Handler)
        self.trace, self.sent = trace, Event()
        suffix = ".json.gz" if trace.suffix == ".gz" else ".json"
        self.path = f"/{secrets.token_urlsafe(16)}/{quote(name + suffix, safe='')}"

    @property
    def address(self) -> str:
        """The address of the file."""
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
            self._end()
            shutil.copyfileobj(file, self.wfile, 1 << 20)
        self.server.sent.set()

    def do_OPTIONS(self) -> None:
        """Answer a preflight request: allow the UI to send requests to this machine."""
        if self._is_allowed():
            self.send_response(HTTPStatus.NO_CONTENT)
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self._end()

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

    def _end(self) -> None:
        self.send_header("Access-Control-Allow-Origin", UI)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def ui_address(trace_address: str, visible_ns: tuple[int, int] | None = None) -> str:
    """Return an address that opens the Perfetto UI in a browser and loads the trace into the UI.

    Args:
        trace_address: the address of the trace.
        visible_ns: the start and the end of the time to show, on the trace's own clock; None shows
            the whole trace.
    """
    parts = [f"url={quote(trace_address, safe='')}"]
    if visible_ns is not None:
        parts += [f"visStart={visible_ns[0]}", f"visEnd={visible_ns[1]}"]
    return f"{UI}/#!/?{'&'.join(parts)}"


def visible_time(capture: Views, finding: Finding) -> tuple[int, int] | None:
    """Return the time to show for a finding, on the trace's own clock.

    The rows of evidence are tried in order. The result covers the first event that is in the trace,
    and some time before and after it. The result is None if the trace has none of the events.
    """
    for row in finding.evidence:
        if span := evidence_span(capture, finding, row):
            margin_ns = max(span[1] - span[0], _LEAST_MARGIN_NS)
            return span[0] - margin_ns, span[1] + margin_ns
    return None
