"""`profile_graph`: time each node of the graph of a model."""

from __future__ import annotations

from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from instrument.base.errors import ConfigError
from instrument.graph.graph_capture import Traced, trace
from instrument.graph.interpreter import NodeInterpreter
from instrument.graph.node_table import module_types, node_labels, node_table
from instrument.graph.outcome import Inputs
from instrument.graph.result import GraphProfile, Overhead
from instrument.graph.side_effects import unchanged
from instrument.graph.tensor_sizes import Inspection, counted_flops
from instrument.read.trace.events import Ints


def profile_graph(
    model: nn.Module, *inputs: Any, runs: int = 10, warmup: int = 2, **kwargs: Any
) -> GraphProfile:
    """Run the graph of a model, node by node; return the times, sizes and FLOPs of its nodes.

        print(profile_graph(model, x).nodes.sort("mean_ns").head(10))

    These are restored after the runs: buffers, attributes of modules, tensors among the inputs, and
    the random number generators of torch, NumPy and Python. These are not restored: parameters,
    files, and the content of lists and dicts that an attribute holds. Hooks see every run.

    If the forward pass waits for other ranks, all ranks must make the same call. For inference,
    call `model.eval()` first, and call this function under `torch.no_grad()`. Before each run of
    the graph, the model also runs without it, so that `GraphProfile.overhead` can compare both.

    Args:
        model: the module whose forward pass runs.
        inputs: positional arguments of the forward pass: tensors and plain values, also in dicts,
            lists and tuples.
        runs: the number of timed runs.
        warmup: the number of runs before the timed runs.
        kwargs: keyword arguments of the forward pass, of the same types as `inputs`.

    Cost: the model runs at most `2 * (runs + warmup) + 6` times, one of them under torch's profiler
    for the FLOPs.

    Raises:
        GraphError: neither `torch.fx` nor `torch.export` can capture the model, a graph cannot
            represent the call (docs/fx.md lists the reasons), or a tensor cannot be restored.
            Errors of the model itself are not caught.
        ConfigError: `runs` is not positive, or `warmup` is negative.
    """
    if runs < 1 or warmup < 0:
        raise ConfigError(
            f"profile_graph was given runs={runs}, warmup={warmup}: runs must be at least 1, and "
            "warmup at least 0."
        )
    call = inputs, kwargs
    traced, device = trace(model, call), _device(model, call)
    flops, sizes = _flops(traced, model, call), _sizes(traced, model, call)
    interpreter = NodeInterpreter(model, traced.graph, traced.constants, device)
    wait = getattr(torch, device or "cpu").synchronize
    model_ns, by_run = [], []
    with unchanged(model, call):
        outputs = traced.result(interpreter.run_timed(traced.values(call)))
        for _ in range(warmup + runs):
            wait()
            start_ns = perf_counter_ns()
            model(*inputs, **kwargs)
            wait()
            model_ns.append(perf_counter_ns() - start_ns)
            interpreter.run_timed(traced.values(call))
            by_run.append(interpreter.times_ns)
    times_ns = np.array(by_run[warmup:], np.int64)
    facts = {**sizes, "flops": flops}
    nodes = node_table(node_labels(traced.graph, model), times_ns, facts)
    return GraphProfile(
        nodes=nodes,
        times_ns=times_ns,
        how=traced.how,
        overhead=_overhead(times_ns, model_ns[warmup:], _node_ns(device)),
        # Otherwise the tensors that autograd saved would live as long as the profile.
        outputs=tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs),
        device=device or "cpu",
        model=type(model).__name__,
        module_types=module_types(traced.graph, model),
    )


def _flops(traced: Traced, model: nn.Module, call: Inputs) -> list[int | None]:
    interpreter = NodeInterpreter(model, traced.graph, traced.constants)
    names = [node.name for node in traced.graph.nodes]
    with unchanged(model, call):
        return counted_flops(lambda: interpreter.run_timed(traced.values(call)), names)


def _sizes(traced: Traced, model: nn.Module, call: Inputs) -> dict[str, list[Any]]:
    """Run the graph once outside of inference mode: torch counts no writes to inference tensors.

    If the model itself holds inference tensors, it runs only in inference mode.
    """
    inspection = Inspection(model, traced.graph, traced.constants)
    graded = torch.is_grad_enabled()
    needed = any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    mode = torch.inference_mode(needed and torch.is_inference_mode_enabled())
    values = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
        traced.values(call),
    )
    with unchanged(model, call), mode, torch.set_grad_enabled(graded):
        inspection.run_timed(values)
    return inspection.columns


def _overhead(times_ns: Ints, model_ns: list[int], node_ns: int) -> Overhead:
    sums, nodes = times_ns.sum(axis=1).tolist(), times_ns.shape[1]
    pairs = [(total - nodes * node_ns) / max(model, 1) for total, model in zip(sums, model_ns)]
    quarters = quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else None
    return Overhead(
        model_ns=round(median(model_ns)),
        nodes_ns=round(median(sums)),
        node_ns=node_ns,
        nodes=nodes,
        of_model=median(pairs),
        quartiles=(quarters[0], quarters[2]) if quarters else None,
    )


def _node_ns(device: str | None) -> int:
    """The time that measuring adds to a node: the median time of nodes that do nothing."""
    graph = fx.Graph()
    for _ in range(200):
        graph.call_function(_nothing, ())
    graph.output(None)
    interpreter = NodeInterpreter(nn.Module(), graph, nn.Module(), device)
    interpreter.run_timed([])
    interpreter.run_timed([])
    return round(median(interpreter.times_ns))


def _nothing() -> None:
    pass


def _device(model: nn.Module, inputs: Inputs) -> str | None:
    """The kind of the device that the model or its inputs are on; None if it is the CPU."""
    for leaf in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)):
        kind = leaf.device.type if isinstance(leaf, Tensor) else "cpu"
        if kind != "cpu" and hasattr(getattr(torch, kind, None), "Event"):
            return kind
    return None
