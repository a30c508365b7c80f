"""Captures to read from: small ones made by hand, whose every number is known, and recordings of torch's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from instrument.capture import Capture
from instrument.runs.rank_summary import write

REDUCES = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
CPU, DEVICE = {"pid": 1, "tid": 1}, {"pid": 0, "tid": 7}


def span(
    name: str, start_us: float, length_us: float, category: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    where = DEVICE if category == "kernel" else CPU
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start_us,
        "dur": length_us,
        "args": args,
        **where,
    }


def annotation(name: str, start_us: float, length_us: float) -> dict[str, Any]:
    return span(name, start_us, length_us, "user_annotation")


def steps() -> list[dict[str, Any]]:
    """Steps 3 and 4 of 1000 µs; in each `forward` of 600 around `attention` of 400 around a matrix product of 300."""
    events = []
    for number, start in ((3, 0), (4, 1000)):
        events += [
            annotation(f"ProfilerStep#{number}", start, 1000),
            annotation("forward", start + 100, 600),
            annotation("attention", start + 200, 400),
            span(
                "aten::mm",
                start + 250,
                300,
                **{"Input Dims": [[8, 3], [3, 4]], "External id": number},
            ),
            span("aten::relu", start + 800, 50, **{"Input Dims": [[8, 4]]}),
        ]
    return events


def kernels() -> list[dict[str, Any]]:
    """A kernel of 70 µs for the product of step 3, and one of 30 for that of step 4."""
    events = []
    for number, start, length in ((3, 0, 70), (4, 1000, 30)):
        launch = {"correlation": number, "External id": number}
        events += [
            span("cudaLaunchKernel", start + 260, 10, "cuda_runtime", **launch),
            span("gemm", start + 300, length, "kernel", **launch),
        ]
    return events


def synchronous_steps(
    own_us: int, *, device: bool = False, later_us: float = 0
) -> list[dict[str, Any]]:
    """Steps 3 and 4 of 1000 µs on one rank of several: work of its own, then an all-reduce that ends after 900.

    On the CPU the work is the range `forward` and the all-reduce gloo's; on a device both are kernels, launched within
    the first 20 µs. The rank's clock is ahead by `later_us`.
    """
    events = []
    for number, start in ((3, later_us), (4, 1000 + later_us)):
        events.append(annotation(f"ProfilerStep#{number}", start, 1000))
        if device:
            for k, (name, at, until) in enumerate(
                (("gemm", 30, 30 + own_us), (REDUCES, 30 + own_us, 900))
            ):
                launch = {"correlation": 10 * number + k}
                events.append(span("cudaLaunchKernel", start + 10 * k, 5, "cuda_runtime", **launch))
                events.append(span(name, start + at, until - at, "kernel", **launch))
        else:
            reduces = annotation("gloo:all_reduce", start + own_us, 900 - own_us) | {"tid": 2}
            events += [
                annotation("forward", start, own_us),
                span("aten::mm", start, own_us),
                reduces,
            ]
    return events


def write_rank(
    output: Path, rank: int, events: list[dict[str, Any]], world_size: int = 4, **changed: Any
) -> Capture:
    """The capture of one rank of several, with the summary that an exporter writes."""
    name = f"steps_000003-000004_rank{rank}"
    capture = write_capture(output, events, name, rank=rank, world_size=world_size, **changed)
    write(capture, capture.folder)
    return capture


def write_capture(
    output: Path,
    events: list[dict[str, Any]],
    name: str = "steps_3-4",
    *,
    base_ns: int = 0,
    **changed: Any,
) -> Capture:
    """A capture folder as the session makes it."""
    folder = output / name
    folder.mkdir(parents=True)
    trace = {
        "schemaVersion": 1,
        "traceEvents": events,
        "baseTimeNanoseconds": base_ns,
        "traceName": "trace.json",
    }
    (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    window = {
        "first_step": 3,
        "last_step": 4,
        "steps": 2,
        "planned_steps": 2,
        "truncated": False,
        "reason": None,
    }
    metadata = {
        "format": 1,
        "name": name,
        "window": window,
        "started_at": "2026-01-02T03:04:05.678901+00:00",
        "rank": 0,
        "world_size": 1,
        "pid": 77,
        "host": "box",
        "devices": [],
        "versions": {"torch": "2.13.0+cpu"},
        "config": {"activities": None, "profile_memory": False, "with_flops": False},
    }
    (folder / "capture.json").write_text(json.dumps(metadata | changed))
    return Capture.load(folder)


def inner_function(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x)


def outer_function(x: torch.Tensor) -> torch.Tensor:
    with record_function("block"):
        return inner_function(x)


def record(path: Path, *, with_stack: bool = False, profile_memory: bool = False) -> Path:
    """Let torch record two calls of `outer_function` and write its trace."""
    config = _ExperimentalConfig(verbose=True) if with_stack else None
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=profile_memory,
        with_stack=with_stack,
        experimental_config=config,
    ) as profiler:
        for _ in range(2):
            outer_function(torch.randn(64, 64))
    profiler.export_chrome_trace(str(path))
    return path
