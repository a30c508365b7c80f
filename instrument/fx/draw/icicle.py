"""The time of a graph's nodes by module and by module type, as flame graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from instrument.analysis.stacks import Stack
from instrument.analysis.table import Table
from instrument.fx.draw.pictures import module_label
from instrument.report.flame import merged
from instrument.report.page import flame

#: The names of the two graphs.
BY_MODULE, BY_TYPE = "By module", "By module type"


def graphs(
    nodes: Table, types: Mapping[str, str], frame_of: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return two flame graphs of the nodes' times; an empty list if no node has a time.

    In the graph `BY_MODULE`, each module is a frame, and its nodes are frames inside this frame. If
    a module without submodules has only one node, this node has no frame of its own.

    Parameters (nodes with the op `get_attr`) have no frames of their own. The time of a parameter
    counts for the frame of the module that holds the parameter. For parameters that the model
    itself holds, there is one frame with the name `get_attr`. This frame has the time of all these
    parameters.

    In the graph `BY_TYPE`, the outermost frames are types. The type of a node is:

    - the class of the module, if the node calls a module;
    - the class of the module, if the node has a call and is the only node of a module without
      submodules;
    - the function or method that the node calls, for any other node with a call;
    - the op of the node, for a node without a call.

    Each graph has the keys of the graphs in `instrument.report.page.flame.section`, and the keys
    `labels` and `targets`. Each of these two keys holds a list with an entry for each name in
    `names`:

    - `labels`: for a module, the name without the path of the module around this module. For any
      other frame, the whole name.
    - `targets`: a link to the module or node in the picture of the graph, such as `#graph?node=3`;
      None for a frame that the picture does not have, such as a type.

    Args:
        nodes: a table with the columns of `NodeTable`.
        types: the classes of modules, by path. A module that is not in `types` has no frame.
        frame_of: the number of a module's frame in the picture, by path of the module.
    """
    by_module, by_type = [], []
    labels: dict[str, str] = {}
    targets: dict[str, str] = {}
    nodes_in = Counter(row.module_path for row in nodes if row.op != "get_attr")
    around_others = {path.rpartition(".")[0] for path in types}
    for at, row in enumerate(nodes):
        modules = _modules(row.module_path or "", types)
        frames = [f"{path}: {types[path]}" for path in modules]
        for name, path, around in zip(frames, modules, ["", *modules]):
            labels[name] = module_label(path, around, types)
            if path in frame_of:
                targets[name] = f"#graph?frame={frame_of[path]}"
            elif row.op != "get_attr":  # the picture hides parameters
                targets.setdefault(name, f"#graph?node={at}")
        is_alone = (
            nodes_in[row.module_path] == 1
            and row.module_path in types
            and row.module_path not in around_others
        )
        if row.op != "get_attr" and not is_alone:
            frames.append(row.name)
            targets[row.name] = f"#graph?node={at}"
        frames = frames or [row.op]
        by_module.append(Stack(tuple(frames), row.median_ns or 0))
        by_type.append(Stack((_type(row, is_alone, types), *frames[-1:]), row.median_ns or 0))
    found = []
    for name, stacks in ((BY_MODULE, by_module), (BY_TYPE, by_type)):
        graph = flame.columns(merged(stacks), set(labels))
        names = graph["names"]
        found.append(
            {
                "name": name,
                "value": "node time",
                **graph,
                "labels": [labels.get(each, each) for each in names],
                "targets": [targets.get(each) for each in names],
            }
        )
    return [graph for graph in found if graph["names"]]


def _modules(path: str, types: Mapping[str, str]) -> list[str]:
    """The paths of a module and the modules around it, without modules of unknown class."""
    around = accumulate(path.split("."), "{}.{}".format)
    return [each for each in around if each and each in types]


def _type(row: Any, is_alone: bool, types: Mapping[str, str]) -> str:
    """The type of a node in the graph `BY_TYPE`; see `graphs`."""
    if row.op == "call_module" or (is_alone and row.op.startswith("call_")):
        return types.get(row.module_path, row.target)
    return str(row.target if row.op.startswith("call_") else row.op)
