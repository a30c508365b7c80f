"""The picture of a graph and its table as one HTML page, which needs no other file."""

from __future__ import annotations

from collections.abc import Iterable

from instrument.analysis.table import Table, cell_text, heading, known_columns
from instrument.fx.draw.svg import heat, views
from instrument.templates import render

_FIRST_SHOWN_BOXES = 150
# These columns come first. The remaining columns follow in the order of the table.
_FIRST = ("name", "share", "median_ns")


def page(nodes: Table, title: str, notes: Iterable[str] = ()) -> str:
    """Render a page with the picture of the graph on the left and the table of nodes on the right.

    The nodes of the picture and the rows of the table link to each other. The page contains the
    script `graph.js` and needs no other file. Its content security policy forbids all other
    scripts. The same table gives the same page.

    Args:
        nodes: a `NodeTable`. Columns that were added to it are shown too.
        title: the title of the page.
        notes: paragraphs below the title.

    Cost: about 1 ms and 2 KB for each node, and 250 bytes for each value that a node takes.
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
