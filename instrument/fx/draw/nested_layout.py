"""The layout of a graph with boxes nested in frames, one frame for each call of a module.

A frame holds nodes that follow each other in the graph, so a module that is called twice has two
frames. Each frame is laid out separately (`sugiyama`), and is then one box in the frame around it.
A line enters a frame through a port in its upper edge, and leaves it through a port in its lower
edge.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from instrument.fx.draw.sugiyama import Drawing, Hyperedge, Point, Segment, arrange

_HEADER, _PADDING = 22.0, 10.0

Edge = tuple[int, int]


class Box(NamedTuple):
    """The size of a node's box; `port_x` is where lines meet it, in pixels from its left edge."""

    width: float
    height: float
    port_x: float


class Line(NamedTuple):
    """One piece of the drawn line that leads from a box to all boxes that take its value.

    If several boxes take the value, the line branches. A line is cut into pieces at its branches
    and at the edges of frames.

    Attributes:
        source: the box that makes the value.
        target: the box where this piece ends; None if this piece ends at a branch or at a frame.
        points: in coordinates of the whole picture.
        after: the index of the piece that this piece continues; None if this piece begins at the
            source.
    """

    source: int
    target: int | None
    points: list[Point]
    after: int | None


@dataclass
class Frame:
    """The frame of a module: its boxes, the frames inside it, and its place in the picture.

    Attributes:
        path: the qualified name of the module; "" for the whole model.
        first, last: the boxes of the frame are `first` to `last` - 1.
        children: what is directly in this frame: inner frames, and indexes of boxes.
        sources: the boxes outside the frame whose values enter the frame.
        results: the boxes inside the frame whose values leave the frame.
        drawing: the layout inside the frame. Ports and children are laid out as boxes. A port is a
            point on the frame's edge at which a line enters or leaves. The ports of `sources` come
            first, then the children, then the ports of `results`.
        lines: the lines inside the frame, by the box whose value the line carries. Each line is a
            pair of lists. The first list holds the places where the line ends, as numbers: child k
            has the number k, and the port of `results[k]` has the number `len(children)` + k. The
            second list holds the segments of the line.
    """

    path: str
    first: int
    last: int
    children: list[int | Frame]
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    sources: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    drawing: Drawing = field(default_factory=lambda: Drawing(0.0, 0.0, [], []))
    lines: dict[int, tuple[list[int], list[Segment]]] = field(default_factory=dict)

    def holds(self, box: int) -> bool:
        """Whether the box is in this frame or in a frame inside it."""
        return self.first <= box < self.last

    def child_of(self, box: int) -> int:
        """The position of a box of this frame in the list `children`.

        If the box is inside an inner frame, the result is the position of the inner frame.
        """
        return bisect_right(self.children, box, key=_first) - 1


def _first(child: int | Frame) -> int:
    return child.first if isinstance(child, Frame) else child


def frames(paths: Sequence[str]) -> Frame:
    """Return the frame of the model, with the frames of its modules inside.

    `paths` are the module paths of the boxes, in graph order. A module with only one child (a box
    or a frame) has no frame: its child takes its place.
    """
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
    """Yield each frame inside `frame` with its depth, outer frames first; children have depth 1."""
    for child in frame.children:
        if isinstance(child, Frame):
            yield 1, child
            yield from ((depth + 1, inner) for depth, inner in nested(child))


