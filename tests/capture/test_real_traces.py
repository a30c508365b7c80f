"""Traces of real hardware, in the folder that INSTRUMENT_TRACES names, with what is known of them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import real_traces
from real_traces import KNOWN, load

from capture.plain_loops import backward_by_flows, device_backward_by_flows, ns, raw
from instrument.read.capture import Capture
from instrument.read.facts.call_tree import nest
from instrument.read.facts.links import Links
from instrument.read.facts.paths import NO_RANGE
from instrument.read.trace.events import ANNOTATION
from instrument.read.views.operators import UNLAUNCHED_ROW

pytestmark = real_traces.needs_traces

# Traces whose device events never overlap, so that their sum is the busy time of the exact sweep.
ONE_AT_A_TIME = (
    "h100_timesformer_inference",
    "v100_216k_events",
    "v100_ns_resolution",
    "v100_resnet50_workers0",
)
STEPS = {
    "h100_timesformer_inference": 1, "h100_qwen_0.5b_inference": 1, "mi300x_resnet_checkpoint_train": 3,
    "v100_216k_events": 5, "v100_ns_resolution": 5, "a100_nccl_2ranks_rank0": 3, "mtia_rank0": 1,
    "v100_resnet50_workers0": 6, "v100_resnet50_workers4": 6, "a100_megatron_tp8_rank0": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", real_traces.each())
def test_every_trace_reads_and_every_view_adds_up(name) -> None:
    capture = load(name)
    events, known = capture.events, KNOWN[name]
    assert events.recorded == known["events"]
    found = Links(events).launches
    if name != "mtia_rank0":  # its device events are of a kind that the list does not count
        assert len(found.device) == known["device_events"]
    rows = list(capture.operators)
    assert rows
    calls = [row for row in rows if row.name != UNLAUNCHED_ROW]
    assert all(row.calls > 0 and 0 <= row.self_cpu_ns <= row.cpu_ns for row in calls)
    assert sum(row.share for row in calls) == pytest.approx(1)
    if len(found.device):
        joined = (found.operator >= 0) | (found.call >= 0)
        assert (
            sum(row.self_device_ns for row in calls)
            == events.duration_ns[found.device[joined]].sum()
            > 0
        )
        assert sum(row.self_device_ns for row in rows) == events.duration_ns[found.device].sum()
        assert sum(row.device_share for row in rows) == pytest.approx(1)
    else:
        assert {row.device_ns for row in rows} == {None}
    for row in capture.ranges:
        assert row.path.split("/")[-1] == row.name.split("/")[-1]
        assert 0 <= row.self_cpu_ns <= row.cpu_ns
    assert len(capture.operators_by("input_shapes")) >= len(rows)
    assert len(capture.operators_by("stack")) >= len(rows)


@pytest.mark.parametrize(
    "name", real_traces.each(["a100_nccl_2ranks_rank0", "mi300x_resnet_checkpoint_train"])
)
def test_backward_is_what_the_traces_own_arrows_give(name) -> None:
    expected = backward_by_flows(real_traces.path(name))
    found = {row.name: row.backward_ns for row in load(name).ranges_by_name if row.backward_ns}
    assert found == {
        name: ns for name, ns in expected.items() if not name.startswith("ProfilerStep#")
    }
    assert found


@pytest.mark.parametrize(
    "name", real_traces.each(["v100_resnet50_workers4", "v100_resnet50_workers0"])
)
def test_what_torch_1_9_wrote_in_another_way_is_read(name) -> None:
    """Backward nodes have no range of the engine, kernels an "external id", threads are text, frames an argument."""
    capture = load(name)
    events = capture.events
    assert {"Operator", "Runtime", "Kernel"} <= {*events.categories}
    assert not events.named(lambda name: name.startswith("autograd::engine")).any()
    times = {row.kind: (row.cpu_ns, row.device_ns) for row in capture.ranges_attribution}
    assert min(times["backward"]) > 0
    assert min(times["accumulate"]) > 0
    found = Links(events).launches
    assert (found.operator >= 0).all()
    assert (found.call >= 0).all()
    assert any("resnet" in frame for stack in capture.stacks() for frame in stack.frames)
    assert not events.memory.address.any()
    assert {row.number for row in capture.steps} == set(range(5, 11))


@pytest.mark.parametrize(
    "name", real_traces.each(["a100_nccl_2ranks_rank0", "mi300x_resnet_checkpoint_train"])
)
def test_device_time_of_the_backward_is_what_the_traces_own_arrows_give(name) -> None:
    expected = device_backward_by_flows(real_traces.path(name))
    found = device_backward(load(name))
    assert found == {
        name: ns for name, ns in expected.items() if not name.startswith("ProfilerStep#")
    }
    assert found


def device_backward(capture: Capture) -> dict[str, int]:
    """The device time of the backward of each name of a range, with that of the ranges inside, without the guesses."""
    found: dict[str, int] = defaultdict(int)
    for row in capture.ranges_attribution.where("device_ns != 0", kind="backward"):
        for name in set(row.path.split("/")) - {NO_RANGE}:
            found[name] += row.device_ns
    return dict(found)


@pytest.mark.parametrize("name", real_traces.each(ONE_AT_A_TIME))
def test_all_device_time_is_found_to_the_nanosecond(name) -> None:
    total = sum(load(name).operators.column("self_device_ns"))
    assert total == round(KNOWN[name]["exact"]["busy_time"] * 1e6)


def test_collectives_are_the_range_that_is_around_their_launch() -> None:
    """Its kernels' External ids name the operator outside of it."""
    capture = load("a100_nccl_2ranks_rank0")
    found = {
        row.name: row.device_ns for row in capture.ranges_by_name if row.name.startswith("nccl:")
    }
    assert found == {"nccl:broadcast": 114_334, "nccl:all_reduce": 46_762_159}
    events = capture.events
    communication = events.among(frozenset({"kernel"})) & events.named(
        lambda name: "nccl" in name.lower()
    )
    assert sum(found.values()) == events.duration_ns[communication].sum()


