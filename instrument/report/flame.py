"""A flame graph as an SVG picture, which any browser opens; nothing in it is run."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from instrument.analysis.stacks import Stack
from instrument.analysis.table import duration
from instrument.printable import printable

_WIDTH, _ROW, _HEAD, _EDGE = 1200, 17, 30, 10
_LETTER = 6.6  # the width of one in the font below
_LEAST = 0.3  # of a box, in pixels; narrower ones cannot be seen, and there are thousands
_STYLE = "text{font:11px monospace;fill:#222}rect{stroke:#fff;stroke-width:.4}"


@dataclass
class _Frame:
    """One box: its time with that of the boxes above it."""

    name: str
    value_ns: int = 0
    calls: dict[str, _Frame] = field(default_factory=dict)


def svg(stacks: Sequence[Stack], title: str) -> str:
    """The picture of some call paths: callers below what they call, as wide as their time; names and times on hover.

    Boxes stand in the order of their names, and frames of one name below one caller are one box. Left out: boxes
    narrower than 0.3 of 1,180 pixels, whose time is in the box below them.
    """
    root = _Frame("all")
    for stack in stacks:
        root.value_ns += stack.value_ns
        at = root
        for name in stack.frames:
            at = at.calls.setdefault(name, _Frame(name))
            at.value_ns += stack.value_ns
    scale = (_WIDTH - 2 * _EDGE) / root.value_ns if root.value_ns else 0.0
    boxes = list(_boxes(root, 0.0, 0, scale))
    depth = max(level for *_, level in boxes) + 1
    height = _HEAD + depth * _ROW + _EDGE
    drawn = (_drawn(frame, x, height - _EDGE - (level + 1) * _ROW, scale, root.value_ns) for frame, x, level in boxes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_EDGE}" y="20">{escape(printable(title))}</text>',
    ]
    return "\n".join([*lines, *drawn, "</svg>\n"])


def _boxes(root: _Frame, x: float, level: int, scale: float) -> Iterator[tuple[_Frame, float, int]]:
    """Each box with its left edge and its level, callers first; not by recursion, as stacks may be deep."""
    waiting = [(root, x, level)]
    while waiting:
        frame, x, level = waiting.pop()
        yield frame, x, level
        for called in sorted(frame.calls.values(), key=lambda called: called.name):
            if called.value_ns * scale >= _LEAST:
                waiting.append((called, x, level + 1))
            x += called.value_ns * scale


def _drawn(frame: _Frame, x: float, y: int, scale: float, whole_ns: int) -> str:
    width, name = frame.value_ns * scale, printable(frame.name)
    share = frame.value_ns / whole_ns if whole_ns else 0.0
    told = f"{name} ({duration(frame.value_ns)}, {share:.1%})"
    fits = int((width - 4) / _LETTER)
    label = name if len(name) <= fits else f"{name[: fits - 1]}…" if fits > 2 else ""
    text = f'<text x="{x + _EDGE + 2:.1f}" y="{y + 12}">{escape(label)}</text>' if label else ""
    place = f'x="{x + _EDGE:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}"'
    return f'<g><title>{escape(told)}</title><rect {place} fill="{_colour(frame.name)}"/>{text}</g>'


def _colour(name: str) -> str:
    """A warm colour that a name always has; frames of Python, torch's operators and the rest differ in tone."""
    hue = 205 if name.startswith(("aten::", "autograd::")) else 45 if ".py(" in name or name.startswith("<") else 15
    spread = zlib.crc32(name.encode("utf-8", "replace"))
    return f"hsl({hue + spread % 17 - 8},{60 + spread // 17 % 21}%,{66 + spread // 357 % 13}%)"
