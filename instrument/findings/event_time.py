"""How much of the steps events take, on the CPU or on the device, and the step without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.views import Views
from instrument.findings.places import measured
from instrument.findings.saving import simulated
from instrument.links.groupby import groupby
from instrument.trace.events import Ints

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_MOST_NAMES = 10


def scaled(whatif: Scenario, events: Ints, by: float = 0) -> Scenario | None:
    """Return the simulation in which CPU events take `by` times their time, with their device work.

    None if the capture cannot be simulated.
    """
    return simulated(lambda: whatif.scale_events(events, by=by))


def shortened(capture: Views, whatif: Scenario, events: Ints, each_ns: float) -> Scenario | None:
    """Return the simulation in which each of some operators takes `each_ns` less time.

    It is taken as a share of the median duration of the operators of the same name. So an operator
    that took longer because its thread had to wait for a CPU wins more. Only the ten names with the
    most operators are shortened. None if the capture cannot be simulated.
    """
    table = capture.events
    _, groups = groupby(table.name[events].astype(np.int64))
    found: Scenario | None = whatif
    for row in sorted(groups.rows(), key=len, reverse=True)[:_MOST_NAMES]:
        median_ns = max(float(np.median(table.duration_ns[events[row]])), 1.0)
        if found is not None:
            found = scaled(found, events[row], max(1 - each_ns / median_ns, 0.0))
    return found


def share_of(capture: Views, events: Ints) -> float:
    """The share of the steps that CPU events take, or that the device works for them if it is more.

    What runs at the same time, on several threads or streams, counts once.
    """
    table, steps = capture.events, measured(capture)
    work = launched_by(capture, events)
    return max(steps.covered(table.start_ns[each], table.end_ns[each]) for each in (events, work))


def launched_by(capture: Views, events: Ints) -> Ints:
    """The device events that were launched inside any of the CPU events."""
    tree, (device, node) = capture.links.call_tree, capture.links.launched
    if not len(device) or not len(events):
        return np.zeros(0, np.int64)
    chosen = np.zeros(len(tree) + 1, np.bool_)  # the last entry is for events without a node
    chosen[tree.nodes_of(events)] = True
    inside = np.append(tree.nearest(chosen[:-1]) >= 0, False)[node]
    found: Ints = device[inside]
    return found
