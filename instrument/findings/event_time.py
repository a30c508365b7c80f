"""The share of the steps that events take, and the simulation in which operators are shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.views import Views
from instrument.findings.device_time import launched_by
from instrument.findings.saving import simulated
from instrument.links.groupby import groupby
from instrument.trace.events import Ints

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_MOST_NAMES = 10


def shortened(capture: Views, whatif: Scenario, events: Ints, each_ns: float) -> Scenario | None:
    """Return the simulation in which each of the given operators takes about `each_ns` less time.

    All operators of a name are scaled by one factor. With this factor, the operator with the median
    duration takes `each_ns` less. The simulation shortens an operator by more than `each_ns` if it
    took longer than the median, for example because it waited for a CPU. Only the ten names with
    the most operators are scaled. The result is None if the capture cannot be simulated.
    """
    table = capture.events
    _, groups = groupby(table.name[events].astype(np.int64))

    def edited() -> Scenario:
        found = whatif
        for row in sorted(groups.rows(), key=len, reverse=True)[:_MOST_NAMES]:
            median_ns = max(float(np.median(table.duration_ns[events[row]])), 1.0)
            found = found.scale_events(events[row], by=max(1 - each_ns / median_ns, 0.0))
        return found

    return simulated(edited)


def share_of(capture: Views, events: Ints) -> float:
    """The share of the steps' time that CPU events take, or that their device work takes.

    The result is the larger of both shares. Overlapping times on several threads or streams count
    once.
    """
    table, steps = capture.events, capture.links.counted_steps
    nodes = capture.links.call_tree.nodes_of(events)
    work, _ = launched_by(capture, nodes[nodes >= 0])
    return max(steps.covered(table.start_ns[each], table.end_ns[each]) for each in (events, work))
