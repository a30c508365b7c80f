"""Find the device events that a launch of a CUDA graph replayed.

All device events of a replay have the same correlation as the call that launched the graph. This
holds on CUDA (`correlationId` of CUPTI's activity records) and on ROCm. If such a device event has
an External id, this id is equal to the External id of that call. From CUDA 12, Kineto also writes
on each device event the id of the graph and the id of the graph's node. On ROCm, Kineto does not
write these ids. In this module, a node is a node of a CUDA graph, not of the call tree.
"""

from __future__ import annotations

import numpy as np

from instrument.trace.events import Events, Flags, Ints, flags, is_runtime


def is_graph_launch(name: str) -> bool:
    """Whether a runtime call of this name launches a graph, such as `cudaGraphLaunch`."""
    return "GraphLaunch" in name


def replayed(events: Events, device: Ints, call: Ints) -> Flags:
    """A mask of the device events that a launch of a CUDA graph replayed.

    Args:
        events: the events of the trace.
        device: the device events, as positions among the events.
        call: for each device event, the call that launched it; -1 if the call is not known.

    On ROCm, replays whose launch is not in the trace are not found.
    """
    launches_graph = events.among(is_runtime) & events.named(is_graph_launch)
    in_graph = flags(
        lambda details: details.graph is not None or details.graph_node is not None, events.details
    )
    found: Flags = np.append(launches_graph, False)[call]
    found |= np.append(in_graph, False)[events.detail[device]]
    return found


def graph_ids(events: Events, device: Ints) -> tuple[Ints, Ints, list[int], list[int]]:
    """The ids that the trace gives to the graph and the node of each device event.

    Returns:
        Four values: the graph of each device event, as an index into the third value; the node of
            each device event, as an index into the fourth value; the sorted ids of the graphs; the
            sorted ids of the nodes. An index is -1 if the trace gives the event no such id.
    """
    graphs = sorted({found.graph for found in events.details if found.graph is not None})
    nodes = sorted({found.graph_node for found in events.details if found.graph_node is not None})
    of_graph: dict[int | None, int] = {id: k for k, id in enumerate(graphs)}
    of_node: dict[int | None, int] = {id: k for k, id in enumerate(nodes)}
    codes = [
        (of_graph.get(found.graph, -1), of_node.get(found.graph_node, -1))
        for found in events.details
    ]
    graph, node = np.array([*codes, (-1, -1)], np.int64).T
    return graph[events.detail[device]], node[events.detail[device]], graphs, nodes
