"""Build the payload of the report page, and the page as one HTML file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.errors import CaptureError
from instrument.findings.diagnose import diagnose
from instrument.report.page import causal, flame, memory, ranges, runs, tables, timeline, verdict
from instrument.report.page.document import ASSETS, document
from instrument.report.page.redacted import redacted
from instrument.runs.rank_summary import RankSummary, summarize
from instrument.templates import render

if TYPE_CHECKING:
    from instrument.capture import Capture

#: The version of the payload. It increases when a key is removed or changes its meaning. A new key
#: does not change the version.
VERSION = 1

_SCRIPTS = (
    "verdict.js",
    "causal.js",
    "ranges.js",
    "timeline.js",
    "flame.js",
    "memory.js",
    "tables.js",
    "runs.js",
)


@dataclass(frozen=True)
class Page:
    """An HTML page. A notebook shows it in a frame.

    Attributes:
        html: the content of the HTML file.
    """

    html: str

    def _repr_html_(self) -> str:
        return render("report/templates/frame.html", page=self.html)

    def __repr__(self) -> str:
        return f"<Page of {len(self.html):,} characters>"


def payload(captures: Iterable[Capture], *, redact: bool = False) -> dict[str, Any]:
    """Return the data of the report page as JSON values; docs/report.md describes the keys.

    The findings are those of all captures together, and the section `runs` compares the captures.
    All other data come from the last capture.

    Args:
        captures: the captures. One after the other is read.
        redact: whether to leave out the names of files, users and hosts.

    Cost: that of `diagnose` plus that of the views on the page.

    Raises:
        CaptureError: there is no capture, or a capture has no trace.
        TraceError: a trace cannot be read.
    """
    read: list[tuple[Path | str, RankSummary]] = []
    last: list[Capture] = []
    private: list[str] = []

    def reading() -> Iterator[Capture]:
        for capture in captures:
            # Only several captures are compared, so a lone capture needs no summary.
            read.extend(map(_summary, last))
            last[:] = [capture]
            private.extend(_private(capture))
            yield capture

    diagnosis = diagnose(reading())
    (capture,) = last
    if read:
        read.append(_summary(capture))
    sections = {
        "verdict": verdict.section(capture, diagnosis),
        "runs": runs.section(read),
        "whatif": _whatif(capture),
        "ranges": ranges.section(capture),
        "timeline": timeline.section(capture, diagnosis),
        "flame": flame.section(capture),
        "memory": memory.section(capture),
        "tables": tables.section(capture),
    }
    found = {
        "version": VERSION,
        "title": capture.name,
        "captures": len(diagnosis.captures),
        "begin_ns": capture.events.begin_ns,
        "sections": {name: section for name, section in sections.items() if section is not None},
    }
    if not redact:
        return found
    without: dict[str, Any] = redacted(found, private)
    return without


def _summary(capture: Capture) -> tuple[Path | str, RankSummary]:
    return capture.place or capture.name, summarize(capture)


def _private(capture: Capture) -> Iterator[str]:
    """The words of a capture to hide: its host, its path, and the name of a single trace file."""
    yield capture.about.host or ""
    if capture.folder is None:
        yield capture.name
    if capture.place is not None and len(capture.place.parts) > 1:
        for path in (str(capture.place), str(capture.place.absolute())):
            yield from (path, shlex.quote(path))


def _whatif(capture: Capture) -> dict[str, Any] | None:
    try:
        return causal.section(capture.whatif)
    except CaptureError:  # the simulation is impossible; the notes of the verdict say why
        return None


def page(payload: dict[str, Any]) -> Page:
    """Return the page of a payload: one HTML file that loads no other file."""
    return Page(document(payload, [f"{ASSETS}/{name}" for name in _SCRIPTS]))
