"""How well each device was used, as TensorBoard's plugin defines it."""

from __future__ import annotations

import pytest
import real_traces
from builders import annotation, call, capture, copy, kernel, span
from real_traces import load, needs_traces

from instrument.read.show.text import render

# What the plugin shows, in percent: GPU utilization, SM efficiency and occupancy.
SHOWN = {
    "v100_resnet50_workers4": (70.27, 69.22, 48.91),
    "v100_resnet50_workers0": (55.51, 54.68, 49.13),
}


@needs_traces
@pytest.mark.parametrize("name", real_traces.each(SHOWN))
def test_what_the_plugin_shows(name) -> None:
    (device,) = load(name).devices
    shares = (device.utilization, device.sm_efficiency, device.occupancy * device.occupancy_covered)
    assert tuple(round(share * 100, 2) for share in shares) == SHOWN[name]


STEPS = [
    annotation("ProfilerStep#1", 0, 100),
    annotation("ProfilerStep#2", 100, 100),
    annotation("run", 0, 20),
    span("aten::mm", 25, 20),
    call("cudaLaunchKernel", 30, 10, 1),
    kernel("gemm", 38, 82, correlation=1),
    call("cudaMemcpyAsync", 130, 10, 2),
    copy(135, 15, correlation=2),
    span("gloo:all_reduce", 160, 10),
    kernel("stray", 175, 5),
]


def test_a_step_lasts_until_its_device_work_ends(tmp_path) -> None:
    """Step 1 lasts until its kernel ends at 120, step 2 until 200. Kernels 38–120 and 175–180."""
    (device,) = capture(tmp_path, STEPS).devices
    assert (device.kernels, device.busy_ns, device.total_ns) == (2, 87_000, 200_000)
    (device,) = capture(tmp_path, [STEPS[0], *STEPS[4:6]]).devices
    assert (device.kernels, device.busy_ns, device.total_ns) == (1, 82_000, 120_000)


def test_a_last_step_that_was_cut_off_is_left_out(tmp_path) -> None:
    """It launched fewer than 4 of the 5 device events of the step before; or none, after a step with one."""
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
        (device,) = capture(tmp_path, events).devices
        of_steps = 5 + (fewer if kept == 2 else 0)
        assert (device.kernels, device.busy_ns) == (of_steps, 5000 * of_steps)
        assert device.total_ns == 100_000 * kept
    (device,) = capture(tmp_path, [*STEPS[:2], *launches]).devices
    assert device.total_ns == 100_000


def test_a_call_that_outlasts_its_step_does_not_prolong_it(tmp_path) -> None:
    events = [
        STEPS[0],
        *STEPS[4:6],
        call("cudaLaunchKernel", 95, 6, 9),
        kernel("b", 130, 5, correlation=9),
    ]
    assert capture(tmp_path, events).devices[0].total_ns == 120_000


def test_device_work_of_before_the_first_step_delays_it(tmp_path) -> None:
    events = [STEPS[0], kernel("earlier", -20, 30), *STEPS[4:6]]
    assert capture(tmp_path, events).devices[0].total_ns == 110_000


def test_a_trace_without_steps_is_one(tmp_path) -> None:
    (device,) = capture(
        tmp_path, [span("aten::mm", 10, 20), span("aten::mm", 40, 10), kernel("gemm", 45, 15)]
    ).devices
    assert (device.kernels, device.busy_ns, device.total_ns) == (1, 15_000, 50_000)
    assert len(capture(tmp_path, []).devices) == 0


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
    products = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}, {"id": 1, "name": "another"}]
    first, second = capture(tmp_path, events, deviceProperties=products).devices
    columns = (
        "device name kernels busy_ns total_ns utilization sm_efficiency occupancy occupancy_covered"
    )
    assert first._fields == tuple(columns.split())
    assert tuple(first)[:5] == (0, "NVIDIA H100 80GB HBM3", 2, 60000, 100000)
    assert first[5:] == pytest.approx((0.6, (20 * 0.5 + 20 * 1 + 20 * 0.75) / 100, 0.35, 1))
    assert tuple(second) == (2, None, 1, 10000, 100000, 0.1, None, None, 0)


def test_a_trace_without_device_events_has_no_devices(tmp_path) -> None:
    assert len(capture(tmp_path, [span("aten::mm", 0, 5)]).devices) == 0


def test_device_work_launched_in_a_range_alone_is_named_below_the_operators(tmp_path) -> None:
    """60 of 80 µs, which no row of an operator holds."""
    events = [
        annotation("decode", 0, 100),
        call("cudaGraphLaunch", 5, 5, 1),
        kernel("a", 20, 60, correlation=1),
        span("aten::mm", 12, 5),
        call("cudaLaunchKernel", 13, 2, 2),
        kernel("b", 80, 20, correlation=2),
    ]
    text = render(capture(tmp_path, events))
    assert "60.000 µs of 80.000 µs device time was launched in ranges, but in no operator" in text
    assert "no operator" not in render(capture(tmp_path, events[3:]))
