"""Two tables of CUDA graphs: one has a row for each graph, the other for each node of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from instrument.read.facts.cuda_graphs import graph_ids, replayed
from instrument.read.facts.device_work import KINDS, Work, launched_ns
from instrument.read.facts.facts import coded, nullable
from instrument.read.facts.groupby import group_rows
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import called_operators
from instrument.read.views.table import Table, known_sum

if TYPE_CHECKING:
    from instrument.read.views.views import Views

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
    "node. None if it is not at the same place in all replays",
    graph_node="the id of the node; None if the trace has no ids of nodes, as on ROCm",
    kernel="the name of the kernel, copy or memset; if the trace has no ids, and "
    "the replays differ, a row holds all nodes of the graph with the same name",
    kind="kernel, communication, copy or memset",
    annotation="the name that `mark_kernels` of `torch.cuda._graph_annotations` gave to the node, "
    "if torch's tool wrote it into the trace",
    calls="how many times the node ran",
    device_ns="device time of all runs of the node",
)


def cuda_graphs(capture: Views) -> Table:
    """Return one row for each CUDA or HIP graph that was replayed; see `CUDA_GRAPHS`.

    The graph with the most device time comes first. In a trace of ROCm, graphs have no ids. So
    graphs that look alike, such as the graphs of equal layers, share one row.

    Cost: sorts the device events of graphs, and builds the call tree.
    """
    links, work = capture.links, capture.work
    events, (nodes, replays) = links.events, _replays(links, work)
    call, began_ns = replays["call"].to_numpy(), replays["began_ns"].to_numpy()
    step = step_at(events, links.steps, replays["launched_ns"].to_numpy())
    replays = replays.with_columns(
        launch_ns=nullable(events.duration_ns[call], call >= 0),
        delay_ns=nullable(np.maximum(began_ns - events.end_ns[call], 0), call >= 0),
        step=nullable(step, step >= 0),
    )
    known, is_one = pl.col("has_launch"), pl.col("is_one").all()
    has_steps = known.any() & bool(len(links.steps))
    found = replays.group_by("name", maintain_order=True).agg(
        pl.col("graph").first(),
        operator=_agreed("operator"),
        range=_agreed("range"),
        steps=pl.when(has_steps).then(pl.col("step").filter(known).drop_nulls().n_unique()),
        replays=pl.when(is_one).then(pl.len()),
        nodes=pl.when(is_one).then(_median("nodes")),
        device_ns=pl.col("device_ns").sum(),
        idle_ns=pl.when(is_one).then(pl.col("idle_ns").sum()),
        launch_ns=known_sum(pl.col("launch_ns")),
        median_delay_ns=_median("delay_ns"),
        max_delay_ns=pl.col("delay_ns").max(),
        median_replay_ns=pl.when(is_one).then(_median("lasts_ns")),
        max_replay_ns=pl.when(is_one).then(pl.col("lasts_ns").max()),
    )
    streams = nodes.group_by("name").agg(streams=pl.col("thread").n_unique())
    found = found.join(streams, on="name", how="left", maintain_order="left")
    return Table.of(CUDA_GRAPHS, found.cast({pl.UInt32: pl.Int64})).sort("device_ns")


def cuda_graph_nodes(capture: Views) -> Table:
    """Return one row for each node of each graph, by graph and node; see `CUDA_GRAPH_NODES`."""
    links, work = capture.links, capture.work
    events, (nodes, _) = links.events, _replays(links, work)
    has_ids = (pl.col("node") >= 0).all().over("name")
    label = pl.when(has_ids).then("node").otherwise("kernel")
    is_same = (label.n_unique().over("name", "place") == 1).all().over("name")
    total_ns, place = pl.col("device_ns").sum().over("name"), pl.col("place")
    found = (
        nodes.with_columns(key=pl.when(~has_ids & is_same).then("place").otherwise(label))
        .sort(-total_ns, -pl.len().cast(pl.Int64).over("replay"), maintain_order=True)
        .group_by("name", "key", "kernel", maintain_order=True)
        .agg(
            pl.col("graph_node", "kind").first(),
            pl.col("device_ns").sum(),
            event=pl.col("event").first(),
            node=pl.when(place.n_unique() == 1).then(place.first()),
            calls=pl.len().cast(pl.Int64),
        )
    )
    detail = events.detail[found["event"].to_numpy()].tolist()
    notes = [events.details[k].annotation if k >= 0 else None for k in detail]
    found = found.select(
        "name", "node", "graph_node", "calls", "device_ns",
        kernel=pl.Series(events.names, dtype=pl.String).gather(found["kernel"]),
        kind=pl.Series(KINDS).gather(found["kind"]),
        annotation=pl.Series(notes, dtype=pl.String),
    )  # fmt: skip
    return Table.of(CUDA_GRAPH_NODES, found)


def _replays(links: Links, work: Work) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The device events that graphs replayed, by replay and start; and the replays, by start.

    Both have the `name` of the graph. A correlation id proves that a replay `is_one` replay.
    """
    events, tree = links.events, links.call_tree
    chosen = np.flatnonzero(replayed(events, work.event, work.call))
    event, launcher = work.event[chosen], links.launched[1][chosen]
    graph, node, ids, node_ids = graph_ids(events, event)
    is_one = events.correlation[event] != 0
    operator = tree.nearest(called_operators(events)[tree.index], launcher)
    operator = np.append(events.name[tree.index], -1)[operator]
    path = links.scopes.path_of_node[launcher]
    nodes = pl.DataFrame(
        {
            "replay": group_rows(events.correlation[event], np.where(is_one, -1, graph)).of,
            "is_one": is_one,
            "event": event,
            "kernel": events.name[event].astype(np.int64),
            "kind": work.kind[chosen],
            "thread": events.thread[event],
            "start_ns": events.start_ns[event],
            "end_ns": events.end_ns[event],
            "device_ns": events.duration_ns[event],
            "code": graph,
            "node": node,
            "graph_node": coded(pl.Series(node_ids, dtype=pl.Int64, strict=False), node),
            "call": work.call[chosen],
            "has_launch": work.launch[chosen] >= 0,
            "launched_ns": launched_ns(events, work)[chosen],
            "operator": coded(pl.Series(events.names, dtype=pl.String), operator),
            "range": coded(pl.Series(links.scopes.paths.texts, dtype=pl.String), path),
        }
    ).sort("replay", "start_ns", "end_ns", maintain_order=True)
    nodes = nodes.with_columns(place=pl.int_range(pl.len()).over("replay"))
    reached_ns, kernels = pl.col("end_ns").cum_max().shift(1), pl.col("kernel").cast(pl.String)
    replays = (
        nodes.group_by("replay", maintain_order=True)
        .agg(
            pl.col("is_one", "call", "has_launch", "launched_ns", "operator", "range").first(),
            pl.col(
                "code"
            ).max(),  # a graph may hold other graphs, whose nodes have ids of their own
            pl.col("device_ns").sum(),
            nodes=pl.len(),
            began_ns=pl.col("start_ns").first(),
            lasts_ns=pl.col("end_ns").max() - pl.col("start_ns").first(),
            idle_ns=(pl.col("start_ns") - reached_ns).clip(lower_bound=0).sum(),
            # On several streams, nodes may overtake each other.
            runs=pl.when(pl.col("thread").n_unique() == 1)
            .then(kernels.str.join(","))
            .otherwise(kernels.sort().str.join(",")),
        )
        .sort("began_ns", maintain_order=True)
    )
    is_known = pl.col("code") >= 0
    looks = pl.concat_str(pl.col("operator", "range").fill_null(""), "runs", separator="\n")
    replays = replays.with_columns(
        key=pl.when(is_known).then(pl.col("code").cast(pl.String)).otherwise(looks),
        graph=coded(pl.Series(ids, dtype=pl.Int64, strict=False), replays["code"].to_numpy()),
    )
    names = replays.select("key", "graph").unique("key", keep="first", maintain_order=True)
    names = names.with_row_index("number", 1).select(
        "key",
        name=pl.when(pl.col("graph").is_null())
        .then(pl.format("#{}", "number"))
        .otherwise(pl.format("graph {}", "graph")),
    )
    replays = replays.join(names, on="key", how="left", maintain_order="left")
    of_replay = replays.select("replay", "name")
    return nodes.join(of_replay, on="replay", how="left", maintain_order="left"), replays


def _agreed(name: str) -> pl.Expr:
    """The value that all replays with a launch share; null if they differ."""
    found = pl.col(name).filter("has_launch")
    return pl.when(found.n_unique() == 1).then(found.first())


def _median(name: str) -> pl.Expr:
    """The median of the known values, the lower one of two middle values."""
    ordered = pl.col(name).drop_nulls().sort()
    return ordered.get((ordered.len().cast(pl.Int64) - 1) // 2, null_on_oob=True)
