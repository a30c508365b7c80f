"""The pictures of a graph: nodes in the frames of their modules, coloured by share of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

from instrument.analysis.table import Table, sum_of_known
from instrument.fx.draw.nested_layout import Box, Frame, Line, corners, frames, lay_out, nested
from instrument.fx.draw.sugiyama import Point
from instrument.units import duration

_CHARACTER, _SMALL_CHARACTER = 6.7, 5.6  # the widths of both sizes of text, in pixels
_LINE, _BADGE = 14.0, 14.0  # the heights of a line of text and of a parameter badge
_LABEL, _BADGE_LABEL = 28, 12  # the most characters in a node and in a parameter badge
# The opacity of the colour of a box: for a share of 0, and for the highest share of the time.
_FAINT, _STRONG = 0.05, 0.8


class DrawnFrame(NamedTuple):
    """An open module: its content is drawn inside a frame.

    `number` is the index of the frame among the frames of all modules.
    """

    number: int
    path: str
    label: str
    x: float
    y: float
    width: float
    height: float


class DrawnLine(NamedTuple):
    """A part of the line that leads from a node to all nodes that take its value.

    Attributes:
        source: the node that makes the value.
        target: the node where this part ends; None if this part does not end at a node.
        number: the id of this part; None if no other part continues this part.
        after: the `number` of the part that this part continues; None if this part begins at the
            source.
        path: the commands of the SVG path.
    """

    source: int
    target: int | None
    number: int | None
    after: int | None
    path: str


class ParameterBadge(NamedTuple):
    """A parameter, drawn beside a node that takes it."""

    number: int
    text: str
    x: float
    y: float
    width: float
    height: float


class DrawnNode(NamedTuple):
    """The box of a node, or of a closed module, which is drawn as one box without its nodes.

    `number` is the row of the node in the table of nodes; for a closed module, the row of its first
    node. `frame` is the number of the frame that is drawn around the module when it is open; None
    for a node. `strength` is the opacity of the colour. `texts` are lines of text with their
    vertical positions.
    """

    number: int
    kind: str
    frame: int | None
    x: float
    y: float
    width: float
    height: float
    strength: float
    texts: list[tuple[float, str]]
    badges: list[ParameterBadge]


class View(NamedTuple):
    """A picture in which modules are open down to `depth`; positions and sizes are in pixels.

    The content of an open module is drawn; a closed module is one box.

    `boxes` is the number of boxes; boxes of parameters do not count. `every_node` says whether all
    modules are open. Each pair in `legend` holds a share of the time, and the opacity of the colour
    for this share.
    """

    depth: int
    boxes: int
    legend: list[tuple[float, float]]
    every_node: bool
    width: float
    height: float
    frames: list[DrawnFrame]
    lines: list[DrawnLine]
    nodes: list[DrawnNode]


@dataclass
class _Unit:
    """One box of the picture: a node, or a closed module.

    `frame` is the number of the frame that is drawn around the module when it is open; None for a
    node.
    """

    nodes: list[int]
    label: str
    frame: int | None = None


@dataclass
class _Graph:
    """The nodes of a graph, and how they are drawn; nodes are indices into `rows`.

    Attributes:
        rows: the rows of the `NodeTable`, one for each node.
        order: the nodes that get a box, in drawing order.
        paths: the module path of each node in `order`.
        badges: by node, the parameters that are drawn beside the node, because the node takes them.
        edges: pairs of a node and a node that takes its value.
        types: the classes of modules, by path.
    """

    rows: list[Any]
    types: Mapping[str, str]
    order: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    badges: dict[int, list[int]] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)


def views(nodes: Table, types: Mapping[str, str]) -> list[View]:
    """Return pictures of a graph: in the first, all modules are closed; the last has every node.

    The number of a node is its row in `nodes`. The frame of a module has the same number in all
    pictures, also while the module is closed (`DrawnNode.frame`).

    Args:
        nodes: a table with the columns of `NodeTable`; each node comes after its inputs.
        types: the classes of modules, by path.

    Cost: about 1 ms for each node.
    """
    graph = _graph(nodes, types)
    root = frames(graph.paths)
    opened = list(nested(root))
    deepest = max((depth for depth, _ in opened), default=0)
    depths = [*range(min(deepest, 4)), deepest]  # more pictures would only enlarge the page
    return [_view(graph, root, opened, depth) for depth in depths]


def module_label(path: str, around: str, types: Mapping[str, str]) -> str:
    """The label of a module: its path below the module `around`, and its class if it is known."""
    below = path.removeprefix(f"{around}.")
    return f"{below}: {types[path]}" if path in types else below


def heat(share: float | None, highest: float) -> float:
    """The opacity of the colour for a share of the time; `highest` is the largest share.

    The opacity grows with the square root of the share, so that small shares look different from
    each other.
    """
    return _FAINT + (_STRONG - _FAINT) * sqrt((share or 0.0) / highest) if highest else _FAINT


def _graph(nodes: Table, types: Mapping[str, str]) -> _Graph:
    graph = _Graph(list(nodes), types)
    index = {row.name: at for at, row in enumerate(graph.rows)}
    taken = set()
    for at, row in enumerate(graph.rows):
        for source in dict.fromkeys(index[name] for name in (row.inputs or "").split(", ") if name):
            if graph.rows[source].op == "get_attr":
                graph.badges.setdefault(at, []).append(source)
                taken.add(source)
            else:
                graph.edges.append((source, at))
    graph.order = [at for at in range(len(graph.rows)) if at not in taken]
    graph.paths = [graph.rows[at].module_path or "" for at in graph.order]
    return graph


def _view(graph: _Graph, root: Frame, opened: Sequence[tuple[int, Frame]], depth: int) -> View:
    """Draw the picture in which modules are open down to `depth`."""
    units: list[_Unit] = []
    numbers = {id(frame): at for at, (_, frame) in enumerate(opened)}
    closed = _closed(graph, root, depth, units, numbers)
    unit_of = {node: at for at, unit in enumerate(units) for node in unit.nodes}
    edges = [(unit_of[one], unit_of[other]) for one, other in graph.edges]
    edges = list(dict.fromkeys((one, other) for one, other in edges if one != other))
    boxes = [_box(graph, unit) for unit in units]
    lines = lay_out(closed, boxes, edges)
    shares = [sum_of_known(graph.rows[node].share for node in unit.nodes) for unit in units]
    highest = max((share for share in shares if share is not None), default=0.0)
    return View(
        depth=depth,
        boxes=sum(
            unit.frame is not None or graph.rows[unit.nodes[0]].op != "get_attr" for unit in units
        ),
        legend=[(highest * k / 4, heat(highest * k / 4, highest)) for k in range(5)],
        every_node=depth == max((deep for deep, _ in opened), default=0),
        width=closed.width,
        height=closed.height,
        frames=_drawn_frames(graph, closed, opened, depth),
        lines=_lines(lines, [unit.nodes[0] for unit in units]),
        nodes=[
            _node(graph, units[at], boxes[at], corner, heat(shares[at], highest))
            for at, corner in corners(closed)
        ],
    )


def _closed(
    graph: _Graph, frame: Frame, depth: int, units: list[_Unit], numbers: dict[int, int]
) -> Frame:
    """Return a copy of a frame in which each inner frame deeper than `depth` is one box.

    The boxes of the copy are appended to `units`. `numbers` has the number of each frame; its keys
    are the results of `id(frame)`.
    """
    first = len(units)
    children: list[int | Frame] = []
    for child in frame.children:
        if isinstance(child, Frame) and depth:
            children.append(_closed(graph, child, depth - 1, units, numbers))
            continue
        children.append(len(units))
        if isinstance(child, Frame):
            nodes = graph.order[child.first : child.last]
            label = module_label(child.path, frame.path, graph.types)
            units.append(_Unit(nodes, label, numbers[id(child)]))
        else:
            units.append(_Unit([graph.order[child]], _label(graph, graph.order[child], frame)))
    return Frame(frame.path, first, len(units), children)


def _label(graph: _Graph, node: int, frame: Frame) -> str:
    """Return the label of a node that is drawn as a box in `frame`.

    Usually, the label is the name of the node. But if the box stands for a whole call of a module,
    the label is the label of the module (see `module_label`). A box stands for a whole call if no
    other box belongs to the call: then no frame is drawn around the box.

    The label is also the name of the node if the class of the module is not known, or if the node
    is a `get_attr` node.
    """
    row = graph.rows[node]
    is_whole = row.module_path in graph.types and row.module_path not in ("", frame.path)
    if row.op == "get_attr" or not is_whole:
        return str(row.name)
    return module_label(row.module_path, frame.path, graph.types)


def _drawn_frames(
    graph: _Graph, closed: Frame, opened: Sequence[tuple[int, Frame]], depth: int
) -> list[DrawnFrame]:
    """The frames of the open modules; see `module_label` for their labels."""
    numbers = [at for at, (frame_depth, _) in enumerate(opened) if frame_depth <= depth]
    prefixes = [""]
    drawn = []
    for number, (frame_depth, frame) in zip(numbers, nested(closed)):
        del prefixes[frame_depth:]
        label = module_label(frame.path, prefixes[-1], graph.types)
        label = _short(label, max(int((frame.width - 16) / _CHARACTER), 4))
        place = (frame.x, frame.y, frame.width, frame.height)
        drawn.append(DrawnFrame(number, frame.path, label, *place))
        prefixes.append(frame.path)
    return drawn


def _texts(graph: _Graph, unit: _Unit) -> list[str]:
    row = graph.rows[unit.nodes[0]]
    time, share = (
        sum_of_known(getattr(graph.rows[node], name) for node in unit.nodes)
        for name in ("median_ns", "share")
    )
    cost = [f"{duration(time)} · {share:.1%}"] if time is not None and share is not None else []
    if unit.frame is not None:
        return [_short(unit.label, _LABEL), *cost, f"{len(unit.nodes)} nodes"]
    shape = [_short(row.output_shape, _LABEL)] if row.output_shape else []
    return [_short(unit.label, _LABEL), *cost, *shape]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most - most // 2) :]}"


def _badge_text(graph: _Graph, node: int) -> str:
    return _short(str(graph.rows[node].target).rpartition(".")[2], _BADGE_LABEL)


def _box(graph: _Graph, unit: _Unit) -> Box:
    """The box around a unit and its parameter badges.

    The badges are beside the unit, and lines meet the middle of the unit itself.
    """
    texts = _texts(graph, unit)
    own, badges = round(max(map(len, texts)) * _CHARACTER + 14, 1), _badges(graph, unit)
    beside = max((_badge_width(graph, node) + 6 for node in badges), default=0.0)
    return Box(own + beside, max(_LINE * len(texts) + 8, _BADGE * len(badges)), own / 2)


def _badges(graph: _Graph, unit: _Unit) -> list[int]:
    return graph.badges.get(unit.nodes[0], []) if unit.frame is None else []


def _badge_width(graph: _Graph, node: int) -> float:
    return len(_badge_text(graph, node)) * _SMALL_CHARACTER + 8


def _node(graph: _Graph, unit: _Unit, box: Box, corner: Point, strength: float) -> DrawnNode:
    x, y = corner
    texts, width, first = _texts(graph, unit), 2 * box.port_x, unit.nodes[0]
    kind = graph.rows[first].op if unit.frame is None else "module"
    top = y + (box.height - _LINE * len(texts)) / 2 + 11
    badges = [
        ParameterBadge(
            node,
            _badge_text(graph, node),
            x=x + width + 6,
            y=y + _BADGE * at + 1,
            width=_badge_width(graph, node),
            height=_BADGE - 2,
        )
        for at, node in enumerate(_badges(graph, unit))
    ]
    lines = [(top + _LINE * at, text) for at, text in enumerate(texts)]
    place = (x, y, width, box.height)
    return DrawnNode(first, kind, unit.frame, *place, strength, lines, badges)


def _lines(lines: Sequence[Line], first_nodes: Sequence[int]) -> list[DrawnLine]:
    """Convert lines between boxes to lines between nodes: each box becomes its first node."""
    continued = {line.after for line in lines}
    return [
        DrawnLine(
            source=first_nodes[line.source],
            target=None if line.target is None else first_nodes[line.target],
            number=number if number in continued else None,
            after=line.after,
            path=_smooth(line.points),
        )
        for number, line in enumerate(lines)
    ]


def _smooth(points: Sequence[Point]) -> str:
    """The SVG path of a line: vertical inside rows, curved between rows."""
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
