"""The range tree and the steps."""

from __future__ import annotations

import asyncio

import pytest
import torch
from builders import allocation, annotation, call, capture, kernel, launched, span
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


SHARED = [
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
        "autograd::engine::evaluate_function: X", 70, 25, tid=2, Sequence_number=1, Fwd_thread_id=1
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
]


def test_operators_have_shares_of_the_same_whole_as_ranges(tmp_path) -> None:
    found, whole, device = capture(tmp_path, SHARED), 100 + 40 + 5, 12 + 24 + 4 + 60
    assert shared_ns(found) == whole * 1000
    shares = {r.name: (r.share, r.device_share) for r in found.operators}
    assert shares["aten::mm"] == (7 / whole, 12 / device)
    assert shares["cudaLaunchKernel"] == (7 / whole, 0)
    assert shares["ProfilerStep*"] == (52 / whole, 0)
    for by in ("thread", "step"):
        table = found.operators_by(by)
        assert sum(share for share in table.column("share") if share is not None) == pytest.approx(
            1
        )
        assert sum(table.column("device_share")) == pytest.approx(1)


@pytest.mark.parametrize("name", each_body())
def test_the_shares_of_a_recording_add_up_to_the_whole(recordings, name) -> None:
    found = recordings(name).capture
    assert sum(found.ranges.column("share") + found.ranges_rest.column("share")) == pytest.approx(1)
    assert sum(found.operators.column("share")) == pytest.approx(1)
    assert {*found.ranges.column("device_share"), *found.operators.column("device_share")} == {None}


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
    "paths in tree order, per step": STEPPED,
    # Each nanosecond of each thread once: 100 µs of the step, 40 of the engine's thread, 5 of the third; of the device
    # 12 + 24 + 4 + 60. `loss` launched before the step began, and its time there does not count; `block` caused 15 of the
    # engine's.
    "shares of threads, backward and devices are of one whole each": SHARED,
    "device time per step is the mean of the steps that count": [
        event
        for number, at in enumerate((0, 1000))
        for event in (
            *(annotation(f"ProfilerStep#{number}", at, 1000), annotation("model", at + 10, 500)),
            *launched("gemm", at + 20, at + 30, 40 + 20 * number, number + 1),
        )
    ],
    # Busy: 5–11, 16–30 twice over for a while, 48–60.
    "device time that overlaps is busy once": [
        *(annotation("outer", 0, 50), annotation("inner", 10, 20)),
        *(
            call("cudaLaunchKernel", at, 1, correlation=number)
            for at, number in ((5, 1), (15, 2), (25, 3), (45, 4))
        ),
        *(kernel("a", 5, 6, correlation=1), kernel("b", 16, 10, correlation=2)),
        *(kernel("c", 20, 10, tid=8, correlation=3), kernel("d", 48, 12, correlation=4)),
        kernel("stray", 35, 2, correlation=77),
    ],
    "the spread is over calls by nearest rank": [
        *(annotation("a", 1000 * at, length) for at, length in enumerate([*range(21, 0, -1), 500])),
        *(annotation("b", 100_000 + 1000 * at, length) for at, length in enumerate([9, 1, 5])),
        annotation("c", 200_000, 4),
    ],
    "what was not recorded": [annotation("a", 0, 10)],
    "memory of the CPU alone": [annotation("a", 0, 10), allocation(2, 8), allocation(9, -8)],
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
