"""Draw what happens when one layer runs: its range, operators, launches, kernels and backward.

`concepts(LIGHT)` and `concepts(DARK)` return the drawing as SVG for a page of these colours.
"""

from __future__ import annotations

from typing import NamedTuple

WIDTH, HEIGHT = 960, 420
LANE, ROW = 132, 30  # where the lanes begin, and the height of a slice, in px
FONT = "system-ui, sans-serif"


class Colours(NamedTuple):
    """The colours of a drawing."""

    ink: str
    soft: str
    line: str
    lane: str
    on_slice: str
    range: str
    operator: str
    launch: str
    kernel: str
    link: str


LIGHT = Colours(
    ink="#1f2328",
    soft="#59636e",
    line="#d8dee4",
    lane="#f6f8fa",
    on_slice="#ffffff",
    range="#0969da",
    operator="#57606a",
    launch="#8250df",
    kernel="#1a7f37",
    link="#cf222e",
)
DARK = Colours(
    ink="#e6edf3",
    soft="#9198a1",
    line="#3d444d",
    lane="#1c2128",
    on_slice="#0d1117",
    range="#6cb6ff",
    operator="#adbac7",
    launch="#b083f0",
    kernel="#57ab5a",
    link="#f47067",
)
# Lane: name, note, top, height.
LANES = (
    ("Training thread", "CPU", 24, 4 * ROW + 16),
    ("Autograd thread", "CPU", 184, 2 * ROW + 16),
    ("Stream", "device", 284, ROW + 16),
)
# Slice: kind, text, left, width, lane, row.
SLICES = (
    ("range", "forward", 0, 330, 0, 0),
    ("range", "forward/mlp", 40, 250, 0, 1),
    ("operator", "aten::addmm", 70, 190, 0, 2),
    ("launch", "cudaLaunchKernel", 100, 136, 0, 3),
    ("range", "backward", 345, 300, 0, 0),
    ("operator", "AddmmBackward0", 400, 205, 1, 0),
    ("launch", "cudaLaunchKernel", 440, 136, 1, 1),
    ("kernel", "gemm", 200, 140, 2, 0),
    ("kernel", "gemm", 540, 180, 2, 0),
)


def concepts(colours: Colours) -> str:
    """The drawing as SVG."""
    parts = [_lane(colours, *lane) for lane in LANES]
    parts += [_slice(colours, *each) for each in SLICES]
    launch_y, kernel_y = _middle(0, 3), _top(2, 0)
    parts += [
        _arrow(colours, 236, launch_y, 270, kernel_y, "starts (correlation)", "right"),
        _arrow(colours, 576, _middle(1, 1), 610, kernel_y, "starts (correlation)", "right"),
        _arrow(
            colours, 260, _middle(0, 2), 500, _top(1, 0), "backward of (sequence number)", "top"
        ),
    ]
    parts.append(_caption(colours))
    body = "\n".join(parts)
    label = "A range calls an operator, which launches a kernel; its backward launches another."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}" font-family="{FONT}" font-size="13">\n'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{colours.link}"/>'
        f"</marker></defs>\n{body}\n</svg>\n"
    )


def _top(lane: int, row: int) -> int:
    return LANES[lane][2] + 8 + row * ROW


def _middle(lane: int, row: int) -> int:
    return _top(lane, row) + ROW // 2 - 2


def _lane(colours: Colours, name: str, note: str, top: int, height: int) -> str:
    return (
        f'<rect x="{LANE - 8}" y="{top}" width="{WIDTH - LANE}" height="{height}" rx="6" '
        f'fill="{colours.lane}" stroke="{colours.line}"/>'
        f'<text x="0" y="{top + 24}" fill="{colours.ink}" font-weight="600">{name}</text>'
        f'<text x="0" y="{top + 42}" fill="{colours.soft}">{note}</text>'
    )


def _slice(
    colours: Colours, kind: str, text: str, left: int, width: int, lane: int, row: int
) -> str:
    x, y = LANE + left, _top(lane, row)
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{ROW - 4}" rx="3" '
        f'fill="{getattr(colours, kind)}"/>'
        f'<text x="{x + 8}" y="{y + 17}" fill="{colours.on_slice}">{text}</text>'
    )


def _arrow(colours: Colours, x: int, y: int, to_x: int, to_y: int, text: str, side: str) -> str:
    start, end = LANE + x, LANE + to_x
    curve = f"M{start} {y} C{end} {y} {end} {y} {end} {to_y - 2}"
    at_x, at_y = (end + 8, to_y - 34) if side == "right" else (end + 8, y + 4)
    return (
        f'<path d="{curve}" fill="none" stroke="{colours.link}" stroke-width="2" '
        f'marker-end="url(#tip)"/>'
        f'<text x="{at_x}" y="{at_y}" fill="{colours.link}">{text}</text>'
    )


def _caption(colours: Colours) -> str:
    lines = (
        "Time goes from left to right; a device runs a kernel some time after its launch. For "
        "forward/mlp, AddmmBackward0",
        "is backward time, and both kernels are device time, although the backward runs outside "
        "of the range.",
    )
    texts = [
        f'<text x="{LANE - 8}" y="{384 + 20 * number}" fill="{colours.soft}">{line}</text>'
        for number, line in enumerate(lines)
    ]
    for number, kind in enumerate(("range", "operator", "launch", "kernel")):
        x = LANE - 8 + 96 * number
        texts.append(
            f'<rect x="{x}" y="346" width="14" height="14" rx="3" fill="{getattr(colours, kind)}"/>'
            f'<text x="{x + 20}" y="358" fill="{colours.ink}">{kind}</text>'
        )
    return "".join(texts)
