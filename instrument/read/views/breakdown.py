"""The devices' time split into compute, communication, copies and idle time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instrument.read.facts.device_work import by_group
from instrument.read.facts.schema import Schema, schema
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

# Every cell is None if the trace has no device events. The first four columns sum to `total_ns`.
BREAKDOWN: Schema = schema(
    compute_ns="time in which a memset, or a kernel that is not communication, ran",
    exposed_communication_ns="time in which communication ran, but no compute",
    exposed_copy_ns="time in which copies ran, but no compute and no communication",
    idle_ns="time in which nothing ran on any device",
    total_ns="time from the start of the first device event to the end of the last one (the sum "
    "of the four columns above)",
    communication_ns="time in which communication ran",
    copy_ns="time in which copies ran",
    overlap_ns="time in which communication and compute ran at the same time",
)


def breakdown(capture: Views) -> Table:
    """Return the device time of the whole trace by kind of work, as one row; see `BREAKDOWN`.

    A second in which two devices work counts as one second.
    """
    work = capture.work
    found = by_group(work, np.zeros(len(work.event), np.int64), 1)
    return Table.of(
        BREAKDOWN, {name: v.tolist() if len(work.event) else [None] for name, v in found.items()}
    )
