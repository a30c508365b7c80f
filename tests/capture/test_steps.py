"""The steps, what the device did for each, and what it waited for."""

from __future__ import annotations

import pytest
import real_traces
from builders import annotation, call, capture, copy, kernel, span, step
from golden import Golden, rows_as_lines
from hypothesis import given
from hypothesis import strategies as st
from real_traces import KNOWN, load, needs_traces

from capture.sums import assert_sums
from capture.test_breakdown import COLUMNS
from instrument.base.range_names import MOMENT

LAUNCHED = tuple(COLUMNS.split())
CLIPPED = tuple(f"clipped_{name}" for name in LAUNCHED if name != "total_ns")
WAITS = ("launch_wait_ns", "gap_wait_ns", "loader_wait_ns", "sync_wait_ns", "unknown_wait_ns")


def in_us(row, names):
    return [getattr(row, name) / 1000 for name in names]


def test_steps_are_in_order_with_their_numbers(tmp_path) -> None:
    events = [
        step(12, 50, 8.5),
        step(11, 10, 20),
        annotation("ProfilerStep#x", 70, 1),
        span("ProfilerStep#13", 60, 1, cat="Operator"),  # torch before 1.12
        span("ProfilerStep#11", 12, 30, cat="gpu_user_annotation"),
    ]
    steps = capture(tmp_path, events).steps
    assert steps.columns == ("number", "start_ns", "duration_ns", *LAUNCHED, *CLIPPED, *WAITS)
    got = [tuple(row)[:3] for row in steps]
    assert got == [(11, 10000, 20000), (12, 50000, 8500), (13, 60000, 1000)]
    assert {value for row in steps for value in tuple(row)[3:]} == {None}


def test_a_moment_outside_of_all_steps_is_of_none(tmp_path) -> None:
    moment = annotation("saved" + MOMENT, 5, 0)
    assert [(m.name, m.step) for m in capture(tmp_path, [moment]).moments] == [("saved", None)]
    inside = annotation("saved" + MOMENT, 15, 0)
    found = capture(tmp_path, [step(3, 10, 10), moment, inside]).moments
    assert [(m.name, m.step) for m in found] == [("saved", None), ("saved", 3)]


# Step 1 launched compute 15–45 and communication 90–130, of which 10 ran in its own time and 30 in that of step 2, which
# launched a copy 142–149 and compute 170–180. Step 1 waited until its launches returned at 12 and 55, then for the device
# itself; step 2 waited 130–142 for the copy's call and 149–165 after it, of which 152–158 in the loader, then until 170
# for the device. Nothing was launched after 180.
TWO_STEPS = [
    step(1, 0, 100),
    step(2, 100, 100),
    call("cudaLaunchKernel", 10, 2, 1),
    kernel("gemm", 15, 30, correlation=1),
    call("cudaLaunchKernel", 50, 5, 2, tid=2),  # the thread of backward
    kernel("ncclDevKernel_AllReduce", 90, 40, correlation=2),
    call("cudaMemcpyAsync", 140, 10, 3),  # pageable: returns after the copy
    copy(142, 7, correlation=3),
    span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 152, 6),
    call("cudaLaunchKernel", 160, 5, 4),
    kernel("gemm", 170, 10, correlation=4),
]


CASES = {
    "the first event of a file can be a launch": [
        call("cudaLaunchKernel", 5, 2, 1),
        step(3, 0, 100),
        kernel("a", 20, 10, correlation=1),
    ],
    "a gap that begins while the host synchronises and one whose launch is unknown": [
        step(1, 0, 100),
        kernel("before the recording", 5, 5),
        call("cudaDeviceSynchronize", 6, 6),
        call("cudaLaunchKernel", 30, 4, 1),
        kernel("gemm", 36, 14, correlation=1),
        kernel("stray", 60, 40),
    ],
    # The copy's call had returned at 5, long before the copy ran: it waited for nothing, and the CPU's wait from 8 to
    # 12 is why the second kernel was launched only at 13.
    "a copy that ran long after its call hides no wait": [
        step(1, 0, 40),
        call("cudaLaunchKernel", 0, 1, 1),
        kernel("first", 1, 9, correlation=1),
        call("cudaMemcpyAsync", 3, 2, 2),
        copy(20, 10, correlation=2),
        call("cudaDeviceSynchronize", 8, 4, 9),
        call("cudaLaunchKernel", 13, 1, 3),
        kernel("second", 15, 5, correlation=3),
    ],
}


def test_steps_by_hand(tmp_path, golden: Golden) -> None:
    """Checked by hand; a cell that is not shown is unknown."""
    told = []
    for name, events in {"two steps": TWO_STEPS, **CASES}.items():
        found = capture(tmp_path, events)
        assert_sums(found)
        told.append(f"---- {name}\n{rows_as_lines({'step': found.steps})}")
    golden("steps.txt", "\n".join(told))


