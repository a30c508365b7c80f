"""Kernels, launches, copies and streams."""

from __future__ import annotations

import json
from collections import defaultdict
from decimal import Decimal

import pytest
import real_traces
from builders import call, capture, copy, kernel, span
from golden import Golden, rows_as_lines
from real_traces import KNOWN, load, needs_traces

from capture.plain_loops import raw
from capture.sums import assert_sums
from instrument.read.capture import Capture


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


EMPTY = span("Memcpy DtoD (Device -> Device)", 20, 2, cat="gpu_memcpy", bytes=0)
CASES = {
    # The second gemm took 10 on the device and 30 to launch; the graph took 6 to launch 7, and counts for relu. Delays:
    # 10 - 5, and 0 as the second gemm began while its call still ran; the graph's first kernel 90 - 66.
    "launches and a graph": KERNELS,
    # Delays: 0, as the first kernel began while its call ran, 100 - 15 and 200 - 25. Busy for 4 · 20 of 320 µs.
    "ids that are far apart": [
        *(call("cudaLaunchKernel", 10 * k, 5, id) for k, id in enumerate((1, 10**6, 10**12))),
        *(
            kernel("gemm", 100 * k, 20, correlation=id)
            for k, id in enumerate((1, 10**6, 10**12, 7))
        ),
    ],
    # 1 % is known of 10 of 40 µs of gemm, and of 10 of 50 in all. Half of the SMs had blocks: 0.5 of 50 of 70 µs.
    "an occupancy of zero is none estimated": [
        kernel("gemm", 0, 30, **launch_shape(8, 0.5, 0)),
        kernel("gemm", 40, 10, **launch_shape(8, 0.5, 1)),
        kernel("nccl", 60, 10, **launch_shape(8, 0.5, 0)),
    ],
    # The launch took 30 µs for a kernel of 4, which began 20 after it.
    "work without a launch is no work of the last call": [
        kernel("stray", 0, 500),
        kernel("relu", 600, 4, correlation=1),
        call("cudaLaunchKernel", 550, 30, 1),
    ],
    "the launch is not in the trace": [kernel("gemm", 0, 5, correlation=9)],
    # 3000 bytes in 6 µs are 500 MB/s; ROCm writes a size on the call, as text; that of a memset may be missing
    "copies": [
        copy(0, 4, bytes=1000),
        copy(10, 2, bytes=2000),
        call("hipMemcpyAsync", 0, 1, 5, bytes="4096"),
        span("Memcpy DtoD (Device -> Device)", 20, 2, cat="gpu_memcpy", correlation=5),
        span("Memset (Device)", 30, 1, cat="gpu_memset"),
        kernel("gemm", 40, 9),
    ],
    # 1000 bytes in 4 µs are 250 MB/s, whatever the second copy moved; no bytes at all are known to be none
    "a copy of unknown size": [copy(0, 4, bytes=1000), copy(10, 2), EMPTY],
    "a copy of a nanosecond": [copy(0, 0.001, bytes=8)],
    "a copy at an impossible rate": [copy(0, 1, bytes=9 * 10**17)],
    # Stream 7 is busy in 0–15 and 30–40, 25 of 40 µs; nccl overlaps a product for 5. The copy has stream 8.
    "streams": [kernel("gemm", 0, 10), kernel("nccl", 5, 10), kernel("gemm", 30, 10), copy(0, 12)],
    "no device": [span("aten::mm", 0, 5)],
}


def test_kernels_launches_copies_and_streams(tmp_path, golden: Golden) -> None:
    """Checked by hand."""
    told = []
    for name, events in CASES.items():
        found = capture(tmp_path, events)
        assert_sums(found)
        views = ("kernels", "launches", "copies", "streams")
        tables = rows_as_lines({view: getattr(found, view) for view in views})
        told.append(f"---- {name}\n{tables}")
    golden("kernels.txt", "\n".join(told))


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


def test_a_grid_is_text_on_one_line_however_it_was_written(tmp_path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"traceEvents": [kernel("gemm", 0, 5, grid=[8, 1, 1], block=[2])]}, indent=2)
    )
    assert [(row.grid, row.block) for row in Capture.load(path).kernels] == [("[8, 1, 1]", "[2]")]


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
    got = sum(row.short_calls for row in launched)
    assert got == found.launches.where(name="cudaLaunchKernel")[0].short_calls
