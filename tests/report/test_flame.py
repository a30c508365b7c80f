"""The flame graph as a picture."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from instrument.analysis.stacks import Stack
from instrument.report.flame import svg

STACKS = [
    Stack(("main", "forward", "aten::mm"), 600_000),
    Stack(("main", "forward"), 100_000),
    Stack(("main", "<b>&\x1b[31m"), 290_000),
    Stack(("main", "tiny"), 10),
    Stack(("main", "forward", "aten::mm"), 9_990),
]


def boxes(picture: str) -> dict[str, tuple[float, float, float]]:
    """By what its tooltip says before the time: left edge, upper edge and width of each box."""
    root = ElementTree.fromstring(picture)
    found = {}
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        title, rect = group[0].text or "", group[1]
        found[title.rpartition(" (")[0]] = tuple(
            float(rect.get(side) or 0) for side in ("x", "y", "width")
        )
    return found


def test_boxes_are_as_wide_as_their_time_and_lie_on_their_callers() -> None:
    found = boxes(svg(STACKS, "title"))
    assert found.keys() == {"all", "main", "forward", "aten::mm", "<b>&\\x1b[31m"}, (
        "and no box too narrow to be seen"
    )
    assert found["all"][::2] == (10, 1180)
    assert found["main"][2] == 1180
    assert found["forward"][2] == pytest.approx(1180 * 0.70999, abs=0.1)
    assert found["aten::mm"][2] == pytest.approx(1180 * 0.60999, abs=0.1)
    assert found["aten::mm"][0] == found["forward"][0] > found["<b>&\\x1b[31m"][0] == 10, (
        "by name, from the left"
    )
    assert (
        found["forward"][1] - found["aten::mm"][1] == found["main"][1] - found["forward"][1] == 17
    )


def test_names_and_times_stand_in_tooltips_and_names_where_they_fit() -> None:
    picture = svg(STACKS, "a < b")
    assert ">a &lt; b</text>" in picture
    assert "<title>aten::mm (609.990 µs, 61.0%)</title>" in picture
    assert ">forward</text>" in picture
    narrow = svg([Stack(("x" * 200,), 5), Stack(("y" * 40,), 95)], "t")
    assert re.findall(r">(x+…?)</text>", narrow) == ["x" * 7 + "…"]
    assert "\x1b" not in picture
    assert "<script" not in svg([Stack(("<script>alert(1)</script>",), 5)], "<script>")


def test_deep_and_empty_stacks_are_drawn() -> None:
    deep = svg([Stack(tuple(f"f{n}" for n in range(3000)), 7)], "deep")
    assert len(boxes(deep)) == 3001
    assert boxes(svg([], "none")).keys() == {"all"}
