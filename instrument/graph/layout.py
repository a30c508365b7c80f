"""Where the boxes of a graph stand, with those of a module inside a frame of its own, and the lines between them.

A module's frame holds nodes that follow each other in the graph; a module called twice has two. Each frame is arranged
by itself (`layers`), then stands as one box among its neighbours; a line that enters or leaves it does so through a
place in its upper or lower edge.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from instrument.graph.layers import Drawing, Net, Point, arrange

_HEADER, _PADDING = 22.0, 10.0

Edge = tuple[int, int]


class Box(NamedTuple):
    """A node's size, and where lines meet it, from its left."""

    width: float
    height: float
    port_x: float


@dataclass
class Frame:
    """A module: boxes `first` to `last` (not included) of the graph, the frames inside, and where it stands.

    `children` are boxes, by number, and frames. `path` is the module's qualified name, "" for the whole model.
    """

    path: str
    first: int
    last: int
    children: list[int | Frame]
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    sources: list[int] = field(default_factory=list)  # boxes outside, whose values come in
    results: list[int] = field(default_factory=list)  # boxes inside, whose values go out
    drawing: Drawing = field(default_factory=lambda: Drawing(0.0, 0.0, [], []))
    lines: dict[tuple[int, int], list[Point]] = field(
        default_factory=dict
    )  # by source and child, or result behind them

    def holds(self, box: int) -> bool:
        """Whether the box stands in this frame or in one inside it."""
        return self.first <= box < self.last

    def child_of(self, box: int) -> int:
        """Which of the children the box is, or is in."""
        return bisect_right(self.children, box, key=_first) - 1

    def line(self, source: int, child: int) -> list[Point]:
        """The line from a source or a child to a child, or to a result behind the children; on the whole picture."""
        return [(self.x + _PADDING + x, self.y + _HEADER + y) for x, y in self.lines[source, child]]


def _first(child: int | Frame) -> int:
    return child.first if isinstance(child, Frame) else child


def frames(paths: Sequence[str]) -> Frame:
    """The frames of boxes whose modules are these, in the graph's order; a frame of one box is none."""
    parts = [tuple(path.split(".")) if path else () for path in paths]
    return Frame("", 0, len(paths), _children(parts, 0, len(paths), 0))


def _children(parts: Sequence[tuple[str, ...]], first: int, last: int, depth: int) -> list[int | Frame]:
    children: list[int | Frame] = []
    for key, run in groupby(range(first, last), key=lambda box: parts[box][: depth + 1]):
        boxes = list(run)
        if len(key) <= depth:
            children += boxes
            continue
        inside = _children(parts, boxes[0], boxes[-1] + 1, depth + 1)
        children += inside if len(inside) == 1 else [Frame(".".join(key), boxes[0], boxes[-1] + 1, inside)]
    return children


def nested(frame: Frame) -> Iterator[tuple[int, Frame]]:
    """The frames inside, outer ones first, each with how deep it lies: 1 for those of the whole model."""
    for child in frame.children:
        if isinstance(child, Frame):
            yield 1, child
            yield from ((depth + 1, inner) for depth, inner in nested(child))


