"""The HTML page of a graph: the time of each module, the picture of the graph, and its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instrument.analysis.table import Table, known_columns
from instrument.fx.draw.icicle import graphs
from instrument.fx.draw.pictures import views
from instrument.report.page.document import ASSETS, document
from instrument.report.page.tables import as_columns
from instrument.units import counted, duration

_MOST_FIRST_BOXES = 40
# These columns come first. The remaining columns follow in the order of the table.
_FIRST = (
    *("name", "share", "median_ns", "module_path", "module_type", "output_shape"),
    *("flops", "flops_per_second", "bound_by", "bound_ns", "bound_share", "output_bytes"),
)


def page(
    nodes: Table, title: str, types: Mapping[str, str] | None = None, notes: Iterable[str] = ()
) -> str:
    """Render the page of a graph: one HTML file that loads no other file.

    For the data in this file, see the function `payload`.

    Args:
        nodes: a `NodeTable`; it may have additional columns. All columns with values are shown.
        title: the title of the page.
        types: the classes of the modules, by qualified name.
        notes: paragraphs of the summary.

    Cost: about 1 ms for each node.
    """
    scripts = [f"{ASSETS}/flame.js", "fx/draw/graph.js"]
    return document(payload(nodes, title, types or {}, notes), scripts, ["fx/draw/graph.css"])


def payload(
    nodes: Table, title: str, types: Mapping[str, str], notes: Iterable[str]
) -> dict[str, Any]:
    """Return the data of the page as JSON values.

    The section `summary` has the keys `facts` (pairs of a value and its description, both texts)
    and `notes`. The keys of the section `graph`:

    - `times`: the times by module and by type; see `icicle.graphs`.
    - `views`: the pictures. In the first picture, each outermost module is one box; in the last
      picture, every node is a box. A picture is a `View`, written as a JSON object.
    - `shown`: the index of the picture to show first.
    - `nodes`: the table, with the keys of `as_columns`.
    """
    pictures = views(nodes, types)
    frames = pictures[-1].frames
    times = graphs(nodes, types, {frame.path: frame.number for frame in reversed(frames)})
    known = known_columns(nodes)
    columns = sorted(known, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    readable = [at for at, view in enumerate(pictures) if view.boxes <= _MOST_FIRST_BOXES]
    return {
        "version": 1,
        "title": title,
        "sections": {
            "summary": {"facts": _facts(nodes, times), "notes": list(notes)},
            "graph": {
                "times": times,
                "views": [_plain(view) for view in pictures],
                "shown": max(readable, default=0),
                "nodes": as_columns(nodes.select(columns)),
            },
        },
    }


def _facts(nodes: Table, times: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Facts for the summary: the time of a run, and what takes most of this time."""
    whole = sum(row.median_ns or 0 for row in nodes)
    if not whole:
        return []
    number = counted(len(nodes), "node")
    facts = [(duration(whole), f"node time of a run: the sum of the medians of {number}")]
    for graph, what in zip(times, ("module", "module type or function")):
        name, time_ns = max(_outermost(graph), key=lambda each: each[1])
        facts.append((f"{time_ns / whole:.1%}", f"in {name}, the {what} with the most time"))
    own, code = max(zip(times[0]["self"], times[0]["name_of"]))
    name = times[0]["names"][code]
    facts.append((f"{own / whole:.1%}", f"in {name}, the node with the most time"))
    return facts


def _outermost(graph: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The name and the total time of each outermost frame of a flame graph."""
    found: list[tuple[str, int]] = []
    for depth, name, own_ns in zip(graph["depth"], graph["name_of"], graph["self"]):
        if not depth:
            found.append((graph["names"][name], 0))
        found[-1] = (found[-1][0], found[-1][1] + own_ns)
    return found


def _plain(value: Any) -> Any:
    """A picture as JSON values; positions are rounded to thousandths of a pixel."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value
