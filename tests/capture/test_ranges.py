"""The range tree and the steps."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import record_function

from capture.conftest import record
from capture.traces import annotation, capture, kernel, span

STEPPED = [
    annotation("ProfilerStep#7", 0, 100),
    annotation("ProfilerStep#8", 100, 100),
    annotation("loss", 80, 10),
    annotation("forward", 10, 40),
    annotation("attention", 15, 10),
    annotation("attention", 30, 15),
    annotation("forward", 110, 60),
    annotation("attention", 120, 20),
    span("aten::mm", 16, 5),
]


def test_ranges_are_paths_in_tree_order_with_self_times_shares_and_per_step_times(tmp_path) -> None:
    rows = capture(tmp_path, STEPPED).ranges
    assert [(r.path, r.name, r.depth, r.calls, r.host_ns, r.self_host_ns, r.host_ns_per_step) for r in rows] == [
        ("forward", "forward", 0, 2, 100000, 55000, 50000),
        ("forward/attention", "attention", 1, 3, 45000, 45000, 22500),
        ("loss", "loss", 0, 1, 10000, 10000, 5000),
    ]
    assert [r.share for r in rows] == pytest.approx([0.5, 0.225, 0.05])
    assert [r.device_ns for r in rows] == [None] * 3


def test_the_columns_are_those_agreed(tmp_path) -> None:
    expected = "path name depth calls host_ns self_host_ns share host_ns_per_step device_ns"
    assert capture(tmp_path, STEPPED).ranges.columns == tuple(expected.split())
    assert capture(tmp_path, []).ranges.columns == tuple(expected.split())


def test_without_steps_shares_are_of_the_time_between_the_first_and_last_host_event(tmp_path) -> None:
    rows = capture(tmp_path, [span("aten::mm", 0, 5), annotation("a", 10, 20), span("aten::mm", 75, 5)]).ranges
    assert [(r.share, r.host_ns_per_step) for r in rows] == [(0.25, None)]


def test_a_range_inside_its_like_is_a_path_of_its_own(tmp_path) -> None:
    rows = capture(tmp_path, [annotation("a", 0, 10), annotation("a", 2, 6), annotation("a", 3, 2)]).ranges
    assert [(r.path, r.host_ns, r.self_host_ns) for r in rows] == [
        ("a", 10000, 4000),
        ("a/a", 6000, 4000),
        ("a/a/a", 2000, 2000),
    ]


def test_ranges_nest_on_their_own_thread_only(tmp_path) -> None:
    rows = capture(tmp_path, [annotation("a", 0, 10), annotation("b", 2, 6, tid=2), annotation("a", 5, 5, tid=2)])
    assert [(r.path, r.calls) for r in rows.ranges] == [("a", 2), ("b", 1)]


def test_device_time_is_of_what_was_launched_inside(tmp_path) -> None:
    rows = capture(
        tmp_path,
        [
            annotation("outer", 0, 50, External_id=1),
            annotation("inner", 10, 20, External_id=2),
            annotation("idle", 60, 5, External_id=5),
            span("aten::mm", 12, 10, External_id=3),
            span("cudaLaunchKernel", 15, 2, cat="cuda_runtime", External_id=3, correlation=9),
            span("cudaMemsetAsync", 40, 2, cat="cuda_runtime", External_id=1, correlation=10),
            kernel("mm", 70, 30, External_id=3, correlation=9),
            kernel("set", 110, 4, External_id=1, correlation=10),
            kernel("stray", 120, 4, External_id=77, correlation=11),
            span("outer", 70, 44, cat="gpu_user_annotation", tid=100, External_id=1),
        ],
    ).ranges
    assert [(r.path, r.device_ns) for r in rows] == [("outer", 34000), ("outer/inner", 30000), ("idle", 0)]


def test_an_unfinished_range_counts_until_the_windows_end(tmp_path) -> None:
    rows = capture(
        tmp_path,
        [
            annotation("ProfilerStep#0", 0, 40),
            annotation("ProfilerStep#1", 40, 60, finished=False),
            annotation("epoch", 10, 90, finished=False),
            annotation("forward", 20, 10),
        ],
    )
    assert [(r.path, r.calls, r.host_ns, r.host_ns_per_step) for r in rows.ranges] == [
        ("epoch", 1, 90000, 90000),
        ("epoch/forward", 1, 10000, 10000),
    ]
    assert [(r.number, r.duration_ns) for r in rows.steps] == [(0, 40000)]


def test_a_real_window_stopped_inside_a_range_and_a_step(tmp_path) -> None:
    step, epoch = record_function("ProfilerStep#5"), record_function("epoch")

    def body() -> None:
        with record_function("ProfilerStep#4"):
            torch.ones(3).sum()
        step.__enter__()
        epoch.__enter__()
        with record_function("forward"):
            torch.ones(3).sum()

    found = record(tmp_path / "trace.json", body).capture
    epoch.__exit__(None, None, None)
    step.__exit__(None, None, None)
    assert [row.number for row in found.steps] == [4]
    assert [(row.path, row.calls) for row in found.ranges] == [("epoch", 1), ("epoch/forward", 1)]
    assert found.ranges[0].host_ns > found.ranges[1].host_ns > 0


def test_ranges_of_a_real_recording_add_up(recordings) -> None:
    found = recordings("convolutions").capture
    assert [row.number for row in found.steps] == [0, 1, 2]
    rows = {row.path: row for row in found.ranges}
    assert {"forward", "Optimizer.step#Adam.step", "Optimizer.zero_grad#Adam.zero_grad"} <= rows.keys()
    by_name = recordings("convolutions").by_name
    assert (rows["forward"].calls, rows["forward"].host_ns) == by_name["forward"][:2]
    whole = sum(found.steps.column("duration_ns"))
    assert rows["forward"].share == rows["forward"].host_ns / whole
    assert 0 < sum(row.share for row in found.ranges if row.depth == 0) < 1


def test_nested_ranges_of_a_real_recording_are_paths(recordings) -> None:
    rows = {row.path: row for row in recordings("checkpointed").capture.ranges}
    assert rows["forward/block"].calls == rows["forward/block/block"].calls == 9
    assert rows["forward/block"].self_host_ns == rows["forward/block"].host_ns - rows["forward/block/block"].host_ns
