"""Recordings of a CUDA device: equal to what torch says of them, and to what their files say by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.conftest import BODIES, COLUMNS, DEVICE_COLUMNS, INEXACT_ROWS, Recording, record
from capture.plain_loops import backward_by_flows, device_backward_by_flows, ns, raw, top_level_ns
from capture.test_real_traces import device_backward
from torch import nn
from torch_rules import torch_table

from instrument import Session, profiled
from instrument.read.capture import Capture

Recordings = Callable[..., Recording]
ON_BOTH = sorted(BODIES.keys() - {"threaded"})
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


def rows(table: Any, device: str, *key: str) -> dict[Any, tuple[int, ...]]:
    columns = [*COLUMNS, *(DEVICE_COLUMNS if device == "cuda" else ())]
    found = {
        tuple(getattr(row, k) for k in key): tuple(getattr(row, c) or 0 for c in columns)
        for row in table
    }
    assert len(found) == len(table), "two rows of one key"
    return {
        k[0] if len(k) == 1 else k: values
        for k, values in found.items()
        if INEXACT_ROWS.isdisjoint(k)
    }


def own_work(capture: Capture) -> set[str]:
    """What torch's table holds besides: the profiler's own work, such as "Activity Buffer Request"."""
    events = capture.events
    return {
        events.names[code] for code in events.name[events.among(frozenset({"overhead"}))].tolist()
    }


@pytest.mark.parametrize("name", ON_BOTH)
def test_rows_equal_those_of_torch_exactly(recordings: Recordings, device: str, name: str) -> None:
    recording = recordings(name, device)
    capture = recording.capture
    table = torch_table(capture.events)
    leave = own_work(capture)
    assert rows(table, device, "name") == {
        k: v for k, v in recording.by_name.items() if k not in leave
    }
    by_shapes = {k: v for k, v in recording.by_shapes.items() if k[0] not in leave}
    found = rows(torch_table(capture.events, input_shapes=True), device, "name", "input_shapes")
    assert found == by_shapes
    if device == "cuda":
        assert sum(table.column("self_device_ns")) > 0
        assert max(table.column("device_bytes")) > 0


@pytest.mark.parametrize("name", ON_BOTH)
def test_kernels_and_copies_equal_torchs(recordings: Recordings, device: str, name: str) -> None:
    recording = recordings(name, device)
    capture = recording.capture
    found = {
        row.name: (row.calls, row.device_ns)
        for table in (capture.kernels, capture.copies)
        for row in table
    }
    assert found == recording.on_device
    assert bool(found) == (device == "cuda")
    assert sum(row.device_calls for row in capture.launches) == sum(
        calls for calls, _ in found.values()
    )


@pytest.mark.parametrize("name", ON_BOTH)
def test_backward_kernels_have_ranges(recordings: Recordings, device: str, name: str) -> None:
    recording = recordings(name, device)
    capture = recording.capture
    on_cpu = {row.name: row.backward_ns for row in capture.ranges_by_name if row.backward_ns}
    stepless = {
        k: v
        for k, v in backward_by_flows(recording.path).items()
        if not k.startswith("ProfilerStep#")
    }
    assert on_cpu == stepless
    parts = capture.ranges_attribution
    assert sum(parts.column("cpu_ns")) == top_level_ns(capture.events)
    if device == "cuda":
        told = device_backward_by_flows(recording.path)
        assert device_backward(capture) == {
            k: v for k, v in told.items() if not k.startswith("ProfilerStep#")
        }
        assert sum(parts.column("device_ns")) == sum(capture.operators.column("self_device_ns"))
        assert capture.ranges.where(path="forward")[0].device_ns > 0


def trained(folder: Path, device: str) -> Capture:
    """A session's window of three steps on one stream."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(warmup=1, active=3, output_dir=str(folder)) as session:
        for batch in session.steps(torch.randn(16, 64) for _ in range(5)):
            with profiled("forward"):
                loss = model(batch.to(device)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (capture,) = session.captures
    return capture


def test_steps_are_made_of_what_they_launched(tmp_path: Path, device: str) -> None:
    """On one stream nothing overlaps, so the union of what ran is its sum."""
    capture = trained(tmp_path, device)
    assert [row.number for row in capture.steps] == [1, 2, 3]
    assert bool(capture.metadata["devices"]) == (device == "cuda")
    found = {
        f"ProfilerStep#{row.number}": (row.compute_ns or 0, row.copy_ns or 0)
        for row in capture.steps
    }
    assert found == device_time_by_step(capture.trace_path, [*found])
    for row in capture.steps:
        if device == "cuda":
            own = row.clipped_compute_ns + row.clipped_exposed_copy_ns + row.clipped_idle_ns
            assert own + row.clipped_exposed_communication_ns == row.duration_ns
            assert row.compute_ns > 0


def device_time_by_step(path: Path, steps: list[str]) -> dict[str, tuple[int, int]]:
    """The nanoseconds of kernels with memsets, and of copies, whose calls began within each step."""
    events = [e for e in raw(path) if e.get("ph") == "X"]
    spans = {
        e["name"]: ns(e) for e in events if e["name"] in steps and e["cat"] == "user_annotation"
    }
    calls = {
        e["args"]["correlation"]: ns(e)[0]
        for e in events
        if e["cat"] in ("cuda_runtime", "cuda_driver")
    }
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:
        launched = (
            calls.get(event.get("args", {}).get("correlation"))
            if event["cat"] in ON_DEVICE
            else None
        )
        for name, (start, end) in spans.items():
            if launched is not None and start <= launched < end:
                total[name][event["cat"] == "gpu_memcpy"] += ns(event)[1] - ns(event)[0]
    return {name: (total[name][0], total[name][1]) for name in steps}


def test_memory_is_what_the_allocator_says(tmp_path: Path, device: str) -> None:
    said = []

    def body() -> None:
        before = allocated(device)
        kept = torch.empty(3 * 1024**2, dtype=torch.uint8, device=device)
        torch.empty(5 * 1024**2, dtype=torch.uint8, device=device)
        kept = kept[:1].clone()
        said.extend([before, allocated(device), kept.numel()])

    capture = record(tmp_path / "trace.json", body, device).capture
    row = next(row for row in capture.memory_devices if row.device.startswith(device))
    assert row.peak_net_bytes == 8 * 1024**2
    if device == "cuda":
        line = capture.memory.timeline("cuda:0")
        assert line.allocated_bytes is not None
        assert line.allocated_bytes[0] - line.size_bytes[0] == said[0]
        assert said[1] in line.allocated_bytes.tolist()
        assert row.peak_bytes == said[0] + row.peak_net_bytes
        assert line.reserved_bytes is not None
        assert line.reserved_bytes[-1] == torch.cuda.memory_reserved()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0