def lay_out(root: Frame, boxes: Sequence[Box], edges: Sequence[Edge]) -> list[list[Point]]:
    """Place all boxes and frames below `root`, and give each edge's line; edges run from boxes to later ones."""
    holders = _holders(root, len(boxes))
    targets: dict[int, list[int]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append(target)
        _cross(holders, source, target)
    _arrange(root, boxes, targets)
    _settle(root, 0.0, 0.0)
    return [_line(holders, source, target) for source, target in edges]


def corners(frame: Frame) -> Iterator[tuple[int, Point]]:
    """Each box of a frame that is laid out, and its left upper corner."""
    for child, (x, y) in zip(frame.children, frame.drawing.corners[len(frame.sources) :]):
        if isinstance(child, Frame):
            yield from corners(child)
        else:
            yield child, (frame.x + _PADDING + x, frame.y + _HEADER + y)


def _holders(root: Frame, count: int) -> list[list[Frame]]:
    """For each box the frames that hold it, the outermost first."""
    holders: list[list[Frame]] = [[root] for _ in range(count)]
    for _, frame in nested(root):
        for box in range(frame.first, frame.last):
            holders[box].append(frame)
    return holders


def _cross(holders: Sequence[Sequence[Frame]], source: int, target: int) -> None:
    """Note the edge at the frames that it leaves and enters."""
    for frame in holders[source]:
        if not frame.holds(target) and source not in frame.results:
            frame.results.append(source)
    for frame in holders[target]:
        if not frame.holds(source) and source not in frame.sources:
            frame.sources.append(source)


def _arrange(frame: Frame, boxes: Sequence[Box], targets: dict[int, list[int]]) -> None:
    """Place what is in a frame, from the innermost on: the sources' places, its children, the results' places."""
    for child in frame.children:
        if isinstance(child, Frame):
            _arrange(child, boxes, targets)
    frame.sources.sort()
    frame.results.sort()
    before, inside = len(frame.sources), [box for box in range(frame.first, frame.last) if box in targets]
    nets, keys = [], []
    for source in [*frame.sources, *inside]:
        ends = _ends(frame, boxes, source, targets[source])
        if ends:
            own = frame.child_of(source) if frame.holds(source) else frame.sources.index(source) - before
            x = _port(frame, boxes, own, source, into=False) if own >= 0 else 0.0
            nets.append(Net(before + own, x, tuple((before + child, at) for child, at in ends.items())))
            keys.append([(source, child) for child in ends])
    sizes = [_size(child, boxes) for child in frame.children]
    ports = [(0.0, 0.0)]
    frame.drawing = arrange(ports * before + sizes + ports * len(frame.results), nets, before, len(frame.results))
    for names, lines in zip(keys, frame.drawing.lines):
        frame.lines.update(zip(names, lines))
    frame.width = frame.drawing.width + 2 * _PADDING
    frame.height = frame.drawing.height + _HEADER + _PADDING


def _ends(frame: Frame, boxes: Sequence[Box], source: int, targets: Sequence[int]) -> dict[int, float]:
    """The children that a value goes to, and the place where it leaves the frame; where on each, from its left."""
    own = frame.child_of(source) if frame.holds(source) else None
    children = dict.fromkeys(frame.child_of(target) for target in targets if frame.holds(target))
    ends = {child: _port(frame, boxes, child, source, into=True) for child in children if child != own}
    if source in frame.results:
        ends[len(frame.children) + frame.results.index(source)] = 0.0
    return ends


def _port(frame: Frame, boxes: Sequence[Box], child: int, source: int, *, into: bool) -> float:
    """Where a line of this value meets a child, from the child's left."""
    inner = frame.children[child]
    if not isinstance(inner, Frame):
        return boxes[inner].port_x
    place = inner.sources.index(source) if into else inner.results.index(source) - len(inner.results)
    return _PADDING + inner.drawing.corners[place][0]


def _size(child: int | Frame, boxes: Sequence[Box]) -> tuple[float, float]:
    return (child.width, child.height) if isinstance(child, Frame) else boxes[child][:2]


def _settle(frame: Frame, x: float, y: float) -> None:
    """Turn places within each frame into places on the whole picture."""
    frame.x, frame.y = x, y
    for child, (left, top) in zip(frame.children, frame.drawing.corners[len(frame.sources) :]):
        if isinstance(child, Frame):
            _settle(child, x + _PADDING + left, y + _HEADER + top)


def _line(holders: Sequence[Sequence[Frame]], source: int, target: int) -> list[Point]:
    """Out of the frames that hold the source alone, across the innermost that holds both, into those of the target."""
    leaving = [frame for frame in reversed(holders[source]) if not frame.holds(target)]
    entering = [frame for frame in holders[target] if not frame.holds(source)]
    shared = holders[target][len(holders[target]) - len(entering) - 1]
    points = [p for frame in leaving for p in frame.line(source, len(frame.children) + frame.results.index(source))]
    for frame in [shared, *entering]:
        points += frame.line(source, frame.child_of(target))
    return points
