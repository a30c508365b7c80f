"""What interrupted training: by hand, as this torch records it, and in real traces."""

from __future__ import annotations

import gc
import gzip
import json
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_traces
import torch
from builders import SINGLE_PROCESS, WORKERS, annotation, call, capture, frame, kernel, span, step
from golden import Golden, rows_as_lines
from hypothesis import given
from hypothesis import strategies as st
from installed import need_collections
from real_traces import load, needs_traces
from torch.utils.data import DataLoader

from capture.plain_loops import raw
from instrument import Session
from instrument.read.capture import Capture

pytestmark = pytest.mark.usefixtures("inline_export")

COMPILE = "_compile.compile_inner (dynamo_timed)"

TRAINING = [
    step(1, 0, 1000),
    step(2, 1000, 1000),
    step(3, 2000, 500, finished=False),
    annotation(WORKERS, 0, 100),
    annotation("enumerate(DataPipe)#MapperIterDataPipe", 10, 50),  # inside the loader
    frame("Python GC", 20, 30),
    frame("Python GC", 30, 40, tid=5),  # on another thread, partly at the same time
    annotation("Python GC", 300, 5),  # the user's own range
    span("a (dynamo_timed)", 400, 100),
    span("b (dynamo_timed)", 450, 100),  # overlaps the one before
    call("cudaMalloc", 600, 50),
    span("cuMemCreate", 610, 10, "cuda_driver"),  # inside the one before
    kernel("cudaMalloc", 700, 80),  # not a call
    span("TorchDynamo Cache Lookup", 1100, 10),
    span(COMPILE, 1200, 400),
    span("backend_compile (dynamo_timed)", 1250, 100),
    span("Driver Compiler", 1300, 20, "overhead", pid=-1, tid=0),
    annotation(WORKERS, 1900, 200),  # 100 of it in step 2
    call("cudaMalloc", 2200, 7),  # in no finished step
]


def test_every_column_by_hand(tmp_path: Path, golden: Golden) -> None:
    """Without a finished step, the columns of steps are unknown."""
    traces = {
        "a training": TRAINING,
        "no finished step": [step(1, 0, 50, finished=False), call("cudaFree", 5, 9)],
        "no interruption": [span("aten::mm", 0, 1)],
        "nothing": [],
    }
    tables = {name: capture(tmp_path, events).interruptions for name, events in traces.items()}
    golden("interruptions.txt", rows_as_lines(tables))


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_time_in_steps_is_that_of_a_plain_loop(tmp_path: Path, seed: int, follow: bool) -> None:
    """Steps follow each other, or overlap and contain each other; calls overlap on several threads."""
    random = np.random.default_rng(seed)
    starts = np.arange(30) * 10 if follow else random.permutation(300)[:30]
    lengths = np.full(30, 10) if follow else random.integers(0, [60, 200][seed % 2], 30)
    steps = [*zip(starts.tolist(), (starts + lengths).tolist())]
    calls = defaultdict(list)
    for at, took in zip(random.integers(0, 320, 80).tolist(), random.integers(0, 20, 80).tolist()):
        calls[f"x{random.integers(0, 25)} (dynamo_timed)"].append((at, at + took))
    calls["all (dynamo_timed)"].append((-5, 999))
    events = [step(k, a, b - a) for k, (a, b) in enumerate(steps)]
    each = [(name, *call) for name, its in calls.items() for call in its]
    events += [span(name, a, b - a, tid=90 + k) for k, (name, a, b) in enumerate(each)]
    covered = {name: {ns for a, b in its for ns in range(a, b)} for name, its in calls.items()}
    begun = sorted(starts.tolist())
    longest = dict(sorted(steps))
    ends = [longest[a] for a in begun]
    counted = [*zip(begun, map(min, ends, [*begun[1:], 999]))][1:]
    inside = {name: [len(ns & {*range(a, b)}) for a, b in counted] for name, ns in covered.items()}
    found = capture(tmp_path, events).interruptions
    assert {row.name: (row.step_ns, row.steps) for row in found} == {
        name: (1000 * sum(us), sum(map(bool, us))) for name, us in inside.items()
    }


