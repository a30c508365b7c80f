"""The section *Flame graph*: Python stacks or sampled lines, and ranges with their operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instrument.base.prose import shortened
from instrument.read.facts.groupby import intern
from instrument.read.facts.links import Links
from instrument.read.facts.places import has_sources
from instrument.read.views.stacks import LONGEST_FRAME, Stack, call_paths, sampled_stacks
from instrument.read.views.views import Views

#: The most frames of a graph. A graph leaves out the frames with the least time.
MOST_FRAMES = 12_000


@dataclass
class Frame:
    """All frames with the same name and caller; `value_ns` includes the time of called frames."""

    name: str
    value_ns: int = 0
    calls: dict[str, Frame] = field(default_factory=dict)


def flame_graphs(capture: Views) -> dict[str, Any] | None:
    """Return the flame graphs of a capture; None if no frame has a time.

    A graph merges all steps and threads; that of samples (`profiler.lines`) those of the whole run.
    Beside the columns, it has a `name`, the kind of its
    frames, and a `value`, the meaning of their widths.

    Cost: about 2 µs per event, more with Python frames.
    """
    links = capture.links
    metrics: dict[Literal["cpu", "device"], str] = {"cpu": "CPU time"}
    if len(links.launches.device):
        metrics["device"] = "device time"
    kinds: dict[str, Iterable[list[Stack]]] = {}
    lines: list[tuple[str, str, list[Stack]]] = []
    if has_sources(capture):
        kinds["Python stacks"] = call_paths(Links(capture.events, python=True), [*metrics])
    elif samples := capture.facts.samples():
        stacks = sampled_stacks(samples, capture.phase)
        lines.append(("Lines, by samples of the whole run", "time", stacks))
    kinds["Ranges and operators"] = call_paths(links, [*metrics], frames=False)
    ranges = {shortened(name, LONGEST_FRAME) for name in links.scopes.paths.names}
    drawn = (
        (name, value, stacks)
        for name, paths in kinds.items()
        for value, stacks in zip(metrics.values(), paths)
    )
    graphs = [
        {"name": name, "value": value, **columns(merged(stacks), ranges)}
        for name, value, stacks in (*lines, *drawn)
    ]
    found = [graph for graph in graphs if graph["name_of"]]
    return {"graphs": found} if found else None


def columns(root: Frame, ranges: set[str]) -> dict[str, Any]:
    """Return the data of one flame graph: the names, depths and times of its frames.

    `names` and `is_range` are the distinct names, and whether each is a range. `depth` (the number
    of callers), `name_of` (an index into `names`) and `self` (the frame's own time) have a value
    for each frame, callers first. `left_out` is the number of frames that are left out; the own
    time of their callers includes their time.

    Args:
        root: the tree of frames; the graph shows the frames below the root.
        ranges: the names of all ranges.
    """
    frames = _in_order(root, 0)
    least_ns = 0
    if len(frames) > MOST_FRAMES:
        least_ns = sorted((frame.value_ns for _, frame in frames), reverse=True)[MOST_FRAMES]
    kept = _in_order(root, least_ns)
    code, names = intern(frame.name for _, frame in kept)
    return {
        "names": [shortened(name, LONGEST_FRAME) for name in names],
        "is_range": [name in ranges for name in names],
        "depth": [depth for depth, _ in kept],
        "name_of": code.tolist(),
        "self": [
            frame.value_ns
            - sum(called.value_ns for called in frame.calls.values() if called.value_ns > least_ns)
            for _, frame in kept
        ],
        "left_out": len(frames) - len(kept),
    }


def merged(stacks: Sequence[Stack]) -> Frame:
    """Merge call paths into a tree: frames with the same name and caller become one frame."""
    root = Frame("all")
    for stack in stacks:
        root.value_ns += stack.value_ns
        at = root
        for name in stack.frames:
            at = at.calls.setdefault(name, Frame(name))
            at.value_ns += stack.value_ns
    return root


def _in_order(root: Frame, least_ns: int) -> list[tuple[int, Frame]]:
    """Return the depth and the frame of all frames above `least_ns`; callers precede callees.

    The function is not recursive, because stacks may be deeper than Python's recursion limit.
    """
    found = []
    waiting = [(0, frame) for frame in root.calls.values()]
    while waiting:
        depth, frame = waiting.pop()
        if frame.value_ns > least_ns:
            found.append((depth, frame))
            waiting += [(depth + 1, called) for called in frame.calls.values()]
    return found
