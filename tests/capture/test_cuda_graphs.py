"""CUDA graphs: their replays in every table, and their nodes; all worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import (
    Event,
    annotation,
    call,
    capture,
    frame,
    kernel,
    span,
    step,
)

from instrument.analysis.operators import UNLAUNCHED_ROW
from instrument.links.cuda_graphs import replayed

GRAPH = 3


def ids(number: int) -> dict[str, int]:
    """The id of a graph, and of one of its nodes as CUPTI numbers them."""
    return {"graph_id": GRAPH, "graph_node_id": (GRAPH << 32) + number}


def replay(launched_us: float, correlation: int, starts: list[float]) -> list[Event]:
    """A launch of 10 µs, and four nodes on two streams; the file does not have them in order of time."""
    a, b, c, last = starts
    return [
        call("cudaGraphLaunch", launched_us, 10, correlation, External_id=correlation),
        kernel("c", c, 20, correlation=correlation, External_id=correlation, **ids(2)),
        kernel("a", a, 10, correlation=correlation, External_id=correlation, **ids(0)),
        kernel("b", b, 20, tid=9, correlation=correlation, External_id=correlation, **ids(1)),
        span("Memset (Device)", last, 2, "gpu_memset", correlation=correlation, **ids(3)),
    ]


# The first replay lasts 50–97 and nothing runs in 90–95; the second one 245–292, without 282–290.
REPLAYS = [
    step(7, 0, 200),
    annotation("forward", 10, 80),
    span("run_graph", 20, 40, External_id=1),
    *replay(25, 1, [50, 60, 70, 95]),
    step(8, 200, 200),
    annotation("forward", 210, 80),
    span("run_graph", 220, 40, External_id=2),
    *replay(225, 2, [245, 255, 262, 290]),
    call("cudaLaunchKernel", 320, 5, 3),
    kernel("eager", 340, 10, correlation=3, graph_id=0, graph_node_id=0, Seq=1),
]


def without_ids(events: list[Event]) -> list[Event]:
    """As Kineto wrote traces before CUDA 12, and writes those of ROCm."""
    return [
        {**event, "args": {k: v for k, v in event["args"].items() if not k.startswith("graph ")}}
        for event in events
    ]


def us(row: Any) -> dict[str, Any]:
    """A row without its unknown cells, with times in microseconds."""
    known = {name: cell for name, cell in row._asdict().items() if cell is not None}
    return {k.removesuffix("_ns"): v / 1000 if k.endswith("_ns") else v for k, v in known.items()}


@pytest.mark.parametrize("has_ids", [True, False])
def test_a_graph_by_hand(tmp_path: Path, has_ids: bool) -> None:
    found = capture(tmp_path, REPLAYS if has_ids else without_ids(REPLAYS))
    (row,) = found.cuda_graphs
    names = {"name": "graph 3", "graph": 3} if has_ids else {"name": "#1"}
    assert us(row) == {
        **names,
        "operator": "run_graph",
        "range": "forward",
        "steps": 2,
        "replays": 2,
        "nodes": 4,
        "device": 104,
        "idle": 5 + 8,
        "launch": 20,
        "median_delay": 10,
        "max_delay": 15,
        "median_replay": 47,
        "max_replay": 47,
        "streams": 2,
    }
    assert [
        (row.node, row.graph_node, row.kernel, row.calls, row.device_ns)
        for row in found.cuda_graph_nodes
    ] == [
        (k, (GRAPH << 32) + k if has_ids else None, name, 2, ns)
        for k, (name, ns) in enumerate(
            [("a", 20_000), ("b", 40_000), ("c", 40_000), ("Memset (Device)", 4_000)]
        )
    ]


@pytest.mark.parametrize("has_ids", [True, False])
def test_replayed_work_belongs_to_its_launch_in_every_table(tmp_path: Path, has_ids: bool) -> None:
    events = [frame("serve.py(1): main", 0, 400, Python_id=1), *REPLAYS]
    found = capture(tmp_path, events if has_ids else without_ids(events))
    operators = {row.name: row.self_device_ns for row in found.operators}
    assert operators["run_graph"] == 104_000
    assert UNLAUNCHED_ROW not in operators
    assert [(row.path, row.device_ns) for row in found.ranges] == [("forward", 104_000)]
    # kernels and memset of 40 + 2 and 37 + 2 µs; step 8 also launched the kernel at 340–350
    steps = [(row.number, row.compute_ns, row.total_ns) for row in found.steps]
    assert steps == [(7, 42_000, 47_000), (8, 49_000, 105_000)]
    kernels = {row.name: (row.calls, row.launch_ns, row.short_calls) for row in found.kernels}
    assert kernels == {"a": (2, 20_000, 0), "b": (2, 0, 0), "c": (2, 0, 0), "eager": (1, 5_000, 0)}
    (launches,) = found.launches.where(name="cudaGraphLaunch")
    assert (launches.calls, launches.device_calls, launches.device_ns) == (2, 8, 104_000)
    device = {stack.frames: stack.value_ns for stack in found.stacks("device")}
    assert sum(ns for frames, ns in device.items() if "run_graph" in frames) == 104_000
    in_graph = replayed(found.events, found.work.event, found.work.call)
    assert found.events.duration_ns[found.work.event[in_graph]].sum() == 104_000


def test_a_launch_before_the_window_is_found_by_the_ids_alone(tmp_path: Path) -> None:
    events = [event for event in REPLAYS if event["name"] != "cudaGraphLaunch"]
    events = [{**event, "args": event["args"] | {"External id": 0}} for event in events]
    (row,) = capture(tmp_path, events).cuda_graphs
    assert (row.name, row.replays, row.device_ns, row.idle_ns) == ("graph 3", 2, 104_000, 13_000)
    assert row[2:5] == (None, None, None)
    assert (row.launch_ns, row.median_delay_ns) == (None, None)
    assert len(capture(tmp_path, without_ids(events)).cuda_graphs) == 0


def test_graphs_are_told_apart_by_their_place_or_by_what_they_run(tmp_path: Path) -> None:
    """Without ids: the same kernels from two ranges are two graphs, other kernels are a third one."""
    events = []
    for number, (name, kernels) in enumerate(
        [("one", "ab"), ("one", "ab"), ("two", "ab"), ("one", "a")], 1
    ):
        at = 100 * number
        events += [annotation(name, at, 50), call("hipGraphLaunch", at + 1, 2, number)]
        events += [
            kernel(each, at + 10 * k, 5, correlation=number) for k, each in enumerate(kernels, 1)
        ]
    found = capture(tmp_path, events).cuda_graphs
    assert [(row.name, row.range, row.replays, row.nodes) for row in found] == [
        ("#1", "one", 2, 2),
        ("#2", "two", 1, 2),
        ("#3", "one", 1, 1),
    ]
    assert {row.steps for row in found} == {None}


def test_several_graphs_with_nodes_of_the_same_names(tmp_path: Path) -> None:
    """Step 8 also launches graph 4 twice: two kernels, 365–370 and 375–378, then 385–390 and 390–394."""
    other = [
        (361, 4, [("a", 365, 5), ("z", 375, 3)]),
        (380, 5, [("a", 385, 5), ("z", 390, 4)]),
    ]
    events = [
        event
        for at, correlation, kernels in other
        for event in [
            call("cudaGraphLaunch", at, 2, correlation),
            *(
                kernel(name, start, us, correlation=correlation, graph_id=4, graph_node_id=k)
                for k, (name, start, us) in enumerate(kernels, 4 << 32)
            ),
        ]
    ]
    # The launches are the first events of the file.
    found = capture(
        tmp_path, sorted(REPLAYS + events, key=lambda e: e["name"] != "cudaGraphLaunch")
    )
    row, small = found.cuda_graphs
    assert (row.name, row.steps, row.replays, row.device_ns, row.streams) == (
        "graph 3",
        2,
        2,
        104_000,
        2,
    )
    assert us(small) == {
        "name": "graph 4",
        "graph": 4,
        "steps": 1,
        "replays": 2,
        "nodes": 2,
        "device": 17,
        "idle": 5,
        "launch": 4,
        "median_delay": 2,
        "max_delay": 3,
        "median_replay": 9,
        "max_replay": 13,
        "streams": 1,
    }
    nodes = found.cuda_graph_nodes.where(name="graph 4")
    assert [(row.node, row.kernel, row.calls, row.device_ns) for row in nodes] == [
        (0, "a", 2, 10_000),
        (1, "z", 2, 7_000),
    ]
    assert len(found.cuda_graph_nodes) == 6


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([("a", 0), ("b", 1)], [("b", 1), ("c", 2)]),  # another graph got this id
        ([("a", 0), ("a", 0)], [("a", 0), ("a", 0)]),  # a loop in the graph
        ([("a", 0), ("a", 1)], [("a", 1), ("a", 0)]),
        ([("a", 0), ("b", 1)], [("b", 1), ("a", 0)]),
    ],
)
def test_a_graph_whose_replays_have_no_common_order(
    tmp_path: Path, first: list[Any], second: list[Any]
) -> None:
    events = []
    for number, nodes in enumerate([first, second], 1):
        events.append(call("cudaGraphLaunch", 100 * number, 2, number))
        events += [
            kernel(name, 100 * number + 10 * k, 5, tid=k, correlation=number, **ids(id))
            for k, (name, id) in enumerate(nodes, 1)
        ]
    found = capture(tmp_path, events)
    assert found.cuda_graphs[0].replays == 2
    assert {row.node for row in found.cuda_graph_nodes} == {None}
    assert sum(row.calls for row in found.cuda_graph_nodes) == 4


def test_nodes_have_no_number_where_the_replays_differ(tmp_path: Path) -> None:
    """Two branches overtake each other in the second replay. With ids, each node is known all the same."""
    order = [("a", 7, 0), ("b", 9, 1), ("b", 7, 2)]
    events = []
    for number, nodes in enumerate([order, [order[1], order[0], order[2]]], 1):
        events.append(call("cudaGraphLaunch", 100 * number, 2, number))
        events += [
            kernel(name, 100 * number + 10 * k, k + 1, tid=tid, correlation=number, **ids(id))
            for k, (name, tid, id) in enumerate(nodes, 1)
        ]
    found = capture(tmp_path, events)
    assert [(row.node, row.kernel, row.calls, row.device_ns) for row in found.cuda_graph_nodes] == [
        (None, "a", 2, 5_000),
        (None, "b", 2, 5_000),
        (None, "b", 2, 8_000),
    ]
    (row,) = (found := capture(tmp_path, without_ids(events))).cuda_graphs
    assert (row.replays, row.nodes) == (2, 3)
    assert [(row.node, row.kernel, row.calls, row.device_ns) for row in found.cuda_graph_nodes] == [
        (None, "a", 2, 5_000),
        (None, "b", 4, 13_000),
    ]


def test_a_replay_that_the_window_cuts_off(tmp_path: Path) -> None:
    """The first replay lost its first two kernels."""
    cut = [event for event in REPLAYS if event["ts"] not in (50, 60)]
    found = capture(tmp_path, cut)
    (row,) = found.cuda_graphs
    assert (row.replays, row.nodes) == (2, 2)
    assert [row.calls for row in found.cuda_graph_nodes] == [1, 1, 2, 2]


def test_annotations_of_torch_are_read(tmp_path: Path) -> None:
    """torch writes the text of `mark_kernels` under `str` or `name`, and other values under `annotation`."""
    keys = [{"str": "phase a"}, {"name": "phase b"}, {"annotation": "[1]"}, {"str": 5}]
    events = [call("cudaGraphLaunch", 0, 2, 1)]
    kernels = [kernel("k", 10 * k, 5, correlation=1, **ids(k)) for k in range(1, 5)]
    events += [{**k, "args": k["args"] | key} for k, key in zip(kernels, keys)]
    nodes = capture(tmp_path, events).cuda_graph_nodes
    assert nodes.column("annotation") == ["phase a", "phase b", "[1]", None]
    assert [row.rows for row in nodes.sums("annotation", ["calls"])] == [1, 1, 1, 1]
    eager = kernel("k", 1, 5, correlation=1, graph_id=0, graph_node_id=0)
    other = capture(tmp_path, [{**eager, "args": eager["args"] | {"name": "x"}}])
    assert other.events.details == ()


@pytest.mark.parametrize("value", [-1, 2**62, 2**70, 1.5, "7", [], None, True])
@pytest.mark.parametrize("key", ["graph id", "graph node id", "correlation", "kernel", "str"])
def test_absurd_values_crash_nothing(tmp_path: Path, key: str, value: object) -> None:
    events = [{**event, "args": event["args"] | {key: value}} for event in REPLAYS]
    found = capture(tmp_path, events)
    assert all(row.device_ns >= 0 for row in found.cuda_graph_nodes)
    assert sum(found.cuda_graphs.column("device_ns")) == sum(
        found.cuda_graph_nodes.column("device_ns")
    )


def test_without_correlations_the_replays_cannot_be_told_apart(tmp_path: Path) -> None:
    events = [*REPLAYS, kernel("z", 360, 7, graph_id=4, graph_node_id=4 << 32)]
    events = [{**event, "args": event["args"] | {"correlation": 0}} for event in events]
    rows = capture(tmp_path, events).cuda_graphs
    assert [(row.name, row.device_ns, row.replays, row.nodes, row.idle_ns) for row in rows] == [
        ("graph 3", 104_000, None, None, None),
        ("graph 4", 7_000, None, None, None),
    ]


def test_what_has_no_correlation_is_part_of_no_replay(tmp_path: Path) -> None:
    more = [kernel(f"z{graph}", 350 + graph, 1, graph_id=graph) for graph in (3, 4, 5)]
    rows = capture(tmp_path, [*REPLAYS, *more]).cuda_graphs
    assert sorted((row.name, row.device_ns, row.replays) for row in rows) == [
        ("graph 3", 105_000, None),
        ("graph 4", 1_000, None),
        ("graph 5", 1_000, None),
    ]