def test_names_times_steps_are_not_held_in_memory(tmp_path: Path) -> None:
    count = 2000
    events = [step(k, 10 * k, 10) for k in range(count)]
    events += [span(f"x{k} (dynamo_timed)", 10 * k + 5, 4) for k in range(count)]
    made = capture(tmp_path, events)
    assert len(made.events) == 2 * count
    tracemalloc.start()
    try:
        found = made.interruptions
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(found.column("steps")) == [0, *[1] * (count - 1)]
    assert most < count * count * 4, "a matrix of 64-bit integers has twice as many bytes"


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("Operator", SINGLE_PROCESS, "loader"),
        ("user_annotation", "enumerate(DataPipe)#Shuffler", "loader"),
        ("user_annotation", "enumerate(batches)", None),
        ("python_function", "collect.py(3): Python GC", None),
        ("cpu_op", "Torch-Compiled Region: 0/0", None),
        ("cpu_op", "CachingAutotuner.benchmark_all_configs (dynamo_timed)", "compilation"),
        ("python_function", "x (dynamo_timed)", None),
        ("Runtime", "cudaFree", "memory allocation"),
        ("cuda_runtime", "cudaHostAlloc", "memory allocation"),
        ("cuda_runtime", "cudaMallocAsync_v11020", "memory allocation"),
        ("cuda_runtime", "cudaHostGetDevicePointer", None),
        ("cuda_runtime", "cudaMemcpyAsync", None),
        ("cuda_driver", "cuMemMap", "memory allocation"),
        ("cuda_driver", "cuLaunchKernel", None),
        ("cuda_driver", "cuModuleLoadData", "module loading"),
        ("cuda_driver", "cuLibraryLoadData", "module loading"),
        ("cuda_runtime", "hipExtMallocWithFlags", "memory allocation"),
        ("cuda_runtime", "hipModuleLoadData", "module loading"),
        ("cuda_runtime", "hipModuleLaunchKernel", None),
        ("xpu_runtime", "urUSMDeviceAlloc", "memory allocation"),
        ("xpu_runtime", "zeModuleCreate", "module loading"),
        ("cpu_op", "cudaMalloc", None),
        ("overhead", "Lazy Function Loading", "module loading"),
        ("overhead", "Runtime Triggered Module Loading", "module loading"),
        ("overhead", "Command Buffer Full", "full launch queue"),
        ("overhead", "Buffer Flush", "profiler"),
        ("overhead", "Unrecognized", "other overhead"),
    ],
)  # fmt: skip
def test_which_event_is_what(tmp_path: Path, category: str, name: str, kind: str | None) -> None:
    found = capture(tmp_path, [span(name, 0, 9, category)]).interruptions
    assert found.column("kind") == ([] if kind is None else [kind])


def recorded(tmp_path: Path, step: Callable[[], Any], **options: Any) -> tuple[Capture, list[Any]]:
    """A window of three steps, and the events of its file."""
    with Session(active=3, output_dir=tmp_path, **options) as session:
        for _ in range(3):
            step()
            session.step()
    (made,) = session.captures
    text = gzip.decompress(made.trace_path.read_bytes()).decode("utf-8", "replace")
    return made, json.loads(text, strict=False)["traceEvents"]


@pytest.mark.parametrize(("workers", "name"), [(0, SINGLE_PROCESS), (2, WORKERS)])
def test_the_loader_as_torch_records_it(tmp_path: Path, workers: int, name: str) -> None:
    loader = iter(DataLoader(torch.ones(24, 2), batch_size=4, num_workers=workers))  # type: ignore[arg-type]
    made, events = recorded(tmp_path, lambda: next(loader).sum())
    (row,) = made.interruptions.where(kind="loader")
    assert (row.name, row.calls, row.steps, row.workers) == (name, 3, 2, workers > 0)
    assert row.cpu_ns == sum(round(e["dur"] * 1000) for e in events if e.get("name") == name)
    assert row.step_ns < row.cpu_ns, "the first step does not count"


