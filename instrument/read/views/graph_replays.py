"""Count the nodes of CUDA graphs that some of the replays lack, because the profiler lost them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instrument.read.facts.cuda_graphs import graph_ids, is_graph_launch, replayed
from instrument.read.facts.groupby import group_rows, groupby
from instrument.read.trace.events import Ints

if TYPE_CHECKING:
    from instrument.read.views.views import Views

# Without ids, only the most frequent kinds of replays are compared, each with so many larger ones.
_MOST_KINDS, _MOST_REFERENCES = 1000, 32
# A part of a replay holds at least this share of its nodes, and is so many times rarer than it. A
# program has few graphs that are parts of others, such as those of the first and the last layer.
_LEAST_PART, _RARER, _LEAST_PARTS = 0.5, 4, 4


def lost_nodes(capture: Views, without_work: Ints) -> tuple[int, int] | str:
    """Return how many nodes are missing in the replays, and how many there should be.

    A launch of a graph among the calls `without_work` has lost as many as a usual replay has.

    With ids, a replay should hold each node that any replay of its graph holds. Without, as on
    ROCm, a replay with a part of the nodes of a far more frequent one has lost the others, if many
    different parts occur. If it cannot be judged, the result is the reason.
    """
    events, work = capture.events, capture.work
    rows = np.flatnonzero(replayed(events, work.event, work.call))
    rows = rows[events.correlation[work.event[rows]] != 0]
    if not len(rows):
        return "the trace has no replay of a CUDA graph"
    event = work.event[rows]
    graph, node, _, _ = graph_ids(events, event)
    replay = groupby(events.correlation[event])[1]
    if replay.count < 2:
        return "the trace has one replay"
    if (node >= 0).all():
        missing, total = _by_id(replay.of, graph, node)
    else:
        kernel = group_rows(events.name[event], events.grid[event], events.block[event])
        missing, total = _by_kernel(replay.of, kernel.of, kernel.count)
    whole = int(events.named(is_graph_launch)[without_work].sum()) * int(np.median(replay.size))
    return missing + whole, total + whole


def _by_id(replay: Ints, graph: Ints, node: Ints) -> tuple[int, int]:
    of_replay = np.full(int(replay.max()) + 1, -1)
    np.maximum.at(of_replay, replay, graph)  # a graph may hold others, with ids of their own
    graph = of_replay[replay]
    known = groupby(group_rows(graph, node).of)[1]
    first = np.zeros(known.count, np.int64)
    first[known.of] = graph
    nodes = np.bincount(first + 1, minlength=int(of_replay.max()) + 2)
    held = group_rows(replay, node).count
    total = int(nodes[of_replay + 1].sum())
    return total - held, total


def _by_kernel(replay: Ints, kernel: Ints, kernels: int) -> tuple[int, int]:
    keys, pair = groupby(replay * kernels + kernel)
    of_replay, of_kernel = keys // kernels, keys % kernels
    starts = np.flatnonzero(np.diff(of_replay, prepend=-1))
    parts = np.split(np.stack([of_kernel, pair.size]), starts[1:], axis=1)
    kinds: dict[bytes, int] = {}
    for each in parts:
        kinds[each.tobytes()] = kinds.get(each.tobytes(), 0) + 1
    every = sorted(kinds.items(), key=lambda kind: -kind[1])[:_MOST_KINDS]
    content = [np.frombuffer(kind, np.int64).reshape(2, -1) for kind, _ in every]
    order = sorted(range(len(every)), key=lambda k: -int(content[k][1].sum()))
    references = np.zeros((_MOST_REFERENCES, kernels), np.int64)
    often, filled, missing, lost = np.zeros(_MOST_REFERENCES, np.int64), 0, 0, 0
    for k in order:
        (which, times), count = content[k], every[k][1]
        size = int(times.sum())
        whole = references[:filled].sum(axis=1)
        holds = (references[:filled, which] >= times).all(axis=1) & (whole > size)
        holds &= (size >= _LEAST_PART * whole) & (count * _RARER <= often[:filled])
        if holds.any():
            lost += 1
            missing += count * int(whole[holds].min() - size)
        elif filled < _MOST_REFERENCES:
            references[filled, which], often[filled] = times, count
            filled += 1
    total = len(replay) + missing
    return (missing, total) if lost >= _LEAST_PARTS else (0, total - missing)
