"""Two tables of CUDA graphs: one has a row for each graph, the other for each node of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from instrument.read.facts.cuda_graphs import graph_ids as ids_of
from instrument.read.facts.cuda_graphs import replayed
from instrument.read.facts.device_work import KINDS, Work, launched_ns
from instrument.read.facts.groupby import Groups, at, cells, groupby, intern
from instrument.read.facts.intervals import sweep
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import Events, Flags, Ints, called_operators
from instrument.read.views.table import Table

CUDA_GRAPHS: Schema = schema(
    name='"graph" and the id of the graph in the trace, such as "graph 7". If the trace has no '
    'ids, the name is "#" and a number in the order of the first replays, such as "#1". In such a '
    "trace, launches inside the same operator and range count as one graph if their replays run "
    "the same kernels in the same order",
    graph="the id of the graph; None if the trace has no ids of graphs, as on ROCm",
    operator="the innermost operator around the launches; None if no operator or several operators "
    "launched the graph",
    range="the path of the range that launched the graph; None if no range or several ranges "
    "launched the graph",
    steps="the number of finished steps that launched the graph; None if no step is finished, or "
    "if the trace holds no launch of the graph",
    replays="how many replays of the graph the trace holds; None if its device events have no "
    "correlation id, because then the trace does not show where a replay begins",
    nodes="the number of kernels, copies and memsets in a replay; the median if replays differ; "
    "None if `replays` is None",
    device_ns="device time of all replays, summed over their kernels, copies and memsets",
    idle_ns="time between start and end of a replay in which no node of the replay ran, summed "
    "over all replays; a replay lasts from the start of its first node to the end of its last "
    "node; None if `replays` is None",
    launch_ns="CPU time of the calls that launched the graph; None if the trace holds no such call",
    median_delay_ns="the median delay from the end of a launch to the start of the replay (the "
    "lower one of two middle delays); 0 if the replay started before the call returned",
    max_delay_ns="the longest delay",
    median_replay_ns="the median time from start to end of a replay; None if `replays` is None",
    max_replay_ns="the longest time from start to end of a replay; None if `replays` is None",
    streams="the number of streams on which the replays ran",
)
CUDA_GRAPH_NODES: Schema = schema(
    name="the name of the graph, as in the table `cuda_graphs`",
    node="the place of the node in a replay: 0 for the node that starts first, 1 for the next "
    "node. None if replays start the nodes in different orders, or if the order is not known",
    graph_node="the id of the node; None if the trace has no ids of nodes, as on ROCm",
    kernel="the name of the kernel, copy or memset; if neither `node` nor `graph_node` is known, a "
    "row holds all nodes of the graph with the same name",
    kind="kernel, communication, copy or memset",
    annotation="the name that `mark_kernels` of `torch.cuda._graph_annotations` gave to the node, "
    "if torch's tool wrote it into the trace",
    calls="how many times the node ran",
    device_ns="device time of all runs of the node",
)


@dataclass(frozen=True, slots=True)
class _Replays:
    """The device events that graphs replayed, sorted by replay and start.

    Attributes:
        event, kind: as in `Work`, for each device event.
        name, node_id: for each device event, the index of its name and of its node's id, or -1.
        replay, ordinal: for each device event, the number of its replay, and its position there.
        first, size: for each replay, its first device event and the number of its events.
        work: for each replay, the position in `Work` of its first device event.
        operator, path: for each replay, the name of the innermost operator and the path of the
            range around its launch, or -1.
        graph_id: for each replay, the index of its graph's id; -1 if the graph has no id.
        is_one: for each replay, whether a correlation id proves that it is one replay.
        graph_ids, node_ids: the distinct ids.
    """

    event: Ints
    kind: Ints
    name: Ints
    node_id: Ints
    replay: Ints
    ordinal: Ints
    first: Ints
    size: Ints
    work: Ints
    operator: Ints
    path: Ints
    graph_id: Ints
    is_one: Flags
    graph_ids: list[int]
    node_ids: list[int]


def cuda_graphs(links: Links, work: Work) -> Table:
    """Return one row for each CUDA or HIP graph that was replayed; see `CUDA_GRAPHS`.

    The graph with the most device time comes first. In a trace of ROCm, graphs have no ids. So
    graphs that look alike, such as the graphs of equal layers, share one row.

    Cost: sorts the device events of graphs, and builds the call tree.
    """
    events, steps = links.events, links.steps
    replays = _replays(links, work)
    graphs, ids, labels = _graphs(events, replays)
    known = work.launch[replays.work] >= 0
    operator, path = (_agreed(graphs, values, known) for values in (replays.operator, replays.path))
    step = np.where(known, step_at(events, steps, launched_ns(events, work)[replays.work]), -1)
    in_steps = np.unique((graphs.of * (len(steps) + 1) + step)[step >= 0]) // (len(steps) + 1)
    number = np.bincount(in_steps, minlength=graphs.count)
    texts, paths = [*events.names, None], [*links.scopes.paths.texts, None]
    columns: dict[str, list[Any]] = {
        "name": labels,
        "graph": ids,
        "operator": [texts[k] for k in operator.tolist()],
        "range": [paths[k] for k in path.tolist()],
        "steps": graphs.cells(number if len(steps) else None, graphs.number(known) > 0),
        **_times(events, work, replays, graphs),
    }
    return Table.of(CUDA_GRAPHS, columns)


def cuda_graph_nodes(links: Links, work: Work) -> Table:
    """Return one row for each node of each graph, by graph and node; see `CUDA_GRAPH_NODES`."""
    events = links.events
    replays = _replays(links, work)
    graphs, _, labels = _graphs(events, replays)
    nodes, position = _nodes(replays, graphs)
    first = nodes.sorted_by().row(0)
    event, position = replays.event[first], position[first]
    details = [events.details[k] if k >= 0 else None for k in events.detail[event].tolist()]
    ids = [*replays.node_ids, None]
    columns: dict[str, Any] = {
        "name": [labels[of] for of in graphs.of[replays.replay[first]].tolist()],
        "node": cells(position, position >= 0),
        "graph_node": [ids[k] for k in replays.node_id[first].tolist()],
        "kernel": [events.names[k] for k in events.name[event].tolist()],
        "kind": [KINDS[k] for k in replays.kind[first].tolist()],
        "annotation": [each.annotation if each else None for each in details],
        "calls": nodes.size,
        "device_ns": nodes.sum(events.duration_ns[replays.event]),
    }
    return Table.of(CUDA_GRAPH_NODES, columns)


def _replays(links: Links, work: Work) -> _Replays:
    events, call_tree = links.events, links.call_tree
    chosen = np.flatnonzero(replayed(events, work.event, work.call))
    event = work.event[chosen]
    graph, node, graph_ids, node_ids = ids_of(events, event)
    is_one = events.correlation[event] != 0
    _, launches = groupby(events.correlation[event])
    _, of = groupby(np.where(is_one, launches.of, launches.count + 1 + graph))
    by_start = of.sorted_by(events.start_ns[event], events.end_ns[event])
    order, first = by_start.order, by_start.start
    event, kind, replay = event[order], work.kind[chosen[order]], of.of[order]
    launcher = links.launched[1][chosen[order[first]]]
    operator = call_tree.nearest(called_operators(events)[call_tree.index], launcher)
    return _Replays(
        event=event,
        kind=kind,
        name=events.name[event].astype(np.int64),
        node_id=node[order],
        replay=replay,
        ordinal=np.arange(len(order)) - first[replay],
        first=first,
        size=by_start.size,
        work=chosen[order[first]],
        operator=np.append(events.name[call_tree.index], -1)[operator],
        path=links.scopes.path_of_node[launcher],
        # The events of one replay can have several graph ids, if the graph holds other graphs.
        graph_id=np.maximum.reduceat(graph[order], first),
        is_one=is_one[order[first]],
        graph_ids=graph_ids,
        node_ids=node_ids,
    )


def _graphs(events: Events, replays: _Replays) -> tuple[Groups, list[int | None], list[str]]:
    """The replays by graph, the most device time first; and each graph's id and label."""
    first, last = replays.first, replays.first + replays.size
    by_time = np.argsort(events.start_ns[replays.event[first]], kind="stable")
    thread = events.thread[replays.event]
    on_one_stream = np.minimum.reduceat(thread, first) == np.maximum.reduceat(thread, first)
    sorted_names = replays.name[np.lexsort((replays.name, replays.replay))]
    runs = np.where(on_one_stream[replays.replay], replays.name, sorted_names)
    keys: list[Any] = [
        int(replays.graph_id[k])
        if replays.graph_id[k] >= 0
        else (int(replays.operator[k]), int(replays.path[k]), runs[first[k] : last[k]].tobytes())
        for k in by_time.tolist()
    ]
    codes, distinct = intern(keys)
    graph = np.empty(len(codes), np.int64)
    graph[by_time] = codes
    spent = Groups(graph[replays.replay], len(distinct)).sum(events.duration_ns[replays.event])
    order = np.argsort(-spent, kind="stable")
    ids = [None if isinstance(key, tuple) else replays.graph_ids[key] for key in distinct]
    labels = [f"#{k}" if id is None else f"graph {id}" for k, id in enumerate(ids, 1)]
    return (
        Groups(graph, len(distinct)).renumbered(order),
        [ids[k] for k in order.tolist()],
        [labels[k] for k in order.tolist()],
    )


