"""Boxes and lines placed in rows, so that every line runs downwards and none crosses a box.

Sugiyama's method (Sugiyama, Tagawa, Toda 1981): rows by longest path, an order within rows by barycentres, places by
least squares. Written here because Graphviz is a system package, networkx has no layered layout and grandalf is no
longer kept.

Cost: linear in boxes, lines and the rows that lines pass, with a logarithm for the sorting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Point = tuple[float, float]

_SWEEPS, _PASSES = 8, 4
_BOX_GAP, _LINE_GAP = 18.0, 10.0
# Between rows: the least, and how much more at most where lines go far aside, a tenth of how far they do.
_ROW_GAP, _WIDENED = 22.0, 40.0
# Lines that pass rows are kept straight before those between neighbours, and those before what merely feeds a box.
_STRAIGHT, _PLAIN, _LOOSE = 8.0, 2.0, 0.25
# Rows that lines may pass, for each box; those that pass most beyond that are drawn without a place of their own.
_PASSED_PER_BOX = 20


class Net(NamedTuple):
    """One value: the box that makes it and those that take it; where on a box, in pixels from its left."""

    source: int
    source_x: float
    targets: tuple[tuple[int, float], ...]


class Piece(NamedTuple):
    """A part of a net's lines, from the end of that net's piece number `after` on; None: from the box."""

    points: list[Point]
    after: int | None


@dataclass
class Drawing:
    """Where everything is: the left upper corner of each box, and each net's lines.

    These are in pieces, so that what several lines pass is there once: the pieces that end at the net's targets, in
    order, then those that are shared.
    """

    width: float
    height: float
    corners: list[Point]
    lines: list[list[Piece]]


class _End(NamedTuple):
    """A line between neighbouring rows, as seen from one of its ends; offsets from the middle."""

    other: int
    other_x: float
    own_x: float
    weight: float


@dataclass
class _Rows:
    """The rows with boxes and, after these, the places where lines pass a row."""

    rank: list[int]
    widths: list[float]
    rows: list[list[int]]
    above: list[list[_End]] = field(default_factory=list)
    below: list[list[_End]] = field(default_factory=list)


def arrange(
    sizes: Sequence[tuple[float, float]], nets: Sequence[Net], tops: int = 0, bottoms: int = 0
) -> Drawing:
    """Place boxes of these widths and heights.

    Boxes are in an order in which every net runs forward. The first `tops` stand in a row above all others, the last
    `bottoms` in a row below. The same arguments give the same drawing.
    """
    rank = _ranks(len(sizes), nets, tops, bottoms)
    rows, chains = _rows(rank, [width for width, _ in sizes], nets)
    _order(rows)
    centres = _centres(rows)
    return _drawn(rows, centres, sizes, nets, chains)


def _ranks(count: int, nets: Iterable[Net], tops: int, bottoms: int) -> list[int]:
    """The row of each box: below all that it takes from; what takes nothing stands right above what takes it."""
    first = 1 if tops else 0
    rank = [0 if box < tops else first for box in range(count)]
    takes, nearest = [False] * count, [count] * count
    ordered = sorted(nets)
    for net in ordered:
        for box, _ in net.targets:
            rank[box] = max(rank[box], rank[net.source] + 1)
            takes[box] = True
    for net in ordered:
        nearest[net.source] = min(
            (rank[box] for box, _ in net.targets if box < count - bottoms), default=count
        )
    for box in range(tops, count - bottoms):
        if not takes[box] and nearest[box] < count:
            rank[box] = max(first, nearest[box] - 1)
    last = max(rank[: count - bottoms], default=-1) + 1
    return rank[: count - bottoms] + [last] * bottoms


def _rows(
    rank: list[int], widths: list[float], nets: Sequence[Net]
) -> tuple[_Rows, list[list[int]]]:
    """The rows with a place for each line in each row that it passes; and for each net its places, downwards.

    The lines of a net pass a row in one place, as one line, until they part.
    """
    rows = _Rows(rank, widths, [[] for _ in range(max(rank, default=-1) + 1)])
    for box in range(len(rank)):
        rows.rows[rank[box]].append(box)
        rows.above.append([])
        rows.below.append([])
    left = _PASSED_PER_BOX * len(rank)
    passed = [
        max((rank[box] for box, _ in net.targets), default=0) - rank[net.source] - 1 for net in nets
    ]
    chains: list[list[int]] = [[] for _ in nets]
    for which in sorted(range(len(nets)), key=passed.__getitem__):
        left -= max(passed[which], 0)
        if left >= 0:
            chains[which] = _routed(rows, nets[which], passed[which])
    return rows, chains


def _routed(rows: _Rows, net: Net, passed: int) -> list[int]:
    """Give a net's lines their places and ends."""
    chain = [net.source]
    source_x = net.source_x - rows.widths[net.source] / 2
    for rank in range(rows.rank[net.source] + 1, rows.rank[net.source] + 1 + passed):
        place = len(rows.widths)
        rows.widths.append(0.0)
        rows.rank.append(rank)
        rows.rows[rank].append(place)
        rows.above.append([])
        rows.below.append([])
        _join(
            rows,
            chain[-1],
            place,
            source_x if len(chain) == 1 else 0.0,
            0.0,
            _PLAIN if len(chain) == 1 else _STRAIGHT,
        )
        chain.append(place)
    loose = not rows.above[net.source] and len(net.targets) == 1
    for box, x in net.targets:
        depth = rows.rank[box] - rows.rank[net.source] - 1
        own_x = x - rows.widths[box] / 2
        _join(
            rows, chain[depth], box, 0.0 if depth else source_x, own_x, _LOOSE if loose else _PLAIN
        )
    return chain[1:]


