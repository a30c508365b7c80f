"""Kernels, launches, copies and streams."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal

import pytest
import real_traces
from builders import call, capture, copy, kernel, span
from real_traces import KNOWN, load, needs_traces

from capture.by_hand import raw
from instrument.capture import Capture


def launch_shape(grid, blocks, occupancy):
    return {
        "grid": [grid, 1, 1],
        "block": [128, 1, 1],
        "blocks_per_SM": blocks,
        "est._achieved_occupancy_%": occupancy,
    }


KERNELS = [
    call("cudaLaunchKernel", 0, 5, 1),
    kernel("gemm", 10, 20, correlation=1, **launch_shape(8, 0.5, 10)),
    call("cudaLaunchKernel", 20, 30, 2),
    kernel("gemm", 40, 10, correlation=2, **launch_shape(4, 2, 40)),
    call("cudaGraphLaunch", 60, 6, 3),
    kernel("relu", 90, 4, correlation=3),
    kernel("ncclDevKernel", 95, 3, correlation=3),
    kernel("relu", 100, 2),
]


def test_kernels_by_name_with_their_launches(tmp_path) -> None:
    """The second gemm took 10 on the device and 30 to launch; the graph took 6 to launch 7, and counts for relu."""
    table = capture(tmp_path, KERNELS).kernels
    columns = "name kind calls device_ns min_ns mean_ns max_ns launch_ns short_calls grid block blocks_per_sm occupancy"
    assert table.columns == (*columns.split(), "occupancy_covered")
    gemm, relu, nccl = table
    assert tuple(gemm)[:9] == ("gemm", "kernel", 2, 30000, 10000, 15000, 20000, 35000, 1)
    assert tuple(gemm)[9:11] == ("[8, 1, 1]", "[128, 1, 1]")
    assert gemm[11:] == pytest.approx(((20 * 0.5 + 10 * 2) / 30, (20 * 0.1 + 10 * 0.4) / 30, 1))
    assert tuple(relu)[:9] == ("relu", "kernel", 2, 6000, 2000, 3000, 4000, 6000, 0)
    assert tuple(relu)[9:] == (None, None, None, None, 0)
    assert tuple(nccl)[:9] == ("ncclDevKernel", "communication", 1, 3000, 3000, 3000, 3000, 0, 0)


def test_launches_are_found_by_ids_that_are_far_apart(tmp_path) -> None:
    ids = (1, 10**6, 10**12)
    events = [call("cudaLaunchKernel", 10 * k, 5, each) for k, each in enumerate(ids)]
    events += [kernel("gemm", 100 * k, 20, correlation=each) for k, each in enumerate((*ids, 7))]
    (gemm,) = capture(tmp_path, events).kernels
    assert (gemm.calls, gemm.launch_ns) == (4, 15_000)


def test_an_occupancy_of_zero_is_none_estimated(tmp_path) -> None:
    events = [
        kernel("gemm", 0, 30, **launch_shape(8, 0.5, 0)),
        kernel("gemm", 40, 10, **launch_shape(8, 0.5, 1)),
        kernel("nccl", 60, 10, **launch_shape(8, 0.5, 0)),
    ]
    found = capture(tmp_path, events)
    assert [(row.occupancy, row.occupancy_covered) for row in found.kernels] == [
        (0.01, 0.25),
        (None, 0),
    ]
    (device,) = found.devices
    assert (device.occupancy, device.occupancy_covered) == (0.01, 0.2)


def test_work_that_nothing_launched_is_no_work_of_the_last_event(tmp_path) -> None:
    events = [
        kernel("stray", 0, 500),
        kernel("relu", 600, 4, correlation=1),
        call("cudaLaunchKernel", 550, 30, 1),
    ]
    assert capture(tmp_path, events).kernels.where(name="relu")[0].short_calls == 1


def test_a_call_inside_an_operator_of_its_thread_belongs_to_it_whatever_id_it_has(tmp_path) -> None:
    """The External id names an operator of another thread; without an operator around, that is it."""
    events = [
        span("named", 0, 10, External_id=5),
        span("around", 0, 10, tid=2, External_id=6),
        call("cudaLaunchKernel", 2, 1, 1, tid=2, External_id=5),
        call("cudaLaunchKernel", 12, 1, 2, tid=2, External_id=5),
        kernel("inside", 20, 4, correlation=1),
        kernel("alone", 30, 7, correlation=2),
    ]
    table = capture(tmp_path, events).operators
    times = {row.name: row.device_ns for row in table if row.name in ("named", "around")}
    assert times == {"named": 7000, "around": 4000}


def test_launch_calls_by_name(tmp_path) -> None:
    """Delays: 10 − 5, and 0 as the second gemm began while its call still ran; the graph's first kernel 90 − 66."""
    table = capture(tmp_path, KERNELS).launches
    columns = "name calls device_calls launch_ns device_ns median_delay_ns max_delay_ns short_calls"
    assert table.columns == tuple(columns.split())
    assert [tuple(row) for row in table] == [
        ("cudaLaunchKernel", 2, 2, 35000, 30000, 0, 5000, 1),
        ("cudaGraphLaunch", 1, 2, 6000, 7000, 24000, 24000, 0),
    ]