def test_a_step_without_device_work_has_none_where_others_have(tmp_path) -> None:
    events = [step(1, 0, 10), step(2, 10, 10), *TWO_STEPS[2:4]]
    events += [call("cudaLaunchKernel", 20, 2, 9), kernel("after the step", 50, 5, correlation=9)]
    first, second = capture(tmp_path, events).steps
    assert in_us(first, LAUNCHED) == [0] * 8
    assert in_us(second, ("compute_ns", "clipped_compute_ns", "clipped_idle_ns")) == [30, 5, 5]


def _oracle(work, loaders, syncs, begin, end):
    """What each microsecond between two times waited for, counted one by one."""
    counts = dict.fromkeys(WAITS, 0)
    syncs = [
        *syncs,
        *(
            (a, returned)
            for a, _, kind, (_, returned) in work
            if kind == "copy" and returned is not None
        ),
    ]
    first = min(0, min(a for a, *_ in work))

    def busy(t):
        return any(a <= t < b for a, b, *_ in work)

    for t in range(begin, end):
        if busy(t):
            continue
        since = t
        while since > first and not busy(since - 1):
            since -= 1
        later = [w for w in work if w[0] > t]
        following = min(later, key=lambda w: w[0]) if later else None
        returned = None if following is None else following[3][1]
        known = following is None or returned is not None
        if known and following is not None and t >= returned:
            counts["gap_wait_ns"] += 1
        elif any(a <= t < b for a, b in loaders):
            counts["loader_wait_ns"] += 1
        elif known and any(a <= since < b for a, b in syncs):
            counts["sync_wait_ns"] += 1
        else:
            counts["launch_wait_ns" if known else "unknown_wait_ns"] += 1
    return counts


SPANS = st.tuples(st.integers(0, 55), st.integers(1, 9))
LAUNCHES = st.one_of(st.none(), SPANS)


@given(
    st.lists(
        st.tuples(st.sampled_from(["gemm", "nccl", "copy"]), SPANS, LAUNCHES),
        min_size=1,
        max_size=7,
    ),
    st.lists(SPANS, max_size=3),
    st.lists(SPANS, max_size=3),
)
def test_waits_are_what_counting_each_microsecond_gives(tmp_path, work, loaders, syncs) -> None:
    events = [step(0, 0, 30), step(1, 30, 25)]
    events += [span("enumerate(DataLoader)#x.__next__", a, n) for a, n in loaders]
    events += [call("cudaStreamSynchronize", a, n) for a, n in syncs]
    known = []
    for number, (name, (a, n), launch) in enumerate(work, 1):
        make = copy if name == "copy" else kernel
        # each on a stream of its own, because they overlap
        events.append(
            make(*([] if name == "copy" else [name]), a, n, correlation=number, tid=100 + number)
        )
        if launch:
            events.append(
                call("cudaMemcpyAsync" if name == "copy" else "cudaLaunchKernel", *launch, number)
            )
        known.append((a, a + n, name, (launch[0], sum(launch)) if launch else (None, None)))
    first, second = capture(tmp_path, events).steps
    ends = [[(a, a + n) for a, n in spans] for spans in (loaders, syncs)]
    for row, begin, end in ((first, 0, 30), (second, 30, 55)):
        assert dict(zip(WAITS, in_us(row, WAITS))) == _oracle(known, *ends, begin, end)
        assert sum(in_us(row, CLIPPED[:4])) == end - begin


@needs_traces
@pytest.mark.parametrize("name", real_traces.each())
def test_the_parts_of_every_real_step_sum_to_the_whole(name) -> None:
    found = load(name)
    for row in found.steps:
        if not KNOWN[name]["device_events"] and name != "mtia_rank0":
            assert row.compute_ns is None
            continue
        assert sum(getattr(row, c) for c in LAUNCHED[:4]) == row.total_ns
        assert sum(getattr(row, c) for c in CLIPPED[:4]) == row.duration_ns
        assert sum(getattr(row, c) for c in WAITS) == row.clipped_idle_ns
        assert min(getattr(row, c) for c in (*LAUNCHED, *CLIPPED, *WAITS)) >= 0


@needs_traces
def test_a_step_that_launched_everything_has_the_whole_traces_figures() -> None:
    """Of two files all is one step; TraceLens leaves out what was launched before the recording, as a step does."""
    for name in ("a100_megatron_tp8_rank0", "h800_deepseek_train"):
        found = load(name)
        assert tuple(found.steps[0])[3:11] == tuple(found.breakdown[0])
    launched = load("h100_qwen_0.5b_inference").steps[0].compute_ns
    assert launched == pytest.approx(
        KNOWN["h100_qwen_0.5b_inference"]["tracelens_ms"]["computation_time"] * 1e6, abs=500
    )


@needs_traces
@pytest.mark.nightly
def test_the_first_workers_waited_for_the_loader_and_the_second_did_not() -> None:
    waiting, fed = (load(f"v100_resnet50_workers{n}").steps for n in (0, 4))
    assert sum(waiting.column("loader_wait_ns")) > 0.7 * sum(waiting.column("clipped_idle_ns"))
    assert sum(fed.column("loader_wait_ns")) < 0.05 * sum(fed.column("clipped_idle_ns"))
