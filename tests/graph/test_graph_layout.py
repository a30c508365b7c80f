"""Frames of modules: what they hold stands inside, what they do not outside, and lines enter only where they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import combinations, pairwise
from types import FrameType
from typing import Any

import pytest

from instrument.fx.draw.nested_layout import Box, Frame, Line, corners, frames, lay_out, nested

SIZE = Box(90.0, 40.0, 45.0)


def blocks(count: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Blocks of an attention and an MLP, each added to what came in; a mask for all of them; a head."""
    paths, edges = ["", "", "embed"], [(0, 2)]
    stream = 2
    for block in range(count):
        at = len(paths)
        own = f"blocks.{block}"
        paths += [f"{own}.attention"] * 4 + [own] + [f"{own}.mlp"] * 2 + [own]
        edges += [
            (stream, at),
            (stream, at + 1),
            (1, at + 2),
            (at, at + 2),
            (at + 1, at + 2),
            (at + 2, at + 3),
        ]
        edges += [(at + 3, at + 4), (stream, at + 4), (at + 4, at + 5), (at + 5, at + 6)]
        edges += [(at + 6, at + 7), (at + 4, at + 7), (at, at + 7)]
        stream = at + 7
    return [*paths, "head", ""], [*edges, (stream, len(paths)), (len(paths), len(paths) + 1)]


def area(frame: Frame) -> tuple[float, float, float, float]:
    return frame.x, frame.y, frame.x + frame.width, frame.y + frame.height


def apart(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def within(inner: tuple[float, ...], outer: tuple[float, ...]) -> bool:
    return (
        outer[0] <= inner[0]
        and outer[1] <= inner[1]
        and inner[2] <= outer[2]
        and inner[3] <= outer[3]
    )


def test_frames_follow_the_modules() -> None:
    root = frames(["", "a.x", "a.x", "a.y", "b", "a.x", "a.z", "c.d.e", "c.d.e"])
    told = [(depth, frame.path, frame.first, frame.last) for depth, frame in nested(root)]
    assert told == [(1, "a", 1, 4), (2, "a.x", 1, 3), (1, "a", 5, 7), (1, "c.d.e", 7, 9)]
    assert root.children[0] == 0
    assert root.children[2] == 4, "a frame of one box is none"


def test_boxes_stand_in_their_frames_alone() -> None:
    paths, edges = blocks(3)
    root = frames(paths)
    lay_out(root, [SIZE] * len(paths), edges)
    at = {box: (x, y, x + SIZE.width, y + SIZE.height) for box, (x, y) in corners(root)}
    assert sorted(at) == list(range(len(paths)))
    assert all(apart(at[one], at[other]) for one, other in combinations(at, 2))
    assert [frame.path for _, frame in nested(root)][:3] == [
        "blocks",
        "blocks.0",
        "blocks.0.attention",
    ]
    for _, frame in nested(root):
        for box, place in at.items():
            assert within(place, area(frame)) if frame.holds(box) else apart(place, area(frame))
    for (_, one), (_, other) in combinations(nested(root), 2):
        if not (one.holds(other.first) or other.holds(one.first)):
            assert apart(area(one), area(other))


def whole(lines: list[Line], line: Line) -> list[tuple[float, float]]:
    """From the box that makes the value on."""
    return (
        line.points if line.after is None else [*whole(lines, lines[line.after])[:-1], *line.points]
    )


def test_lines_go_from_box_to_box_and_through_no_frame_of_others() -> None:
    paths, edges = blocks(3)
    root = frames(paths)
    lines = lay_out(root, [SIZE] * len(paths), edges)
    at = dict(corners(root))
    ending = {
        (line.source, line.target): whole(lines, line) for line in lines if line.target is not None
    }
    assert set(ending) == set(edges)
    for (source, target), line in ending.items():
        assert line[0] == pytest.approx((at[source][0] + SIZE.port_x, at[source][1] + SIZE.height))
        assert line[-1] == pytest.approx((at[target][0] + SIZE.port_x, at[target][1]))
        for (x, y), (x2, y2) in pairwise(line):
            assert y <= y2 + 0.01
            assert abs(x - x2) < 0.2 or y2 - y > 15, "the line jumps aside at a frame"
            piece = (min(x, x2), y + 0.1, max(x, x2), y2 - 0.1)
            strange = [
                f.path for _, f in nested(root) if not f.holds(source) and not f.holds(target)
            ]
            for _, frame in nested(root):
                if frame.path in strange and piece[1] < piece[3]:
                    assert apart(piece, area(frame)), (
                        f"the line {source} to {target} crosses {frame.path}"
                    )


def test_twice_the_graph_is_twice_the_work() -> None:
    paths, edges = blocks(20)
    longer, more = blocks(40)
    once = calls(lambda: lay_out(frames(paths), [SIZE] * len(paths), edges))
    assert once < calls(lambda: lay_out(frames(longer), [SIZE] * len(longer), more)) < 2.4 * once


def calls(run: Any) -> int:
    """How many functions it calls: what it costs, whatever else the machine does."""
    count = 0

    def note(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_the_same_graph_has_the_same_layout() -> None:
    assert [*places()] == [*places()]


def places() -> Iterator[Any]:
    paths, edges = blocks(2)
    root = frames(paths)
    yield lay_out(root, [SIZE] * len(paths), edges)
    yield from corners(root)