def test_only_kernels_that_a_host_operator_launched_count() -> None:
    known = KNOWN["h100_qwen_0.5b_inference"]["tracelens_ms"][
        "busy_time"
    ]  # in floats of absolute microseconds
    table = load("h100_qwen_0.5b_inference").operators
    (unlaunched,) = table.where(name=UNLAUNCHED_ROW)
    total = sum(table.column("self_device_ns")) - unlaunched.self_device_ns
    assert total == pytest.approx(known * 1e6, abs=20)
    assert round(unlaunched.device_share, 2) == 0.30


@pytest.mark.parametrize("name", real_traces.each(STEPS))
def test_the_steps_are_found(name) -> None:
    assert len(load(name).steps) == STEPS[name]


@pytest.mark.nightly
def test_each_optimizer_step_launches_nine_kernels() -> None:
    events = load("v100_ns_resolution").events
    found, call_tree = Links(events).launches, nest(events, events.among(ANNOTATION))
    around = call_tree.node_at(events.thread[found.call], events.start_ns[found.call])
    is_kernel = events.among(frozenset({"kernel"}))[found.device]
    names = events.name[call_tree.index[around[is_kernel & (around >= 0)]]]
    assert np.sum(names == events.names.index("Optimizer.step#SGD.step")) == 5 * 9


@pytest.mark.parametrize(
    "name", real_traces.each(["b200_eager", "mi300x_vllm_graph", "h100_timesformer_inference"])
)
def test_stacks_hold_all_device_time(name) -> None:
    capture = load(name)
    stacks = capture.stacks()
    assert len(stacks) > 100
    assert sum(stack.value_ns for stack in capture.stacks("device")) == sum(
        capture.operators.column("self_device_ns")
    )


