"""Backward time finds its range: by hand, and as torch's own arrows say."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from builders import ACCUMULATE as SUM
from builders import (
    ENGINE,
    accumulation,
    allocation,
    annotation,
    call,
    capture,
    frame,
    kernel,
    made,
    node,
    span,
)
from golden import Golden, rows_as_lines
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from capture.conftest import each_body, record
from capture.plain_loops import backward_by_flows, top_level_ns
from capture.sums import assert_sums
from instrument.read.capture import Capture


def parts(found: Capture) -> dict[tuple[str, str], int]:
    return {(row.path, row.kind): row.cpu_ns for row in found.ranges_attribution if row.cpu_ns}


def backward(found: Capture) -> dict[str, tuple[int, int]]:
    return {row.path: (row.backward_ns, row.accumulate_ns) for row in found.ranges}


TRAINING = [
    annotation("ProfilerStep#1", 0, 200),
    annotation("forward", 10, 40),
    annotation("block", 15, 20),
    made("aten::addmm", 20, 10, 0),  # torch counts from 0
    made("aten::sum", 40, 5, 8),
    made("aten::neg", 55, 3, 9),
    annotation("backward", 60, 75),
    node("NegBackward0", 70, 6, 9),
    node("SumBackward0", 77, 5, 8),
    node("AddmmBackward0", 90, 20, 0),
    span("AddmmBackward0", 91, 18, tid=2, Sequence_number=0, Fwd_thread_id=1),
    span("aten::mm", 92, 10, tid=2, External_id=4),
    *accumulation(111, 4),
    annotation("hook", 112, 1, tid=2),
    node("UnknownBackward0", 120, 8, 3),
    *accumulation(129, 3),
    annotation("optimizer", 140, 30),
    annotation("Optimizer.step#SGD.step", 145, 20),
    span("aten::add_", 150, 5),
]


FIRST = [made("aten::relu", 0, 3, 5), node("ReluBackward0", 20, 6, 5)]
CASES = {
    "nodes that run inside a range are in its CPU time, but not of it": [
        {**event, "tid": 1} for event in TRAINING if event["name"] != "hook"
    ],
    # `forward` has 7 + 5 µs of its own, and with its backward 73; `outer` what ran in it, whatever it was backward of: 61.
    "device time of a range is also that of its backward, each once": [
        annotation("outer", 5, 190, tid=2),
        *(event for event in TRAINING if event["name"] != "hook"),
        *(
            span("aten::launch", at, 2, tid=tid, External_id=number)
            for number, at, tid in ((1, 22, 1), (2, 95, 2), (3, 42, 1), (5, 112, 2))
        ),
        *(kernel("forward", 23, 5, External_id=1), kernel("backward", 100, 50, External_id=2)),
        *(kernel("sum", 48, 7, External_id=3), kernel("accumulate", 160, 11, External_id=5)),
    ],
    # 3 + 4 µs have no place.
    "gradients accumulated before any node or on another thread": [
        *accumulation(15, 3),
        *(annotation("a", 0, 10), made("aten::relu", 1, 3, 5), node("ReluBackward0", 20, 6, 5)),
        *(*accumulation(27, 4, tid=3), *accumulation(30, 5)),
    ],
    # The relu of 9 µs is of `a`, and the convolution of 6 of `b`.
    "two forward threads with the same numbers are told apart by names": [
        *(annotation("a", 0, 10), made("aten::relu", 1, 3, 5), made("aten::mul", 5, 3, 6)),
        *(annotation("b", 0, 10, tid=4), made("aten::cudnn_convolution", 2, 3, 5, tid=4)),
        node("CudnnConvolutionBackward0", 20, 6, 5, thread=1),
        node("ReluBackward0", 40, 9, 5, thread=2),
    ],
    "a range between a node and the accumulation after it changes nothing": [
        *(annotation("a", 0, 10), made("aten::relu", 1, 3, 5), node("ReluBackward0", 20, 6, 5)),
        *(annotation("hook", 27, 2, tid=2), *accumulation(30, 5)),
    ],
    # 3 µs of forward, 6 of backward and 4 of accumulation.
    "the first node of a trace counts like others": [*FIRST, *accumulation(27, 4)],
    "the first node, and one without a forward": [
        *FIRST,
        span(ENGINE + "X", 21, 2, tid=2),
        *accumulation(27, 4),
    ],
    "the first event of a trace counts like others": [
        *(made("aten::relu", 1, 3, 5), annotation("a", 0, 10), annotation("b", 0, 10, tid=4)),
        *(made("aten::x", 2, 3, 5, tid=4), node("ReluBackward0", 20, 6, 5)),
    ],
    # Of the step's 100 µs, 20 are of forward, and 10 of its backward.
    "a range around forward and backward counts a kernel once": [
        annotation("step", 0, 100),
        annotation("forward", 5, 20),
        made("aten::mm", 10, 5, 1),
        node("MmBackward0", 50, 10, 1, tid=1),
        call("cudaLaunchKernel", 52, 1, correlation=9),
        kernel("mm", 60, 10, correlation=9),
    ],
    # TBackward0 is of aten::t, the last with number 5, which is in `b`.
    "the last operator with a number made the node": [
        *(
            annotation("a", 0, 10),
            made("aten::detach", 2, 3, 5),
        ),  # needed no gradient: the number is still free
        *(annotation("b", 20, 10), made("aten::linear", 21, 8, 5), made("aten::t", 22, 3, 5)),
        *(annotation("c", 40, 10), made("aten::relu", 41, 3, 6)),
        node("TBackward0", 60, 7, 5),
        node("ReluBackward0", 80, 7, 6, thread=0),  # its forward thread is not known
    ],
    "torch 1 9 tells nodes by their forward thread alone": [
        annotation("a", 0, 10),
        span("aten::relu", 1, 3, cat="Operator", Sequence_number=5),
        span("ReluBackward1", 20, 6, cat="Operator", tid=2, Sequence_number=5, Fwd_thread_id=1),
        span(SUM, 27, 2, cat="Operator", tid=2),
    ],
    # Thread 1 has both numbers, but only thread 4 a relu for ReluBackward0; there, number 6 is not found.
    "names that agree weigh more than numbers found": [
        *(annotation("a", 0, 10), made("aten::mul", 1, 3, 5), made("aten::mul", 5, 3, 6)),
        *(annotation("b", 0, 10, tid=4), made("aten::relu", 2, 3, 5, tid=4)),
        *(node("ReluBackward0", 20, 6, 5), node("CustomBackward", 40, 9, 6)),
    ],
    # Thread 1 has number 5, and thread 4 has 5 and 6: 6 + 9 µs are of `b`.
    "where no name agrees the thread with more of the numbers is taken": [
        *(annotation("a", 0, 10), made("aten::x", 1, 3, 5)),
        *(
            annotation("b", 0, 10, tid=4),
            made("aten::y", 2, 3, 5, tid=4),
            made("aten::y", 6, 3, 6, tid=4),
        ),
        *(node("CustomBackward", 20, 6, 5), node("CustomBackward", 40, 9, 6)),
    ],
    # The first forward thread of the nodes is that of `early`.
    "two forward threads that did the same are taken in the order in which they began": [
        *(annotation("late", 3, 10), made("aten::relu", 4, 3, 5)),
        *(annotation("early", 0, 10, tid=4), made("aten::relu", 1, 3, 5, tid=4)),
        *(node("ReluBackward0", 20, 6, 5, thread=1), node("ReluBackward0", 40, 9, 5, thread=2)),
    ],
    # 6 + 9 µs.
    "a node of a node is backward of the first ones range": [
        *(annotation("a", 0, 10), made("aten::pow", 1, 3, 5)),
        *(node("PowBackward0", 20, 6, 5, tid=1), made("aten::mul", 22, 2, 6)),
        node("MulBackward0", 40, 9, 6, tid=1),
    ],
    # 10 + 10 µs.
    "nodes that name each other have no place": [
        *(node("XBackward0", 0, 10, 5, tid=1), made("aten::y", 2, 2, 6)),
        *(node("YBackward0", 20, 10, 6, tid=1), made("aten::x", 22, 2, 5)),
    ],
    # 100 - 20 - 15 µs are the optimizer's.
    "a closure in an optimizer step is optimizer time but for its ranges and its backward": [
        annotation("Optimizer.step#LBFGS.step", 0, 100),
        *(annotation("forward", 10, 20), made("aten::mm", 12, 5, 1)),
        node("MmBackward0", 40, 15, 1, tid=1),
    ],
    # Of the node's 80 µs, 20 are of the block that is repeated, and 10 of the hook.
    "the range of a hook in a node that repeats a forward is not recomputed": [
        node("CheckpointFunctionBackward", 10, 80, 1, tid=1),
        span("aten::detach", 12, 2),
        annotation("block", 20, 20),
        made("aten::mm", 25, 10, 7),
        annotation("hook", 50, 10),
        annotation("block", 100, 20),
    ],
}


def test_where_the_time_of_the_backward_goes(tmp_path, golden: Golden) -> None:
    """Checked by hand: CPU and device time of each range by the kind of work."""
    told = []
    for name, events in {"a training": TRAINING, **CASES}.items():
        found = capture(tmp_path, events)
        assert_sums(found)
        columns = "path forward_ns backward_ns accumulate_ns optimizer_ns cpu_ns self_cpu_ns"
        ranges = found.ranges.select(
            [*columns.split(), "device_ns", "self_device_ns", "device_busy_ns"]
        )
        tables = {"part": found.ranges_attribution, "range": ranges}
        told.append(f"---- {name}\n{rows_as_lines(tables)}")
    golden("backward.txt", "\n".join(told))


@pytest.mark.parametrize("name", each_body())
def test_the_parts_of_a_recording_are_the_whole(recordings, name) -> None:
    found = recordings(name).capture
    assert sum(found.ranges_attribution.column("cpu_ns")) == top_level_ns(found.events) > 0
    rows = list(found.ranges)
    for kind in ("forward", "backward", "accumulate", "optimizer"):
        placed = sum(
            ns for (path, of), ns in parts(found).items() if of == kind and path != "(no range)"
        )
        assert sum(getattr(row, f"{kind}_ns") for row in rows if row.depth == 0) == placed > 0
    assert not [
        row
        for row in found.ranges_attribution
        if row.kind == "unattributed" and row.cpu_ns > 0.01 * rows[0].cpu_ns
    ]


@pytest.mark.parametrize("name", each_body())
def test_backward_is_what_torchs_own_arrows_give(recordings, name) -> None:
    expected = backward_by_flows(recordings(name).path)
    found = {row.name: row.backward_ns for row in recordings(name).capture.ranges_by_name}
    assert expected["forward"] > 0
    assert {name: ns for name, ns in found.items() if ns} == {
        n: v for n, v in expected.items() if n in found
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_ranges_are_ranges_and_their_backward_is_placed(tmp_path, reentrant) -> None:
    layer = nn.Linear(8, 8)

    def block(x: torch.Tensor) -> torch.Tensor:
        with record_function("block"):
            return layer(x).relu()

    def body() -> None:
        with record_function("forward"):
            y = checkpoint(block, torch.ones(4, 8, requires_grad=True), use_reentrant=reentrant)
        with record_function("backward"):
            y.sum().backward()

    body()
    found = record(tmp_path / "trace.json", body).capture
    rows = {row.path: row for row in found.ranges}
    again = "backward/block (recomputed)"
    assert set(rows) == {"forward", "forward/block", "backward", again}
    where = again if reentrant else "forward/block"
    assert rows[where].backward_ns > 0
    assert rows[again].recompute_ns == rows[again].cpu_ns == rows["backward"].recompute_ns > 0
    assert rows[again].forward_ns == rows["forward/block"].recompute_ns == 0
    got = [row.name for row in found.ranges_by_name]
    assert got == ["forward", "block", "backward", "block (recomputed)"]
    parts = {(row.path, row.kind): row.cpu_ns for row in found.ranges_attribution}
    assert parts[again, "recompute"] == rows[again].cpu_ns
    assert sum(found.ranges_attribution.column("cpu_ns")) == top_level_ns(found.events)


@pytest.mark.parametrize("name", ["derivative", "power"])
def test_a_range_of_the_backward_that_records_gradients_is_not_recomputed(tmp_path, name) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with record_function("power"):
                return x**3

        @staticmethod
        def backward(ctx, grad):
            with record_function(name):
                squared = ctx.saved_tensors[0] ** 2
            return grad * 3 * squared

    def body() -> None:
        x = torch.ones(4, requires_grad=True)
        with record_function("forward"):
            y = Cube.apply(x).sum()
        with record_function("backward"):
            torch.autograd.grad(y, x, create_graph=True)

    found = record(tmp_path / "trace.json", body).capture
    got = [row.path for row in found.ranges]
    assert got == ["forward", "forward/power", "backward", f"backward/{name}"]
    assert sum(found.ranges.column("recompute_ns")) == 0


def test_nested_checkpoints_are_recomputed_as_often_as_they_run(tmp_path) -> None:
    layer, calls = nn.Linear(8, 8), {False: 0, True: 0}

    def inner(x: torch.Tensor) -> torch.Tensor:
        with record_function("inner"):
            calls[torch._C._current_graph_task_id() >= 0] += 1
            return layer(x).relu()

    def outer(x: torch.Tensor) -> torch.Tensor:
        with record_function("outer"):
            return checkpoint(inner, layer(x), use_reentrant=False)

    def body() -> None:
        checkpoint(
            outer, torch.ones(4, 8, requires_grad=True), use_reentrant=False
        ).sum().backward()

    body()
    calls.update({False: 0, True: 0})
    found = record(tmp_path / "trace.json", body).capture
    rows = {row.name: row.calls for row in found.ranges_by_name}
    assert (rows["inner"], rows["inner (recomputed)"]) == (calls[False], calls[True])
    assert min(calls.values()) >= 1


def test_flops_of_each_module_are_those_of_torchs_counter_backward_included(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    def body() -> None:
        y = x
        for number, part in enumerate(model):
            with record_function(str(number)):
                y = part(y)
        with record_function("backward"):
            y.sum().backward()

    expected = {}
    for number, part in enumerate(model):
        given = nn.Sequential(*model[:number])(x).detach().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            part(given).sum().backward()
        expected[str(number)] = counter.get_total_flops() or None
    rows = {row.path: row for row in record(tmp_path / "trace.json", body).capture.ranges}
    assert {name: rows[name].flops for name in expected} == expected
    assert expected["1"] is None
    linear, whole = (
        rows["3"],
        rows["3"].forward_ns + rows["3"].backward_ns + rows["3"].accumulate_ns,
    )
    assert linear.flops_per_second == linear.flops * 10**9 // whole
    with FlopCounterMode(display=False) as counter:
        body()
    assert rows["0"].flops + rows["3"].flops == counter.get_total_flops()
    assert 0 < rows["backward"].flops < counter.get_total_flops()


def test_operators_of_the_backward_are_grouped_with_the_range_of_their_forward(tmp_path) -> None:
    """The node that names no forward operator of the trace, and what accumulates after it, are in no range."""
    found: dict[str | None, set[str]] = defaultdict(set)
    for row in capture(tmp_path, TRAINING).operators_by("range"):
        found[row.range].add(row.name.removeprefix(ENGINE))
    assert found == {
        None: {
            *("ProfilerStep*", "forward", "backward", "optimizer", "aten::neg", "NegBackward0"),
            *("UnknownBackward0", SUM),
        },
        "forward": {"block", "aten::sum", "SumBackward0"},
        "forward/block": {"aten::addmm", "AddmmBackward0", "aten::mm", SUM, "hook"},
        "optimizer": {"Optimizer.step#SGD.step"},
        "optimizer/Optimizer.step#SGD.step": {"aten::add_"},
    }


@pytest.mark.parametrize("name", each_body("checkpointed"))  # there a range in its like is no row
def test_the_operators_of_a_range_have_the_time_that_is_placed_there(recordings, name) -> None:
    """A range's own row is grouped with the range above it, so its time is moved to its own path here."""
    found = recordings(name).capture
    paths = {row.path for row in found.ranges}
    by_range: dict[str, int] = defaultdict(int)
    for row in found.operators_by("range"):
        own = row.name if row.range is None else f"{row.range}/{row.name}"
        by_range[own if own in paths else row.range or "(no range)"] += row.self_cpu_ns
    placed: dict[str, int] = defaultdict(int)
    for row in found.ranges_attribution:
        placed[row.path] += row.cpu_ns
    assert {path: ns for path, ns in by_range.items() if ns} == {
        path: ns for path, ns in placed.items() if ns
    }
    assert by_range["forward"] > 0


