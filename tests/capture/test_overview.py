"""The overview of TensorBoard's plugin."""

from __future__ import annotations

import pytest
from builders import annotation, call, capture, copy, kernel, span

from capture.test_real_traces import load
from capture.test_real_traces import pytestmark as needs_traces
from capture.test_steps import in_us

PARTS = "kernel_ns memcpy_ns memset_ns communication_ns runtime_ns loader_ns cpu_ns other_ns"

# What the plugin shows: averages in µs of a step, then GPU utilization, SM efficiency and occupancy in percent.
SHOWN = {
    "v100_resnet50_workers0": (
        (98589, 1915, 89, 0, 2908, 59262, 13674, 1156),
        (55.51, 54.68, 49.13),
    ),
    "v100_resnet50_workers4": (
        (99145, 3160, 98, 0, 10564, 1186, 22665, 4251),
        (70.27, 69.22, 48.91),
    ),
}


@needs_traces
@pytest.mark.parametrize("name", SHOWN)
def test_what_the_plugin_shows(name) -> None:
    parts, percents = SHOWN[name]
    found = load(name)
    table = found.overview
    assert [row.number for row in table] == [5, 6, 7, 8, 9, 10]
    assert tuple(round(sum(table.column(part)) / 6 / 1000) for part in PARTS.split()) == parts
    (device,) = found.devices
    shares = (device.utilization, device.sm_efficiency, device.occupancy * device.occupancy_covered)
    assert tuple(round(share * 100, 2) for share in shares) == percents


STEPS = [
    annotation("ProfilerStep#1", 0, 100),
    annotation("ProfilerStep#2", 100, 100),
    annotation("enumerate(DataLoader)#_Iter.__next__", 0, 20),
    span("aten::mm", 25, 20),
    call("cudaLaunchKernel", 30, 10, 1),
    kernel("gemm", 38, 82, correlation=1),
    call("cudaMemcpyAsync", 130, 10, 2),
    copy(135, 15, correlation=2),
    span("gloo:all_reduce", 160, 10),
    kernel("stray", 175, 5),
]


def test_time_goes_to_the_first_that_covers_it_and_steps_follow_the_device(tmp_path) -> None:
    """Step 1 lasts until its kernel ends at 120. Loader 0–20, operator 25–30, its call 30–38, kernel 38–120.
    Step 2 from there: its call 130–135, copy 135–150, gloo 160–170, a kernel 175–180."""
    table = capture(tmp_path, STEPS).overview
    assert table.columns == ("number", "start_ns", "duration_ns", *PARTS.split())
    first, second = table
    assert in_us(first, ("start_ns", "duration_ns")) == [0, 120]
    assert in_us(first, PARTS.split()) == [82, 0, 0, 0, 8, 20, 5, 5]
    assert in_us(second, ("start_ns", "duration_ns")) == [120, 80]
    assert in_us(second, PARTS.split()) == [5, 15, 0, 10, 5, 0, 0, 45]


def test_a_last_step_that_was_cut_off_is_left_out(tmp_path) -> None:
    """It launched none of the device events, where the one before launched two; 4 of 5 would have been enough."""
    launches = [call("cudaLaunchKernel", 10, 1, 1), kernel("a", 20, 5, correlation=1)]
    for fewer, kept in ((3, 1), (4, 2)):
        events = STEPS[:2]
        for step, count in ((0, 5), (100, fewer)):
            for n in range(count):
                at, number = step + 10 * n, step + n + 1
                events = [
                    *events,
                    call("cudaLaunchKernel", at, 1, number),
                    kernel("a", at + 2, 5, correlation=number),
                ]
        found = capture(tmp_path, events)
        assert len(found.overview) == kept
        (device,) = found.devices
        of_steps = 5 + (fewer if kept == 2 else 0)
        assert (device.kernels, device.busy_ns) == (of_steps, 5000 * of_steps)
    assert len(capture(tmp_path, [*STEPS[:2], *launches]).overview) == 1


def test_a_call_that_outlasts_its_step_does_not_prolong_it(tmp_path) -> None:
    events = [
        STEPS[0],
        *STEPS[4:6],
        call("cudaLaunchKernel", 95, 6, 9),
        kernel("b", 130, 5, correlation=9),
    ]
    assert capture(tmp_path, events).overview[0].duration_ns == 120_000


def test_device_work_of_before_the_first_step_delays_it(tmp_path) -> None:
    events = [STEPS[0], kernel("earlier", -20, 30), *STEPS[4:6]]
    (row,) = capture(tmp_path, events).overview
    assert in_us(row, ("start_ns", "duration_ns")) == [10, 110]


def test_a_trace_without_steps_is_one(tmp_path) -> None:
    (row,) = capture(
        tmp_path, [span("aten::mm", 10, 20), span("aten::mm", 40, 10), kernel("gemm", 45, 15)]
    ).overview
    assert row.number is None
    assert in_us(row, ("start_ns", "duration_ns", "cpu_ns", "kernel_ns", "other_ns")) == [
        10,
        50,
        25,
        15,
        10,
    ]
    assert len(capture(tmp_path, []).overview) == 0


def test_devices_by_hand(tmp_path) -> None:
    """In 0–100: kernels 10–50 with 0.5 blocks an SM and 30–70 with 0.75, together at most 1 for 30–50."""

    def shaped(blocks, occupancy):
        return {"blocks_per_SM": blocks, "est._achieved_occupancy_%": occupancy}

    events = [
        STEPS[0],
        kernel("a", 10, 40, **shaped(0.5, 20)),
        kernel("b", 30, 40, **shaped(0.75, 50)),
        kernel("c", 90, 30, pid=2),
        copy(0, 100),
    ]
    first, second = capture(tmp_path, events).devices
    columns = (
        "device kernels busy_ns total_ns utilization sm_efficiency occupancy occupancy_covered"
    )
    assert first._fields == tuple(columns.split())
    assert tuple(first)[:4] == (0, 2, 60000, 100000)
    assert first[4:] == pytest.approx((0.6, (20 * 0.5 + 20 * 1 + 20 * 0.75) / 100, 0.35, 1))
    assert tuple(second) == (2, 1, 10000, 100000, 0.1, None, None, 0)


def test_a_trace_without_device_events_has_no_devices(tmp_path) -> None:
    assert len(capture(tmp_path, [span("aten::mm", 0, 5)]).devices) == 0
