"""The same answers found in plain loops, from the file or from the events, to compare with."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from instrument.read.facts.links import _HIDDEN
from instrument.read.trace.events import Events
from instrument.read.trace.scanner import TEXTS

ON_CPU = {"cpu_op", "Operator", "user_annotation"}


def top_level_ns(events: Events) -> int:
    """The time that CPU events fill, over all threads."""
    category = [events.categories[k] for k in events.category.tolist()]
    thread, external = events.thread.tolist(), events.external_id.tolist()
    correlation = events.correlation.tolist()
    owner: dict[int, int] = {}
    for k, kind in enumerate(category):
        if kind in ON_CPU:
            owner.setdefault(external[k], thread[k])
    lanes, calls = defaultdict(list), []
    for k, (kind, start, end) in enumerate(
        zip(category, events.start_ns.tolist(), events.end_ns.tolist())
    ):
        if events.names[events.name[k]] in _HIDDEN:
            continue
        if kind in ON_CPU:
            lanes[thread[k]].append((start, -end))
        elif kind == "Runtime" or kind.endswith(("_runtime", "_driver")):
            calls.append((k, start, end))
    of_calls = []
    for k, start, end in calls:
        named = external[k] if external[k] and external[k] != correlation[k] else None
        elsewhere = owner.get(named, thread[k]) != thread[k]
        bare = elsewhere and not any(first <= start <= -last for first, last in lanes[thread[k]])
        of_calls.append((owner[named] if bare else thread[k], (start, -end)))
    for lane, interval in of_calls:
        lanes[lane].append(interval)
    return sum(map(_top_of_one_thread, lanes.values()))


def _top_of_one_thread(intervals: list[tuple[int, int]]) -> int:
    total, filled_until, open_until = 0, min(intervals, default=(0, 0))[0], []
    for start, minus_end in sorted(intervals):
        end = -minus_end
        needed = end + (start == end)
        while open_until and open_until[-1] < needed:
            open_until.pop()
        if not open_until:
            total += max(end - max(start, filled_until), 0)
            filled_until = max(filled_until, end)
        open_until.append(end)
    return total


def raw(path: Path, parse_float: Callable[[str], Any] = float) -> list[dict[str, Any]]:
    """The events of a file as JSON; as decimals the times are exact, as floats of today's µs they are not."""
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    text = data.decode(errors="replace")
    return json.loads(text, strict=False, parse_float=parse_float)["traceEvents"]


def ns(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def device_backward_by_flows(path: Path) -> dict[str, int]:
    """As `backward_by_flows`, but what the backward launched on a device, joined by the correlation alone."""
    events = [e for e in raw(path) if e.get("ph") in ("X", "s", "f")]
    ranges = [(ns(e), e["tid"], e["name"]) for e in events if e.get("cat") == "user_annotation"]
    nodes = [(e["tid"], *ns(e)) for e in events if e["name"].startswith("autograd::engine")]
    tails = {e["id"]: e for e in events if e.get("cat") == "fwdbwd" and e["ph"] == "s"}
    heads = [e for e in events if e.get("cat") == "fwdbwd" and e["ph"] == "f"]
    calls = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    total: dict[str, int] = defaultdict(int)
    for event in events:
        call = calls.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or call is None:
            continue
        launched, _ = ns(call)
        (node,) = [n for n in nodes if n[0] == call["tid"] and n[1] <= launched < n[2]] or [None]
        arrows = [
            h
            for h in heads
            if node and h["tid"] == node[0] and node[1] <= round(h["ts"] * 1000) < node[2]
        ]
        for name in {name for arrow in arrows for name in _around(ranges, tails[arrow["id"]])}:
            total[name] += ns(event)[1] - ns(event)[0]
    return dict(total)


def _around(ranges: list[Any], tail: dict[str, Any]) -> set[str]:
    at = round(tail["ts"] * 1000)
    return {
        name for (first, last), tid, name in ranges if tid == tail["tid"] and first <= at <= last
    }


def backward_by_flows(path: Path) -> dict[str, int]:
    """Backward time of each name of a range, by the arrows that torch itself draws from an operator to its backward."""
    events = raw(path)
    ranges = [(ns(e), e["tid"], e["name"]) for e in events if e.get("cat") == "user_annotation"]
    nodes = [(e["tid"], *ns(e)) for e in events if e["name"].startswith("autograd::engine")]
    from_: dict[int, Any] = {
        e["id"]: e for e in events if e.get("cat") == "fwdbwd" and e["ph"] == "s"
    }
    total: dict[str, int] = defaultdict(int)
    for arrow in (e for e in events if e.get("cat") == "fwdbwd" and e["ph"] == "f"):
        head = round(arrow["ts"] * 1000)
        ((start, end),) = [(a, b) for tid, a, b in nodes if tid == arrow["tid"] and a <= head < b]
        for name in _around(ranges, from_[arrow["id"]]):
            total[name] += end - start
    return dict(total)


def same(a: Events, b: Events) -> bool:
    """Whether every column, and every name in its place, is the same; only the texts may have another order."""
    if sorted(a.texts) != sorted(b.texts):
        return False
    place = {text: code for code, text in enumerate(b.texts)}
    codes = np.array([*(place[text] for text in a.texts), -1], np.int32)
    for owner_a, owner_b in ((a, b), (a.memory, b.memory)):
        for field in fields(owner_a):
            left, right = getattr(owner_a, field.name), getattr(owner_b, field.name)
            if field.name in TEXTS:
                left = codes[left]
            if isinstance(left, np.ndarray):
                if left.dtype != right.dtype or not np.array_equal(
                    left, right, equal_nan=left.dtype.kind == "f"
                ):
                    return False
            elif field.name not in ("memory", "texts") and left != right:
                return False
    return True
