"""Make evidence from events: one row for each name."""

from __future__ import annotations

import numpy as np

from instrument.analysis.views import Views
from instrument.findings.finding import Evidence, Finding
from instrument.links.groupby import groupby
from instrument.trace.events import Codes, Ints, split_overload


def evidence(
    capture: Views, events: Ints, most: int = 5, *, detail: str = ""
) -> tuple[Evidence, ...]:
    """Make one row of evidence for each event name; the rows with the most time come first.

    Every row gets the same `detail`. At most `most` rows are returned.
    """
    table = capture.events
    return evidence_by_name(
        capture, table.name[events], events, table.duration_ns[events], most, detail
    )


def evidence_by_name(
    capture: Views, name: Codes | Ints, events: Ints, time_ns: Ints, most: int = 5, detail: str = ""
) -> tuple[Evidence, ...]:
    """Group events by the given names, and make one row of evidence for each name.

    Args:
        capture: the capture.
        name: for each event, the name of its row, as an index into `events.names`.
        events: the positions of the events.
        time_ns: the time of each event. The names with the most time come first. In each row,
            `start_ns` is the start of the event with the most time.
        most: the largest number of rows.
        detail: the detail of every row.
    """
    names, groups = groupby(name.astype(np.int64))
    total_ns = groups.sum(time_ns)
    longest = groups.sorted_by(time_ns).row(100)
    return tuple(
        Evidence(
            name=capture.events.names[names[k]],
            calls=int(groups.size[k]),
            total_ns=int(total_ns[k]),
            start_ns=int(capture.events.start_ns[events[longest[k]]]),
            detail=detail,
        )
        for k in np.argsort(-total_ns, kind="stable")[:most].tolist()
    )


def without_overloads(rows: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """Remove the overload from the operator's name in each row."""
    return tuple(row._replace(name=split_overload(row.name)[0]) for row in rows)


def evidence_span(capture: Views, finding: Finding, evidence: Evidence) -> tuple[int, int] | None:
    """Find the event that starts at `evidence.start_ns`, and return its start and end.

    If several events start at this time, events whose name begins with the name of the evidence are
    preferred. Of these, the longest is chosen. The result is None if no event starts then, or if
    the evidence of the finding is in another capture.
    """
    if evidence.start_ns is None or finding.capture not in (None, capture.name):
        return None
    events = capture.events
    found = np.flatnonzero(events.start_ns == evidence.start_ns)
    if not len(found):
        return None
    named = [events.names[k].startswith(evidence.name) for k in events.name[found].tolist()]
    last = found[np.lexsort((events.end_ns[found], named))[-1]]
    return evidence.start_ns, int(events.end_ns[last])
