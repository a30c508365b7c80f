"""CUDA graphs: their replays in every table, and the names of their nodes from the capture; all worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    Event,
    annotation,
    call,
    capture,
    frame,
    kernel,
    made,
    node,
    span,
    step,
    write_trace,
)

from instrument.analysis.operators import UNLAUNCHED_ROW
from instrument.capture import Capture
from instrument.errors import CaptureError, ConfigError
from instrument.links.cuda_graphs import replayed
from instrument.links.stream_capture import CapturedGraph, CapturedNames, GraphNodes

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
    found = capture(tmp_path, REPLAYS if has_ids else without_ids(REPLAYS)).cuda_graphs
    (row,) = found
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
        "no_names": "no capture",
    }
    assert [
        (row.node, row.graph_node, row.kernel, row.calls, row.device_ns) for row in found.nodes
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
        "no_names": "no capture",
    }
    nodes = found.cuda_graphs.nodes.where(name="graph 4")
    assert [(row.node, row.kernel, row.calls, row.device_ns) for row in nodes] == [
        (0, "a", 2, 10_000),
        (1, "z", 2, 7_000),
    ]
    assert len(found.cuda_graphs.nodes) == 6


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([("a", 0), ("b", 1)], [("b", 1), ("c", 2)], "unknown order"),  # another graph got this id
        ([("a", 0), ("a", 0)], [("a", 0), ("a", 0)], None),  # a loop in the graph
        ([("a", 0), ("a", 1)], [("a", 1), ("a", 0)], None),
        ([("a", 0), ("b", 1)], [("b", 1), ("a", 0)], None),
    ],
)
def test_a_graph_whose_replays_have_no_common_order(
    tmp_path: Path, first: list[Any], second: list[Any], reason: str | None
) -> None:
    """The captured calls name their kernels, so that these tell which operators launched the nodes."""
    events = [call("cudaStreamBeginCapture", 0, 2, 90), call("cudaStreamEndCapture", 60, 2, 91)]
    for k, (name, _) in enumerate(first):
        events += [
            span(f"aten::{name}", 10 + 20 * k, 9),
            launch("hipLaunchKernel", 12 + 20 * k, 92 + k, name),
        ]
    for number, nodes in enumerate([first, second], 1):
        events.append(call("cudaGraphLaunch", 100 * number, 2, number))
        events += [
            kernel(name, 100 * number + 10 * k, 5, tid=k, correlation=number, **ids(id))
            for k, (name, id) in enumerate(nodes, 1)
        ]
    found = capture(tmp_path, events).cuda_graphs
    assert (found[0].replays, found[0].no_names) == (2, reason)
    assert {row.node for row in found.nodes} == {None}
    assert sum(row.calls for row in found.nodes) == 4
    known = {row.operator for row in found.nodes}
    assert known == ({None} if reason else {f"aten::{name}" for name, _ in first})


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
    found = capture(tmp_path, events).cuda_graphs
    assert found[0].no_names == "no capture"
    assert [(row.node, row.kernel, row.calls, row.device_ns) for row in found.nodes] == [
        (None, "a", 2, 5_000),
        (None, "b", 2, 5_000),
        (None, "b", 2, 8_000),
    ]
    (row,) = (found := capture(tmp_path, without_ids(events)).cuda_graphs)
    assert (row.replays, row.nodes) == (2, 3)
    assert [(row.node, row.kernel, row.calls, row.device_ns) for row in found.nodes] == [
        (None, "a", 2, 5_000),
        (None, "b", 4, 13_000),
    ]


def launch(
    name: str, at_us: float, correlation: int, kernel: str | None = None, **more: Any
) -> Event:
    """A launch that is captured; on ROCm it names its kernel."""
    known = {} if kernel is None else {"kernel": kernel}
    return call(name, at_us, 2, correlation, **more, **known)


def captured(
    at: float, named: bool = False, *, operator: str = "aten::mm", tid: int = 1
) -> list[Event]:
    """A capture of 100 µs: a matrix product in no range, a layer and its backward, a memset.

    Another thread runs a kernel meanwhile, which is not captured; a host function does nothing on the device.
    """
    a, b, c = "abc" if named else (None, None, None)
    first = 1000 + int(at)
    return [
        call("cudaStreamBeginCapture", at, 2, first, tid=tid),
        span(operator, at + 5, 8, tid=tid),
        launch("cudaLaunchKernel", at + 6, first + 1, a, tid=tid),
        call("cuLaunchKernel", at + 7, 1, first + 1, tid=tid),  # of the driver, for the call above
        annotation("layer", at + 15, 20, tid=tid),
        made("aten::addmm", at + 18, 10, 5, tid=tid),
        {**launch("cuLaunchKernelEx", at + 20, first + 2, b, tid=tid), "cat": "cuda_driver"},
        node("AddmmBackward0", at + 40, 20, 5, tid=2),
        span("AddmmBackward0", at + 42, 16, tid=2),
        launch("cudaLaunchKernel", at + 45, first + 3, c, tid=2),
        span("aten::zero_", at + 65, 10, tid=tid),
        call("cudaMemsetAsync", at + 66, 2, first + 4, tid=tid),
        call("cudaLaunchHostFunc", at + 80, 2, first + 5, tid=tid),
        call("cudaLaunchKernel", at + 50, 2, first + 6, tid=3),
        kernel("eager", at + 60, 5, tid=20, correlation=first + 6),
        call("cudaStreamEndCapture", at + 98, 2, first + 7, tid=tid),
    ]


NAMES = [
    ("a", "aten::mm", None),
    ("b", "aten::addmm", "layer"),
    ("c", "AddmmBackward0", "layer"),
    ("Memset (Device)", "aten::zero_", None),
]


def moved(events: list[Event], by_us: float) -> list[Event]:
    return [{**event, "ts": event["ts"] + by_us} for event in events]


LATER = moved(REPLAYS, 1000)


def names_of(found: Capture) -> list[tuple[str, str | None, str | None]]:
    return [(row.kernel, row.operator, row.range) for row in found.cuda_graphs.nodes]


@pytest.mark.parametrize("named", [False, True], ids=["CUDA", "ROCm"])
@pytest.mark.parametrize("second_file", [False, True])
def test_nodes_get_the_operators_and_ranges_of_the_captured_launches(
    tmp_path: Path, second_file: bool, named: bool
) -> None:
    """On CUDA the launches name no kernels, so that only their number, kinds and order are compared."""
    if second_file:
        (tmp_path / "capture").mkdir()
        other = write_trace(tmp_path / "capture", captured(5000, named))
        found = Capture.load(write_trace(tmp_path, LATER), graph_captures=[other])
    else:
        found = capture(tmp_path, [*captured(0, named), *LATER])
    (row,) = found.cuda_graphs
    assert (row.names_from, row.no_names) == ("kernel names" if named else "order", None)
    assert names_of(found) == NAMES
    by_range = found.cuda_graphs.nodes.by("range")
    assert [tuple(row) for row in by_range] == [("layer", 2, 4, 80_000), (None, 2, 4, 24_000)]
    with pytest.raises(ConfigError, match="'stack'"):
        found.cuda_graphs.nodes.by("stack")  # type: ignore[arg-type]


def changed(events: list[Event], name: str, **args: Any) -> list[Event]:
    """The captured launch of a kernel gets other arguments."""
    return [
        {**event, "args": event["args"] | args} if event["args"].get("kernel") == name else event
        for event in events
    ]


def without(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] != name]


FORK = call("cudaStreamWaitEvent", 30, 2, 900)
REFUSED = {
    "other launches: one fewer": without(captured(0), "cuLaunchKernelEx"),
    "other launches: one more": [*captured(0), launch("cudaLaunchKernel", 90, 900)],
    "other launches: another order": [
        *without(captured(0), "cudaMemsetAsync"),
        call("cudaMemsetAsync", 30, 2, 900),
    ],
    "other launches: a graph in the graph": [
        *without(captured(0), "cuLaunchKernelEx"),
        call("cudaGraphLaunch", 20, 2, 900),
    ],
    "other launches: it ends as the graph is launched": without(captured(927), "cuLaunchKernelEx"),
    "other kernels": changed(captured(0, named=True), "b", kernel="x"),
    "other kernels: it ends as the graph is launched": changed(
        captured(927, named=True), "b", kernel="x"
    ),
    "unknown order: branches, no names": [*captured(0), FORK],
    "no capture: it ends after the launch": captured(1500),
    "no capture: two at once": [*captured(0), *captured(50, tid=4)],
    "no capture: it has no end": without(captured(0), "cudaStreamEndCapture"),
    "no capture: another thread ends one": [
        *without(captured(0), "cudaStreamEndCapture"),
        call("cudaStreamEndCapture", 98, 2, 900, tid=4),
    ],
    "no capture: a second one begins": [
        *without(captured(0), "cudaStreamEndCapture"),
        call("cudaStreamBeginCapture", 98, 2, 900),
    ],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_capture_that_does_not_fit_gives_no_names(tmp_path: Path, reason: str) -> None:
    found = capture(tmp_path, [*REFUSED[reason], *LATER])
    (row,) = found.cuda_graphs
    assert (row.names_from, row.no_names) == (None, reason.split(":")[0])
    assert {names[1:] for names in names_of(found)} == {(None, None)}


def test_several_captures_give_the_names_on_which_they_agree(tmp_path: Path) -> None:
    events = [*captured(0), *captured(200, operator="aten::bmm"), *LATER]
    found = capture(tmp_path, events)
    assert found.cuda_graphs[0][-2:] == ("order", "several captures")
    assert names_of(found) == [("a", None, None), *NAMES[1:]]
    # A capture that names its kernels decides against one that does not.
    found = capture(tmp_path, [*captured(0, named=True), *events[len(captured(0)) :]])
    assert found.cuda_graphs[0][-2:] == ("kernel names", None)
    assert names_of(found) == NAMES


def small_capture(at_us: float, correlation: int, kernel: str | None = None) -> list[Event]:
    """A capture of one launch in `aten::a`, 20 µs long."""
    return [
        call("cudaStreamBeginCapture", at_us, 1),
        span("aten::a", at_us + 2, 8),
        launch("cudaLaunchKernel", at_us + 3, correlation, kernel),
        call("cudaStreamEndCapture", at_us + 19, 1),
    ]


def small_replay(at_us: float, graph: int, name: str) -> list[Event]:
    """A replay of a graph of one kernel."""
    device = kernel(name, at_us + 10, 5, correlation=graph, graph_id=graph, graph_node_id=graph)
    return [call("cudaGraphLaunch", at_us, 5, graph), device]


NONE, ORDER, KERNELS = (None, "several graphs"), ("order", None), ("kernel names", None)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # One of the two was captured before the recording.
        ([*small_capture(0, 100), "x", "y"], [NONE, NONE]),
        # Two graphs of one capture, or a capture for each graph.
        ([*small_capture(0, 100), "x", "x"], [ORDER, ORDER]),
        ([*small_capture(0, 100), *small_capture(50, 101), "x", "y", "x"], [ORDER] * 3),
        ([*small_capture(0, 100), *small_capture(50, 101), "x", "y", "z"], [NONE] * 3),
        # The second capture ends after two launches, or after one.
        ([*small_capture(0, 100), "x", "y", *small_capture(250, 101), "x"], [NONE, NONE, ORDER]),
        ([*small_capture(0, 100), "x", *small_capture(150, 101), "y", "z"], [NONE] * 3),
        ([*small_capture(0, 100), "x", *small_capture(150, 101), "y", "x"], [ORDER] * 3),
        # A capture that names its kernels takes x away from the other one.
        ([*small_capture(0, 100), *small_capture(50, 101, "x"), "x", "y"], [KERNELS, ORDER]),
    ],
)
def test_captures_without_kernel_names_do_not_name_more_graphs_than_they_made(
    tmp_path: Path, events: list[Any], expected: list[Any]
) -> None:
    """A text stands for a graph that replays this kernel; the replays are 100 µs apart from 100 µs on."""
    graphs = [each for each in events if isinstance(each, str)]
    trace = [each for each in events if not isinstance(each, str)]
    for k, name in enumerate(graphs, 1):
        trace += small_replay(100 * k, k, name)
    found = capture(tmp_path, trace).cuda_graphs
    by_graph = {row.graph: (row.names_from, row.no_names) for row in found}
    assert [by_graph[k] for k in range(1, len(graphs) + 1)] == expected
    known = {row.name: row.operator for row in found.nodes}
    assert known == {row.name: "aten::a" if row.names_from else None for row in found}


class Counted(str):
    """A text that counts how often it is compared or looked up."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Counted.count += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.count += 1
        return str.__hash__(self)

    def __lt__(self, other: str) -> bool:
        Counted.count += 1
        return str.__lt__(self, other)


