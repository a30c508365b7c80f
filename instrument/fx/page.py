"""The HTML page of a graph: the time by module and by type, and the table of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from instrument.analysis.stacks import Stack
from instrument.analysis.table import Table, known_columns
from instrument.base.units import counted, duration
from instrument.fx.node_table import modules_around
from instrument.report.flame import Frame, merged
from instrument.report.page import flame
from instrument.report.page.document import ASSETS, document
from instrument.report.page.parts import columns_of, fact, facts, folded, section, table, text

# These columns come first. The remaining columns follow in the order of the table.
_FIRST = (
    *("name", "share", "median_ns", "module_path", "module_type", "output_shape"),
    *("flops", "flops_per_second", "bound_by", "bound_ns", "bound_share", "output_bytes"),
)


def page(
    nodes: Table, title: str, types: Mapping[str, str] | None = None, notes: Iterable[str] = ()
) -> str:
    """Render the page of a graph: one HTML file that loads no other file.

    Args:
        nodes: a table of nodes; it may have additional columns. All columns with values are shown.
        title: the title of the page.
        types: the classes of the modules, by qualified name.
        notes: paragraphs of the summary.
    """
    trees = icicles(nodes, types or {})
    known = known_columns(nodes)
    columns = sorted(known, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    payload = {
        "version": 1,
        "title": title,
        "sections": {
            "summary": section(
                "Summary",
                facts(fact("", *each) for each in _facts(nodes, trees)),
                folded("How this was measured", map(text, notes)),
            ),
            "graph": {
                "times": [
                    {"name": name, "value": "node time", **_columns(root, types or {})}
                    for name, root in trees.items()
                    if root.value_ns
                ],
                "nodes": table("Nodes", columns_of(nodes.select(columns)), sort="share", shown=30),
            },
        },
    }
    return document(payload, [f"{ASSETS}/flame.js", "fx/page.js"])


def icicles(nodes: Table, types: Mapping[str, str]) -> dict[str, Frame]:
    """Return two trees of frames with the nodes' times, by module and by module type.

    By module, each module is a frame, and its nodes are frames inside it. By type, the outermost
    frames are the classes of modules, for nodes that call no module their functions, and for nodes
    without a call their op. A node that is alone in a module without submodules has no frame of its
    own, and stands for its module. The time of a parameter (`get_attr`) counts for the frame of the
    module that holds it.

    Args:
        nodes: a table of nodes.
        types: the classes of modules, by path. A module that is not in `types` has no frame.
    """
    by_module, by_type = [], []
    nodes_in = Counter(row.module_path for row in nodes if row.op != "get_attr")
    outer = {path.rpartition(".")[0] for path in types}
    for row in nodes:
        path, time_ns = row.module_path, row.median_ns or 0
        frames = [_frame(each, types) for each in modules_around(path) if each in types]
        is_alone = nodes_in[path] == 1 and path in types and path not in outer
        if row.op != "get_attr" and not is_alone:
            frames.append(row.name)
        frames = frames or [row.op]
        kind = row.target if row.op.startswith("call_") else row.op
        if row.op == "call_module" or (is_alone and row.op.startswith("call_")):
            kind = types.get(path, kind)
        by_module.append(Stack(tuple(frames), time_ns))
        by_type.append(Stack((str(kind), frames[-1]), time_ns))
    return {"By module": merged(by_module), "By module type": merged(by_type)}


def _frame(path: str, types: Mapping[str, str]) -> str:
    return f"{path}: {types[path]}"


def _columns(root: Frame, types: Mapping[str, str]) -> dict[str, Any]:
    """The data of an icicle. `labels` leaves out the path of the module around each module."""
    labels = {}
    for path in types:
        outer = [each for each in modules_around(path) if each in types][:-1]
        below = path.removeprefix(f"{outer[-1]}.") if outer else path
        labels[_frame(path, types)] = f"{below}: {types[path]}"
    graph = flame.columns(root, set(labels))
    return {**graph, "labels": [labels.get(name, name) for name in graph["names"]]}


def _facts(nodes: Table, trees: Mapping[str, Frame]) -> list[tuple[str, str]]:
    """Pairs of a value and its description: the time of a run, and what takes most of it."""
    whole = sum(row.median_ns or 0 for row in nodes)
    if not whole:
        return []
    number = counted(len(nodes), "node")
    facts = [(duration(whole), f"node time of a run: the sum of the medians of {number}")]
    for root, what in zip(trees.values(), ("module", "module type or function")):
        top = max(root.calls.values(), key=lambda frame: frame.value_ns)
        facts.append(
            (f"{top.value_ns / whole:.1%}", f"in {top.name}, the {what} with the most time")
        )
    slowest = max(nodes, key=lambda row: row.median_ns or 0)
    share = f"{slowest.median_ns / whole:.1%}"
    return [*facts, (share, f"in {slowest.name}, the node with the most time")]
