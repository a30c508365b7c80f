"""The range tree and the steps."""

from __future__ import annotations

import asyncio

import pytest
import torch
from builders import allocation, annotation, call, capture, kernel, span
from golden import Golden, rows_as_lines
from torch.profiler import record_function

from capture.conftest import each_body, record
from capture.sums import assert_sums
from instrument import profiled
from instrument.annotate import backends
from instrument.base.range_names import MOMENT
from instrument.read.views.ranges import shared_ns

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
    found = capture(tmp_path, STEPPED)
    rows = found.ranges
    assert [
        (r.path, r.name, r.depth, r.calls, r.cpu_ns, r.self_cpu_ns, r.cpu_ns_per_step) for r in rows
    ] == [
        ("forward", "forward", 0, 2, 100000, 55000, 60000),
        ("forward/attention", "attention", 1, 3, 45000, 45000, 20000),
        ("loss", "loss", 0, 1, 10000, 10000, 0),
    ]
    assert [r.share for r in rows] == pytest.approx([0.4, 0.2, 0.0])
    assert [(r.name, r.self_cpu_ns, r.share, r.device_share) for r in found.ranges_rest] == [
        ("(no range)", 90000, 0.4, None)
    ]
    assert shared_ns(found) == 100000
    assert [r.device_ns for r in rows] == [None] * 3


def test_shares_of_ranges_threads_backward_and_devices_are_of_one_whole_each(tmp_path) -> None:
    """Each nanosecond of each thread once: 100 µs of the step, 40 of the engine's thread, 5 of the third.

    `loss` launched before the step began, and its time there does not count; `block` caused 15 of the engine's.
    """
    found = capture(
        tmp_path,
        [
            annotation("loss", -30, 20),
            call("cudaLaunchKernel", -25, 2, correlation=1),
            annotation("ProfilerStep#3", 0, 100),
            annotation("model", 10, 40),
            annotation("block", 20, 20),
            span("aten::mm", 25, 10, Sequence_number=7, External_id=1),
            call("cudaLaunchKernel", 26, 3, correlation=2),
            span(
                "autograd::engine::evaluate_function: MmBackward0",
                55,
                15,
                tid=2,
                Sequence_number=7,
                Fwd_thread_id=1,
            ),
            call("cudaLaunchKernel", 60, 3, tid=2, correlation=3),
            span(
                "autograd::engine::evaluate_function: X",
                70,
                25,
                tid=2,
                Sequence_number=1,
                Fwd_thread_id=1,
            ),
            annotation("Optimizer.step#SGD.step", 90, 8),
            call("cudaLaunchKernel", 91, 1, correlation=4),
            annotation("worker", 95, 10, tid=3),
            kernel("before", 0, 50, correlation=1),
            kernel("forward", 50, 12, correlation=2),
            kernel("backward", 70, 24, correlation=3),
            kernel("update", 100, 4, correlation=4),
            kernel("earlier", 2, 60, correlation=99),
            kernel("stray", 110, 99),
        ],
    )
    whole, device, rows = 100 + 40 + 5, 12 + 24 + 4 + 60, found.ranges
    assert shared_ns(found) == whole * 1000
    assert {r.path: (r.share, r.device_share, r.total_ns, r.self_total_ns) for r in rows} == {
        "loss": (0, 0, 20000, 20000),
        "model": (20 / whole, 0, 55000, 20000),
        "model/block": ((20 + 15) / whole, (12 + 24) / device, 35000, 35000),
        "Optimizer.step#SGD.step": (8 / whole, 4 / device, 8000, 8000),
        "worker": (5 / whole, 0, 10000, 10000),
    }
    assert [tuple(r) for r in found.ranges_rest] == [
        ("(backward of no range)", 25000, 25000, 0, 25 / whole, 0),
        ("(no range)", 52000, 52000, 0, 52 / whole, 0),
        ("(no launch)", None, None, 159000, None, 60 / device),
    ]
    assert sum(rows.column("share") + found.ranges_rest.column("share")[:2]) == pytest.approx(1)
    assert sum(
        rows.column("device_share") + found.ranges_rest.column("device_share")
    ) == pytest.approx(1)
    operators = {r.name: (r.share, r.device_share) for r in found.operators}
    assert operators["aten::mm"] == (7 / whole, 12 / device)
    assert operators["cudaLaunchKernel"] == (7 / whole, 0)
    assert operators["ProfilerStep*"] == (52 / whole, 0)
    for table in (found.operators, found.operators_by("thread"), found.operators_by("step")):
        assert sum(share for share in table.column("share") if share is not None) == pytest.approx(
            1
        )
        assert sum(table.column("device_share")) == pytest.approx(1)
    assert [(r.path, r.cpu_ns_per_step, r.device_ns_per_step) for r in rows if r.depth == 0] == [
        ("loss", 0, 0),
        ("model", 40000, 36000),
        ("Optimizer.step#SGD.step", 8000, 4000),
        ("worker", 5000, 0),
    ]


