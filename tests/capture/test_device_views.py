"""Every view of a device on one small training, whose numbers are worked out by hand; all but kernels on the CPU."""

from __future__ import annotations

from collections import Counter

import pytest
from builders import (
    REDUCES,
    Event,
    allocation,
    annotation,
    call,
    capture,
    copy,
    frame,
    kernel,
    made,
    node,
    span,
    step,
    write_rank,
    write_trace,
)
from golden import Golden, rows_as_lines

from capture.plain_loops import backward_by_flows, device_backward_by_flows, top_level_ns
from capture.sums import assert_sums
from capture.test_real_traces import device_backward
from instrument.read.capture import Capture
from instrument.read.ranks.rank_summary import summarize
from instrument.read.ranks.run import Run
from instrument.read.views.operators import UNLAUNCHED_ROW

LAUNCH = "cudaLaunchKernel"


def flow(number: int, tail_us: float, head_us: float) -> list[Event]:
    """torch's own arrow from an operator on thread 1 to its backward on thread 2."""
    common = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 1, "id": number}
    return [
        {**common, "ph": "s", "tid": 1, "ts": tail_us},
        {**common, "ph": "f", "bp": "e", "tid": 2, "ts": head_us},
    ]


# What ran on the device, with the end of its call: gemm 35–60 (30), its backward 95–130 (90), the all-reduce 132–168
# (130), sgd 164–174 (160), a copy 180–190 (175); in step 8 gemm 220–230 (215).
TRAINING = [
    frame("train.py(3): main", 0, 300, Python_id=1),
    step(7, 0, 200),
    annotation("forward", 10, 60),
    made("aten::linear", 20, 20, 1),
    span("aten::addmm", 22, 15, External_id=2, Input_Dims=[[4], [8, 3], [3, 4]]),
    call(LAUNCH, 25, 5, 1, External_id=2),
    node("AddmmBackward0", 80, 35, 1),
    span("AddmmBackward0", 82, 31, tid=2, External_id=3),
    call(LAUNCH, 85, 5, 2, tid=2, External_id=3),
    annotation("nccl:all_reduce", 120, 15, tid=2),  # its kernel names the operator before it
    call(LAUNCH, 125, 5, 3, tid=2, External_id=3),
    annotation("Optimizer.step#SGD.step", 150, 30),
    call(LAUNCH, 155, 5, 4),
    call("cudaMemcpyAsync", 170, 5, 5),
    call("cudaDeviceSynchronize", 185, 10),
    step(8, 200, 100),
    span("aten::mm", 205, 20, External_id=4),
    call(LAUNCH, 210, 5, 6, External_id=4),
    kernel("gemm", 35, 25, correlation=1, External_id=2),
    kernel("gemm_backward", 95, 35, correlation=2, External_id=3),
    kernel(REDUCES, 132, 36, tid=9, correlation=3, External_id=3, Process_Group_Ranks="[0, 1]"),
    kernel("sgd", 164, 10, correlation=4),
    copy(180, 10, correlation=5, bytes=5000),
    kernel("gemm", 220, 10, correlation=6, External_id=4),
    allocation(26, 1024, 1, 1024, device=0, reserved=4096),
    allocation(86, 512, 2, 1536, device=0, reserved=4096),
    allocation(156, -1024, 1, 512, device=0, reserved=4096),
    *flow(1, 21, 81),
]
VIEWS = (
    "breakdown", "kernels", "launches", "copies", "collectives", "streams", "steps", "ranges", "operators"
)  # fmt: skip


def test_the_views_of_a_device(tmp_path, golden: Golden) -> None:
    """Checked by hand. Of the device's 195 µs compute is 35–60, 95–130, 164–174 and 220–230; the all-reduce overlaps
    sgd for 4 µs. From the end of its call to its start what was launched waited 5, 5, 2, 4 and 5 µs. Step 7 launched all
    but the last; its device waited for launches until 30, 90 and 175, and from 190 on for the CPU's waiting.
    """
    found = capture(tmp_path, TRAINING)
    assert_sums(found)
    golden("views_of_a_device.txt", rows_as_lines({name: getattr(found, name) for name in VIEWS}))


def test_the_backward_is_where_the_traces_own_arrows_lead(tmp_path) -> None:
    path = write_trace(tmp_path, TRAINING)
    assert backward_by_flows(path) == {"forward": 35_000, "ProfilerStep#7": 35_000}
    assert device_backward_by_flows(path) == {"forward": 35_000, "ProfilerStep#7": 35_000}
    found = Capture.load(path)
    assert {row.name: row.backward_ns for row in found.ranges if row.backward_ns} == {
        "forward": 35_000
    }
    assert device_backward(found) == {"forward": 35_000}