def comparisons(number: int, is_named: bool, in_order: bool, same: bool) -> int:
    """How many texts are compared to find the names of some graphs of four nodes in as many captures."""

    def texts(of: str, k: int) -> list[Any]:
        return [Counted(f"{of}{node}" if same else f"{of}{node} of {k}") for node in range(4)]

    captures = [
        CapturedGraph(
            kind=np.zeros(4, np.int64),
            kernel=texts("kernel", k) if is_named else [None] * 4,
            operator=texts("operator", k),
            range=[None] * 4,
            is_named=is_named,
            forks=False,
            end_ns=k,
        )
        for k in range(number)
    ]
    graphs = [
        GraphNodes(np.zeros(4, np.int64), texts("kernel", k), in_order, number)
        for k in range(number)
    ]
    Counted.count = 0
    found = CapturedNames(captures).of(graphs)
    assert len(found) == number
    assert (found[0].source is None) == (not is_named and not in_order)
    return Counted.count


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("is_named", [True, False])
def test_twice_the_captures_and_graphs_are_twice_the_work(
    is_named: bool, in_order: bool, same: bool
) -> None:
    few, many = (comparisons(number, is_named, in_order, same) for number in (50, 100))
    assert 0 < few < many < 2.2 * few


def test_the_kernels_tell_the_nodes_of_branches_apart(tmp_path: Path) -> None:
    """Two operators launch the kernel a; only its range is known."""
    found = capture(tmp_path, [*captured(0, named=True), FORK, *LATER])
    assert found.cuda_graphs[0][-2:] == ("kernel names", None)
    assert names_of(found) == NAMES
    twice = [
        *changed(captured(0, named=True), "c", kernel="a"),
        FORK,
        *({**event, "name": "a"} if event["name"] == "c" else event for event in LATER),
    ]
    found = capture(tmp_path, twice)
    assert found.cuda_graphs[0][-2:] == ("kernel names", "unknown order")
    assert names_of(found) == [("a", None, None), NAMES[1], ("a", None, None), NAMES[3]]