def _nodes(replays: _Replays, graphs: Groups) -> tuple[Groups, Ints]:
    """The device events, grouped by node, and the position of each in its graph, or -1.

    The node id decides; without ids, the position in the replay; if replays differ, the kernel
    name. Nodes are in the order of the replay with the most device events, because other replays
    can be cut by the window.
    """
    graph, name = graphs.of[replays.replay], replays.name
    by_graph = Groups(graph, graphs.count)
    has_ids = (by_graph.number(replays.node_id < 0) == 0)[graph]
    label = np.where(has_ids, replays.node_id, name)
    longest = graphs.sorted_by(-replays.size).row(0)
    rank = _ranks(replays, graph, label, longest)
    rises = (replays.ordinal == 0) | (rank > np.append(-1, rank[:-1]))
    same_size = (replays.size == replays.size[longest][graphs.of])[replays.replay]
    model = np.where(same_size, replays.first[longest][graph] + replays.ordinal, 0)
    same = same_size & (label[model] == label)
    in_order = by_graph.number(~np.where(has_ids, (rank >= 0) & rises, same)) == 0
    position = np.where(in_order[graph], np.where(has_ids, rank, replays.ordinal), -1)
    key = np.where(position >= 0, position, label)
    width, names = int(key.max(initial=0)) + 1, int(name.max(initial=0)) + 1
    _, nodes = groupby((graph * width + key) * names + name)
    return nodes, position


