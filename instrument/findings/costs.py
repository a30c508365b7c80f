"""The cost of calls: their device time, or their CPU time in a trace without device work."""

from __future__ import annotations

from instrument.analysis.views import Views
from instrument.findings.device_time import launched_by
from instrument.findings.evidence import evidence_by_name, without_overloads
from instrument.findings.finding import Evidence
from instrument.links.groupby import Groups
from instrument.links.step_index import CountedSteps
from instrument.trace.events import Ints


def costs(capture: Views, nodes: Ints) -> Ints:
    """The cost of each call in nanoseconds; `cost_share` explains the cost."""
    if not len(capture.work.event):
        return capture.links.spent_ns[nodes]
    device, around = launched_by(capture, nodes)
    return Groups(around, len(nodes)).sum(capture.events.duration_ns[device])


def cost_share(capture: Views, time: CountedSteps, nodes: Ints) -> float:
    """The cost of calls as a share of the measured steps; overlapping times count once.

    The cost is the time of the device work that the calls launched. In a trace without device work,
    it is the CPU time of the calls. `nodes` are nodes of the call tree; no node lies inside
    another.
    """
    tree = capture.links.call_tree
    if not len(capture.work.event):
        return time.covered(tree.start_ns[nodes], tree.end_ns[nodes])
    device, _ = launched_by(capture, nodes)
    events = capture.events
    return time.covered(events.start_ns[device], events.end_ns[device])


def evidence_of_nodes(capture: Views, nodes: Ints) -> tuple[Evidence, ...]:
    """Make one row of evidence for each name of the nodes; the highest cost comes first."""
    events = capture.links.call_tree.index[nodes]
    what = "device time" if len(capture.work.event) else "CPU time"
    name, cost_ns = capture.events.name[events], costs(capture, nodes)
    return without_overloads(evidence_by_name(capture, name, events, cost_ns, detail=what))
