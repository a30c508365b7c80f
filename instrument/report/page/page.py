"""The payload of the report page, and the page itself as one HTML file."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from instrument.errors import CaptureError
from instrument.report.page import causal, ranges, tables, verdict
from instrument.templates import render

if TYPE_CHECKING:
    from instrument.capture import Capture

#: The version of the payload. It grows when a key changes its meaning or goes; keys may be added.
VERSION = 1

_FOLDER = "report/assets/page"
# The parts of the only script, in their order. Those of the sections register themselves in an
# object that the first part makes.
_SCRIPTS = ("page.js", "table.js", "bars.js", "verdict.js", "causal.js", "ranges.js", "tables.js")


def payload(captures: Sequence[Capture]) -> dict[str, Any]:
    """Return what the page of some captures shows, as plain JSON values.

    Raises:
        CaptureError: there is no capture, or one holds no trace.
        TraceError: a trace cannot be read.
    """
    from instrument.findings.diagnose import diagnose

    capture = captures[-1]
    diagnosis = diagnose(captures)
    found = {
        "verdict": verdict.section(capture, diagnosis),
        "whatif": _whatif(capture),
        "ranges": ranges.section(capture),
        "tables": tables.section(capture),
    }
    return {
        "version": VERSION,
        "title": capture.name,
        "begin_ns": capture.events.begin_ns,
        "sections": {name: section for name, section in found.items() if section is not None},
    }


def _whatif(capture: Capture) -> dict[str, Any] | None:
    try:
        return causal.section(capture.whatif)
    except CaptureError:  # no simulation; the verdict's notes say why
        return None


def page(payload: dict[str, Any]) -> str:
    """Return a payload as one HTML file, which loads nothing and needs no other file."""
    text = json.dumps(payload, separators=(",", ":"))
    return render(
        "report/templates/report.html",
        title=payload["title"],
        styles=[f"{_FOLDER}/page.css"],
        scripts=[f"{_FOLDER}/{name}" for name in _SCRIPTS],
        payload=b64encode(gzip.compress(text.encode(), mtime=0)).decode(),
    )
