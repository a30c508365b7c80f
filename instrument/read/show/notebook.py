"""What a notebook shows of a capture: the parts of its text as HTML, the verdict and the views."""

from __future__ import annotations

from typing import Any

from instrument.base.errors import InstrumentError
from instrument.read.show.remarks import incomplete
from instrument.read.show.text import capture_parts
from instrument.read.show.verdict import first_parts
from instrument.read.views.section import Part, Section, lines_of
from instrument.read.views.templates import render
from instrument.read.views.views import VIEWS, Views

_ROWS = 20
_OTHERS = {"stacks()": "call paths with their self times", "events": "all events as columns"}


def to_html(capture: Views) -> str:
    """Return the capture as a fragment of an HTML page: verdict, heading, tables, views.

    If the trace cannot be read, the error message replaces the tables.
    """
    first: list[list[str]] = []
    parts: list[Part] = []
    try:
        heading, *parts = capture_parts(capture, rows=_ROWS)
        parts.append(incomplete(capture, ("ranges", "operators")))
        first = first_parts(capture)
    except InstrumentError as error:
        heading = [capture.name, str(error)]
    views = {name: view.help for name, view in VIEWS.items()} | _OTHERS
    return render(
        "read/show/templates/capture.html",
        heading=heading,
        first=first,
        parts=[_part(each) for each in parts if each],
        views=sorted(views.items()),
    )


def _part(part: Part) -> dict[str, Any]:
    if not isinstance(part, Section):
        return {"lines": lines_of(part), "table": None}
    table = part.table.select(part.columns)
    return {"lines": [part.title], "table": table}