def _join(
    rows: _Rows, upper: int, lower: int, upper_x: float, lower_x: float, weight: float
) -> None:
    rows.below[upper].append(_End(lower, lower_x, upper_x, weight))
    rows.above[lower].append(_End(upper, upper_x, lower_x, weight))


def _order(rows: _Rows) -> None:
    """Sort each row by where its lines come from, then by where they go to, and so on; the fewest crossings stay."""
    position = [0.0] * len(rows.widths)
    for row in rows.rows:
        _number(row, position)
    best, fewest = [list(row) for row in rows.rows], crossings(rows, position)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        ends = rows.below if sweep % 2 else rows.above
        for row in reversed(rows.rows) if sweep % 2 else rows.rows:
            row.sort(key=lambda item: _barycentre(item, ends[item], position, rows.widths))
            _number(row, position)
        found = crossings(rows, position)
        if found < fewest:
            best, fewest = [list(row) for row in rows.rows], found
    rows.rows = best


def _number(row: Sequence[int], position: list[float]) -> None:
    for at, item in enumerate(row):
        position[item] = float(at)


def _barycentre(
    item: int, ends: Sequence[_End], position: Sequence[float], widths: Sequence[float]
) -> float:
    if not ends:
        return position[item]
    return sum(_at(end.other, end.other_x, position, widths) for end in ends) / len(ends)


def _at(item: int, x: float, position: Sequence[float], widths: Sequence[float]) -> float:
    """A place within the row's order: between two items for a line that ends aside of a wide box's middle."""
    return position[item] + (x / widths[item] if widths[item] else 0.0)


def crossings(rows: _Rows, position: Sequence[float]) -> int:
    """How many pairs of lines cross between neighbouring rows, counted by inversions."""
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
    """How many pairs stand in the wrong order: a Fenwick tree over the ranks of the values."""
    ranks = {value: rank for rank, value in enumerate(sorted(set(values)), 1)}
    tree, found = [0] * (len(ranks) + 1), 0
    for seen, value in enumerate(values):
        at, not_above = ranks[value], 0
        while at:
            not_above += tree[at]
            at -= at & -at
        found += seen - not_above
        at = ranks[value]
        while at < len(tree):
            tree[at] += 1
            at += at & -at
    return found


def _centres(rows: _Rows) -> list[float]:
    """The middle of each item, as near to its neighbours as the row lets it.

    By neighbours below and above in turns, so that all spread; above last, so that what follows each other stands
    straight, and what nothing is above of stands over what it feeds.
    """
    centres = [0.0] * len(rows.widths)
    hung = [above or below for above, below in zip(rows.above, rows.below)]
    for _ in range(_PASSES):
        for row in rows.rows:
            _place(row, hung, centres, rows.widths)
        for row in reversed(rows.rows):
            _place(row, rows.below, centres, rows.widths)
    for row in rows.rows:
        _place(row, hung, centres, rows.widths)
    return centres


