"""The table of nodes: a row for each node of a graph, and the groups of these rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from instrument.base.errors import ConfigError
from instrument.graph.groupings import GROUPINGS, Grouping
from instrument.read.trace.events import Ints
from instrument.read.views.table import Table, sum_of_known

_PACKAGES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def node_table(
    labels: Mapping[str, Sequence[Any]], times_ns: Ints, facts: Mapping[str, Sequence[Any]]
) -> Table:
    """Make the table of nodes, in graph order; docs/fx.md describes its columns.

    Args:
        labels: the columns of `node_labels`.
        times_ns: the times of the nodes, of shape (runs, nodes).
        facts: the columns `output_shape output_dtype output_bytes new_bytes moved_bytes flops`.
    """
    times = _times(times_ns)
    return Table({**labels, **times, **facts, **_rates(facts, times)})


def grouped(nodes: Table, times_ns: Ints, what: Grouping, depth: int | None = None) -> Table:
    """Group the nodes of a table; see `GraphProfile.by`."""
    if what not in GROUPINGS:
        raise ConfigError(
            f"Nodes cannot be grouped by {what!r}; choose one of {', '.join(GROUPINGS)}."
        )
    keys = nodes.column(what)
    if what == "module_path" and depth is not None:
        keys = [None if key is None else ".".join(key.split(".")[:depth]) for key in keys]
    members: dict[Any, list[int]] = {}
    for node, key in enumerate(keys):
        members.setdefault(key, []).append(node)
    groups = members.values()
    times = _times(np.stack([times_ns[:, nodes].sum(axis=1) for nodes in groups], axis=1))
    sums = {}
    for name in ("output_bytes", "new_bytes", "moved_bytes", "flops"):
        cells = nodes.column(name)
        sums[name] = [sum_of_known(cells[node] for node in group) for group in groups]
    sizes = {what: list(members), "nodes": [len(group) for group in groups]}
    return Table({**sizes, **times, **sums, **_rates(sums, times)})


def _times(times_ns: Ints) -> dict[str, list[Any]]:
    """The columns of times; `times_ns` is an array of shape (runs, table rows), with a run."""
    runs, rows = times_ns.shape
    ranked = np.sort(times_ns, axis=0)
    median, p95 = (ranked[-(-percent * runs // 100) - 1] for percent in (50, 95))
    return {
        "calls": [runs] * rows,
        "mean_ns": np.rint(ranked.mean(axis=0)).astype(np.int64).tolist(),
        "median_ns": median.tolist(),
        "p95_ns": p95.tolist(),
        "share": (median / median.sum()).tolist() if median.any() else [None] * rows,
    }


def _rates(
    facts: Mapping[str, Sequence[Any]], times: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    flops, moved = facts["flops"], facts["moved_bytes"]
    return {
        "flops_per_second": [
            n * 10**9 // ns if n is not None and ns else None
            for n, ns in zip(flops, times["median_ns"])
        ],
        "intensity": [
            n / size if n is not None and size else None for n, size in zip(flops, moved)
        ],
    }


def node_labels(graph: fx.Graph, model: nn.Module) -> dict[str, list[Any]]:
    """The columns that name the nodes: `op name target module_path module_type source inputs`."""
    nodes = list(graph.nodes)
    modules = [_module(node, model) for node in nodes]
    return {
        "op": [node.op for node in nodes],
        "name": [node.name for node in nodes],
        "target": [_target(node) for node in nodes],
        "module_path": [path for path, _ in modules],
        "module_type": [kind for _, kind in modules],
        "source": [_innermost(_FRAME.findall(node.stack_trace or "")) for node in nodes],
        "inputs": [", ".join(each.name for each in node.all_input_nodes) for node in nodes],
    }


def module_types(graph: fx.Graph, model: nn.Module) -> dict[str, str]:
    """The class of each module whose call runs at least one node, by path of the module."""
    stacks = [node.meta.get("nn_module_stack", {}).values() for node in graph.nodes]
    paths = sorted({str(path) for stack in stacks for path, _ in stack})
    return {path: kind for path in paths if (kind := _class_name(model, path)) is not None}


def modules_around(path: str | None) -> Iterator[str]:
    """The paths of the modules around a node, the outermost first, from its `module_path`."""
    return accumulate(path.split("."), "{}.{}".format) if path else iter(())


def line_of(traceback: TracebackType | None) -> str | None:
    """The place of the innermost frame of the user's own code in a traceback, as file:line."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, str(traceback.tb_lineno)))
        traceback = traceback.tb_next
    return _innermost(frames)


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    name = str(getattr(node.target, "__name__", node.target))
    module = str(getattr(node.target, "__module__", None) or "torch")
    return f"{module.removeprefix('_')}.{name}"  # `_operator` is the module of `operator.add`


def _module(node: fx.Node, model: nn.Module) -> tuple[str | None, str | None]:
    """The qualified name and the class of the innermost module that a node runs in."""
    if node.op in ("placeholder", "output"):
        return None, None
    if node.op == "get_attr":
        path = str(node.target).rpartition(".")[0]
    else:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path = str(stack[-1][0]) if stack else ""
    kind = _class_name(model, path)
    return (None, None) if kind is None else (path, kind)


def _class_name(model: nn.Module, path: str) -> str | None:
    """The class of a module; None for the path of a constant, which the model does not hold."""
    try:
        return type(model.get_submodule(path)).__name__
    except AttributeError:
        return None


def _innermost(frames: list[tuple[str, str]]) -> str | None:
    """The innermost frame outside of torch, this package and generated code, as file:line.

    `frames` has the file and the line of each Python frame, the outermost first.
    """
    own = [frame for frame in frames if not frame[0].startswith((*_PACKAGES, "<"))]
    return ":".join(own[-1]) if own else None
