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

from instrument.fx.draw.sugiyama import Drawing, Net, Piece, Point, arrange

_HEADER, _PADDING = 22.0, 10.0

Edge = tuple[int, int]


class Box(NamedTuple):
    """A node's size, and where lines meet it, from its left."""

    width: float
    height: float
    port_x: float


class Line(NamedTuple):
    """A part of the lines of what the box `source` makes, from the end of line number `after` on.

    Attributes:
        target: the box where it ends; None for a part that several share, or between two frames.
        points: on the whole picture.
        after: None at the box that makes the value.
    """

    source: int
    target: int | None
    points: list[Point]
    after: int | None


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
    lines: dict[int, tuple[list[int], list[Piece]]] = field(
        default_factory=dict
    )  # by source: where to, and the pieces

    def holds(self, box: int) -> bool:
        """Whether the box stands in this frame or in one inside it."""
        return self.first <= box < self.last

    def child_of(self, box: int) -> int:
        """Which of the children the box is, or is in."""
        return bisect_right(self.children, box, key=_first) - 1


def _first(child: int | Frame) -> int:
    return child.first if isinstance(child, Frame) else child


def frames(paths: Sequence[str]) -> Frame:
    """The frames of boxes whose modules are these, in the graph's order; a frame of one box is none."""
    parts = [tuple(path.split(".")) if path else () for path in paths]
    return Frame("", 0, len(paths), _children(parts, 0, len(paths), 0))


def _children(
    parts: Sequence[tuple[str, ...]], first: int, last: int, depth: int
) -> list[int | Frame]:
    children: list[int | Frame] = []
    for key, run in groupby(range(first, last), key=lambda box: parts[box][: depth + 1]):
        boxes = list(run)
        if len(key) <= depth:
            children += boxes
            continue
        inside = _children(parts, boxes[0], boxes[-1] + 1, depth + 1)
        children += (
            inside if len(inside) == 1 else [Frame(".".join(key), boxes[0], boxes[-1] + 1, inside)]
        )
    return children


def nested(frame: Frame) -> Iterator[tuple[int, Frame]]:
    """The frames inside, outer ones first, each with how deep it lies: 1 for those of the whole model."""
    for child in frame.children:
        if isinstance(child, Frame):
            yield 1, child
            yield from ((depth + 1, inner) for depth, inner in nested(child))


def lay_out(root: Frame, boxes: Sequence[Box], edges: Sequence[Edge]) -> list[Line]:
    """Place all boxes and frames below `root`, and give the edges' lines; edges run from boxes to later ones."""
    holders = _holders(root, len(boxes))
    targets: dict[int, list[int]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append(target)
        _cross(holders, source, target)
    _arrange(root, boxes, targets)
    _settle(root, 0.0, 0.0)
    lines: list[Line] = []
    for source in targets:
        end: int | None = None
        for frame in reversed(holders[source]):
            end = _draw(frame, source, end, lines)
            if end is None:  # the value leaves no further frame
                break
    return lines


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
    before, inside = (
        len(frame.sources),
        [box for box in range(frame.first, frame.last) if box in targets],
    )
    nets: dict[int, Net] = {}
    reached: list[list[int]] = []
    for source in [*frame.sources, *inside]:
        ends = _ends(frame, boxes, source, targets[source])
        if ends:
            own = (
                frame.child_of(source)
                if frame.holds(source)
                else frame.sources.index(source) - before
            )
            x = _port(frame, boxes, own, source, into=False) if own >= 0 else 0.0
            nets[source] = Net(
                before + own, x, tuple((before + child, at) for child, at in ends.items())
            )
            reached.append([*ends])
    sizes = [_size(child, boxes) for child in frame.children]
    ports = [(0.0, 0.0)]
    sizes = ports * before + sizes + ports * len(frame.results)
    frame.drawing = arrange(sizes, [*nets.values()], before, len(frame.results))
    frame.lines = dict(zip(nets, zip(reached, frame.drawing.lines)))
    frame.width = frame.drawing.width + 2 * _PADDING
    frame.height = frame.drawing.height + _HEADER + _PADDING


def _ends(
    frame: Frame, boxes: Sequence[Box], source: int, targets: Sequence[int]
) -> dict[int, float]:
    """The children that a value goes to, and the place where it leaves the frame; where on each, from its left."""
    own = frame.child_of(source) if frame.holds(source) else None
    children = dict.fromkeys(frame.child_of(target) for target in targets if frame.holds(target))
    ends = {
        child: _port(frame, boxes, child, source, into=True) for child in children if child != own
    }
    if source in frame.results:
        ends[len(frame.children) + frame.results.index(source)] = 0.0
    return ends


def _port(frame: Frame, boxes: Sequence[Box], child: int, source: int, *, into: bool) -> float:
    """Where a line of this value meets a child, from the child's left."""
    inner = frame.children[child]
    if not isinstance(inner, Frame):
        return boxes[inner].port_x
    place = (
        inner.sources.index(source) if into else inner.results.index(source) - len(inner.results)
    )
    return _PADDING + inner.drawing.corners[place][0]


def _size(child: int | Frame, boxes: Sequence[Box]) -> tuple[float, float]:
    return (child.width, child.height) if isinstance(child, Frame) else boxes[child][:2]


def _settle(frame: Frame, x: float, y: float) -> None:
    """Turn places within each frame into places on the whole picture."""
    frame.x, frame.y = x, y
    for child, (left, top) in zip(frame.children, frame.drawing.corners[len(frame.sources) :]):
        if isinstance(child, Frame):
            _settle(child, x + _PADDING + left, y + _HEADER + top)


def _draw(frame: Frame, source: int, after: int | None, lines: list[Line]) -> int | None:
    """Add a value's lines in a frame and in those that it enters from there; the number of the one that leaves it."""
    reached, pieces = frame.lines[source]
    first, last = len(lines), len(frame.children)
    ends = [frame.children[child] if child < last else None for child in reached]
    for number, piece in enumerate(pieces):
        points = [(frame.x + _PADDING + x, frame.y + _HEADER + y) for x, y in piece.points]
        if piece.after is None and after is not None:
            points.insert(0, lines[after].points[-1])
        end = ends[number] if number < len(ends) else None
        before = after if piece.after is None else first + piece.after
        lines.append(Line(source, end if isinstance(end, int) else None, points, before))
    for number, end in enumerate(ends):
        if isinstance(end, Frame):
            _draw(end, source, first + number, lines)
    return first + len(reached) - 1 if reached[-1] >= last else None
