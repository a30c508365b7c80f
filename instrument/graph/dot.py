"""The graph in Graphviz's DOT language: nodes in the frames of their modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from math import sqrt

from instrument.base.printable import printable
from instrument.base.units import duration, percent
from instrument.read.views.table import Table


def dot(nodes: Table) -> str:
    """Return the graph as DOT, to draw with `dot -Tsvg`.

    The more time a node takes, the stronger is its colour. A module with several nodes is a frame.
    Parameters (`get_attr`) are left out. In the table, each node comes after its inputs.
    """
    rows = [row for row in nodes if row.op != "get_attr"]
    highest = max((row.share or 0 for row in rows), default=0) or 1
    number = {row.name: at for at, row in enumerate(rows)}
    sizes = Counter(path for row in rows for path in _modules_around(row.module_path))
    types = {row.module_path: row.module_type for row in rows if row.module_type}
    lines = ["digraph {", 'node [shape=box style=filled fontname="monospace"]']
    for at, row in enumerate(rows):
        frames = [path for path in _modules_around(row.module_path) if sizes[path] > 1]
        for path in frames:  # a subgraph that is written again goes on
            label = f"{path}: {types[path]}" if path in types else path
            lines.append(f"subgraph {_quoted(f'cluster {path}')} {{ label={_quoted(label)}")
        texts = [f"{row.name} ({row.target})", row.output_shape or ""]
        if row.median_ns is not None and row.share is not None:
            texts.insert(1, f"{duration(row.median_ns)}, {percent(row.share)}")
        # A hue, a saturation and a brightness; the root makes small shares differ.
        colour = f"0.06 {sqrt((row.share or 0) / highest):.3f} 1"
        lines.append(f'n{at} [label={_quoted(*texts)} fillcolor="{colour}"]{"}" * len(frames)}')
    for at, row in enumerate(rows):
        sources = [number[name] for name in row.inputs.split(", ") if name in number]
        lines += [f"n{source} -> n{at}" for source in sources]
    return "\n".join([*lines, "}", ""])


def _modules_around(path: str | None) -> Iterator[str]:
    """The paths of the modules around a node, the outermost first, from its `module_path`."""
    return accumulate(path.split("."), "{}.{}".format) if path else iter(())


def _quoted(*lines: str) -> str:
    """The lines as one string of DOT, in which backslashes and `&` have no meaning."""
    texts = (
        printable(line).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
        for line in lines
        if line
    )
    return '"' + "\\n".join(texts) + '"'