def test_a_grid_is_text_on_one_line_however_it_was_written(tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"traceEvents": [kernel("gemm", 0, 5, grid=[8, 1, 1], block=[2])]}, indent=2)
    )
    assert [(row.grid, row.block) for row in Capture.load(path).kernels] == [("[8, 1, 1]", "[2]")]


def test_kernels_whose_launch_was_not_recorded(tmp_path) -> None:
    found = capture(tmp_path, [kernel("gemm", 0, 5, correlation=9)])
    assert (found.kernels[0].launch_ns, found.kernels[0].short_calls) == (None, None)
    assert len(found.launches) == 0


def test_copies_by_kind_with_bandwidth(tmp_path) -> None:
    """3000 bytes in 6 µs are 500 MB/s; ROCm writes a size on the call, as text; that of a memset may be missing."""
    events = [
        copy(0, 4, bytes=1000),
        copy(10, 2, bytes=2000),
        call("hipMemcpyAsync", 0, 1, 5, bytes="4096"),
        span("Memcpy DtoD (Device -> Device)", 20, 2, cat="gpu_memcpy", correlation=5),
        span("Memset (Device)", 30, 1, cat="gpu_memset"),
        kernel("gemm", 40, 9),
    ]
    found = capture(tmp_path, events)
    columns = "name calls device_ns min_ns mean_ns max_ns bytes bytes_per_second"
    assert found.copies.columns == tuple(columns.split())
    assert [tuple(row) for row in found.copies] == [
        ("Memcpy HtoD (Pinned -> Device)", 2, 6000, 2000, 3000, 4000, 3000, 500_000_000),
        ("Memcpy DtoD (Device -> Device)", 1, 2000, 2000, 2000, 2000, 4096, 2_048_000_000),
        ("Memset (Device)", 1, 1000, 1000, 1000, 1000, None, None),
    ]
    assert [row.name for row in found.kernels] == ["gemm"]


def test_a_copy_whose_size_is_not_known_counts_neither_in_bytes_nor_in_bandwidth(tmp_path) -> None:
    """1000 bytes in 4 µs are 250 MB/s, whatever the second copy moved; no bytes at all are known to be none."""
    empty = span("Memcpy DtoD (Device -> Device)", 20, 2, cat="gpu_memcpy", bytes=0)
    table = capture(tmp_path, [copy(0, 4, bytes=1000), copy(10, 2), empty]).copies
    assert [(row.calls, row.device_ns, row.bytes, row.bytes_per_second) for row in table] == [
        (2, 6000, 1000, 250_000_000),
        (1, 2000, 0, 0),
    ]


