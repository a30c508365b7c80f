"""What the nodes of a graph are called: their targets, their modules, the lines they come from."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

_PACKAGES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, Path(__file__).parent))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def labels(graph: fx.Graph, model: nn.Module) -> dict[str, list[Any]]:
    """The columns of `NodeTable` that name its nodes."""
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
    home = str(getattr(node.target, "__module__", None) or "torch").removeprefix("_")  # of built-ins: operator, torch
    return f"{home}.{name}"


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
    except AttributeError:  # a constant of the graph
        return None, None


def _source(stack: str | None) -> str | None:
    """The innermost line of the user's own code, as file:line."""
    return innermost(_FRAME.findall(stack or ""))


def line_of(traceback: TracebackType | None) -> str | None:
    """The innermost line of the user's own code in a traceback."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, str(traceback.tb_lineno)))
        traceback = traceback.tb_next
    return innermost(frames)


def innermost(frames: list[tuple[str, str]]) -> str | None:
    """The last of these frames, outermost first, that is neither torch's nor ours nor made at run time."""
    own = [frame for frame in frames if not frame[0].startswith((*_PACKAGES, "<"))]
    return ":".join(own[-1]) if own else None