def lay_out(root: Frame, boxes: Sequence[Box], edges: Sequence[Edge]) -> list[Line]:
    """Place all boxes and frames in `root` and return the lines; edges must lead to later boxes."""
    holders = _holders(root, len(boxes))
    targets: dict[int, list[int]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append(target)
        _add_ports(holders, source, target)
    _arrange(root, boxes, targets)
    _set_places(root, 0.0, 0.0)
    lines: list[Line] = []
    for source in targets:
        end: int | None = None
        for frame in reversed(holders[source]):
            end = _draw(frame, source, end, lines)
            if end is None:  # the value does not leave this frame
                break
    return lines


def corners(frame: Frame) -> Iterator[tuple[int, Point]]:
    """Yield each box of a frame, and the upper left corner of the box. Call `lay_out` first."""
    for child, (x, y) in zip(frame.children, frame.drawing.corners[len(frame.sources) :]):
        if isinstance(child, Frame):
            yield from corners(child)
        else:
            yield child, (frame.x + _PADDING + x, frame.y + _HEADER + y)


def _holders(root: Frame, count: int) -> list[list[Frame]]:
    """Return a list for each box: the frames around the box, the outermost frame first."""
    holders: list[list[Frame]] = [[root] for _ in range(count)]
    for _, frame in nested(root):
        for box in range(frame.first, frame.last):
            holders[box].append(frame)
    return holders


def _add_ports(holders: Sequence[Sequence[Frame]], source: int, target: int) -> None:
    """Add ports for the line from `source` to `target` where the line crosses edges of frames.

    `source` is added to `results` of each frame that the line leaves, and to `sources` of each
    frame that the line enters. `holders` is the result of `_holders`.
    """
    for frame in holders[source]:
        if not frame.holds(target) and source not in frame.results:
            frame.results.append(source)
    for frame in holders[target]:
        if not frame.holds(source) and source not in frame.sources:
            frame.sources.append(source)


def _arrange(frame: Frame, boxes: Sequence[Box], targets: dict[int, list[int]]) -> None:
    """Set the layout and the size of the frames inside a frame, and then of the frame itself.

    `Frame.drawing` gives the order of the boxes in the layout.
    """
    for child in frame.children:
        if isinstance(child, Frame):
            _arrange(child, boxes, targets)
    frame.sources.sort()
    frame.results.sort()
    before = len(frame.sources)
    inside = [box for box in range(frame.first, frame.last) if box in targets]
    hyperedges: dict[int, Hyperedge] = {}
    reached: list[list[int]] = []
    for source in [*frame.sources, *inside]:
        ends = _ends(frame, boxes, source, targets[source])
        if ends:
            if frame.holds(source):
                start = before + frame.child_of(source)
                x = _port(frame, boxes, frame.child_of(source), source, into=False)
            else:
                start, x = frame.sources.index(source), 0.0
            places = tuple((before + child, at) for child, at in ends.items())
            hyperedges[source] = Hyperedge(start, x, places)
            reached.append([*ends])
    sizes = [_size(child, boxes) for child in frame.children]
    port = [(0.0, 0.0)]
    sizes = port * before + sizes + port * len(frame.results)
    frame.drawing = arrange(sizes, [*hyperedges.values()], before, len(frame.results))
    frame.lines = dict(zip(hyperedges, zip(reached, frame.drawing.lines)))
    frame.width = frame.drawing.width + 2 * _PADDING
    frame.height = frame.drawing.height + _HEADER + _PADDING


def _ends(
    frame: Frame, boxes: Sequence[Box], source: int, targets: Sequence[int]
) -> dict[int, float]:
    """The ends of a value's line inside a frame.

    The line ends at each child that takes the value. If the value leaves the frame, the line also
    ends at a port, the point on the frame's edge where the value leaves. The keys are the indices
    of these children and ports; the indices of the ports follow the index of the last child. The
    values are the distances from the left edge of a child or port to the point where the line meets
    it.
    """
    own = frame.child_of(source) if frame.holds(source) else None
    children = dict.fromkeys(frame.child_of(target) for target in targets if frame.holds(target))
    ends = {
        child: _port(frame, boxes, child, source, into=True) for child in children if child != own
    }
    if source in frame.results:
        ends[len(frame.children) + frame.results.index(source)] = 0.0
    return ends


def _port(frame: Frame, boxes: Sequence[Box], child: int, source: int, *, into: bool) -> float:
    """Return where the line of a value meets a child, in pixels from the left edge of the child.

    A child is a box or an inner frame that lies directly in `frame`; `child` is its index in
    `frame.children`. The value comes from the box `source`. With `into`, the line leads into the
    child. Without `into`, the line leads out of the child.
    """
    inner = frame.children[child]
    if not isinstance(inner, Frame):
        return boxes[inner].port_x
    ports = inner.sources if into else inner.results
    first = 0 if into else len(inner.drawing.corners) - len(ports)
    return _PADDING + inner.drawing.corners[first + ports.index(source)][0]


def _size(child: int | Frame, boxes: Sequence[Box]) -> tuple[float, float]:
    return (child.width, child.height) if isinstance(child, Frame) else boxes[child][:2]


def _set_places(frame: Frame, x: float, y: float) -> None:
    """Place a frame at `x` and `y` in the picture, and then all frames inside it."""
    frame.x, frame.y = x, y
    for child, (left, top) in zip(frame.children, frame.drawing.corners[len(frame.sources) :]):
        if isinstance(child, Frame):
            _set_places(child, x + _PADDING + left, y + _HEADER + top)


def _draw(frame: Frame, source: int, after: int | None, lines: list[Line]) -> int | None:
    """Draw the line of one value inside a frame: append the pieces of the line to `lines`.

    The pieces directly in the frame come first. After them come the pieces in the inner frames to
    which the line leads.

    Args:
        frame: the frame.
        source: the box that makes the value.
        after: the index in `lines` of the piece that the line continues in this frame. This piece
            ends at the edge of this frame or of the inner frame that holds `source`. None if
            `source` is directly in this frame.
        lines: the pieces so far.

    Returns:
        The index in `lines` of the piece that ends at the lower edge of the frame; None if the
        value does not leave the frame.
    """
    reached, segments = frame.lines[source]
    first, last = len(lines), len(frame.children)
    ends = [frame.children[child] if child < last else None for child in reached]
    for number, segment in enumerate(segments):
        points = [(frame.x + _PADDING + x, frame.y + _HEADER + y) for x, y in segment.points]
        if segment.after is None and after is not None:
            points.insert(0, lines[after].points[-1])
        end = ends[number] if number < len(ends) else None
        before = after if segment.after is None else first + segment.after
        lines.append(Line(source, end if isinstance(end, int) else None, points, before))
    for number, end in enumerate(ends):
        if isinstance(end, Frame):
            _draw(end, source, first + number, lines)
    return first + len(reached) - 1 if reached[-1] >= last else None