def test_device_time_per_step_is_the_mean_of_the_steps_that_count(tmp_path) -> None:
    events = []
    for number in range(2):
        at = 1000 * number
        events += [
            annotation(f"ProfilerStep#{number}", at, 1000),
            annotation("model", at + 10, 500),
            call("cudaLaunchKernel", at + 20, 5, correlation=number + 1),
            kernel("gemm", at + 30, 40 + 20 * number, correlation=number + 1),
        ]
    (row,) = (row for row in capture(tmp_path, events).ranges if row.path == "model")
    assert (row.device_ns, row.device_ns_per_step) == (100_000, 60_000)


@pytest.mark.parametrize("name", each_body())
def test_the_shares_of_a_recording_add_up_to_the_whole(recordings, name) -> None:
    found = recordings(name).capture
    assert sum(found.ranges.column("share") + found.ranges_rest.column("share")) == pytest.approx(1)
    assert sum(found.operators.column("share")) == pytest.approx(1)
    assert {*found.ranges.column("device_share"), *found.operators.column("device_share")} == {None}


def test_device_time_that_overlaps_is_busy_once_and_the_rest_is_idle(tmp_path) -> None:
    launches = [
        call("cudaLaunchKernel", at, 1, correlation=number)
        for at, number in ((5, 1), (15, 2), (25, 3), (45, 4))
    ]
    rows = capture(
        tmp_path,
        [
            annotation("outer", 0, 50),
            annotation("inner", 10, 20),
            *launches,
            kernel("a", 5, 6, correlation=1),  # busy: 5-11, 16-30 twice over for a while, 48-60
            kernel("b", 16, 10, correlation=2),
            kernel("c", 20, 10, tid=8, correlation=3),
            kernel("d", 48, 12, correlation=4),
            kernel("stray", 35, 2, correlation=77),
        ],
    ).ranges
    assert [(r.device_ns, r.self_device_ns, r.device_busy_ns, r.device_idle_ns) for r in rows] == [
        (38000, 18000, 32000, 50000 - 6000 - 14000 - 2000 - 2000),
        (20000, 20000, 14000, 20000 - 1000 - 14000),
    ]


def test_what_was_not_recorded_is_none_and_never_zero(tmp_path) -> None:
    (row,) = capture(tmp_path, [annotation("a", 0, 10)]).ranges
    unknown = (
        "module_type cpu_ns_per_step device_share backward_ns accumulate_ns recompute_ns "
        "device_ns device_ns_per_step self_device_ns device_busy_ns device_idle_ns allocated_bytes bytes "
        "device_allocated_bytes device_bytes flops flops_per_second"
    )
    assert " ".join(name for name, cell in row._asdict().items() if cell is None) == unknown
    (row,) = capture(tmp_path, [annotation("a", 0, 10), allocation(2, 8), allocation(9, -8)]).ranges
    assert (row.allocated_bytes, row.bytes, row.device_bytes) == (8, 0, None)


def test_the_spread_is_over_calls_by_nearest_rank(tmp_path) -> None:
    calls = [
        annotation("a", 1000 * at, length) for at, length in enumerate([*range(21, 0, -1), 500])
    ]
    odd = [annotation("b", 100000 + 1000 * at, length) for at, length in enumerate([9, 1, 5])]
    rows = capture(tmp_path, [*calls, *odd, annotation("c", 200000, 4)]).ranges
    got = [(r.min_ns, r.median_ns, r.p95_ns, r.max_ns) for r in rows]
    assert got == [(1000, 11000, 21000, 500000), (1000, 5000, 9000, 9000), (4000, 4000, 4000, 4000)]


