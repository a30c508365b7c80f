"""Build the payload of the report page, and the page as one HTML file."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from instrument.base.errors import CaptureError
from instrument.read.advise.diagnose import Diagnosing
from instrument.read.advise.verdict import notes
from instrument.read.advise.verdict import verdict as sentence_of
from instrument.read.show.page.causal import what_if
from instrument.read.show.page.flame import flame_graphs
from instrument.read.show.page.memory import memory
from instrument.read.show.page.parts import text
from instrument.read.show.page.ranges import ranges
from instrument.read.show.page.tables import tables
from instrument.read.show.page.timeline import timeline
from instrument.read.show.page.verdict import verdict
from instrument.read.show.remarks import facts, origin
from instrument.read.simulate.scenario import scenario
from instrument.read.views.private_words import private_words, words_of_path
from instrument.read.views.templates import render
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.compare.side import Comparable, Side
    from instrument.read.ranks.rank_summary import RankSummary

# The folder of the scripts and style sheets, as a path in the package.
_ASSETS = "read/show/assets/page"
_SCRIPTS = (
    "page.js", "parts.js", "table.js", "canvas.js", "timeline.js", "flame.js", "memory.js"
)  # fmt: skip
_STYLES = ("page.css", "canvas.css")
# The level of gzip. Level 4 takes twice as long, for a payload that is 6 to 17 % smaller.
_LEVEL = 1


@dataclass(frozen=True)
class Page:
    """An HTML page. A notebook shows it in a frame.

    Attributes:
        html: the content of the HTML file.
    """

    html: str

    def _repr_html_(self) -> str:
        return render("read/show/templates/frame.html", page=self.html)

    def __repr__(self) -> str:
        return f"<Page of {len(self.html):,} characters>"


def payload(
    captures: Iterable[Views],
    *,
    before: Comparable | Side | None = None,
    redact: bool = False,
    diagnosing: Diagnosing | None = None,
) -> dict[str, Any]:
    """Return the data of the report page as JSON values, which the page's own scripts draw.

    The keys are `title` (the name of the capture that the sections show), `captures` (how many were
    read), `begin_ns` (the start of the recording on the trace's clock; all other times count from
    it), `head` (the texts below the title) and `sections`. A section without data is absent.
    Sections have a `title`, a `heading` and `parts` (`parts.py`); `comparison` also has `sentence`,
    what changed most; `timeline` and `flame` have columns (`timeline.py`, `flame.py`). In the page,
    this JSON is compressed with gzip and encoded as base64, in the element with the id `payload`.

    The findings are those of all captures together, and the section `runs` compares the captures.
    The section `comparison` compares all captures with `before`. All other data come from the last
    capture.

    Args:
        captures: the captures; they are read one after the other.
        before: what to compare the captures with; see `instrument.read.compare.diff.diff`.
        redact: whether to leave out the names of files, users and hosts.
        diagnosing: diagnoses the captures; pass one to get the diagnosis from it afterwards.

    Cost: that of `diagnose` and of the views on the page; with `before`, also that of `diff`.

    Raises:
        CaptureError: there is no capture, a capture has no trace, or `before` cannot be read.
        TraceError: a trace cannot be read.
    """
    # Rooms that most pages do not need are imported where they are needed.
    from instrument.read.ranks.rank_summary import without_trace

    was = now = None
    if before is not None:
        from instrument.read.compare.side import Side, load

        was, now = load(before), Side("this run")
    seen, private = diagnosing or Diagnosing(), set[str]()
    summaries: list[tuple[Path | str, RankSummary]] = []
    capture: Views | None = None
    for each in captures:
        private.update(private_words(each))
        if without_trace(each):  # only its summary is known
            seen.add(each)
            summaries.append(seen.summaries[-1])
            continue
        if capture is not None:  # a single capture has no section *Run*
            summaries.append(_summary(capture))
        capture = each  # before it is read, so that only one is in memory
        seen.add(capture)
        if now is not None:
            now.add(capture)
    diagnosis = seen.diagnosis
    assert capture is not None
    sections = {
        "comparison": _comparison(was, now),
        "verdict": verdict(capture, diagnosis),
        "runs": _run([*summaries, _summary(capture)] if summaries else []),
        "ranges": ranges(capture),
        "whatif": _what_if(capture),
        "timeline": timeline(capture, diagnosis),
        "flame": flame_graphs(capture),
        "memory": memory(capture),
        "tables": tables(capture),
    }
    changed = (sections["comparison"] or {}).get("sentence")
    count = len(diagnosis.captures)
    said = sentence_of(diagnosis)
    head = [
        text(f"{changed}." if changed else said, id="sentence"),
        text(said if changed else ""),
        *map(text, notes(diagnosis)),
        text(" · ".join(facts(capture)), "soft"),
        text(" · ".join(origin(capture)), "soft"),
        text(
            f"The last of {count} captures. The findings and the section Run cover all captures."
            if count > 1
            else "",
            "soft",
        ),
    ]
    found = {
        "title": capture.name,
        "captures": count,
        "begin_ns": capture.events.begin_ns,
        "head": [part for part in head if part],
        "sections": {name: section for name, section in sections.items() if section is not None},
    }
    if not redact:
        return found
    if was is not None:
        private.update(was.private, words_of_path(was.name))
    from instrument.read.show.page.redacted import redacted

    without: dict[str, Any] = redacted(found, private)
    return without


def _summary(capture: Views) -> tuple[Path | str, RankSummary]:
    from instrument.read.ranks.rank_summary import summarize

    return capture.place or capture.name, summarize(capture)


def _run(summaries: list[tuple[Path | str, RankSummary]]) -> dict[str, Any] | None:
    if not summaries:
        return None
    from instrument.read.show.page.runs import run

    return run(summaries)


def _comparison(before: Side | None, after: Side | None) -> dict[str, Any] | None:
    if before is None or after is None:
        return None
    from instrument.read.show.page.comparison import comparison

    return comparison(before, after)


def _what_if(capture: Views) -> dict[str, Any] | None:
    try:
        return what_if(scenario(capture))
    except CaptureError:  # the simulation is impossible; the notes of the verdict say why
        return None


def page(payload: dict[str, Any]) -> Page:
    """Return the page of a payload: one HTML file that loads no other file.

    Its content security policy allows only its own script and style sheet. The same payload gives
    the same page.
    """
    try:
        text = msgspec.json.encode(payload)
    except (TypeError, UnicodeEncodeError):
        # numpy's numbers, or a name in the trace with half a character, which UTF-8 cannot hold
        text = json.dumps(payload, separators=(",", ":")).encode()
    html = render(
        "read/show/templates/report.html",
        title=payload["title"],
        styles=[f"{_ASSETS}/{name}" for name in _STYLES],
        scripts=[f"{_ASSETS}/{name}" for name in _SCRIPTS],
        payload=b64encode(gzip.compress(text, _LEVEL, mtime=0)).decode(),
    )
    return Page(html)
