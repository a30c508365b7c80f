"""Build the payload of the report page, and the page as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.analysis.private_words import private_words, words_of_path
from instrument.compare.side import Comparable, Side, load
from instrument.errors import CaptureError
from instrument.findings.diagnose import diagnose_all
from instrument.report.page import (
    causal,
    comparison,
    flame,
    memory,
    ranges,
    runs,
    tables,
    timeline,
    verdict,
)
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
    "comparison.js",
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


def payload(
    captures: Iterable[Capture], *, before: Comparable | None = None, redact: bool = False
) -> dict[str, Any]:
    """Return the data of the report page as JSON values; docs/report.md describes the keys.

    The findings are those of all captures together, and the section `runs` compares the captures.
    The section `comparison` compares all captures with `before`. All other data come from the last
    capture.

    Args:
        captures: the captures; they are read one after the other.
        before: what to compare the captures with; see `instrument.compare.diff.diff`.
        redact: whether to leave out the names of files, users and hosts.

    Cost: that of `diagnose` and of the views on the page; with `before`, also that of `diff`.

    Raises:
        CaptureError: there is no capture, a capture has no trace, or `before` cannot be read.
        TraceError: a trace cannot be read.
    """
    read: list[tuple[Path | str, RankSummary]] = []
    last: list[Capture] = []
    private: set[str] = set()
    was = None if before is None else load(before)
    now = Side("this run")

    def reading() -> Iterator[Capture]:
        for capture in captures:
            # The section `runs` needs summaries. A single capture has no such section.
            read.extend(map(_summary, last))
            last[:] = [capture]
            private.update(private_words(capture))
            if was is not None:
                now.add(capture)
            yield capture

    diagnosis = diagnose_all(reading())
    (capture,) = last
    if read:
        read.append(_summary(capture))
    sections = {
        "verdict": verdict.section(capture, diagnosis),
        "comparison": None if was is None else comparison.section(was, now),
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
    if was is not None:
        private.update(was.private, words_of_path(was.name))
    without: dict[str, Any] = redacted(found, private)
    return without


def _summary(capture: Capture) -> tuple[Path | str, RankSummary]:
    return capture.place or capture.name, summarize(capture)


def _whatif(capture: Capture) -> dict[str, Any] | None:
    try:
        return causal.section(capture.whatif)
    except CaptureError:  # the simulation is impossible; the notes of the verdict say why
        return None


def page(payload: dict[str, Any]) -> Page:
    """Return the page of a payload: one HTML file that loads no other file."""
    return Page(document(payload, [f"{ASSETS}/{name}" for name in _SCRIPTS]))
