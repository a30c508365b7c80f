"""Recordings of real training, made once: the trace file and what torch itself says of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import export
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import MemRecordsAcc
from torch.profiler import profile, record_function
from torch.utils.checkpoint import checkpoint

from instrument.read.capture import Capture
from instrument.read.facts import loops
from instrument.read.trace import scanner

# Our columns, and what torch calls them.
COLUMNS = {
    "calls": "count",
    "cpu_ns": "cpu_time_total",
    "self_cpu_ns": "self_cpu_time_total",
    "cpu_bytes": "cpu_memory_usage",
    "self_cpu_bytes": "self_cpu_memory_usage",
}
DEVICE_COLUMNS = {
    "device_ns": "device_time_total",
    "self_device_ns": "self_device_time_total",
    "device_bytes": "device_memory_usage",
    "self_device_bytes": "self_device_memory_usage",
}
# Older torch looks for an event's memory in floats of µs since 1970, which lie a quarter of a µs apart: what is
# allocated that near an event's start or end counts where it does not belong, or as of no event, in a row of its own.
EXACT_MEMORY = "start_ns" in signature(MemRecordsAcc.in_interval).parameters
if not EXACT_MEMORY:
    for columns in (COLUMNS, DEVICE_COLUMNS):
        for name in [name for name in columns if name.endswith("_bytes")]:
            del columns[name]
INEXACT_ROWS = set() if EXACT_MEMORY else {"[memory]"}
# torch 2.14 leaves the rows of Python's frames out unless asked for them; older torch cannot leave them out.
WITH_FRAMES = (
    {"include_python_functions": True}
    if "include_python_functions" in signature(profile.key_averages).parameters
    else {}
)


@pytest.fixture(params=["scanned", "decoded"])
def each_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read with the compiled modules, and as on a machine without a compiler."""
    if request.param == "decoded":
        monkeypatch.setattr(scanner, "compiled", None)
        monkeypatch.setattr(loops, "compiled", None)
    elif scanner.compiled is None:
        pytest.skip("the scanner is not compiled")


@dataclass
class Recording:
    """A trace, and torch's rows: by name, and by name and shapes, each a tuple in the order of COLUMNS.

    Where a device was recorded, DEVICE_COLUMNS follow, and `on_device` has the calls and nanoseconds of what ran there.
    """

    path: Path
    by_name: dict[str, tuple[int, ...]]
    by_shapes: dict[tuple[str, str], tuple[int, ...]]
    on_device: dict[str, tuple[int, int]]

    @property
    def capture(self) -> Capture:
        return Capture.load(self.path)


def record(path: Path, body: Callable[[], None], device: str = "cpu", **options: Any) -> Recording:
    """Profile a body and export the trace; torch's µs are floats of whole nanoseconds."""
    options = {"record_shapes": True, "profile_memory": True, **options}
    columns = COLUMNS | (DEVICE_COLUMNS if device == "cuda" else {})
    profiler = export(path, body, device, **options)

    def rows(*, shapes: bool) -> dict[Any, tuple[int, ...]]:
        found = {}
        for row in profiler.key_averages(group_by_input_shape=shapes, **WITH_FRAMES):
            if row.device_type != DeviceType.CPU or row.key in INEXACT_ROWS:
                continue
            key = (row.key, str(row.input_shapes)) if shapes else row.key
            assert key not in found, "torch has two rows of one name: the comparison would lose one"
            values = {ours: getattr(row, theirs) for ours, theirs in columns.items()}
            found[key] = tuple(
                round(v * 1000) if name.endswith("ns") else v for name, v in values.items()
            )
        return found

    on_device = {
        row.key: (row.count, round(row.self_device_time_total * 1000))
        for row in profiler.key_averages()
        if row.device_type != DeviceType.CPU and not row.is_user_annotation
    }
    return Recording(path, rows(shapes=False), rows(shapes=True), on_device)


def training(
    model: nn.Module, forward: Callable[[], torch.Tensor], steps: int = 3
) -> Callable[[], None]:
    """Steps of forward, backward and optimizer, warmed up."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        with record_function("forward"):
            loss = forward().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def body() -> None:
        for _ in range(steps):
            step()

    step()
    return body


def convolutions(device: str = "cpu") -> Callable[[], None]:
    """The only one with steps, so that in the others memory lies outside every call."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), head).to(device)
    step = training(model, lambda: model(torch.randn(2, 3, 8, 8, device=device)), steps=1)

    def body() -> None:
        for number in range(3):
            with record_function(f"ProfilerStep#{number}"):
                step()

    return body


def transformer(device: str = "cpu") -> Callable[[], None]:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).to(
        device
    )
    return training(model, lambda: model(torch.randn(2, 5, 16, device=device)))


def lstm(device: str = "cpu") -> Callable[[], None]:
    model = nn.LSTM(8, 16, 2).to(device)
    return training(model, lambda: model(torch.randn(4, 3, 8, device=device))[0])


def checkpointed(device: str = "cpu") -> Callable[[], None]:
    """An embedding and a checkpointed MLP, in ranges of one name inside each other."""
    embedding, mlp = nn.Embedding(20, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = nn.ModuleList([embedding, mlp]).to(device)

    def forward() -> torch.Tensor:
        x = embedding(torch.randint(0, 20, (4, 6), device=device))
        for _ in range(3):
            with record_function("block"), record_function("block"):
                x = checkpoint(mlp, x, use_reentrant=False)
        return x

    return training(model, forward)


def _work(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x @ x, x @ x @ x])


def _start(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(_work, x)


def threaded() -> Callable[[], None]:
    """Training on the CPU after another thread has allocated, while a range of this one waited for it.

    Of Python's own threads torch records either nothing or no memory; TorchScript's fork hands its state on.
    """
    with warnings.catch_warnings():
        # TorchScript is deprecated; torch 2.14 changed the category to FutureWarning
        warnings.filterwarnings("ignore", "`torch.jit")
        start = torch.jit.script(_start)
    train, given = transformer(), torch.ones(60, 60)

    def body() -> None:
        with record_function("waiting"):
            kept = start(given).wait()
        train()
        assert kept.shape == (120, 60)

    start(given).wait()
    return body


BODIES = {f.__name__: f for f in (convolutions, checkpointed, threaded, transformer, lstm)}


def each_body(*without: str) -> list[Any]:
    """Parameters of a test on recordings: three in `make test`, all in `make nightly`."""
    nightly = ("transformer", "lstm")
    return [
        pytest.param(name, marks=pytest.mark.nightly if name in nightly else [])
        for name in BODIES
        if name not in without
    ]


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recording]:
    """The recording of a model by its function's name, the device, and whether Python's frames are in it."""

    @cache
    def get(name: str, device: str = "cpu", with_stack: bool = False) -> Recording:
        torch.manual_seed(0)
        body = BODIES[name]() if device == "cpu" else BODIES[name](device)
        path = tmp_path_factory.mktemp(name) / "trace.json"
        return record(path, body, device, with_stack=with_stack)

    return get
