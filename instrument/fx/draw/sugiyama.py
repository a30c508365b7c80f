"""Layered layout: boxes in rows, with lines that run downwards and pass between the boxes.

This is Sugiyama's method (Sugiyama, Tagawa, Toda 1981). It finds the rows by longest path, then the
order within each row by barycentres, then horizontal positions by least squares. The method is
implemented here because Graphviz is a system package, networkx has no layered layout and grandalf
is no longer maintained.

Where a line passes a row, the row has a waypoint: an item like a box, but with a width of 0. The
line goes through the waypoint, so the line does not cross the boxes of the row. The number of
waypoints is limited. In large graphs, the longest lines have no waypoints, and may cross boxes.

Cost: linear in boxes, lines and waypoints, times a logarithm for sorting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Point = tuple[float, float]

_SWEEPS, _PASSES = 8, 4
_BOX_GAP, _LINE_GAP = 18.0, 10.0
# The minimum distance between two neighbouring rows. A tenth of the largest sideways distance of a
# line between the two rows is added, but at most `_MOST_WIDENING`.
_ROW_GAP, _MOST_WIDENING = 22.0, 40.0
# How strongly a line pulls its two ends to the same horizontal position: `_STRAIGHT` between two
# waypoints, `_LOOSE` from a box without inputs to its only target, `_PLAIN` for all other lines.
_STRAIGHT, _PLAIN, _LOOSE = 8.0, 2.0, 0.25
# The maximum number of waypoints divided by the number of boxes. Above this limit, the lines that
# pass the most rows have no waypoints.
_WAYPOINTS_PER_BOX = 20


class Hyperedge(NamedTuple):
    """The line of a value, from the box that makes the value to the boxes that take it.

    A target is a pair: a box, and the point where the line meets this box. `source_x` is the point
    where the line leaves the source. Points are in pixels from the left edge of the box.
    """

    source: int
    source_x: float
    targets: tuple[tuple[int, float], ...]


class Segment(NamedTuple):
    """A piece of the line of a hyperedge.

    The piece begins at the end of segment number `after` of the same hyperedge. If `after` is None,
    the piece begins at the source box.
    """

    points: list[Point]
    after: int | None


@dataclass
class Drawing:
    """The layout: the upper left corner of each box, and the lines of each hyperedge.

    The line of a hyperedge branches to its targets. The line is cut into segments, so a part on the
    way to several targets is drawn only once. The segments that end at the targets come
    first, in the order of the targets. The shared segments follow.
    """

    width: float
    height: float
    corners: list[Point]
    lines: list[list[Segment]]


class _Neighbour(NamedTuple):
    """A line from one item (the own item) to an item in a neighbouring row (the other item).

    Attributes:
        other: the other item.
        other_x: where the line meets the other item, in pixels to the right of the middle of the
            other item.
        own_x: where the line meets the own item, in pixels to the right of the middle of the own
            item.
        weight: how strongly the line pulls the own item. The wanted position of an item is a
            weighted mean over the lines of the item.
    """

    other: int
    other_x: float
    own_x: float
    weight: float


@dataclass
class _Rows:
    """The rows of the layout, and the items in the rows.

    An item is a box or a waypoint. A waypoint is a point where a line passes a row. Each item is a
    number: with 5 boxes, the items 0 to 4 are the boxes, and the items from 5 on are waypoints.

    Attributes:
        rank: the index of each item's row; row 0 is at the top.
        widths: the width of each item in pixels; 0 for a waypoint.
        rows: the items of each row, from left to right.
        above, below: for each item, the lines from this item to items in the next row above, and
            to items in the next row below.
    """

    rank: list[int]
    widths: list[float]
    rows: list[list[int]]
    above: list[list[_Neighbour]] = field(default_factory=list)
    below: list[list[_Neighbour]] = field(default_factory=list)


def arrange(
    sizes: Sequence[tuple[float, float]],
    hyperedges: Sequence[Hyperedge],
    tops: int = 0,
    bottoms: int = 0,
) -> Drawing:
    """Return the layout of boxes and lines. The same arguments give the same drawing.

    Args:
        sizes: the width and height of each box. Each target of a hyperedge comes after its source.
        hyperedges: the lines, one for each value, from its source to all its targets.
        tops: the first `tops` boxes form a row above all other boxes.
        bottoms: the last `bottoms` boxes form a row below all other boxes.
    """
    rank = _ranks(len(sizes), hyperedges, tops, bottoms)
    rows, waypoints = _rows(rank, [width for width, _ in sizes], hyperedges)
    _order(rows)
    centres = _centres(rows)
    return _drawn(rows, centres, sizes, hyperedges, waypoints)


def _ranks(count: int, hyperedges: Iterable[Hyperedge], tops: int, bottoms: int) -> list[int]:
    """The row of each box. A box is below all its sources.

    A box without sources is in the row directly above the highest of its targets.
    """
    first = 1 if tops else 0
    rank = [0 if box < tops else first for box in range(count)]
    has_source, nearest = [False] * count, [count] * count
    ordered = sorted(hyperedges)
    for edge in ordered:
        for box, _ in edge.targets:
            rank[box] = max(rank[box], rank[edge.source] + 1)
            has_source[box] = True
    for edge in ordered:
        below = [rank[box] for box, _ in edge.targets if box < count - bottoms]
        nearest[edge.source] = min([nearest[edge.source], *below])
    for box in range(tops, count - bottoms):
        if not has_source[box] and nearest[box] < count:
            rank[box] = max(first, nearest[box] - 1)
    last = max(rank[: count - bottoms], default=-1) + 1
    return rank[: count - bottoms] + [last] * bottoms


def _rows(
    rank: list[int], widths: list[float], hyperedges: Sequence[Hyperedge]
) -> tuple[_Rows, list[list[int]]]:
    """The rows with their waypoints, and the waypoints of each hyperedge from top to bottom.

    In each row, a hyperedge has at most one waypoint, even on its way to several targets.
    """
    rows = _Rows(rank, widths, [[] for _ in range(max(rank, default=-1) + 1)])
    for box in range(len(rank)):
        rows.rows[rank[box]].append(box)
        rows.above.append([])
        rows.below.append([])
    left = _WAYPOINTS_PER_BOX * len(rank)
    passed = [
        max((rank[box] for box, _ in edge.targets), default=0) - rank[edge.source] - 1
        for edge in hyperedges
    ]
    waypoints: list[list[int]] = [[] for _ in hyperedges]
    for which in sorted(range(len(hyperedges)), key=passed.__getitem__):
        left -= max(passed[which], 0)
        if left >= 0:
            waypoints[which] = _routed(rows, hyperedges[which], passed[which])
    return rows, waypoints


def _routed(rows: _Rows, edge: Hyperedge, passed: int) -> list[int]:
    """Add the waypoints and lines of a hyperedge to the rows; return the waypoints.

    `passed` is the number of rows between the source and the lowest target.
    """
    chain = [edge.source]
    source_x = edge.source_x - rows.widths[edge.source] / 2
    for rank in range(rows.rank[edge.source] + 1, rows.rank[edge.source] + 1 + passed):
        waypoint = len(rows.widths)
        rows.widths.append(0.0)
        rows.rank.append(rank)
        rows.rows[rank].append(waypoint)
        rows.above.append([])
        rows.below.append([])
        if len(chain) == 1:
            _join(rows, edge.source, waypoint, source_x, 0.0, _PLAIN)
        else:
            _join(rows, chain[-1], waypoint, 0.0, 0.0, _STRAIGHT)
        chain.append(waypoint)
    loose = not rows.above[edge.source] and len(edge.targets) == 1
    for box, x in edge.targets:
        depth = rows.rank[box] - rows.rank[edge.source] - 1
        upper_x, lower_x = 0.0 if depth else source_x, x - rows.widths[box] / 2
        _join(rows, chain[depth], box, upper_x, lower_x, _LOOSE if loose else _PLAIN)
    return chain[1:]


def _join(
    rows: _Rows, upper: int, lower: int, upper_x: float, lower_x: float, weight: float
) -> None:
    rows.below[upper].append(_Neighbour(lower, lower_x, upper_x, weight))
    rows.above[lower].append(_Neighbour(upper, upper_x, lower_x, weight))


def _order(rows: _Rows) -> None:
    """Sort the items of each row so that lines rarely cross.

    The rows are sorted several times, in turn from top to bottom and from bottom to top. The items
    of a row are sorted by the mean position of their neighbours in the row that was sorted before.
    The order with the fewest crossings is kept.
    """
    position = [0.0] * len(rows.widths)
    for row in rows.rows:
        _set_positions(row, position)
    best, fewest = [list(row) for row in rows.rows], crossings(rows, position)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        ends = rows.below if sweep % 2 else rows.above
        for row in reversed(rows.rows) if sweep % 2 else rows.rows:
            row.sort(key=lambda item: _barycentre(item, ends[item], position, rows.widths))
            _set_positions(row, position)
        found = crossings(rows, position)
        if found < fewest:
            best, fewest = [list(row) for row in rows.rows], found
    rows.rows = best


def _set_positions(row: Sequence[int], position: list[float]) -> None:
    for at, item in enumerate(row):
        position[item] = float(at)


def _barycentre(
    item: int, ends: Sequence[_Neighbour], position: Sequence[float], widths: Sequence[float]
) -> float:
    if not ends:
        return position[item]
    return sum(_at(end.other, end.other_x, position, widths) for end in ends) / len(ends)


def _at(item: int, x: float, position: Sequence[float], widths: Sequence[float]) -> float:
    """The point where a line meets an item, as a position in the order of the row.

    The middle of item 2 has the position 2.0. Other points of this item have positions between 1.5
    and 2.5. `x` is the distance from the middle in pixels.
    """
    return position[item] + (x / widths[item] if widths[item] else 0.0)


def crossings(rows: _Rows, position: Sequence[float]) -> int:
    """The number of crossings of lines between neighbouring rows, counted as inversions."""
    total = 0
    for row in rows.rows:
        ends = sorted(
            (
                _at(item, end.own_x, position, rows.widths),
                _at(end.other, end.other_x, position, rows.widths),
            )
            for item in row
            for end in rows.below[item]
        )
        total += _inversions([lower for _, lower in ends])
    return total


def _inversions(values: Sequence[float]) -> int:
    """The number of pairs of values in the wrong order."""
    earlier: list[float] = []  # sorted
    found = 0
    for value in values:
        at = bisect_right(earlier, value)
        found += len(earlier) - at
        earlier.insert(at, value)
    return found


def _centres(rows: _Rows) -> list[float]:
    """The x position of each item's middle, as close to its neighbours as the row's order allows.

    Each row is placed several times, because other rows move too. Placements by the neighbours
    above alternate with placements by the neighbours below. The last placement is by the neighbours
    above, so that a line through several rows is straight. For an item without neighbours above,
    the neighbours below always count.
    """
    centres = [0.0] * len(rows.widths)
    upper = [above or below for above, below in zip(rows.above, rows.below)]
    for _ in range(_PASSES):
        for row in rows.rows:
            _place(row, upper, centres, rows.widths)
        for row in reversed(rows.rows):
            _place(row, rows.below, centres, rows.widths)
    for row in rows.rows:
        _place(row, upper, centres, rows.widths)
    return centres


def _place(
    row: Sequence[int],
    ends: Sequence[Sequence[_Neighbour]],
    centres: list[float],
    widths: Sequence[float],
) -> None:
    """Set the centres of the items of a row by least squares, and keep their order.

    Items that would be too close to each other move as one block. `ends` holds the neighbours that
    pull each item.
    """
    # Each block: the position of its first item, its weight, and its number of items.
    blocks: list[tuple[float, float, int]] = []
    shifts: list[float] = []
    shift = 0.0
    for at, item in enumerate(row):
        if at:
            shift += _distance(widths[row[at - 1]], widths[item])
        shifts.append(shift)
        pull = sum(end.weight for end in ends[item])
        wanted = sum(
            end.weight * (centres[end.other] + end.other_x - end.own_x) for end in ends[item]
        )
        centre, weight = (wanted / pull, pull) if pull else (centres[item], 1e-3)
        blocks.append((centre - shift, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, left_weight, left_items), (right, right_weight, right_items) = blocks[-2:]
            weight = left_weight + right_weight
            mean = (left * left_weight + right * right_weight) / weight
            blocks[-2:] = [(mean, weight, left_items + right_items)]
    starts = (start for start, _, items in blocks for _ in range(items))
    for item, start, shift in zip(row, starts, shifts):
        centres[item] = start + shift


def _distance(left: float, right: float) -> float:
    """The minimum distance between the middles of two adjacent items of these widths."""
    return (left + right) / 2 + (_BOX_GAP if left or right else _LINE_GAP)


def _drawn(
    rows: _Rows,
    centres: Sequence[float],
    sizes: Sequence[tuple[float, float]],
    hyperedges: Sequence[Hyperedge],
    waypoints: Sequence[Sequence[int]],
) -> Drawing:
    """Make the drawing; places are in pixels from its upper left corner."""
    left = min((centre - width / 2 for centre, width in zip(centres, rows.widths)), default=0.0)
    right = max((centre + width / 2 for centre, width in zip(centres, rows.widths)), default=0.0)
    tops, bottoms, y = [], [], 0.0
    for row in rows.rows:
        tops.append(y)
        bottoms.append(y + max((sizes[item][1] for item in row if item < len(sizes)), default=0.0))
        y = bottoms[-1] + _ROW_GAP + min(_MOST_WIDENING, _sideways(rows, row, centres) // 10)
    corners = [
        (round(centres[box] - width / 2 - left, 1), tops[rows.rank[box]])
        for box, (width, _) in enumerate(sizes)
    ]

    def lines(edge: Hyperedge, passed_at: Sequence[int]) -> list[Segment]:
        own = rows.rank[edge.source]
        start = corners[edge.source][0] + edge.source_x
        trunk = [(start, corners[edge.source][1] + sizes[edge.source][1]), (start, bottoms[own])]
        for waypoint in passed_at:
            x, rank = round(centres[waypoint] - left, 1), rows.rank[waypoint]
            trunk += [(x, tops[rank]), (x, bottoms[rank])]
        passed = [min(rows.rank[box] - own - 1, len(passed_at)) for box, _ in edge.targets]
        ends = [(corners[box][0] + x, corners[box][1]) for box, x in edge.targets]
        return _segments(trunk, passed, ends)

    drawn = [lines(edge, passed_at) for edge, passed_at in zip(hyperedges, waypoints)]
    return Drawing(round(right - left, 1), bottoms[-1] if bottoms else 0.0, corners, drawn)


def _segments(
    trunk: Sequence[Point], passed: Sequence[int], ends: Sequence[Point]
) -> list[Segment]:
    """Cut the line of a hyperedge into segments.

    The line begins with a trunk. The branch to each target leaves the trunk above the row of this
    target, and the trunk is cut there. `passed` has, for each target, the number of rows that the
    trunk passes on the way to this target. `ends` are the points where the branches end.
    """
    forks = sorted({rows for rows in passed if rows})
    if forks and passed.count(forks[-1]) == 1:
        forks.pop()  # only one branch uses the trunk after the last fork, so no cut is needed

    def segment(rows: int, forks_before: int, *end: Point) -> Segment:
        begin = 2 * forks[forks_before - 1] + 1 if forks_before else 0
        after = len(ends) + forks_before - 1 if forks_before else None
        return Segment([*trunk[begin : 2 * rows + 2], *end], after)

    branches = [segment(rows, bisect_right(forks, rows), end) for rows, end in zip(passed, ends)]
    return branches + [segment(rows, number) for number, rows in enumerate(forks)]


def _sideways(rows: _Rows, row: Sequence[int], centres: Sequence[float]) -> float:
    """The largest horizontal distance that a line covers from this row to the next row."""
    ends = ((item, end) for item in row for end in rows.below[item])
    return max(
        (abs(centres[e.other] + e.other_x - centres[item] - e.own_x) for item, e in ends),
        default=0.0,
    )
