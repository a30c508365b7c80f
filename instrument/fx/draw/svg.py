"""The graph as SVG: nodes in frames of their modules, coloured by their share of the time, each a link to its row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

from instrument.analysis.table import Table, cell_text
from instrument.fx.draw.nested_layout import Box, Frame, Line, corners, frames, lay_out, nested
from instrument.fx.draw.sugiyama import Point
from instrument.templates import render
from instrument.units import duration

_CHARACTER, _SMALL_CHARACTER = 6.7, 5.6  # the widths of both sizes of text, in pixels
_LINE, _CHIP = 14.0, 14.0
_LABEL, _PLAIN_LABEL = 24, 12  # the longest, in characters, of a node and of a parameter beside it
# How strongly a node is coloured that took none of the time, and one that took the most.
_FAINT, _STRONG = 0.05, 0.8


class DrawnFrame(NamedTuple):
    """An open module; `number` is its place among all modules of the graph."""

    number: int
    path: str
    label: str
    x: float
    y: float
    width: float
    height: float


class DrawnLine(NamedTuple):
    """A line from node `source`, to node `target` where it ends at one.

    `number` is what lines that go on from its end have as `after`; None where none does.
    """

    source: int
    target: int | None
    number: int | None
    after: int | None
    path: str


class DrawnParameter(NamedTuple):
    """A parameter beside the one node that takes it."""

    number: int
    tooltip: str
    text: str
    x: float
    y: float
    width: float
    height: float


class DrawnNode(NamedTuple):
    """A node, or a closed module by its first node; `target` is where its link leads, `texts` are lines with places."""

    number: int
    kind: str
    target: str
    tooltip: str
    x: float
    y: float
    width: float
    height: float
    strength: float
    texts: list[tuple[float, str]]
    chips: list[DrawnParameter]


class View(NamedTuple):
    """A picture that opens modules down to some depth; `number` is its place among those of the graph.

    `every_node` says that it is the last one, which opens all modules. Places and sizes are in pixels.
    """

    number: int
    depth: int
    boxes: int
    highest: float
    every_node: bool
    width: float
    height: float
    frames: list[DrawnFrame]
    lines: list[DrawnLine]
    nodes: list[DrawnNode]

    @property
    def svg(self) -> str:
        """The picture as SVG."""
        return render("fx/draw/graph.svg", view=self)


@dataclass
class _Unit:
    """What is drawn as one box: a node, or a module that is not opened with the number of its frame."""

    nodes: list[int]
    path: str = ""
    frame: int | None = None


@dataclass
class _Graph:
    """The rows in the order they are drawn, without parameters that one node alone takes: those stand beside it."""

    rows: list[Any]
    order: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    beside: dict[int, list[int]] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)  # of nodes, by row


def views(nodes: Table) -> list[View]:
    """Pictures of a graph: its outermost modules closed, then opened one depth after the other, then every node.

    `nodes` has a row for each node, in an order in which inputs come first, with the columns of `NodeTable`. In the
    last picture row 3 is the element `n-3`; all link to `r-3`, and a closed module to itself in the next picture.

    Cost: about 1 ms for each node.
    """
    graph = _graph(nodes)
    root = frames(graph.paths)
    opened = list(nested(root))
    deepest = max((depth for depth, _ in opened), default=0)
    depths = [
        *range(min(deepest, 4)),
        deepest,
    ]  # the pictures between tell little, and make the page large
    return [_view(graph, root, opened, number, depth) for number, depth in enumerate(depths)]


def heat(share: float | None, highest: float) -> float:
    """How strongly a share of the time is coloured, as an opacity; by its root, so that small ones differ too."""
    return _FAINT + (_STRONG - _FAINT) * sqrt((share or 0.0) / highest) if highest else _FAINT


def _graph(nodes: Table) -> _Graph:
    graph = _Graph(list(nodes))
    index = {row.name: at for at, row in enumerate(graph.rows)}
    takers: dict[int, list[int]] = {at: [] for at in range(len(graph.rows))}
    for at, row in enumerate(graph.rows):
        for source in dict.fromkeys(index[name] for name in (row.inputs or "").split(", ") if name):
            takers[source].append(at)
            graph.edges.append((source, at))
    brought: dict[
        int, list[int]
    ] = {}  # parameters that several nodes take are drawn before the first of these
    for at, row in enumerate(graph.rows):
        if row.op == "get_attr" and takers[at]:
            (graph.beside if len(takers[at]) == 1 else brought).setdefault(
                takers[at][0], []
            ).append(at)
    moved = {at for several in (*graph.beside.values(), *brought.values()) for at in several}
    for at, row in enumerate(graph.rows):
        if at not in moved:
            together = [*brought.get(at, []), at]
            graph.order += together
            graph.paths += [row.module_path or ""] * len(together)
    return graph


def _view(
    graph: _Graph, root: Frame, opened: Sequence[tuple[int, Frame]], number: int, depth: int
) -> View:
    """The picture with the frames open that lie at most `depth` deep."""
    units: list[_Unit] = []
    numbers = {id(frame): at for at, (_, frame) in enumerate(opened)}
    cut = _cut(graph, root, depth, units, numbers)
    unit_of = {node: at for at, unit in enumerate(units) for node in unit.nodes}
    edges = [(unit_of[one], unit_of[other]) for one, other in graph.edges if one in unit_of]
    edges = list(dict.fromkeys((one, other) for one, other in edges if one != other))
    boxes = [_box(graph, unit) for unit in units]
    lines = lay_out(cut, boxes, edges)
    shares = [_sum(graph.rows[node].share for node in unit.nodes) for unit in units]
    highest = max((share for share in shares if share is not None), default=0.0)
    return View(
        number=number,
        depth=depth,
        boxes=len(units),
        highest=highest,
        every_node=depth == max((deep for deep, _ in opened), default=0),
        width=cut.width,
        height=cut.height,
        frames=[_frame(inner, outer, at) for at, (inner, outer) in _frames(cut, opened, depth)],
        lines=_lines(lines, [unit.nodes[0] for unit in units]),
        nodes=[
            _node(graph, units[at], boxes[at], corner, heat(shares[at], highest), number)
            for at, corner in corners(cut)
        ],
    )


def _cut(
    graph: _Graph, frame: Frame, depth: int, units: list[_Unit], numbers: dict[int, int]
) -> Frame:
    """The same frames with those deeper than `depth` closed; fills `units`, by whose numbers they hold boxes."""
    first = len(units)
    children: list[int | Frame] = []
    for child in frame.children:
        if isinstance(child, Frame) and depth:
            children.append(_cut(graph, child, depth - 1, units, numbers))
            continue
        children.append(len(units))
        if isinstance(child, Frame):
            units.append(
                _Unit(graph.order[child.first : child.last], child.path, numbers[id(child)])
            )
        else:
            units.append(_Unit([graph.order[child]]))
    return Frame(frame.path, first, len(units), children)


def _frames(
    cut: Frame, opened: Sequence[tuple[int, Frame]], depth: int
) -> Iterable[tuple[int, tuple[Frame, str]]]:
    """The open frames with their numbers and the paths of the frames around them."""
    kept = [at for at, (deep, _) in enumerate(opened) if deep <= depth]
    around = [""]
    for at, (deep, frame) in zip(kept, nested(cut)):
        del around[deep:]
        yield at, (frame, around[-1])
        around.append(f"{frame.path}.")


def _sum(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _texts(graph: _Graph, unit: _Unit) -> list[str]:
    """What stands in a box."""
    row = graph.rows[unit.nodes[0]]
    time, share = (
        _sum(getattr(graph.rows[node], name) for node in unit.nodes)
        for name in ("median_ns", "share")
    )
    cost = [f"{duration(time)} · {share:.1%}"] if time is not None and share is not None else []
    if unit.frame is not None:
        return [_short(unit.path, _LABEL), *cost, f"{len(unit.nodes)} nodes"]
    return [
        _short(row.name, _LABEL),
        *cost,
        *([_short(row.output_shape, _LABEL)] if row.output_shape else []),
    ]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def _chip_text(graph: _Graph, node: int) -> str:
    return _short(str(graph.rows[node].target).rpartition(".")[2], _PLAIN_LABEL)


def _width(texts: Iterable[str]) -> float:
    return round(max(map(len, texts)) * _CHARACTER + 14, 1)


def _box(graph: _Graph, unit: _Unit) -> Box:
    """Its size with the parameters beside it; lines meet the node itself."""
    texts = _texts(graph, unit)
    own, chips = _width(texts), _chips(graph, unit)
    beside = max((_chip_width(graph, node) + 6 for node in chips), default=0.0)
    return Box(own + beside, max(_LINE * len(texts) + 8, _CHIP * len(chips)), own / 2)


def _chips(graph: _Graph, unit: _Unit) -> list[int]:
    return graph.beside.get(unit.nodes[0], []) if unit.frame is None else []


def _chip_width(graph: _Graph, node: int) -> float:
    return len(_chip_text(graph, node)) * _SMALL_CHARACTER + 8


def _node(
    graph: _Graph, unit: _Unit, box: Box, corner: Point, strength: float, view: int
) -> DrawnNode:
    x, y = corner
    texts, width, first = _texts(graph, unit), 2 * box.port_x, unit.nodes[0]
    if unit.frame is None:
        kind, target, tooltip = graph.rows[first].op, f"r-{first}", _tooltip(graph.rows[first])
    else:
        kind, target, tooltip = (
            "module",
            f"m-{view + 1}-{unit.frame}",
            f"{unit.path}: {len(unit.nodes)} nodes",
        )
    top = y + (box.height - _LINE * len(texts)) / 2 + 11
    chips = [
        DrawnParameter(
            node,
            _tooltip(graph.rows[node]),
            _chip_text(graph, node),
            x=x + width + 6,
            y=y + _CHIP * at + 1,
            width=_chip_width(graph, node),
            height=_CHIP - 2,
        )
        for at, node in enumerate(_chips(graph, unit))
    ]
    lines = [(top + _LINE * at, text) for at, text in enumerate(texts)]
    return DrawnNode(first, kind, target, tooltip, x, y, width, box.height, strength, lines, chips)


def _tooltip(row: Any) -> str:
    columns = (
        "name",
        "op",
        "target",
        "module_path",
        "median_ns",
        "share",
        "output_shape",
        "output_dtype",
        "source",
    )
    cells = [(name, getattr(row, name)) for name in columns if getattr(row, name) not in (None, "")]
    return "\n".join(
        f"{name.removesuffix('_ns').replace('_', ' ')}: {cell_text(name, v, 200)}"
        for name, v in cells
    )


def _frame(frame: Frame, around: str, number: int) -> DrawnFrame:
    label = _short(frame.path.removeprefix(around), max(int((frame.width - 16) / _CHARACTER), 4))
    return DrawnFrame(number, frame.path, label, frame.x, frame.y, frame.width, frame.height)


def _lines(lines: Sequence[Line], first_nodes: Sequence[int]) -> list[DrawnLine]:
    """The lines between nodes; `first_nodes` are those of the boxes that the given lines are between."""
    goes_on = {line.after for line in lines}
    return [
        DrawnLine(
            source=first_nodes[line.source],
            target=None if line.target is None else first_nodes[line.target],
            number=number if number in goes_on else None,
            after=line.after,
            path=_smooth(line.points),
        )
        for number, line in enumerate(lines)
    ]


def _smooth(points: Sequence[Point]) -> str:
    """Upright through rows, bent between them."""
    path, last = [f"M{points[0][0]:g} {points[0][1]:g}"], points[0]
    for x, y in points[1:]:
        if (x, y) == last:
            continue
        middle = (last[1] + y) / 2
        straight = abs(x - last[0]) < 0.5 or y == last[1]
        path.append(
            f"L{x:g} {y:g}" if straight else f"C{last[0]:g} {middle:g} {x:g} {middle:g} {x:g} {y:g}"
        )
        last = (x, y)
    return "".join(path)
