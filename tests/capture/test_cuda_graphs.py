"""CUDA graphs: their replays in every table, and their nodes; all worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Event, annotation, call, capture, frame, kernel, span, step
from golden import Golden, rows_as_lines

from capture.sums import assert_sums
from instrument.read.facts.cuda_graphs import replayed
from instrument.read.views.operators import UNLAUNCHED_ROW

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


def launches(*replays: list[tuple[str, int, int]]) -> list[Event]:
    """A launch of a graph for each list of kernels with their streams and node ids; the n-th kernel lasts n + 1 µs."""
    events = []
    for number, nodes in enumerate(replays, 1):
        events.append(call("cudaGraphLaunch", 100 * number, 2, number))
        events += [
            kernel(name, 100 * number + 10 * k, k + 1, tid=tid, correlation=number, **ids(id))
            for k, (name, tid, id) in enumerate(nodes, 1)
        ]
    return events


# Graph 4 is launched twice in step 8: kernels at 365–370 and 375–378, then at 385–390 and 390–394.
GRAPH_4 = [
    *(call("cudaGraphLaunch", at, 2, correlation) for at, correlation in ((361, 4), (380, 5))),
    *(
        kernel(name, at, lasts, correlation=correlation, graph_id=4, graph_node_id=(4 << 32) + node)
        for name, at, lasts, correlation, node in (
            ("a", 365, 5, 4, 0), ("z", 375, 3, 4, 1), ("a", 385, 5, 5, 0), ("z", 390, 4, 5, 1)
        )
    ),
]  # fmt: skip
A, B, OTHER_B, C = ("a", 7, 0), ("b", 9, 1), ("b", 7, 2), ("c", 7, 2)
CASES = {
    # Nodes of 2 · (10 + 20 + 20 + 2) µs; launches return at 35 and 235, 15 and 10 µs before the first node.
    "two replays": REPLAYS,
    "two replays without ids": without_ids(REPLAYS),
    "the launches are not in the trace": [
        {**event, "args": event["args"] | {"External id": 0}}
        for event in REPLAYS
        if event["name"] != "cudaGraphLaunch"
    ],
    # the launches are the first events of the file
    "two graphs": sorted(REPLAYS + GRAPH_4, key=lambda e: e["name"] != "cudaGraphLaunch"),
    # From 35 to 70 are 35 µs; the replay has 70–97, of which 90–95 are idle.
    "a replay of which the window cuts off two kernels": [
        event for event in REPLAYS if event["ts"] not in (50, 60)
    ],
    # In each replay 2 + 3 µs in 13, of which 8 are idle, from 8 µs after the launch on.
    "another graph gets the id": launches([A, B], [B, C]),
    "a loop in the graph": launches([A, A], [A, A]),
    "two nodes in another order": launches([A, B], [B, A]),
    "two nodes of one name in another order": launches([B, OTHER_B], [OTHER_B, B]),
    # 2 + 3 + 4 µs in 24, twice.
    "two branches overtake each other": launches([A, B, OTHER_B], [B, A, OTHER_B]),
    "two branches overtake each other, without ids": without_ids(
        launches([A, B, OTHER_B], [B, A, OTHER_B])
    ),
    # Without them, no replay can be told from another.
    "no correlations": [
        {**event, "args": event["args"] | {"correlation": 0}}
        for event in [*REPLAYS, kernel("z", 360, 7, graph_id=4, graph_node_id=4 << 32)]
    ],
    "kernels without a correlation": [
        *REPLAYS,
        *(kernel(f"z{graph}", 350 + graph, 1, graph_id=graph) for graph in (3, 4, 5)),
    ],
}


def test_graphs_and_their_nodes(tmp_path: Path, golden: Golden) -> None:
    """Checked by hand. A node has a number if it has the same place in all replays; with ids, each is a row."""
    told = []
    for name, events in CASES.items():
        found = capture(tmp_path, events)
        assert_sums(found)
        tables = {"graph": found.cuda_graphs, "node": found.cuda_graph_nodes}
        told.append(f"---- {name}\n{rows_as_lines(tables)}")
    golden("cuda_graphs.txt", "\n".join(told))


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
    got = [(row.name, row.range, row.replays, row.nodes) for row in found]
    assert got == [("#1", "one", 2, 2), ("#2", "two", 1, 2), ("#3", "one", 1, 1)]
    assert {row.steps for row in found} == {None}


def test_annotations_of_torch_are_read(tmp_path: Path) -> None:
    """torch writes the text of `mark_kernels` under `str` or `name`, and other values under `annotation`."""
    keys = [{"str": "phase a"}, {"name": "phase b"}, {"annotation": "[1]"}, {"str": 5}]
    events = [call("cudaGraphLaunch", 0, 2, 1)]
    kernels = [kernel("k", 10 * k, 5, correlation=1, **ids(k)) for k in range(1, 5)]
    events += [{**k, "args": k["args"] | key} for k, key in zip(kernels, keys)]
    nodes = capture(tmp_path, events).cuda_graph_nodes
    assert nodes.column("annotation") == ["phase a", "phase b", "[1]", None]
    assert nodes.frame["annotation"].value_counts()["count"].to_list() == [1, 1, 1, 1]
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
