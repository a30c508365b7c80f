"""Make evidence from events: one row for each name, the row with the most time first."""

from __future__ import annotations

import numpy as np

from instrument.analysis.synchronisations import callers
from instrument.analysis.views import Views
from instrument.findings.finding import Evidence
from instrument.links.groupby import groupby
from instrument.trace.events import Codes, Ints, split_overload


def evidence(
    capture: Views, events: Ints, most: int = 5, *, detail: str = ""
) -> tuple[Evidence, ...]:
    """Make one row for each event name, at most `most`; every row gets the same `detail`."""
    table = capture.events
    return evidence_by_name(
        capture, table.name[events], events, table.duration_ns[events], most, detail
    )


def evidence_by_name(
    capture: Views, name: Codes | Ints, events: Ints, time_ns: Ints, most: int = 5, detail: str = ""
) -> tuple[Evidence, ...]:
    """Group events by the given names, and make one row for each name.

    Args:
        capture: the capture.
        name: for each event, the name of its row, as an index into `events.names`.
        events: the positions of the events.
        time_ns: the time of each event. The start and end in a row are those of the event with the
            most time.
        most: the largest number of rows.
        detail: the detail of every row.
    """
    names, groups = groupby(name.astype(np.int64))
    total_ns = groups.sum(time_ns)
    longest = groups.sorted_by(time_ns).row(100)
    table = capture.events
    return tuple(
        Evidence(
            name=table.names[names[k]],
            calls=int(groups.size[k]),
            total_ns=int(total_ns[k]),
            start_ns=int(table.start_ns[events[longest[k]]]),
            end_ns=int(table.end_ns[events[longest[k]]]),
            detail=detail,
        )
        for k in np.argsort(-total_ns, kind="stable")[:most].tolist()
    )


def evidence_by_operator(
    capture: Views, calls: Ints, time_ns: Ints, detail: str
) -> tuple[Evidence, ...]:
    """Make one row for each operator around the given calls.

    `time_ns` is a time for each call, and `detail` says what this time is. Calls outside all
    operators are grouped by their own names.
    """
    operator, _ = callers(capture.links, calls)
    name = np.where(operator >= 0, operator, capture.events.name[calls])
    return without_overloads(evidence_by_name(capture, name, calls, time_ns, detail=detail))


def without_overloads(rows: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """Remove the overload from the operator's name in each row."""
    return tuple(row._replace(name=split_overload(row.name)[0]) for row in rows)