@pytest.mark.parametrize(("last", "known"), [("d", True), ("c", False)])
def test_the_tracer_of_rocm_loses_the_last_kernel(tmp_path: Path, last: str, known: bool) -> None:
    """If the last two kernels are the same, either of them can be the lost one."""
    first = without(captured(0, named=True), "cudaMemsetAsync")
    events = [*first, launch("hipLaunchKernel", 90, 900, last)]
    found = capture(tmp_path, [*events, *without(LATER, "Memset (Device)")])
    expected = ("kernel names", None) if known else (None, "other launches")
    assert found.cuda_graphs[0][-2:] == expected
    assert names_of(found) == [
        (*names[:1], *(names[1:] if known else (None, None))) for names in NAMES[:3]
    ]


def test_copies_and_memsets_that_rocm_runs_as_kernels(tmp_path: Path) -> None:
    events = [
        {**event, "cat": "kernel", "name": "__amd_rocclr_fillBufferAligned"}
        if event["name"] == "Memset (Device)"
        else event
        for event in LATER
    ]
    found = capture(tmp_path, [*captured(0, named=True), *events])
    assert found.cuda_graphs[0].names_from == "kernel names"
    assert names_of(found)[3][1:] == ("aten::zero_", None)


def test_a_replay_that_the_window_cuts_off_has_names_all_the_same(tmp_path: Path) -> None:
    """The first replay lost its first two kernels."""
    cut = [event for event in LATER if event["ts"] not in (1050, 1060)]
    found = capture(tmp_path, [*captured(0), *cut])
    (row,) = found.cuda_graphs
    assert (row.replays, row.nodes, row.names_from) == (2, 2, "order")
    assert [row.calls for row in found.cuda_graphs.nodes] == [1, 1, 2, 2]
    assert names_of(found) == NAMES


