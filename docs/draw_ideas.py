"""Draw as rows of boxes: schedules, the blocks of a comparison, the states of a folder.

Each function returns an SVG for a page of the given colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from draw_concepts import FONT, Colours

from instrument.base.queue import _BUSY, _PARTIAL, _QUEUED
from instrument.record.config.schedule import planned
from instrument.record.config.schema import ProfilerConfig

WIDTH, LEFT = 960, 270  # px; LEFT is where the boxes begin
STEPS = 22
SCHEDULES: dict[str, dict[str, Any]] = {
    "wait=1 warmup=1 active=5": {"wait": 1, "warmup": 1, "active": 5},
    "wait=5 warmup=1 active=2 repeat=0": {"wait": 5, "warmup": 1, "active": 2, "repeat": 0},
    "at_steps=[4,15] active=3": {"at_steps": [4, 15], "active": 3},
    "every_n_steps=10 active=1": {"every_n_steps": 10, "active": 1},
}


class Box(NamedTuple):
    """A box: its left edge and width in px, its text, and the names of its colours."""

    left: float
    width: float
    text: str
    fill: str
    ink: str


def schedule(colours: Colours) -> str:
    """The steps that four schedules record, computed as a session computes them."""
    size = (WIDTH - LEFT) / STEPS
    rows = []
    for title, options in SCHEDULES.items():
        kinds = dict.fromkeys(range(STEPS), "lane")
        windows = takewhile(lambda it: it.first < STEPS, planned(ProfilerConfig(**options)))
        for window in windows:
            kinds |= dict.fromkeys(range(window.warmup_from, window.first), "launch")
            kinds |= dict.fromkeys(range(window.first, (window.last or STEPS) + 1), "range")
        boxes = [
            Box(
                step * size,
                size - 2,
                str(step),
                kinds[step],
                "on_slice" if kinds[step] != "lane" else "soft",
            )
            for step in range(STEPS)
        ]
        rows.append((title, boxes))
    legend = (
        ("lane", "idle: a step costs one comparison"),
        ("launch", "warm-up, discarded"),
        ("range", "recorded: a window"),
    )
    return _drawing(colours, "Which steps four schedules record", rows, legend)


def blocks(colours: Colours) -> str:
    """Two blocks of a comparison: the runs A B B A and B A A B."""
    size = (WIDTH - LEFT) / 8
    letters = [*enumerate("ABBA"), *enumerate("BAAB", 4)]
    runs = [
        Box(
            at * size,
            size - (12 if at == 3 else 3),
            each,
            "range" if each == "A" else "kernel",
            "on_slice",
        )
        for at, each in letters
    ]
    ratios = [
        Box(
            at * 4 * size, 4 * size - 12, f"block {at + 1}: one log-ratio of B and A", "lane", "ink"
        )
        for at in range(2)
    ]
    slow = [Box(2 * size, 3 * size - 3, "the machine is slow: A and B alike", "lane", "link")]
    rows = [("runs, in time", runs), ("a busy moment", slow), ("what is judged", ratios)]
    legend = (("range", "A: as it is"), ("kernel", "B: with the change"))
    return _drawing(colours, "Runs of A and B take turns in blocks", rows, legend)


def states(colours: Colours) -> str:
    """The names that the folder of a window has, one after the other, and who works in it."""
    size, name = (WIDTH - LEFT) / 4, "steps_3-7"
    names = (f".{name}{_PARTIAL}", f".{name}{_QUEUED}", f".{name}{_BUSY}", name)
    fills = ("launch", "operator", "kernel", "range")
    does = (
        "torch writes the trace",
        "the trace is complete",
        "compresses, runs sinks",
        "the capture is complete",
    )
    if_killed = (
        "nobody: it is lost",
        "another exporter",
        "instrument export",
        "",
    )
    rows = [
        (
            "name of the folder",
            [Box(at * size, size - 8, names[at], fills[at], "on_slice") for at in range(4)],
        ),
        ("state", [Box(at * size, size - 8, does[at], "lane", "ink") for at in range(4)]),
        (
            "who goes on if it is killed",
            [Box(at * size, size - 8, if_killed[at], "lane", "soft") for at in range(4)],
        ),
    ]
    legend = (("launch", "the training process"), ("kernel", "the exporter, another process"))
    return _drawing(colours, "The four states of a window's folder", rows, legend)


def _drawing(
    colours: Colours,
    label: str,
    rows: Sequence[tuple[str, Sequence[Box]]],
    legend: Sequence[tuple[str, str]],
) -> str:
    parts, y = [], 8
    for title, boxes in rows:
        parts.append(_text(colours.ink, 0, y + 19, title))
        for each in boxes:
            left, middle = LEFT + each.left, LEFT + each.left + each.width / 2
            parts.append(_box(colours, each.fill, left, y, each.width, 28))
            parts.append(_text(getattr(colours, each.ink), middle, y + 19, each.text, "middle"))
        y += 40
    x = LEFT
    for fill, text in legend:
        parts.append(_box(colours, fill, x, y + 4, 14, 14))
        parts.append(_text(colours.soft, x + 20, y + 16, text))
        x += 44 + 7 * len(text)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 26}" role="img" '
        f'aria-label="{label}" font-family="{FONT}" font-size="13">\n{body}\n</svg>\n'
    )


def _box(colours: Colours, fill: str, x: float, y: int, width: float, height: int) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="3" '
        f'fill="{getattr(colours, fill)}" stroke="{colours.line}"/>'
    )


def _text(fill: str, x: float, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
