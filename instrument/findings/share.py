"""The share of the counted steps that events take, on the CPU or on devices."""

from __future__ import annotations

from instrument.analysis.views import Views
from instrument.findings.evidence import evidence_by_name, without_overloads
from instrument.findings.finding import Evidence
from instrument.links.groupby import Groups
from instrument.trace.events import Ints


def share_of(capture: Views, events: Ints) -> float:
    """The share of the steps in which at least one of the events runs."""
    table = capture.events
    return capture.links.counted_steps.covered(table.start_ns[events], table.end_ns[events])


def share_with_device(capture: Views, events: Ints) -> float:
    """The share that CPU events take, or that their device work takes, if this is larger."""
    nodes = capture.links.call_tree.nodes_of(events)
    work, _ = launched_by(capture, nodes[nodes >= 0])
    return max(share_of(capture, events), share_of(capture, work))


def cost_share(capture: Views, nodes: Ints) -> float:
    """The share that the device work of calls takes; without device work, that of the calls.

    `nodes` are nodes of the call tree; no node lies inside another.
    """
    if not len(capture.work.event):
        return share_of(capture, capture.links.call_tree.index[nodes])
    return share_of(capture, launched_by(capture, nodes)[0])


def costs(capture: Views, nodes: Ints) -> Ints:
    """The cost of each call in nanoseconds; `cost_share` explains the cost."""
    if not len(capture.work.event):
        return capture.links.spent_ns[nodes]
    device, around = launched_by(capture, nodes)
    return Groups(around, len(nodes)).sum(capture.events.duration_ns[device])


def evidence_by_cost(capture: Views, nodes: Ints) -> tuple[Evidence, ...]:
    """Make one row of evidence for each name of the nodes; the highest cost comes first."""
    events = capture.links.call_tree.index[nodes]
    what = "device time" if len(capture.work.event) else "CPU time"
    name, cost_ns = capture.events.name[events], costs(capture, nodes)
    return without_overloads(evidence_by_name(capture, name, events, cost_ns, detail=what))


def launched_by(capture: Views, nodes: Ints) -> tuple[Ints, Ints]:
    """The device events that the given calls launched, directly or in calls inside them.

    Args:
        capture: the capture.
        nodes: the calls, as nodes of the call tree.

    Returns:
        The device events, and for each of them the index in `nodes` of the innermost call around
            its launch.
    """
    device, launcher = capture.links.launched
    around = capture.links.call_tree.nearest_of(nodes, launcher)
    inside = around >= 0
    return device[inside], around[inside]