def test_annotations_of_torch_are_read(tmp_path: Path) -> None:
    """torch writes the text of `mark_kernels` under `str` or `name`, and other values under `annotation`."""
    keys = [{"str": "phase a"}, {"name": "phase b"}, {"annotation": "[1]"}, {"str": 5}]
    events = [call("cudaGraphLaunch", 0, 2, 1)]
    kernels = [kernel("k", 10 * k, 5, correlation=1, **ids(k)) for k in range(1, 5)]
    events += [{**k, "args": k["args"] | key} for k, key in zip(kernels, keys)]
    nodes = capture(tmp_path, events).cuda_graphs.nodes
    assert nodes.column("annotation") == ["phase a", "phase b", "[1]", None]
    assert [row.nodes for row in nodes.by("annotation")] == [1, 1, 1, 1]
    eager = kernel("k", 1, 5, correlation=1, graph_id=0, graph_node_id=0)
    other = capture(tmp_path, [{**eager, "args": eager["args"] | {"name": "x"}}])
    assert other.events.details == ()


@pytest.mark.parametrize("value", [-1, 2**62, 2**70, 1.5, "7", [], None, True])
@pytest.mark.parametrize("key", ["graph id", "graph node id", "correlation", "kernel", "str"])
def test_absurd_values_crash_nothing(tmp_path: Path, key: str, value: object) -> None:
    events = [*captured(0, named=True), *LATER]
    events = [{**event, "args": event["args"] | {key: value}} for event in events]
    found = capture(tmp_path, events).cuda_graphs
    assert all(row.device_ns >= 0 for row in found.nodes)
    assert sum(found.column("device_ns")) == sum(found.nodes.column("device_ns"))


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


def test_a_missing_second_file_is_an_error(tmp_path: Path) -> None:
    path = write_trace(tmp_path, REPLAYS)
    with pytest.raises(CaptureError, match="nowhere"):
        Capture.load(path, graph_captures=[tmp_path / "nowhere"])