def _place(
    row: Sequence[int],
    ends: Sequence[Sequence[_End]],
    centres: list[float],
    widths: Sequence[float],
) -> None:
    """Least squares under the row's order: where items would stand closer than they may, they move as one block."""
    blocks: list[
        tuple[float, float, int]
    ] = []  # the place of the block's first item, its weight, its items
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
        place, weight = (wanted / pull, pull) if pull else (centres[item], 1e-3)
        blocks.append((place - shift, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, heavy, some), (other, light, more) = blocks[-2:]
            blocks[-2:] = [
                ((one * heavy + other * light) / (heavy + light), heavy + light, some + more)
            ]
    places = (place for place, _, items in blocks for _ in range(items))
    for item, place, moved in zip(row, places, shifts):
        centres[item] = place + moved


def _distance(left: float, right: float) -> float:
    """Between the middles of two neighbours."""
    return (left + right) / 2 + (_BOX_GAP if left or right else _LINE_GAP)


def _drawn(
    rows: _Rows,
    centres: Sequence[float],
    sizes: Sequence[tuple[float, float]],
    nets: Sequence[Net],
    chains: Sequence[Sequence[int]],
) -> Drawing:
    """Whole pixels, from the left upper corner on."""
    left = min((centre - width / 2 for centre, width in zip(centres, rows.widths)), default=0.0)
    right = max((centre + width / 2 for centre, width in zip(centres, rows.widths)), default=0.0)
    tops, bottoms, y = [], [], 0.0
    for row in rows.rows:
        tops.append(y)
        bottoms.append(y + max((sizes[item][1] for item in row if item < len(sizes)), default=0.0))
        y = bottoms[-1] + _ROW_GAP + min(_WIDENED, _aside(rows, row, centres) // 10)
    corners = [
        (round(centres[box] - width / 2 - left, 1), tops[rows.rank[box]])
        for box, (width, _) in enumerate(sizes)
    ]

    def lines(net: Net, chain: Sequence[int]) -> list[Piece]:
        own = rows.rank[net.source]
        start = corners[net.source][0] + net.source_x
        trunk = [(start, corners[net.source][1] + sizes[net.source][1]), (start, bottoms[own])]
        for place in chain:
            through = round(centres[place] - left, 1)
            trunk += [(through, tops[rows.rank[place]]), (through, bottoms[rows.rank[place]])]
        passed = [min(rows.rank[box] - own - 1, len(chain)) for box, _ in net.targets]
        return _pieces(
            trunk, passed, [(corners[box][0] + x, corners[box][1]) for box, x in net.targets]
        )

    drawn = [lines(net, chain) for net, chain in zip(nets, chains)]
    return Drawing(round(right - left, 1), bottoms[-1] if bottoms else 0.0, corners, drawn)


def _pieces(trunk: Sequence[Point], passed: Sequence[int], ends: Sequence[Point]) -> list[Piece]:
    """Lines along a trunk to their ends, cut where one leaves others, after it passed so many rows."""
    forks = sorted({rows for rows in passed if rows})
    if forks and passed.count(forks[-1]) == 1:
        forks.pop()  # the last goes on alone

    def piece(rows: int, forked: int, *end: Point) -> Piece:
        begin = 2 * forks[forked - 1] + 1 if forked else 0
        return Piece(
            [*trunk[begin : 2 * rows + 2], *end], len(ends) + forked - 1 if forked else None
        )

    branches = [piece(rows, bisect_right(forks, rows), end) for rows, end in zip(passed, ends)]
    return branches + [piece(rows, forked) for forked, rows in enumerate(forks)]


def _aside(rows: _Rows, row: Sequence[int], centres: Sequence[float]) -> float:
    """How far the lines below a row go to one side at most."""
    ends = ((item, end) for item in row for end in rows.below[item])
    return max(
        (abs(centres[e.other] + e.other_x - centres[item] - e.own_x) for item, e in ends),
        default=0.0,
    )