def _ranks(replays: _Replays, graph: Ints, label: Ints, longest: Ints) -> Ints:
    """The position of each event's node in the longest replay; -1 if it ran not just once there."""
    _, node = groupby(graph * (int(label.max(initial=0)) + 1) + label)
    model = np.flatnonzero(longest[graph] == replays.replay)
    rank = np.full(node.count, -1)
    rank[node.of[model]] = replays.ordinal[model]
    rank[np.bincount(node.of[model], minlength=node.count) > 1] = -1
    return rank[node.of]


def _agreed(groups: Groups, values: Ints, known: Flags) -> Ints:
    """For each group, the value that its rows in the mask `known` share; -1 if they differ."""
    chosen = Groups(groups.of[known], groups.count)
    least, greatest = chosen.min(values[known]), -chosen.min(-values[known])
    return np.where(least == greatest, least, -1)


def _times(events: Events, work: Work, replays: _Replays, graphs: Groups) -> dict[str, list[Any]]:
    """The columns of `CUDA_GRAPHS` with counts and times."""
    is_one = graphs.number(~replays.is_one) == 0
    start, end = events.start_ns[replays.event], events.end_ns[replays.event]
    began = start[replays.first]
    lasted = np.maximum.reduceat(end, replays.first) - began
    timeline = sweep([(start, end)], [replays.replay])
    idle = lasted - timeline.total_ns(timeline.active[0], len(replays.first))
    spent = Groups(replays.replay, len(replays.first)).sum(end - start)
    call = work.call[replays.work]
    known = call >= 0
    delay = np.maximum(began - events.end_ns[call], 0)[known]
    by_delay = Groups(graphs.of[known], graphs.count).sorted_by(delay)
    by_time, by_size = graphs.sorted_by(lasted), graphs.sorted_by(replays.size)
    streams = np.unique(
        graphs.of[replays.replay] * len(events.threads) + events.thread[replays.event]
    )
    return {
        "replays": graphs.cells(graphs.size, is_one),
        "nodes": graphs.cells(replays.size[by_size.row(50)], is_one),
        "device_ns": graphs.sum(spent).tolist(),
        "idle_ns": graphs.cells(graphs.sum(idle), is_one),
        "launch_ns": graphs.sums(events.duration_ns[call], known),
        "median_delay_ns": at(delay, by_delay.row(50)),
        "max_delay_ns": at(delay, by_delay.row(100)),
        "median_replay_ns": graphs.cells(lasted[by_time.row(50)], is_one),
        "max_replay_ns": graphs.cells(lasted[by_time.row(100)], is_one),
        "streams": np.bincount(streams // len(events.threads), minlength=graphs.count).tolist(),
    }
