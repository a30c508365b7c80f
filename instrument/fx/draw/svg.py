"""The graph as SVG: nodes in frames of their modules, coloured by their share of the time, each a link to its row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import sqrt
from typing import Any, NamedTuple

from instrument.analysis.table import Table, cell_text, duration
from instrument.fx.draw.nested_layout import Box, Frame, Line, corners, frames, lay_out, nested
from instrument.fx.draw.sugiyama import Point

_CHARACTER, _SMALL_CHARACTER = 6.7, 5.6  # the widths of both sizes of text, in pixels
_LINE, _CHIP = 14.0, 14.0
_LABEL, _PLAIN_LABEL = 24, 12  # the longest, in characters, of a node and of a parameter beside it
# How strongly a node is coloured that took none of the time, and one that took the most.
_FAINT, _STRONG = 0.05, 0.8


class View(NamedTuple):
    """A picture that opens modules down to some depth; `number` is its place among those of the graph."""

    number: int
    depth: int
    boxes: int
    highest: float
    svg: str


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
    depths = [*range(min(deepest, 4)), deepest]  # the pictures between tell little, and make the page large
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
    brought: dict[int, list[int]] = {}  # parameters that several nodes take are drawn before the first of these
    for at, row in enumerate(graph.rows):
        if row.op == "get_attr" and takers[at]:
            (graph.beside if len(takers[at]) == 1 else brought).setdefault(takers[at][0], []).append(at)
    moved = {at for several in (*graph.beside.values(), *brought.values()) for at in several}
    for at, row in enumerate(graph.rows):
        if at not in moved:
            together = [*brought.get(at, []), at]
            graph.order += together
            graph.paths += [row.module_path or ""] * len(together)
    return graph


def _view(graph: _Graph, root: Frame, opened: Sequence[tuple[int, Frame]], number: int, depth: int) -> View:
    """The picture with the frames open that lie at most `depth` deep."""
    units: list[_Unit] = []
    numbers = {id(frame): at for at, (_, frame) in enumerate(opened)}
    cut = _cut(graph, root, depth, units, numbers)
    unit_of = {node: at for at, unit in enumerate(units) for node in unit.nodes}
    edges = [(unit_of[one], unit_of[other]) for one, other in graph.edges if one in unit_of]
    edges = list(dict.fromkeys((one, other) for one, other in edges if one != other))
    boxes = [_box(graph, unit) for unit in units]
    lines = lay_out(cut, boxes, edges)
    names = [f"{unit.nodes[0]}" for unit in units]
    shares = [_sum(graph.rows[node].share for node in unit.nodes) for unit in units]
    highest = max((share for share in shares if share is not None), default=0.0)
    parts = [_frame(inner, outer, number, at) for at, (inner, outer) in _frames(cut, opened, depth)]
    goes_on = {line.after for line in lines}
    parts += [_edge(names, number, line, number in goes_on) for number, line in enumerate(lines)]
    last = depth == max((deep for deep, _ in opened), default=0)
    for at, corner in corners(cut):
        parts.append(_drawn(graph, units[at], boxes[at], corner, heat(shares[at], highest), number, ids=last))
    size = f'width="{cut.width:g}" height="{cut.height:g}" viewBox="0 0 {cut.width:g} {cut.height:g}"'
    svg = f'<svg {size} role="img" aria-label="the graph">\n{"".join(parts)}</svg>'
    return View(number, depth, len(units), highest, svg)


def _cut(graph: _Graph, frame: Frame, depth: int, units: list[_Unit], numbers: dict[int, int]) -> Frame:
    """The same frames with those deeper than `depth` closed; fills `units`, by whose numbers they hold boxes."""
    first = len(units)
    children: list[int | Frame] = []
    for child in frame.children:
        if isinstance(child, Frame) and depth:
            children.append(_cut(graph, child, depth - 1, units, numbers))
            continue
        children.append(len(units))
        if isinstance(child, Frame):
            units.append(_Unit(graph.order[child.first : child.last], child.path, numbers[id(child)]))
        else:
            units.append(_Unit([graph.order[child]]))
    return Frame(frame.path, first, len(units), children)


def _frames(cut: Frame, opened: Sequence[tuple[int, Frame]], depth: int) -> Iterable[tuple[int, tuple[Frame, str]]]:
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
    time, share = (_sum(getattr(graph.rows[node], name) for node in unit.nodes) for name in ("median_ns", "share"))
    cost = [f"{duration(time)} · {share:.1%}"] if time is not None and share is not None else []
    if unit.frame is not None:
        return [_short(unit.path, _LABEL), *cost, f"{len(unit.nodes)} nodes"]
    return [_short(row.name, _LABEL), *cost, *([_short(row.output_shape, _LABEL)] if row.output_shape else [])]


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


def _drawn(graph: _Graph, unit: _Unit, box: Box, corner: Point, strength: float, view: int, *, ids: bool) -> str:
    """A box of the picture as a link, and the parameters beside it."""
    x, y = corner
    texts, width, first = _texts(graph, unit), 2 * box.port_x, unit.nodes[0]
    name = f' id="n-{first}"' if ids else ""
    if unit.frame is None:
        kind, target, told = graph.rows[first].op, f"r-{first}", _told(graph.rows[first])
    else:
        kind, target, told = "module", f"m-{view + 1}-{unit.frame}", f"{unit.path}: {len(unit.nodes)} nodes"
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{box.height:g}" rx="4"'
    top = y + (box.height - _LINE * len(texts)) / 2 + 11
    lines = "".join(
        f'<text x="{x + box.port_x:g}" y="{top + _LINE * at:g}">{escape(text)}</text>' for at, text in enumerate(texts)
    )
    chips = "".join(
        _chip(graph, node, first, (x + width, y + _CHIP * at), ids=ids) for at, node in enumerate(_chips(graph, unit))
    )
    body = f'{rect} class="paper"/>{rect} fill-opacity="{strength:.3f}"/>{lines}'
    link = f'<a{name} class="node {kind}" data-n="{first}" href="#{target}">'
    return f"{link}<title>{escape(told)}</title>{body}</a>{chips}\n"


def _chip(graph: _Graph, node: int, taker: int, corner: Point, *, ids: bool) -> str:
    """A parameter beside the node that takes it."""
    x, y = corner[0] + 6, corner[1] + 1
    width, name = _chip_width(graph, node), f' id="n-{node}"' if ids else ""
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_CHIP - 2:g}" rx="3" class="paper"/>'
    text = f'<text x="{x + width / 2:g}" y="{y + 9:g}">{escape(_chip_text(graph, node))}</text>'
    link = f'<a{name} class="node chip" data-n="{node}" href="#r-{node}">'
    line = f'<path class="edge" data-from="{node}" data-to="{taker}" d="M{x:g} {y + 6:g}L{corner[0]:g} {y + 6:g}"/>\n'
    return f"{link}<title>{escape(_told(graph.rows[node]))}</title>{rect}{text}</a>{line}"


def _told(row: Any) -> str:
    """A node's tooltip."""
    columns = ("name", "op", "target", "module_path", "median_ns", "share", "output_shape", "output_dtype", "source")
    cells = [(name, getattr(row, name)) for name in columns if getattr(row, name) not in (None, "")]
    return "\n".join(f"{name.removesuffix('_ns').replace('_', ' ')}: {cell_text(name, v, 200)}" for name, v in cells)