def test_graphs_are_what_a_plain_loop_over_the_file_finds() -> None:
    """25 launches of HIP graphs: one for the first layer, 23 that look alike, one for the last layer."""
    events = raw(real_traces.path("mi300x_vllm_graph"))
    launched = {
        event["args"]["correlation"]: ns(event)
        for event in events
        if event.get("name") == "hipGraphLaunch"
    }
    replays: dict[int, list[dict]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and event["args"]["correlation"] in launched:
            replays[event["args"]["correlation"]].append(event)
    expected: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    for correlation, kernels in replays.items():
        kernels.sort(key=lambda event: event["ts"])
        (called, returned), times = launched[correlation], [ns(event) for event in kernels]
        until, idle = times[0][0], 0
        for start, end in times:
            idle, until = idle + max(start - until, 0), max(until, end)
        expected[tuple(event["name"] for event in kernels)].append(
            (sum(b - a for a, b in times), idle, returned - called, times[0][0] - returned)
        )
    load_ = load("mi300x_vllm_graph")
    found = {
        (row.replays, row.nodes): (
            row.device_ns,
            row.idle_ns,
            row.launch_ns,
            row.median_delay_ns,
            row.max_delay_ns,
        )
        for row in load_.cuda_graphs
    }
    assert found == {
        (len(rows), len(names)): (
            *(sum(row[k] for row in rows) for k in range(3)),
            sorted(row[3] for row in rows)[(len(rows) - 1) // 2],
            max(row[3] for row in rows),
        )
        for names, rows in expected.items()
    }
    assert sum(row[0] for row in found.values()) == 149_919_755
    assert sorted(found) == [(1, 4), (1, 12), (23, 15)]
    assert {row.range for row in load_.cuda_graphs} == {load_.ranges[0].path}


# Sums of TraceLens's performance model over the calls of an operator: GFLOPS, kernel time in µs, MiB moved. For the
# others it has another definition: it counts the additions of `addmm` and `baddbmm`, half of the square of causal
# attention, for a backward convolution the gradient of the output twice, and no memsets of MIOpen.
TRACELENS = {
    ("a100_megatron_tp8_rank0", "aten::mm"): (16922.171146, 67774, 16214.0),
    ("a100_megatron_tp8_rank0", "aten::bmm"): (687.194767, 7373, 10880.0),
    ("h100_timesformer_inference", "aten::bmm"): (2909.559620, 44998.353516, 46884.379395),
    ("h100_qwen_0.5b_inference", "aten::mm"): (4164.037902, 6668.681641, 5999.0625),
    ("mi300x_resnet_checkpoint_train", "aten::mm"): (0.061440, 44.474609, 6.032410),
    ("mi300x_resnet_checkpoint_train", "aten::convolution"): (210.546524, None, 607.213989),
    # without the gradient of the image, which the first convolution does not compute
    ("mi300x_resnet_checkpoint_train", "aten::convolution_backward"): (
        217.627361 - 3 * 2.360279,
        None,
        None,
    ),
    ("b200_eager", "aten::mm"): (0.144783, 33.503906, 138.129608),
    ("mi300x_vllm_graph", "aten::mm"): (53.280276, 346.636719, 1122.505127),
}


@pytest.mark.parametrize(("name", "operator"), real_traces.each(TRACELENS))
def test_flops_times_and_traffic_are_those_of_tracelens(name, operator) -> None:
    rows = load(name).efficiency.where(name=operator)
    found = (
        sum(rows.column("flops")) / 1e9,
        sum(rows.column("device_ns")) / 1e3,
        sum(rows.column("moved_bytes")) / 2**20,
    )
    expected = TRACELENS[name, operator]
    for ours, theirs in zip(found, expected):
        assert theirs is None or ours == pytest.approx(theirs, rel=2e-5)


def test_causal_attention_is_that_of_tracelens_but_for_the_diagonal() -> None:
    """TraceLens counts half of the square, of 559 rows and columns; the diagonal is not masked either."""
    (row,) = load("h100_qwen_0.5b_inference").efficiency.where(
        name="aten::_scaled_dot_product_flash_attention"
    )
    assert row.flops / 560 * 559 == pytest.approx(245.745058e9, rel=1e-6)
    assert row.device_ns == pytest.approx(2722.704e3, rel=1e-5)
    assert row.moved_bytes == 1677 * 2**20


def test_checkpointing_computes_all_but_the_first_convolution_again() -> None:
    """The forward of 20 convolutions of a ResNet-18, 19 of them in checkpoints."""
    steps = load("mi300x_resnet_checkpoint_train").efficiency_steps
    first = 2 * 10 * 112 * 112 * 64 * 3 * 7 * 7
    forward = load("mi300x_resnet_checkpoint_train").efficiency.where(name="aten::convolution")
    per_step = sum(forward.column("flops")) // 3
    assert set(steps.column("recomputed_flops")) == {(per_step - first) // 2}