def test_a_recorded_coroutine_has_a_call_and_its_slices(tmp_path) -> None:
    @profiled("work")
    async def work() -> None:
        for _ in range(2):
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work(), work())

    def body() -> None:
        backends.arm()
        try:
            asyncio.run(both())
        finally:
            backends.disarm()

    row = record(tmp_path / "trace.json", body).capture.ranges.where(path="work")[0]
    assert (row.calls, row.slices, row.min_ns) == (2, 6, None)


CASES = {
    # `early` has 10 µs of step 1, and `late` 5; where slices overlap in part, the time is the later one's, so that of the
    # 100 µs of the step `early` has none, `late` 5, and 95 are in no range.
    "of a range that began before the first step counts what lies in it": [
        annotation("early", -20, 30),
        annotation("ProfilerStep#1", 0, 100),
        annotation("late", 95, 50),
    ],
    # 20 of 5 + 20 + 5 µs.
    "without steps shares are of all that was recorded": [
        span("aten::mm", 0, 5),
        annotation("a", 10, 20),
        span("aten::mm", 75, 5),
    ],
    # `p` is alone in 0–10, and `a` in 10–20; `b`, which began last, has 20–100.
    "time that siblings share is the later ones": [
        annotation("p", 0, 100),
        annotation("a", 10, 70),
        annotation("b", 20, 80),
    ],
    # 10 - 6, 6 - 2 and 2 µs of their own; by name, the outermost lasts 10 µs.
    "a range inside its like is a path of its own": [
        annotation("a", 0, 10),
        annotation("a", 2, 6),
        annotation("a", 3, 2),
    ],
    # On thread 2, `b` has 2–5, and `a`, which began later, 5–10: shares are of 10 + 8 µs.
    "ranges nest on their own thread only": [
        annotation("a", 0, 10),
        annotation("b", 2, 6, tid=2),
        annotation("a", 5, 5, tid=2),
    ],
    # `inner` launched 30 of 38 µs, `outer` itself 4, and no call the other 4. The CPU was in ranges for 50 + 5.
    "device time is of what was launched inside": [
        annotation("outer", 0, 50, External_id=1),
        annotation("inner", 10, 20, External_id=2),
        annotation("idle", 60, 5, External_id=5),
        span("aten::mm", 12, 10, External_id=3),
        call("cudaLaunchKernel", 15, 2, External_id=3, correlation=9),
        call("cudaMemsetAsync", 40, 2, External_id=1, correlation=10),
        kernel("mm", 70, 30, External_id=3, correlation=9),
        kernel("set", 110, 4, External_id=1, correlation=10),
        kernel("stray", 120, 4, External_id=77, correlation=11),
        span("outer", 70, 44, cat="gpu_user_annotation", External_id=1),
    ],
    # 2 · 20 · 30 · 40 flops; the kernels, of 4 + 6 µs, ran in 20–28.
    "flops per second are over the time that the device worked": [
        annotation("a", 0, 100),
        span("aten::mm", 10, 50, External_id=1, Input_Dims=[[20, 30], [30, 40]]),
        kernel("first", 20, 4, External_id=1),
        kernel("second", 22, 6, External_id=1),
    ],
    # In `inner`, 30 + 7 + 4000 bytes were allocated, and 100 + 1000 freed; `outer` allocated 100 more.
    "memory is of the ranges own thread": [
        annotation("outer", 0, 50),
        annotation("inner", 10, 20),
        annotation("inner", 40, 5),
        allocation(5, 100),
        allocation(15, 30),
        allocation(20, -100),
        allocation(42, 7),
        allocation(43, 4000, device=0),
        allocation(44, -1000, device=0),
        allocation(16, 999, tid=2),
    ],
    # `load` has 3 + 5 + 8 µs, of which 2 are of `inner`; with `late` these are 17.
    "slices of a suspended call are one row": [
        annotation("load (resumed)", 0, 3),  # of a call that began before the window
        annotation("load", 10, 5),
        annotation("load (resumed)", 20, 8),
        annotation("inner", 22, 2),
        annotation("late (resumed)", 40, 1),
    ],
    "moments and the compilers notes are no ranges": [
        annotation("mine", 0, 20),
        annotation(f"saved{MOMENT}", 5, 0),
        annotation("record_data: frame 0, compile_id=0", 8, 9),
    ],
    # The kernels of `block` last 20 µs each, and together fill 100–130.
    "by name device work of several paths is busy together": [
        *(annotation(name, at, 40) for name, at in (("one", 0), ("two", 50))),
        *(annotation("block", at, 20) for at in (10, 60)),
        *(call("cudaLaunchKernel", at, 1, correlation=at) for at in (15, 65)),
        kernel("k", 100, 20, correlation=15),
        kernel("k", 110, 20, correlation=65),
    ],
    # `a` lasts 50 + 8 µs, of which 30 are of `b`, and 10 of these of the inner `a`: 38 of its own. The product has
    # 2 · 2 · 3 · 4 flops.
    "by name a range inside its like counts once": [
        annotation("a", 0, 50),
        annotation("b", 10, 30),
        annotation("a", 20, 10),
        span("aten::mm", 21, 5, Input_Dims=[[2, 3], [3, 4]]),
        call("cudaLaunchKernel", 22, 1, correlation=1),
        kernel("k", 24, 2, correlation=1),
        allocation(23, 16),
        annotation("a", 60, 8),
    ],
    # Of the 40 µs of the step that ended, `epoch` has 10–40, of which 10 are of `forward`.
    "an unfinished range counts until the windows end": [
        annotation("ProfilerStep#0", 0, 40),
        annotation("ProfilerStep#1", 40, 60, finished=False),
        annotation("epoch", 10, 90, finished=False),  # 30 of it lie in the one step that ended
        annotation("forward", 20, 10),
    ],
    # Of the 100 µs of the optimizer's step, 30 are of the closure's ranges, and forward. So are 10 more of `batch`.
    "the closure given to an optimizer is not its own work": [
        annotation("batch", 0, 110),
        annotation("Optimizer.step#SGD.step", 5, 100),
        annotation("training_step", 10, 30),
        annotation("encoder", 12, 20),
        span("aten::mm", 15, 5, Sequence_number=7),
        annotation("update", 50, 20),
        span("aten::add_", 55, 5),
    ],
}


