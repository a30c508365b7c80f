"""A flame graph as an SVG picture without scripts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from instrument.analysis.stacks import Stack
from instrument.base.printable import printable
from instrument.base.templates import render
from instrument.base.units import duration

_WIDTH, _ROW, _HEAD, _EDGE = 1200, 17, 30, 10
_LETTER = 6.6  # the width of a letter in pixels
_LEAST = 0.3  # the least width of a box in pixels; thousands of boxes are too narrow to see


@dataclass
class Frame:
    """All frames with the same name and caller; `value_ns` includes the time of called frames."""

    name: str
    value_ns: int = 0
    calls: dict[str, Frame] = field(default_factory=dict)


class _Box(NamedTuple):
    """A frame in the picture; positions and sizes are in pixels."""

    x: float
    y: int
    width: float
    label: str
    tooltip: str
    colour: str


def svg(stacks: Sequence[Stack], title: str) -> str:
    """Return call paths as a flame graph in SVG; the name and time of a box are shown on hover.

    The width of a box is proportional to its time. The box of a caller is below the boxes of the
    frames that it calls. Frames with the same name and caller share a box. Boxes are ordered by
    name. The whole graph is 1,180 pixels wide. Boxes narrower than 0.3 pixels are left out, but
    their time is still in the box of the caller.
    """
    root = merged(stacks)
    scale = (_WIDTH - 2 * _EDGE) / root.value_ns if root.value_ns else 0.0
    placed = list(_placed(root, scale))
    height = _HEAD + (max(level for *_, level in placed) + 1) * _ROW + _EDGE
    return render(
        "report/templates/stacks.svg",
        title=title,
        boxes=[
            _box(frame, x, height - _EDGE - (level + 1) * _ROW, scale, root)
            for frame, x, level in placed
        ],
        width=_WIDTH,
        height=height,
        edge=_EDGE,
        box_height=_ROW - 1,
    )


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


def _placed(root: Frame, scale: float) -> Iterator[tuple[Frame, float, int]]:
    """Yield each frame to draw, its left edge and its level; callers come before called frames.

    The function is not recursive, because stacks may be deeper than Python's recursion limit.
    """
    waiting = [(root, float(_EDGE), 0)]
    while waiting:
        frame, x, level = waiting.pop()
        yield frame, x, level
        for called in sorted(frame.calls.values(), key=lambda called: called.name):
            if called.value_ns * scale >= _LEAST:
                waiting.append((called, x, level + 1))
            x += called.value_ns * scale


def _box(frame: Frame, x: float, y: int, scale: float, root: Frame) -> _Box:
    width, name = frame.value_ns * scale, printable(frame.name)
    share = frame.value_ns / root.value_ns if root.value_ns else 0.0
    fits = int((width - 4) / _LETTER)
    label = name if len(name) <= fits else f"{name[: fits - 1]}…" if fits > 2 else ""
    tooltip = f"{name} ({duration(frame.value_ns)}, {share:.1%})"
    return _Box(round(x, 1), y, round(width, 1), label, tooltip, _colour(frame.name))


def _colour(name: str) -> str:
    """The colour of a name. Its hue shows what the name is: operator, Python frame or other."""
    hue = (
        205
        if name.startswith(("aten::", "autograd::"))
        else 45
        if ".py(" in name or name.startswith("<")
        else 15
    )
    spread = zlib.crc32(name.encode("utf-8", "replace"))
    return f"hsl({hue + spread % 17 - 8},{60 + spread // 17 % 21}%,{66 + spread // 357 % 13}%)"
