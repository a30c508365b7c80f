"""How much of the steps events take, on the CPU or on the device, and the step without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.views import Views
from instrument.findings.places import measured
from instrument.findings.saving import simulated
from instrument.links.intervals import merged
from instrument.trace.events import Ints

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario


def scaled(whatif: Scenario, events: Ints, by: float = 0) -> Scenario | None:
    """Return the simulation in which CPU events take `by` times their time, with their device work.

    None if the capture cannot be simulated.
    """
    return simulated(lambda: whatif.scale_events(events, by=by))


def share_of(capture: Views, events: Ints) -> float:
    """The share of the steps that CPU events take, or that the device works for them if it is more.

    The events may not lie inside each other.
    """
    table, steps = capture.events, measured(capture)
    on_cpu_ns = int(steps.within(table.start_ns[events], table.end_ns[events]).sum())
    work = launched_by(capture, events)
    busy = merged(table.start_ns[work], table.end_ns[work])  # streams may work at the same time
    on_device_ns = int(steps.within(*busy).sum())
    return steps.share(max(on_cpu_ns, on_device_ns))


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
