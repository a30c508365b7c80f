"""The table of nodes: a row for each node of a graph, and the groups of these rows."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import fx, nn

from instrument.base.errors import ConfigError
from instrument.graph import GROUPINGS, Grouping
from instrument.read.trace.events import Ints
from instrument.read.views.table import Table, known_sum

_PACKAGES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def node_table(
    labels: Mapping[str, Sequence[Any]], times_ns: Ints, work: Mapping[str, Sequence[Any]]
) -> Table:
    """Make the table of nodes, in graph order; docs/graph.md describes its columns.

    Args:
        labels: the columns of `node_labels`.
        times_ns: the times of the nodes, of shape (runs, nodes).
        work: the columns of `node_work`.
    """
    times = _times(times_ns)
    return Table({**labels, **times, **work, **_rates(work, times)})


def grouped(nodes: Table, times_ns: Ints, what: Grouping, depth: int | None = None) -> Table:
    """Group the nodes of a table; see `GraphProfile.by`."""
    if what not in GROUPINGS:
        raise ConfigError(
            f"Nodes cannot be grouped by {what!r}; choose one of {', '.join(GROUPINGS)}."
        )
    key = pl.col(what)
    if what == "module_path" and depth is not None:
        key = key.str.split(".").list.head(depth).list.join(".")
    sums = ("output_bytes", "new_bytes", "moved_bytes", "flops")
    groups = (
        nodes.frame.with_columns(key)
        .with_row_index("node")
        .group_by(what, maintain_order=True)
        .agg(
            "node", pl.len().alias("nodes"), *(known_sum(pl.col(name)).alias(name) for name in sums)
        )
    )
    times = _times(
        np.stack([times_ns[:, each.to_numpy()].sum(axis=1) for each in groups["node"]], axis=1)
    )
    work = {name: groups[name].to_list() for name in sums}
    return Table(
        {what: groups[what], "nodes": groups["nodes"], **times, **work, **_rates(work, times)}
    )


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
    work: Mapping[str, Sequence[Any]], times: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    flops, moved = work["flops"], work["moved_bytes"]
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


def line_of(error: BaseException) -> str | None:
    """The place of the innermost frame of the user's own code in a traceback, as file:line."""
    frames = traceback.walk_tb(error.__traceback__)
    return _innermost([(frame.f_code.co_filename, str(line)) for frame, line in frames])


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
    try:
        return path, type(model.get_submodule(path)).__name__
    except AttributeError:  # of a constant, which the model does not hold
        return None, None


def _innermost(frames: list[tuple[str, str]]) -> str | None:
    """The innermost frame outside of torch, this package and generated code, as file:line.

    `frames` has the file and the line of each Python frame, the outermost first.
    """
    own = [frame for frame in frames if not frame[0].startswith((*_PACKAGES, "<"))]
    return ":".join(own[-1]) if own else None
