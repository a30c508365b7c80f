"""Recordings of torch's own profiler: of a block, with the ranges that its trace holds, and of two nested functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from instrument import Capture, Session
from instrument.annotate import backends


def run_session(
    folder: Path, steps: int, each: Callable[[], object] = lambda: None, **options: Any
) -> Session:
    """Run a session of these options for some steps, and call `each` in each of them."""
    with Session(output_dir=folder, **{"active": None, **options}) as session:
        for _ in range(steps):
            each()
            session.step()
    return session


def window(folder: Path, each: Callable[[], object] = lambda: None, **options: Any) -> Capture:
    """The capture of a window of one step, in which `each` is called."""
    (capture,) = run_session(folder, 1, each, **{"active": 1, **options}).captures
    return capture


class Ranges:
    """What `recorded` gives: after the block, `ranges` holds (name, parent) of each range in order of its start."""

    ranges: list[tuple[str, str | None]]
    raw: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ranges]


@contextmanager
def recorded(folder: Path, *, all_threads: bool = False) -> Iterator[Ranges]:
    """Record the block with torch's own profiler and read the user annotations from its trace."""
    result = Ranges()
    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        backends.arm()
        try:
            yield result
        finally:
            backends.disarm()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    result.raw = sorted(
        (e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"]
    )
    result.ranges = [(e["name"], _parent(e, result.raw)) for e in result.raw]


def _parent(event: dict[str, Any], events: list[dict[str, Any]]) -> str | None:
    around = [
        other
        for other in events
        if other is not event
        and other["tid"] == event["tid"]
        and other["ts"] <= event["ts"]
        and other["ts"] + other["dur"] >= event["ts"] + event["dur"]
    ]
    return max(around, key=lambda e: e["ts"])["name"] if around else None


def inner_function(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x)


def outer_function(x: torch.Tensor) -> torch.Tensor:
    with record_function("block"):
        return inner_function(x)


def export(path: Path, body: Callable[[], object], device: str = "cpu", **options: Any) -> profile:
    """Record a body with torch's own profiler and write its trace."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()  # so that nothing of the warm-up runs in the window
    with profile(activities=activities, **options) as profiler:
        body()
    profiler.export_chrome_trace(str(path))
    return profiler


def record(path: Path, *, with_stack: bool = False, profile_memory: bool = False) -> Path:
    """Let torch record two calls of `outer_function` and write its trace."""

    def body() -> None:
        for _ in range(2):
            outer_function(torch.randn(64, 64))

    config = _ExperimentalConfig(verbose=True) if with_stack else None
    options = {"with_stack": with_stack, "profile_memory": profile_memory}
    export(path, body, record_shapes=True, experimental_config=config, **options)
    return path
