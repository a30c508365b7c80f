"""The payload of the report page, and the page itself as one HTML file."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.errors import CaptureError
from instrument.findings.diagnose import diagnose
from instrument.report.page import causal, flame, memory, ranges, runs, tables, timeline, verdict
from instrument.report.page.redacted import redacted
from instrument.runs.rank_summary import RankSummary, summarize
from instrument.templates import render

if TYPE_CHECKING:
    from instrument.capture import Capture

#: The version of the payload. It grows when a key changes its meaning or is removed; keys may be
#: added.
VERSION = 1

# Higher levels take twice as long, and make the payload 1 % smaller.
_LEVEL = 6
_FOLDER = "report/assets/page"
# The parts of the only script, in their order. Those of the sections register themselves in an
# object that the first part makes.
_SCRIPTS = (
    "page.js",
    "table.js",
    "bars.js",
    "canvas.js",
    "verdict.js",
    "causal.js",
    "ranges.js",
    "timeline.js",
    "flame.js",
    "memory.js",
    "tables.js",
    "runs.js",
)
_STYLES = ("page.css", "canvas.css")


@dataclass(frozen=True)
class Page:
    """A page as HTML. A notebook shows it in a frame.

    Attributes:
        html: the whole file.
    """

    html: str

    def _repr_html_(self) -> str:
        return render("report/templates/frame.html", page=self.html)

    def __repr__(self) -> str:
        return f"<Page of {len(self.html):,} characters>"


def payload(captures: Iterable[Capture], *, redact: bool = False) -> dict[str, Any]:
    """Return what the page of some captures shows, as JSON values; docs/report.md has the keys.

    The captures are diagnosed as one run. The other sections show the last capture, besides the
    section on windows and ranks, which compares all of them.

    Args:
        captures: the captures, which are read one after the other.
        redact: whether to leave out the names of files, users and hosts.

    Cost: that of `diagnose`, and of the views that the page shows.

    Raises:
        CaptureError: there is no capture, or one holds no trace.
        TraceError: a trace cannot be read.
    """
    read: list[tuple[Path | str, RankSummary]] = []
    last: list[Capture] = []

    def reading() -> Iterator[Capture]:
        for capture in captures:
            read.append((capture.place or capture.name, summarize(capture)))
            last[:] = [capture]
            yield capture

    diagnosis = diagnose(reading())
    (capture,) = last
    sections = {
        "verdict": verdict.section(capture, diagnosis),
        "whatif": _whatif(capture),
        "ranges": ranges.section(capture),
        "timeline": timeline.section(capture, diagnosis),
        "flame": flame.section(capture),
        "memory": memory.section(capture),
        "tables": tables.section(capture),
        "runs": runs.section(read),
    }
    found = {
        "version": VERSION,
        "title": capture.name,
        "captures": len(read),
        "begin_ns": capture.events.begin_ns,
        "sections": {name: section for name, section in sections.items() if section is not None},
    }
    if not redact:
        return found
    files = [capture.name] if capture.folder is None else []
    without: dict[str, Any] = redacted(found, files + [each.host or "" for _, each in read])
    return without


def _whatif(capture: Capture) -> dict[str, Any] | None:
    try:
        return causal.section(capture.whatif)
    except CaptureError:  # no simulation; the verdict's notes say why
        return None


def page(payload: dict[str, Any]) -> Page:
    """Return the page of a payload: one HTML file, which loads nothing and needs no other file."""
    text = json.dumps(payload, separators=(",", ":"))
    html = render(
        "report/templates/report.html",
        title=payload["title"],
        styles=[f"{_FOLDER}/{name}" for name in _STYLES],
        scripts=[f"{_FOLDER}/{name}" for name in _SCRIPTS],
        payload=b64encode(gzip.compress(text.encode(), _LEVEL, mtime=0)).decode(),
    )
    return Page(html)