def test_the_rate_of_a_nanosecond(tmp_path) -> None:
    (row,) = capture(tmp_path, [copy(0, 0.001, bytes=8)]).copies
    assert row.bytes_per_second == 8 * 10**9


def test_an_impossible_rate_is_not_known(tmp_path) -> None:
    (row,) = capture(tmp_path, [copy(0, 1, bytes=9 * 10**17)]).copies
    assert (row.bytes, row.bytes_per_second) == (9 * 10**17, None)


def test_streams(tmp_path) -> None:
    events = [kernel("gemm", 0, 10), kernel("nccl", 5, 10), kernel("gemm", 30, 10), copy(0, 12)]
    table = capture(tmp_path, events).streams
    columns = "device stream calls busy_ns compute_ns communication_ns copy_ns idle_ns"
    assert table.columns == tuple(columns.split())
    assert [tuple(row) for row in table] == [
        (0, 7, 3, 25000, 20000, 10000, 0, 15000),
        (0, 8, 1, 12000, 0, 0, 12000, 0),
    ]


def test_a_trace_without_device_events_has_no_rows(tmp_path) -> None:
    found = capture(tmp_path, [span("aten::mm", 0, 5)])
    assert [
        len(table) for table in (found.kernels, found.copies, found.launches, found.streams)
    ] == [0] * 4


def _told_by_the_file(name):
    """Sums straight from the JSON, with decimals: by kernel name, by copy name, and the trace's own bandwidths."""
    events = raw(real_traces.path(name), parse_float=Decimal)
    times = {"kernel": defaultdict(list), "copy": defaultdict(list)}
    for event in events:
        kind = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}.get(
            event.get("cat", "").lower()
        )
        kind = kind or {"memcpy": "copy", "memset": "copy"}.get(event.get("cat", "").lower())
        if event["ph"] == "X" and kind:
            times[kind][event["name"]].append((int(event["dur"] * 1000), event["args"]))
    return times


@needs_traces
@pytest.mark.parametrize("name", real_traces.each(n for n in KNOWN if n != "mtia_rank0"))
def test_sums_of_every_real_trace_are_those_of_its_file(name) -> None:
    found, told = load(name), _told_by_the_file(name)
    for table, kind in ((found.kernels, "kernel"), (found.copies, "copy")):
        sums = {
            key: (len(v), sum(ns for ns, _ in v), max(ns for ns, _ in v))
            for key, v in told[kind].items()
        }
        assert {row.name: (row.calls, row.device_ns, row.max_ns) for row in table} == sums
    for row in found.copies:
        told_of = [args for _, args in told["copy"][row.name] if "bytes" in args]
        assert row.bytes == (sum(args["bytes"] for args in told_of) if told_of else None)
        if (
            len(told_of) == 1 and row.device_ns % 1000
        ):  # the trace's own bandwidth is of unrounded times
            bandwidth = float(told_of[0]["memory bandwidth (GB/s)"])
            assert row.bytes_per_second == pytest.approx(bandwidth * 1e9, rel=0.01)
    assert sum(row.calls for row in found.streams) == KNOWN[name]["device_events"]


@needs_traces
@pytest.mark.parametrize(
    ("name", "kernels"),
    real_traces.each([("v100_resnet50_workers4", 62), ("v100_resnet50_workers0", 67)]),
)
def test_tensorboard_counts_as_many_kernels(name, kernels) -> None:
    found = load(name)
    assert len(found.kernels) == kernels
    launched = [row for row in found.kernels if row.launch_ns is not None]
    costs = sum(row.launch_ns for row in launched)
    assert costs == sum(row.launch_ns for row in found.launches.where(name="cudaLaunchKernel"))
    assert (
        sum(row.short_calls for row in launched)
        == found.launches.where(name="cudaLaunchKernel")[0].short_calls
    )
