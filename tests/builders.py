"""Traces and captures written by hand, whose every number is known; times are in µs, as in a trace.

CPU events lie on thread 1 of process 1, device work on stream 7 of device 0, unless `tid` or `pid` says otherwise. The
underscores of an argument's name stand for blanks: `Input_Dims=[[8, 3]]`.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from instrument.base.files import lines_file
from instrument.read.capture import Capture
from instrument.read.ranks.rank_summary import write
from instrument.read.show.text import view_part
from instrument.read.trace import reader
from instrument.read.trace.events import Events
from instrument.read.views.layout import plain

Event = dict[str, Any]

CPU, DEVICE = {"pid": 1, "tid": 1}, {"pid": 0, "tid": 7}
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync"}
SINGLE_PROCESS = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"
ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
REDUCES = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
WINDOW = {
    "first_step": 3, "last_step": 4, "steps": 2, "planned_steps": 2, "truncated": False,
    "reason": None,
}  # fmt: skip

MIB = 1024**2


def span(
    name: str,
    start_us: float,
    duration_us: float,
    cat: str = "cpu_op",
    *,
    pid: Any = None,
    tid: Any = None,
    **args: Any,
) -> Event:
    """An operator, or with another category any event that lasts."""
    lane = DEVICE if cat in ON_DEVICE else CPU
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": lane["pid"] if pid is None else pid,
        "tid": lane["tid"] if tid is None else tid,
        "ts": start_us,
        "dur": duration_us,
        "args": {key.replace("_", " "): value for key, value in args.items()},
    }


def annotation(name: str, start_us: float, duration_us: float, **more: Any) -> Event:
    """A range."""
    return span(name, start_us, duration_us, "user_annotation", **more)


def step(number: int, start_us: float, duration_us: float, **more: Any) -> Event:
    return annotation(f"ProfilerStep#{number}", start_us, duration_us, **more)


def in_steps(count: int, length_us: float, *inside: Event) -> list[Event]:
    """Equal steps, numbered from 0, each with these events, whose times are since the start of their step."""
    return [
        {**event, "ts": event["ts"] + number * length_us}
        for number in range(count)
        for event in (step(number, 0, length_us), *inside)
    ]


def frame(name: str, start_us: float, duration_us: float, **more: Any) -> Event:
    """A Python function."""
    return span(name, start_us, duration_us, "python_function", **more)


def call(
    name: str, start_us: float, duration_us: float, correlation: int = 0, **more: Any
) -> Event:
    """A call of the device's runtime; what it started has the same correlation."""
    return span(name, start_us, duration_us, "cuda_runtime", correlation=correlation, **more)


def kernel(name: str, start_us: float, duration_us: float, **more: Any) -> Event:
    return span(name, start_us, duration_us, "kernel", **more)


def copy(start_us: float, duration_us: float, **more: Any) -> Event:
    """A copy to the device, on stream 8."""
    return span(PINNED, start_us, duration_us, "gpu_memcpy", **{"tid": 8, **more})


def synchronisation(
    kind: str, start_us: float, duration_us: float, *, tid: Any = None, **args: Any
) -> Event:
    """A `cuda_sync` event, with the names of its arguments as Kineto writes them: `wait_on_stream=7`."""
    event = span(kind, start_us, duration_us, "cuda_sync", tid=tid)
    return {**event, "args": {"cuda_sync_kind": kind, **args}}


def launched(
    name: str, called_us: float, start_us: float, duration_us: float, correlation: int, **more: Any
) -> list[Event]:
    """A kernel and the call of 5 µs that launched it."""
    return [
        call("cudaLaunchKernel", called_us, 5, correlation),
        kernel(name, start_us, duration_us, correlation=correlation, **more),
    ]


def made(name: str, start_us: float, duration_us: float, sequence: int, **more: Any) -> Event:
    """An operator that notes the sequence number of the backward node that it makes."""
    return span(name, start_us, duration_us, Sequence_number=sequence, Fwd_thread_id=0, **more)


def node(
    name: str, start_us: float, duration_us: float, sequence: int, thread: int = 1, tid: int = 2
) -> Event:
    """The backward node of the operator with that number on the thread that torch calls `thread`."""
    numbers = {"Sequence_number": sequence, "Fwd_thread_id": thread}
    return span(ENGINE + name, start_us, duration_us, tid=tid, **numbers)


def accumulation(start_us: float, duration_us: float, tid: int = 2) -> list[Event]:
    """The node that adds to a parameter's gradient."""
    return [
        span(ENGINE + ACCUMULATE, start_us, duration_us, tid=tid),
        span(ACCUMULATE, start_us + 1, duration_us - 2, tid=tid),
    ]


def allocation(
    at_us: float,
    size: int,
    address: int | None = None,
    total: int | None = None,
    *,
    device: int | None = None,
    reserved: int = 0,
    tid: Any = 1,
) -> Event:
    """An allocation on the CPU or a device, or a free where the size is negative; `total` is what lives after it."""
    arguments = {
        "Bytes": size,
        "Device Type": 0 if device is None else 1,
        "Device Id": -1 if device is None else device,
    }
    if address is not None:
        arguments["Addr"] = address
    if total is not None:
        arguments |= {"Total Allocated": total, "Total Reserved": reserved}
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": tid,
        "ts": at_us, "args": arguments,
    }  # fmt: skip