def _frame(frame: Frame, around: str, view: int, number: int) -> str:
    label = frame.path.removeprefix(around)
    label = _short(label, max(int((frame.width - 16) / _CHARACTER), 4))
    rect = f'<rect x="{frame.x:g}" y="{frame.y:g}" width="{frame.width:g}" height="{frame.height:g}" rx="6"/>'
    text = f'<text x="{frame.x + 8:g}" y="{frame.y + 15:g}">{escape(label)}</text>'
    return f'<g id="m-{view}-{number}" class="frame"><title>{escape(frame.path)}</title>{rect}{text}</g>\n'


def _edge(names: Sequence[str], number: int, line: Line, goes_on: bool) -> str:
    """A line as one smooth path; `data-at` is what those name as `data-after` that go on from its end."""
    to = "" if line.target is None else f' data-to="{names[line.target]}"'
    at = f' data-at="{number}"' if goes_on else ""
    after = "" if line.after is None else f' data-after="{line.after}"'
    return f'<path class="edge" data-from="{names[line.source]}"{to}{at}{after} d="{_smooth(line.points)}"/>\n'


def _smooth(points: Sequence[Point]) -> str:
    """Upright through rows, bent between them."""
    path, last = [f"M{points[0][0]:g} {points[0][1]:g}"], points[0]
    for x, y in points[1:]:
        if (x, y) == last:
            continue
        middle = (last[1] + y) / 2
        straight = abs(x - last[0]) < 0.5 or y == last[1]
        path.append(f"L{x:g} {y:g}" if straight else f"C{last[0]:g} {middle:g} {x:g} {middle:g} {x:g} {y:g}")
        last = (x, y)
    return "".join(path)