def test_ranges_by_hand(tmp_path, golden: Golden) -> None:
    """Checked by hand; a cell that is not shown is unknown."""
    told = []
    for name, events in CASES.items():
        found = capture(tmp_path, events)
        assert_sums(found)
        tables = {"range": found.ranges, "by name": found.ranges_by_name, "rest": found.ranges_rest}
        told.append(f"---- {name}\n{rows_as_lines(tables)}")
    golden("ranges.txt", "\n".join(told))


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
    assert found.ranges[0].cpu_ns > found.ranges[1].cpu_ns > 0


def test_ranges_of_a_real_recording_add_up(recordings) -> None:
    found = recordings("convolutions").capture
    assert [row.number for row in found.steps] == [0, 1, 2]
    rows = {row.path: row for row in found.ranges}
    assert {
        "forward",
        "Optimizer.step#Adam.step",
        "Optimizer.zero_grad#Adam.zero_grad",
    } <= rows.keys()
    by_name = recordings("convolutions").by_name
    assert (rows["forward"].calls, rows["forward"].cpu_ns) == by_name["forward"][:2]
    counted, shared = found.links.counted_steps.count, shared_ns(found)
    assert shared >= found.links.counted_steps.total_ns, "with what other threads did in them"
    assert rows["forward"].share > rows["forward"].cpu_ns_per_step * counted / shared, (
        "its backward too"
    )


def test_nested_ranges_of_a_real_recording_are_paths(recordings) -> None:
    rows = {row.path: row for row in recordings("checkpointed").capture.ranges}
    assert rows["forward/block"].calls == rows["forward/block/block"].calls == 9
    got = rows["forward/block"].self_cpu_ns
    assert got == rows["forward/block"].cpu_ns - rows["forward/block/block"].cpu_ns
