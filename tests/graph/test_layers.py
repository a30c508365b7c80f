"""Boxes in rows: nothing overlaps, lines run downwards past boxes, and few of them cross."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from random import Random

import pytest

from instrument.fx.draw import sugiyama
from instrument.fx.draw.sugiyama import Drawing, Hyperedge, Point, Segment, arrange

SIZES = [(80.0, 30.0), (140.0, 45.0), (60.0, 90.0)]


def drawn(
    count: int, edges: list[tuple[int, int]], sizes: list[tuple[float, float]] | None = None
) -> Drawing:
    sizes = sizes or [SIZES[0]] * count
    return arrange(sizes, hyperedges(edges, sizes))


def hyperedges(edges: list[tuple[int, int]], sizes: list[tuple[float, float]]) -> list[Hyperedge]:
    targets: dict[int, list[tuple[int, float]]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append((target, sizes[target][0] / 2))
    return [
        Hyperedge(source, sizes[source][0] / 2, tuple(ends)) for source, ends in targets.items()
    ]


def whole(segments: list[Segment], number: int) -> list[Point]:
    """The line to a target of a hyperedge, from the source box on."""
    points, after = segments[number]
    return points if after is None else [*whole(segments, after)[:-1], *points]


def lines_of(drawing: Drawing, every: list[Hyperedge]) -> list[list[list[Point]]]:
    """The lines to the targets of each hyperedge."""
    return [
        [whole(segments, number) for number in range(len(edge.targets))]
        for edge, segments in zip(every, drawing.lines)
    ]


def some_graph(
    seed: int, count: int = 40
) -> tuple[list[tuple[int, int]], list[tuple[float, float]]]:
    random = Random(seed)
    edges = {
        (random.randrange(max(0, at - 9), at), at)
        for at in range(1, count)
        for _ in range(random.randrange(3))
    }
    return sorted(edges), [random.choice(SIZES) for _ in range(count)]


def overlaps(
    one: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> bool:
    (left, top, right, bottom), (left2, top2, right2, bottom2) = one, other
    return left < right2 and left2 < right and top < bottom2 and top2 < bottom


def box(corner: Point, size: tuple[float, float]) -> tuple[float, float, float, float]:
    return (*corner, corner[0] + size[0], corner[1] + size[1])


@pytest.mark.parametrize("seed", range(12))
def test_boxes_keep_apart_and_lines_pass_them(seed: int) -> None:
    edges, sizes = some_graph(seed)
    drawing = drawn(len(sizes), edges, sizes)
    boxes = [box(corner, size) for corner, size in zip(drawing.corners, sizes)]
    assert not [pair for pair in combinations(boxes, 2) if overlaps(*pair)]
    whole = (-0.1, -0.1, drawing.width + 0.1, drawing.height)
    assert all(
        whole[0] <= left and right <= whole[2] and bottom <= whole[3]
        for left, _, right, bottom in boxes
    )
    every = hyperedges(edges, sizes)
    for edge, lines in zip(every, lines_of(drawing, every)):
        for (target, _), line in zip(edge.targets, lines):
            assert line[0] == (boxes[edge.source][0] + edge.source_x, boxes[edge.source][3])
            assert line[-1][1] == boxes[target][1]
            for (x, y), (x2, y2) in pairwise(line):
                assert y <= y2, "a line goes up"
                piece = (min(x, x2) - 0.2, y + 0.1, max(x, x2) + 0.2, y2 - 0.1)
                assert not [at for at, each in enumerate(boxes) if overlaps(piece, each)], (
                    "a line crosses a box"
                )


@pytest.mark.parametrize("seed", range(12))
def test_a_row_is_as_far_down_as_the_longest_path(seed: int) -> None:
    edges, sizes = some_graph(seed)
    longest: dict[int, int] = {}
    for at in range(len(sizes)):
        longest[at] = max(
            (longest[source] + 1 for source, target in edges if target == at), default=0
        )
    rows = sorted({y for _, y in drawn(len(sizes), edges, sizes).corners})
    for at, (_, y) in enumerate(drawn(len(sizes), edges, sizes).corners):
        below = [longest[target] for source, target in edges if source == at]
        expected = (
            longest[at] if longest[at] or not below else min(below) - 1
        )  # a source stands at what takes it
        assert rows.index(y) == expected


def test_crossings_are_counted_and_undone() -> None:
    ladder = [(0, 6), (1, 5), (2, 4), (3, 7)]
    assert count_crossings(8, ladder, [[0, 1, 2, 3], [4, 5, 6, 7]]) == 3
    lines = [line for (line,) in lines_of(drawn(8, ladder), hyperedges(ladder, [SIZES[0]] * 8))]
    ends = [(line[0][0], line[-1][0]) for line in lines]
    assert not [
        1 for one, other in combinations(ends, 2) if (one[0] - other[0]) * (one[1] - other[1]) < 0
    ]


@pytest.mark.parametrize("seed", range(5))
def test_crossings_are_those_of_every_pair(seed: int) -> None:
    random = Random(seed)
    edges = [pair for pair in product(range(8), range(8, 16)) if random.random() < 0.4]
    pairs = sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(edges, 2))
    assert count_crossings(16, edges, [list(range(8)), list(range(8, 16))]) == pairs > 0


def count_crossings(count: int, edges: list[tuple[int, int]], rows: list[list[int]]) -> int:
    found, _ = sugiyama._rows(
        [0 if at in rows[0] else 1 for at in range(count)],
        [80.0] * count,
        hyperedges(edges, [SIZES[0]] * count),
    )
    return sugiyama.crossings(
        found, [float(row.index(at)) for at in range(count) for row in rows if at in row]
    )


def test_a_chain_is_straight_and_what_it_is_added_to_runs_beside_it() -> None:
    chain = [(at, at + 1) for at in range(9)]
    plain = drawn(10, chain)
    assert len({x for x, _ in plain.corners}) == 1
    residual = drawn(10, [*chain, (1, 8)])
    (_, around), *_ = (
        lines
        for lines in lines_of(residual, hyperedges([*chain, (1, 8)], [SIZES[0]] * 10))
        if len(lines) == 2
    )
    beside = {x for x, _ in around[2:-1]}
    assert len(beside) == 1, "the line is upright"
    assert len({x for x, _ in residual.corners[2:8]}) == 1


def test_places_at_the_edges_keep_their_row() -> None:
    sizes = [(0.0, 0.0), SIZES[0], SIZES[0], SIZES[0], (0.0, 0.0)]
    drawing = arrange(
        sizes,
        [Hyperedge(0, 0.0, ((3, 40.0),)), Hyperedge(1, 40.0, ((2, 40.0), (4, 0.0)))],
        tops=1,
        bottoms=1,
    )
    heights = [y for _, y in drawing.corners]
    assert heights[0] == 0.0 < min(heights[1:4])
    assert heights[4] == drawing.height > max(heights[1:4])


def test_a_box_without_sources_stands_above_the_targets_of_all_its_values() -> None:
    chain = [Hyperedge(0, 10.0, ((1, 40.0),)), Hyperedge(0, 20.0, ((3, 40.0),))]
    chain += [Hyperedge(1, 40.0, ((2, 40.0),)), Hyperedge(2, 40.0, ((3, 40.0),))]
    heights = [y for _, y in arrange([SIZES[0]] * 4, chain).corners]
    assert heights == sorted(set(heights))


def test_lines_that_pass_too_much_are_drawn_all_the_same() -> None:
    edges = [*((at, at + 1) for at in range(99)), *((at, 99) for at in range(98))]
    drawing = drawn(100, edges)
    every = hyperedges(edges, [SIZES[0]] * 100)
    points = [len(line) for lines in lines_of(drawing, every) for line in lines]
    assert len(points) == len(edges)
    assert sum(points) < 2 * sugiyama._WAYPOINTS_PER_BOX * 100 * 2


def test_what_lines_of_a_net_share_is_there_once() -> None:
    edges = [*((at, at + 1) for at in range(30)), *((0, at) for at in (5, 5, 9, 20, 30))]
    drawing = drawn(31, edges)
    (edge, segments), *_ = zip(hyperedges(edges, [SIZES[0]] * 31), drawing.lines)
    steps = [step for each in segments for step in pairwise(each.points) if step[0] != step[1]]
    assert [target for target, _ in edge.targets] == [1, 5, 5, 9, 20, 30]
    stub = steps[0]
    assert {step for step in steps if steps.count(step) > 1} <= {
        stub,
        *(pairwise(segments[1].points)),
    }
    assert sum(len(each.points) for each in segments) < 2 * 30 + 4 * len(segments)


def test_nothing_is_drawn_of_nothing() -> None:
    assert arrange([], []) == Drawing(0.0, 0.0, [], [])
