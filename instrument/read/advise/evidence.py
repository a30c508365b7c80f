"""What events cost: their share of the counted steps, and rows of evidence for a finding."""

from __future__ import annotations

import numpy as np

from instrument.read.advise.finding import Evidence
from instrument.read.facts.groupby import Groups, group_rows, groupby
from instrument.read.facts.intervals import Intervals
from instrument.read.facts.places import sources_of_names
from instrument.read.trace.events import Codes, Ints, is_runtime, split_overload
from instrument.read.views.views import Views

# Of the calls of an operator with the same shapes, nothing disturbed the one at this percentile.
_UNDISTURBED = 10


def device_kind(capture: Views) -> str:
    """Which kind of device does the work: cuda, hip, xpu, mtia or hpu; cpu without device work."""
    events, work = capture.events, capture.work.event
    if not len(work):
        return "cpu"
    codes: list[int] = np.unique(events.category[work]).tolist()
    categories = {*filter(is_runtime, events.categories), *(events.categories[k] for k in codes)}
    found = {name.partition("_")[0] for name in categories} & {"xpu", "mtia", "hpu"}
    if found:
        return min(found)
    # Kineto's category of HIP's calls is cuda_runtime.
    return "hip" if any(name.startswith("hip") for name in events.names) else "cuda"


def in_steps(capture: Views, events: Ints) -> Ints:
    """Those of the events that begin in a counted step."""
    return events[capture.links.counted_steps.holds(capture.events.start_ns[events]) >= 0]


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
    return share_of(capture, launched_by(capture, nodes)[0]) if len(nodes) else 0.0


def costs(capture: Views, nodes: Ints) -> Ints:
    """The cost of each call in nanoseconds; `cost_share` explains the cost."""
    if not len(capture.work.event):
        return capture.links.spent_ns[nodes]
    device, around = launched_by(capture, nodes)
    return Groups(around, len(nodes)).sum(capture.events.duration_ns[device])


def launched_by(capture: Views, nodes: Ints) -> tuple[Ints, Ints]:
    """The device events that calls launched, directly or in calls inside them.

    `nodes` are the calls, as nodes of the call tree. The second result is, for each device event,
    the index in `nodes` of the innermost call around its launch.
    """
    device, launcher = capture.links.launched
    around = capture.links.call_tree.nearest_of(nodes, launcher)
    inside = around >= 0
    return device[inside], around[inside]


def undisturbed_ns(capture: Views, nodes: Ints, time_ns: Ints) -> Ints:
    """The time of each operator in the steps as if no other program or thread had disturbed it.

    It follows from equal calls: those of an operator with the same input shapes. Without shapes,
    they are the calls of a range that have the same place among those of each step, or all if their
    number changes from step to step: then half of them are taken as slow for another reason.

    `nodes` are nodes of the call tree, and `time_ns` is the recorded time of each.
    """
    events, links = capture.events, capture.links
    index = links.call_tree.index[nodes]
    if (events.shapes[index] >= 0).any():
        same = group_rows(events.name[index], events.shapes[index])
        least: Ints = time_ns[same.sorted_by(time_ns).row(_UNDISTURBED)][same.of]
        return np.minimum(least, time_ns)
    start_ns = links.call_tree.start_ns[nodes]
    same = group_rows(events.name[index], links.scopes.path_of_node[nodes])
    in_step = group_rows(same.of, links.counted_steps.holds(start_ns))
    at_place = group_rows(same.of, in_step.sorted_by(start_ns).ordinals())
    is_regular = same.min(at_place.size[at_place.of]) == links.counted_steps.count
    median = time_ns[same.sorted_by(time_ns).row(50)]
    least = np.where(is_regular[same.of], at_place.min(time_ns)[at_place.of], median[same.of])
    return np.minimum(least, time_ns)


def lasting(spans: Intervals) -> int:
    """The length of the spans in ns, which do not overlap."""
    return int((spans[1] - spans[0]).sum())


def evidence(
    capture: Views,
    events: Ints,
    name: Codes | Ints | None = None,
    time_ns: Ints | None = None,
    *,
    most: int = 5,
    detail: str = "",
) -> tuple[Evidence, ...]:
    """Make one row for each name of the events, at most `most`; every row has the same `detail`.

    `name` are other names, as indices into `events.names`, and `time_ns` other times than the
    durations. The start and end in a row are those of the event with the most time.
    """
    table = capture.events
    name = table.name[events] if name is None else name
    time_ns = table.duration_ns[events] if time_ns is None else time_ns
    names, groups = groupby(name.astype(np.int64))
    total_ns, size = groups.sum(time_ns), groups.size
    longest = events[groups.sorted_by(time_ns).row(100)]
    return tuple(
        evidence_row(
            capture, table.names[names[k]], int(size[k]), int(total_ns[k]), longest[k], detail
        )
        for k in np.argsort(-total_ns, kind="stable")[:most].tolist()
    )


def evidence_row(
    capture: Views, name: str, calls: int, total_ns: int, longest: int, detail: str = ""
) -> Evidence:
    """Make one row; `longest` is the position of its longest event, or -1 if there is none."""
    if longest < 0:
        return Evidence(name, calls, total_ns, detail=detail)
    events = capture.events
    start_ns, end_ns = int(events.start_ns[longest]), int(events.end_ns[longest])
    is_kernel = name == events.names[events.name[longest]] and longest in capture.work.event
    return Evidence(name, calls, total_ns, start_ns, end_ns, detail, is_kernel)


def evidence_by_cost(capture: Views, nodes: Ints) -> tuple[Evidence, ...]:
    """Make one row of evidence for each name of the nodes; the highest cost comes first."""
    events = capture.links.call_tree.index[nodes]
    what = "device time" if len(capture.work.event) else "CPU time"
    return without_overloads(evidence(capture, events, time_ns=costs(capture, nodes), detail=what))


def evidence_of_function(capture: Views, source: str, time_ns: int) -> Evidence:
    """Make a row for the time that a function of the user spends outside of operators."""
    frames, events = capture.links.frames, capture.events
    is_source = np.array([each == source for each in sources_of_names(capture.links)], np.bool_)
    calls = in_steps(capture, frames.index[is_source[events.name[frames.index]]])
    # The function may begin before the window.
    return Evidence(source, max(len(calls), 1), time_ns, detail="outside of operators")


def without_overloads(rows: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    """Remove the overload from the operator's name in each row."""
    return tuple(row._replace(name=split_overload(row.name)[0]) for row in rows)
