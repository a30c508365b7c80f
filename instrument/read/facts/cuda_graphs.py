"""Find the device events that a launch of a CUDA graph replayed.

All device events of a replay have the correlation of the call that launched the graph, on CUDA and
on ROCm. From CUDA 12, Kineto also writes the ids of the graph and of the graph's node on each.
"""

from __future__ import annotations

import numpy as np

from instrument.read.trace.events import Events, Flags, Ints, flags, is_runtime


def is_graph_launch(name: str) -> bool:
    """Whether a runtime call of this name launches a graph, such as `cudaGraphLaunch`."""
    return "GraphLaunch" in name


def replayed(events: Events, device: Ints, call: Ints) -> Flags:
    """A mask of the device events that a launch of a CUDA graph replayed.

    `device` holds positions among the events, and `call` the call that launched each of them, or
    -1. On ROCm, replays whose launch is not in the trace are not found.
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
        The graph of each device event, as an index into the third value, or -1; its node, as an
            index into the fourth value, or -1; the sorted ids of the graphs; those of the nodes.
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