def test_the_parts_are_the_whole(tmp_path) -> None:
    """On the CPU two steps, and on the thread of the engine a node of 35 and a range of 15."""
    found = capture(tmp_path, TRAINING)
    parts = found.ranges_attribution
    assert sum(parts.column("cpu_ns")) == top_level_ns(found.events) == 350_000
    on_device = sum(found.operators.column("self_device_ns"))
    assert sum(parts.column("device_ns")) == on_device == 126_000
    assert sum(stack.value_ns for stack in found.stacks("device")) == on_device
    assert sum(row.device_share or 0 for row in found.operators) == pytest.approx(1)
    assert UNLAUNCHED_ROW not in found.operators.column("name")
    by_stream = Counter(found.events.thread[found.work.event].tolist())
    assert sorted(row.calls for row in found.streams) == sorted(by_stream.values())


def test_memory_of_the_device_is_what_the_allocator_says(tmp_path) -> None:
    found = capture(tmp_path, TRAINING)
    memory = found.memory
    (row,) = found.memory_devices
    assert (row.device, row.allocations, row.frees, row.net_bytes) == ("cuda:0", 2, 1, 512)
    assert (row.peak_bytes, row.peak_net_bytes, row.reserved_bytes) == (1536, 1536, 4096)
    line = memory.timeline("cuda:0")
    assert line["allocated_bytes"].to_list() == [1024, 1536, 512]
    assert found.memory_live("range").where(name="forward")[0].bytes == 1024


OLD = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "cuda_runtime": "Runtime",
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
}


def test_what_torch_1_9_wrote_in_another_way_says_the_same(tmp_path) -> None:
    """Its categories have other names, ids are small letters, and threads and correlations are as they were."""
    old = []
    for event in TRAINING:
        args = {
            "external id" if key == "External id" else key: value
            for key, value in event.get("args", {}).items()
        }
        old.append({**event, "cat": OLD.get(event["cat"], event["cat"]), "args": args})
    found, same = capture(tmp_path / "old", old), capture(tmp_path, TRAINING)
    for view in ("breakdown", "kernels", "launches", "copies", "streams", "steps"):
        assert list(getattr(found, view)) == list(getattr(same, view)), view
    times = {row.name: row.device_ns for row in found.operators}
    assert times == {row.name: row.device_ns for row in same.operators}


def test_a_trace_tells_its_rank_and_the_groups_of_its_collectives(tmp_path) -> None:
    """The summary leaves out the broadcast: it ends on each rank as it likes."""
    events = [*TRAINING, kernel("ncclDevKernel_Broadcast_RING_LL()", 240, 5, correlation=6)]
    path = write_trace(tmp_path, events, distributedInfo={"rank": 1, "world_size": 2})
    found = Capture.load(path)
    assert (found.events.rank, found.events.world_size) == (1, 2)
    row, broadcast = found.collective_calls
    assert (row.name, row.kind, row.ranks) == (REDUCES.partition("(")[0], "all_reduce", "[0, 1]")
    assert (row.step, row.ordinal, row.start_ns, row.end_ns) == (7, 0, 132_000, 168_000)
    assert (broadcast.kind, broadcast.step, broadcast.duration_ns) == ("broadcast", 8, 5_000)
    summary = summarize(found)
    assert summary.collective_groups.ranks == ["[0, 1]"]
    assert list(summary.collectives.end_ns) == [168_000]


def test_ranks_differ_in_what_they_wait_for(tmp_path) -> None:
    """The all-reduce of the second rank began 20 later, and ended with the other's, as both clocks have it."""
    late = [
        {**event, "ts": event["ts"] + 20, "dur": event["dur"] - 20}
        if event["name"] == REDUCES
        else event
        for event in TRAINING
    ]
    for rank, events in enumerate((TRAINING, late)):
        write_rank(tmp_path, rank, events, 2)
    (window,) = Run.load(tmp_path).windows
    found = [Capture.load(path).breakdown[0] for path in window.paths]
    exposed = [(row.exposed_communication_ns, row.idle_ns) for row in found]
    assert exposed == [(32_000, 73_000), (12_000, 93_000)]
    assert window.clocks.column("matched") == [1, 1]
    assert window.clocks.column("offset_ns") == [0, 0]
