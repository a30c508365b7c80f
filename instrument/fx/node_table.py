"""`NodeTable`: a row for each node of a graph, and the columns that name the nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from instrument.analysis.table import Table, sum_of_known
from instrument.errors import ConfigError
from instrument.fx.groupings import GROUPINGS, Grouping
from instrument.trace.events import Ints

_LABELS = ("op", "name", "target", "module_path", "module_type", "source", "inputs")
_MADE = ("output_shape", "output_dtype", "output_bytes")
_PACKAGES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class NodeTable(Table):
    """A row for each node, in graph order. Times are integer nanoseconds; an unknown cell is None.

    - `op`, `name`, `target`: as in torch.fx; `target` is the path of a module, or the name of a
      function or method.
    - `module_path`, `module_type`: the path and the class of the innermost module around the node.
      The path of the model itself is "".
    - `source`: file and line of the call in the user's own code.
    - `inputs`: the names of the nodes whose values this node takes, separated by commas.
    - `calls`: the number of timed runs.
    - `mean_ns median_ns p95_ns`: the mean, median and 95th percentile of the node's time over these
      runs. The median and the percentile are without interpolation (nearest rank).
    - `share`: `median_ns` divided by the sum of `median_ns` over all nodes. So the time between
      nodes does not count.
    - `output_shape output_dtype output_bytes`: the shapes, types and bytes of the tensors that the
      node returns, including views.
    - `new_bytes`: the memory that the node allocated for these tensors; 0 for views and for writes
      in place.
    - `moved_bytes`: the bytes that the node moves if it reads each input tensor and each parameter
      once, and writes each output tensor once; 0 for a view. Operators that select elements, such
      as an embedding, read from each tensor at most as many bytes as they return.
    - `flops`: the FLOPs of the node's operators, by formula. Operators without a formula do not
      count; None if no operator has a formula.
    - `flops_per_second`: `flops` divided by `median_ns`.
    - `intensity`: `flops` divided by `moved_bytes`.
    """

    def __init__(
        self,
        labels: Mapping[str, Sequence[Any]],
        times_ns: Ints,
        facts: Mapping[str, Sequence[Any]],
    ) -> None:
        self._labels, self._times_ns, self._facts = labels, times_ns, facts
        work = {name: facts[name] for name in ("new_bytes", "moved_bytes", "flops")}
        super().__init__(
            {
                **{name: labels[name] for name in _LABELS},
                **_times(times_ns),
                **{name: facts[name] for name in _MADE},
                **_work(work, times_ns),
            }
        )

    def by(self, what: Grouping, *, depth: int | None = None) -> Table:
        """Group the nodes: one row for each group, in the order of the groups' first nodes.

        The column `nodes` is the number of nodes in a group. The time of a group in a run is the
        sum of the times of its nodes. `mean_ns median_ns p95_ns` are statistics over the runs.

        Args:
            what: the column to group by.
            depth: with `module_path`, nodes of deeper modules count for the module around them at
                this depth. The direct submodules of the model have depth 1.

        Raises:
            ConfigError: there is no such grouping.
        """
        if what not in GROUPINGS:
            raise ConfigError(
                f"Nodes cannot be grouped by {what!r}; choose one of {', '.join(GROUPINGS)}."
            )
        keys = list(self._labels[what])
        if what == "module_path" and depth is not None:
            keys = [None if key is None else ".".join(key.split(".")[:depth]) for key in keys]
        index = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        members: list[list[int]] = [[] for _ in index]
        for node, key in enumerate(keys):
            members[index[key]].append(node)
        times_ns = np.stack([self._times_ns[:, nodes].sum(axis=1) for nodes in members], axis=1)
        names = ("output_bytes", "new_bytes", "moved_bytes", "flops")
        sums = {
            name: [sum_of_known(self._facts[name][n] for n in nodes) for nodes in members]
            for name in names
        }
        labels = {what: list(index), "nodes": [len(nodes) for nodes in members]}
        return Table(
            {
                **labels,
                **_times(times_ns),
                "output_bytes": sums.pop("output_bytes"),
                **_work(sums, times_ns),
            }
        )


def _times(times_ns: Ints) -> dict[str, list[Any]]:
    """The columns of times; `times_ns` is an array of shape (runs, table rows)."""
    runs, rows = times_ns.shape
    if not runs:
        return {
            "calls": [0] * rows,
            **dict.fromkeys(("mean_ns", "median_ns", "p95_ns", "share"), [None] * rows),
        }
    ranked = np.sort(times_ns, axis=0)
    median, p95 = (ranked[-(-percent * runs // 100) - 1] for percent in (50, 95))
    return {
        "calls": [runs] * rows,
        "mean_ns": np.rint(ranked.mean(axis=0)).astype(np.int64).tolist(),
        "median_ns": median.tolist(),
        "p95_ns": p95.tolist(),
        "share": (median / median.sum()).tolist() if median.any() else [None] * rows,
    }


def _work(facts: Mapping[str, Sequence[Any]], times_ns: Ints) -> dict[str, Sequence[Any]]:
    """The columns of `facts` (sizes and FLOPs), and `flops_per_second` and `intensity`."""
    times = _times(times_ns)["median_ns"]
    flops, moved = facts["flops"], facts["moved_bytes"]
    return {
        **facts,
        "flops_per_second": [
            n * 10**9 // ns if n is not None and ns else None for n, ns in zip(flops, times)
        ],
        "intensity": [
            n / size if n is not None and size else None for n, size in zip(flops, moved)
        ],
    }


def labels(graph: fx.Graph, model: nn.Module) -> dict[str, list[Any]]:
    """The columns of `NodeTable` that name and describe the nodes."""
    nodes = list(graph.nodes)
    modules = [_module(node, model) for node in nodes]
    return {
        "op": [node.op for node in nodes],
        "name": [node.name for node in nodes],
        "target": [_target(node) for node in nodes],
        "module_path": [path for path, _ in modules],
        "module_type": [kind for _, kind in modules],
        "source": [_source(node.stack_trace) for node in nodes],
        "inputs": [", ".join(each.name for each in node.all_input_nodes) for node in nodes],
    }


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


def module_types(graph: fx.Graph, model: nn.Module) -> dict[str, str]:
    """The class of each module whose call runs at least one node, by path of the module."""
    stacks = [node.meta.get("nn_module_stack", {}).values() for node in graph.nodes]
    paths = sorted({str(path) for stack in stacks for path, _ in stack})
    return {path: kind for path in paths if (kind := _class_name(model, path)) is not None}


def _source(stack: str | None) -> str | None:
    """The place of the innermost frame of the user's own code in a stack's text, as file:line."""
    return innermost(_FRAME.findall(stack or ""))


def line_of(traceback: TracebackType | None) -> str | None:
    """The place of the innermost frame of the user's own code in a traceback, as file:line."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, str(traceback.tb_lineno)))
        traceback = traceback.tb_next
    return innermost(frames)


def innermost(frames: list[tuple[str, str]]) -> str | None:
    """The innermost frame outside of torch, this package and generated code, as file:line.

    `frames` has the file and the line of each Python frame, the outermost first.
    """
    own = [frame for frame in frames if not frame[0].startswith((*_PACKAGES, "<"))]
    return ":".join(own[-1]) if own else None
