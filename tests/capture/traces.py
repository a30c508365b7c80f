"""Small traces written by hand."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from instrument.capture import Capture
from instrument.trace import reader
from instrument.trace.events import Events

Event = dict[str, Any]


def span(
    name: str, start_us: float, duration_us: float, cat: str = "cpu_op", tid: Any = 1, **args: Any
) -> Event:
    """An event with a duration; the underscores of argument names stand for spaces."""
    arguments = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid,
        "ts": start_us, "dur": duration_us, "args": arguments,
    }  # fmt: skip


def annotation(name: str, start_us: float, duration_us: float, **more: Any) -> Event:
    return span(name, start_us, duration_us, cat="user_annotation", **more)


def frame(name: str, start_us: float, duration_us: float, **more: Any) -> Event:
    return span(name, start_us, duration_us, cat="python_function", **more)


def kernel(name: str, start_us: float, duration_us: float, **args: Any) -> Event:
    return span(name, start_us, duration_us, cat="kernel", tid=100, **args)


def allocation(at_us: float, size: int, tid: Any = 1, device_type: int = 0) -> Event:
    arguments = {"Bytes": size, "Device Type": device_type, "Device Id": -1, "Total Allocated": 0}
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": tid,
        "ts": at_us, "args": arguments,
    }  # fmt: skip


def write(folder: Path, events: list[Any], **document: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({**document, "traceEvents": events}))
    return path


def read(folder: Path, events: list[Any], **document: Any) -> Events:
    return reader.read(write(folder, events, **document))


def capture(folder: Path, events: list[Any], **document: Any) -> Capture:
    return Capture.load(write(folder, events, **document))


def same(a: Events, b: Events) -> bool:
    """Whether every column, and every name in its place, is the same."""
    for owner_a, owner_b in ((a, b), (a.memory, b.memory)):
        for field in fields(owner_a):
            left, right = getattr(owner_a, field.name), getattr(owner_b, field.name)
            if isinstance(left, np.ndarray):
                if left.dtype != right.dtype or not np.array_equal(
                    left, right, equal_nan=left.dtype.kind == "f"
                ):
                    return False
            elif field.name != "memory" and left != right:
                return False
    return True
