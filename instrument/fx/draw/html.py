"""A graph's picture and its table as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable

from instrument.analysis.table import Table, cell_text, heading, known_columns
from instrument.fx.draw.svg import heat, views
from instrument.templates import render

_FIRST_SHOWN_BOXES = 150
# The columns that tell most, before the others in the table's own order.
_FIRST = ("name", "share", "median_ns")


def page(nodes: Table, title: str, notes: Iterable[str] = ()) -> str:
    """The page: on the left the graph, on the right a row for each node; a click on one leads to the other.

    `nodes` is a `NodeTable` or one with more columns. Nothing is loaded from anywhere, and the page's own policy lets
    no script run but `graph.js`. The same table gives the same page.

    Cost: about 1 ms and 2 KB for each node, and 250 bytes for each value that it takes.
    """
    pictures = views(nodes)
    columns = sorted(
        known_columns(nodes), key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)
    )
    return render(
        "fx/draw/graph.html",
        title=title,
        notes=notes,
        views=pictures,
        shown=max(
            (view.number for view in pictures if view.boxes <= _FIRST_SHOWN_BOXES), default=0
        ),
        nodes=nodes,
        columns=columns,
        texts={
            name for name in columns if any(isinstance(cell, str) for cell in nodes.column(name))
        },
        highest=max((share for share in nodes.column("share") if share), default=1.0),
        heat=heat,
        heading=heading,
        cell_text=cell_text,
    )