def test_the_stacks_of_a_range_hold_its_backward(tmp_path) -> None:
    """A range that is opened in a backward node is one of its own, here as in the tree."""
    found = capture(tmp_path, [frame("main", 0, 200), *TRAINING])
    own = {stack.frames[-1]: stack.value_ns for stack in found.stacks(range="block")}
    assert own == {
        "block": 10000, "aten::addmm": 10000,
        ENGINE + "AddmmBackward0": 2000, "AddmmBackward0": 8000, "aten::mm": 10000, ENGINE + SUM: 2000, SUM: 1000,
    }  # fmt: skip
    assert sum(own.values()) == sum(
        ns for (path, _), ns in parts(found).items() if path == "forward/block"
    )
    assert (
        own.items()
        < {stack.frames[-1]: stack.value_ns for stack in found.stacks(range="forward")}.items()
    )


def test_the_stacks_of_a_real_range_sum_to_its_time_and_its_backwards(recordings) -> None:
    found = recordings("convolutions", with_stack=True).capture
    (forward,) = found.ranges.where(path="forward")
    whole = sum(stack.value_ns for stack in found.stacks(range="forward"))
    assert whole == forward.cpu_ns + forward.backward_ns + forward.accumulate_ns
    assert forward.backward_ns > 0


def test_what_backward_allocates_belongs_to_the_range_of_its_forward(tmp_path) -> None:
    held = [
        allocation(95, 64, tid=2),
        allocation(79, 16, tid=2),
        allocation(121, 4, tid=2),
        allocation(42, 2),
    ]
    for address, event in enumerate(held, start=1):
        event["args"]["Addr"] = address
    live = capture(tmp_path, [*TRAINING, *held]).memory_live("range")
    got = {row.name: row.bytes for row in live}
    assert got == {"forward/block": 64, "forward": 16 + 2, "[no range]": 4}
