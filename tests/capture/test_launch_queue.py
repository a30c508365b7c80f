"""The launch queue of each stream: by hand, by a plain loop over the JSON, and against Holistic Trace Analysis 0.5.0."""

from __future__ import annotations

from collections import defaultdict

import pytest
import real_traces
from builders import Event, call, capture, kernel, launched
from real_traces import load, needs_traces

from capture.plain_loops import raw
from instrument.read.capture import Capture

LAUNCH, GRAPH = "cudaLaunchKernel", "cudaGraphLaunch"
# Stream 7 waits for its launches from 0 to 20, 10 to 30, 40 to 45; the graph from 50 to 60 there, to 65 on stream 9.
# The launch of the kernel at 80 is not in the trace; the clocks put the kernel at 99 before its call.
SMALL = [
    *launched("gemm", 0, 20, 10, 1),
    *launched("relu", 10, 30, 5, 2),
    *launched("gemm", 40, 45, 5, 3),
    call(GRAPH, 50, 5, 4),
    kernel("first of the graph", 60, 5, correlation=4),
    kernel("second of the graph", 70, 5, correlation=4),
    kernel("elsewhere", 65, 5, tid=9, correlation=4),
    kernel("from before", 80, 5, correlation=77),
    *launched("early", 100, 99, 5, 5),
]


def rows(found: Capture) -> list[tuple]:
    return [tuple(row) for row in found.queue]


def test_the_length_of_each_queue_by_hand(tmp_path) -> None:
    """Outstanding for 20 + 20 + 5 + 10 of 100 µs; none from 30 to 40, from 45 to 50 and from 60 to 100."""
    found = capture(tmp_path, SMALL)
    assert rows(found) == [
        (0, 7, 5, pytest.approx(0.55), 2, 55_000, 100_000, 0, 0, 1),
        (0, 9, 1, 1.0, 1, 0, 15_000, 0, 0, 0),
    ]


def test_a_stream_that_the_trace_does_not_launch_on(tmp_path) -> None:
    found = capture(tmp_path, [kernel("from before", 0, 5), *launched("gemm", 1, 2, 3, 1, tid=9)])
    assert [row[:3] for row in rows(found)] == [(0, 9, 1), (0, 7, 0)]
    assert rows(found)[1][3:] == (None, None, None, None, None, None, 1)


def test_a_trace_without_device_work_has_no_queue(tmp_path) -> None:
    found = capture(tmp_path, [call(LAUNCH, 0, 5, 1)])
    assert len(found.queue) == 0


def full(waits: list[tuple[float, float]], name: str = LAUNCH) -> list[Event]:
    """1021 launches of 4 µs, then one for each start and duration; the device starts one kernel each 100 µs from 10000 on."""
    calls = [*((5 * k, 4) for k in range(1021)), *waits]
    events = []
    for k, (start, duration) in enumerate(calls):
        events += [call(name, start, duration, k + 1)]
        events += [kernel("gemm", 10_000 + 100 * k, 99, correlation=k + 1)]
    return events


@pytest.mark.parametrize(
    ("waits", "name", "calls", "ns"),
    [
        # The first waits from 5105 until 10000, the others until 10100 and 10200.
        ([(5105, 4900), (10_010, 95), (10_150, 55)], LAUNCH, 3, (4895 + 90 + 50) * 1000),
        # Only 1020 are outstanding, as the first kernel has started.
        ([(10_050, 200)], LAUNCH, 0, 0),
        # It returned before any kernel started: whatever took long, it was not the queue.
        ([(5105, 4894)], LAUNCH, 0, 0),
        ([(5105, 4900)], "hipLaunchKernel", None, None),
    ],
)
def test_calls_that_a_full_queue_blocks(tmp_path, waits, name, calls, ns) -> None:
    found = capture(tmp_path, full(waits, name))
    assert [(row.max_length, row.blocked_calls, row.blocked_ns) for row in found.queue] == [
        (1021 if waits[0][0] > 10_000 else 1022, calls, ns)
    ]


# By HTA 0.5.0 with its last step and without its rounding (HTA_DISABLE_NS_ROUNDING=1), from the rows of
# get_queue_length_time_series: half the rows, mean length over time, maximum, µs without any.
HTA = {
    ("hta_simple_add", 7): (91, 0.2640732776641403, 5, 11_797_929),
    ("hta_simple_add", 20): (7, 3.563079050957699e-05, 1, 13_583_273),
    ("v100_resnet50_workers0", "stream 7"): (9096, 100.64901027055014, 569, 402_607),
    ("v100_216k_events", 7): (20270, 7.586768909759641, 77, 798_723),
    ("v100_216k_events", 14): (2020, 1.1254308725485744, 22, 1_227_328),
    ("h100_timesformer_inference", 7): (534, 201.79183841252035, 409, 4_420.214),
    ("h100_qwen_0.5b_inference", 7): (1198, 46.722751688762834, 111, 1_584.971),
    ("a100_nccl_2ranks_rank0", 7): (3753, 0.20756692325249576, 10, 575_220.710),
    ("h800_deepseek_train", 27): (40, 3.0997211294258253, 7, 16_795),
    ("mi300x_resnet_checkpoint_train", 0): (2673, 867.533349675771, 1840, 0),
    ("a100_megatron_tp8_rank0", 24): (84, 0.5108542545608333, 4, 402_141),
}


@needs_traces
@pytest.mark.parametrize(("name", "stream"), real_traces.each(HTA))
def test_hta_gives_the_same(name, stream) -> None:
    (row,) = load(name).queue.where(stream=stream)
    launches, mean, longest, empty_us = HTA[name, stream]
    assert (row.launches, row.max_length) == (launches, longest)
    assert row.mean_length == pytest.approx(mean, rel=1e-7)
    assert row.empty_ns == pytest.approx(empty_us * 1000, abs=10)


@needs_traces
@pytest.mark.nightly
def test_the_full_queue_of_a_real_trace() -> None:
    """HTA: 232465.25 µs with 1022 or more outstanding, in steps of 0.25 µs (get_time_spent_blocked_on_full_queue)."""
    (row,) = load("v100_ns_resolution").queue
    assert (row.launches, row.max_length, row.blocked_calls) == (6095, 1022, 1288)
    assert row.blocked_ns == pytest.approx(232_465_250, rel=1e-5)


@needs_traces
@pytest.mark.parametrize("name", real_traces.each(["mi300x_vllm_graph", "b200_eager"]))
def test_a_plain_loop_gives_the_same_with_calls_that_hta_does_not_count(name) -> None:
    """They launch by hipGraphLaunch, hipModuleLaunchKernel and cuLaunchKernelEx."""
    events = [event for event in raw(real_traces.path(name)) if event.get("ph") == "X"]
    calls = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    starts = defaultdict(lambda: float("inf"))
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            key = (event["args"]["stream"], event["args"]["correlation"])
            starts[key] = min(starts[key], event["ts"])
    assert len({stream for stream, _ in starts}) == 1
    changes = sorted([(calls[k], 1) for _, k in starts] + [(ts, -1) for ts in starts.values()])
    length, longest, area, before = 0, 0, 0.0, changes[0][0]
    for ts, change in changes:
        area += length * (ts - before)
        length, before = length + change, ts
        longest = max(longest, length)
    (row,) = load(name).queue
    assert (row.launches, row.max_length) == (len(starts), longest)
    assert row.mean_length == pytest.approx(area / (before - changes[0][0]), rel=1e-6)