def test_garbage_collections_are_those_that_python_reports(tmp_path: Path) -> None:
    need_collections()
    reported = Counter[str]()

    def count(phase: str, _: dict[str, int]) -> None:
        reported[phase] += 1

    def collects() -> None:
        gc.callbacks.append(count)
        for generation in (0, 1, 0):
            gc.collect(generation)
        gc.callbacks.remove(count)

    was_on = gc.isenabled()
    gc.disable()
    try:
        made, _ = recorded(
            tmp_path, collects, with_stack=True, experimental_config={"record_python_gc_info": True}
        )
    finally:
        if was_on:
            gc.enable()
    (row,) = made.interruptions.where(kind="garbage collection")
    assert reported == {"start": 9, "stop": 9}
    assert (row.calls, row.steps, row.threads) == (9, 2, 1)
    assert 0 < row.step_ns < row.cpu_ns
    assert row.max_ns <= row.cpu_ns


def test_a_compilation_inside_a_window(tmp_path: Path, log) -> None:
    log.expect("torch.compile compiled")
    torch._dynamo.reset()
    sizes = iter((2, 2, 3))
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")
    made, events = recorded(tmp_path, lambda: compiled(torch.ones(next(sizes))))
    (row,) = made.interruptions.where(name=COMPILE)
    assert (row.kind, row.calls, row.steps) == ("compilation", 2, 1), (
        "the first step does not count"
    )
    assert row.cpu_ns == sum(round(e["dur"] * 1000) for e in events if e.get("name") == COMPILE)
    (guards,) = made.interruptions.where(kind="guards")
    assert guards.calls == sum(e.get("name") == guards.name for e in events) >= 2


def by_name(path: Path, *names: str) -> dict[str, tuple[int, int, int]]:
    """Calls, time and longest call of events with these names, none of which nest."""
    lengths = defaultdict(list)
    for event in raw(path):
        if event.get("ph") == "X" and event["name"] in names:
            lengths[event["name"]].append(round(event["dur"] * 1000))
    return {name: (len(each), sum(each), max(each)) for name, each in lengths.items()}


@needs_traces
@pytest.mark.parametrize(
    ("name", "expected"),
    real_traces.each(
        [
            (
                "hta_simple_add",
                dict.fromkeys(
                    ("cudaMalloc", "cudaFree", "cudaHostAlloc"), ("memory allocation", None)
                ),
            ),
            ("v100_resnet50_workers0", {SINGLE_PROCESS: ("loader", False)}),
            ("v100_resnet50_workers4", {WORKERS: ("loader", True)}),
            (
                "b200_eager",
                {
                    "Activity Buffer Request": ("profiler", None),
                    "Lazy Function Loading": ("module loading", None),
                    "TorchDynamo Cache Lookup": ("guards", None),
                },
            ),
            (
                "a100_megatron_tp8_rank1",
                {WORKERS: ("loader", True), "TorchDynamo Cache Lookup": ("guards", None)},
            ),
            ("mtia_rank0", {}),
        ]
    ),
)
def test_real_traces(name: str, expected: dict[str, tuple[str, bool | None]]) -> None:
    found = load(name).interruptions
    assert {row.name: (row.kind, row.workers) for row in found} == expected
    assert {row.name: (row.calls, row.cpu_ns, row.max_ns) for row in found} == by_name(
        real_traces.path(name), *expected
    )


@needs_traces
@pytest.mark.parametrize(
    ("name", "plugin_us"),
    real_traces.each([("v100_resnet50_workers4", 1186), ("v100_resnet50_workers0", 59262)]),
)
def test_the_wait_for_the_loader_is_at_least_that_of_tensorboards_plugin(name, plugin_us) -> None:
    """The plugin leaves out the time in which the device works; both traces have six steps."""
    (row,) = load(name).interruptions
    assert plugin_us * 1000 - 500 <= row.cpu_ns / 6
    assert row.steps == 5, "the first step does not count"