def _of_device(at_us: int, mebibytes: int, address: int, total: int) -> Event:
    size, total = mebibytes * MIB, total * MIB
    return allocation(at_us, size, address, total, device=0, reserved=64 * MIB)


# Allocations beside `steps()`: in the matrix product of step 3 and of step 4, in forward, and from before.
MEMORY = [
    _of_device(260, 24, 1, 32),
    _of_device(650, 6, 2, 38),
    _of_device(900, -24, 1, 14),
    _of_device(1300, 10, 3, 24),
    _of_device(1500, -8, 9, 16),
]


def steps() -> list[Event]:
    """Steps 3 and 4 of 1000 µs; in each `forward` of 600 around `attention` of 400 around a matrix product of 300."""
    events = []
    for number, start in ((3, 0), (4, 1000)):
        events += [
            step(number, start, 1000),
            annotation("forward", start + 100, 600),
            annotation("attention", start + 200, 400),
            span("aten::mm", start + 250, 300, Input_Dims=[[8, 3], [3, 4]], External_id=number),
            span("aten::relu", start + 800, 50, Input_Dims=[[8, 4]]),
        ]
    return events


def kernels() -> list[Event]:
    """A kernel of 70 µs for the product of step 3, and one of 30 for that of step 4."""
    events = []
    for number, start, length in ((3, 0, 70), (4, 1000, 30)):
        events += [
            call("cudaLaunchKernel", start + 260, 10, number, External_id=number),
            kernel("gemm", start + 300, length, correlation=number, External_id=number),
        ]
    return events


def synchronous_steps(own_us: int, *, device: bool = False, later_us: float = 0) -> list[Event]:
    """Steps 3 and 4 of 1000 µs on one rank of several: work of its own, then an all-reduce that ends after 900.

    On the CPU the work is the range `forward` and the all-reduce gloo's; on a device both are kernels, launched within
    the first 20 µs. The rank's clock is ahead by `later_us`.
    """
    events = []
    for number, start in ((3, later_us), (4, 1000 + later_us)):
        events.append(step(number, start, 1000))
        if device:
            first = 10 * number
            events += launched("gemm", start, start + 30, own_us, first)
            events += launched(REDUCES, start + 10, start + 30 + own_us, 870 - own_us, first + 1)
        else:
            events += [
                annotation("forward", start, own_us),
                span("aten::mm", start, own_us),
                annotation("gloo:all_reduce", start + own_us, 900 - own_us, tid=2),
            ]
    return events


def write_trace(folder: Path, events: list[Any], **document: Any) -> Path:
    """The bare file `trace.json`, with keys of the document beside its events."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json"
    path.write_text(json.dumps({**document, "traceEvents": events}))
    return path


def read(folder: Path, events: list[Any], **document: Any) -> Events:
    return reader.read(write_trace(folder, events, **document))


def capture(folder: Path, events: list[Any], **document: Any) -> Capture:
    """The capture of a bare file."""
    return Capture.load(write_trace(folder, events, **document))


def write_capture(
    output: Path, events: list[Event], name: str = "steps_3-4", *, base_ns: int = 0, **changed: Any
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
    metadata = {
        "format": 1,
        "name": name,
        "window": WINDOW,
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


BACKWARD = ("library", "torch/autograd/graph.py", 9, "_engine_run_backward")


def write_samples(
    output: Path, samples: Sequence[tuple[float | None, Sequence[Any]]], base_ns: int = 0
) -> None:
    """The file of the lines of a run: of each sample the time in the window (None: outside of it), and its stack.

    The innermost frame is first; a number is a line of the user's train.py.
    """
    stacks = [
        [
            frame if isinstance(frame, tuple) else ("user", "train.py", frame, "main")
            for frame in stack
        ]
        for _, stack in samples
    ]
    frames = list(dict.fromkeys(frame for stack in stacks for frame in stack))
    content = {
        "format": 1,
        "frames": frames,
        "stacks": [[frames.index(frame) for frame in stack] for stack in stacks],
        "counts": [[0, "train", "", number, 1] for number in range(len(samples))],
        "times": [
            [base_ns + round(at * 1000), number]
            for number, (at, _) in enumerate(samples)
            if at is not None
        ],
    }
    (output / lines_file(0)).write_text(json.dumps(content))


def write_rank(
    output: Path, rank: int, events: list[Event], world_size: int = 4, **changed: Any
) -> Capture:
    """The capture of one rank of several, with the summary that an exporter writes."""
    name = f"steps_000003-000004_rank{rank}"
    made = write_capture(output, events, name, rank=rank, world_size=world_size, **changed)
    write(made, made.folder)
    return made


def payload_of(page: Path) -> Any:
    """What a report page shows, unpacked as the page does."""
    packed = re.search(r'id="payload">([^<]*)<', page.read_text(encoding="utf-8"))
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def is_harmless(text: str) -> bool:
    """Whether every line of a text can be shown on a terminal as it is."""
    return all(line.isprintable() for line in text.split("\n"))


def view_text(
    capture: Capture, view: str, *, rows: int = 15, columns: list[str] | None = None
) -> str:
    """The first rows of a view as plain text; `view` is the attribute's name, such as "memory_devices"."""
    return plain([view_part(view, attrgetter(view)(capture), rows=rows, columns=columns)])
