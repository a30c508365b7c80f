"""`profile_graph` and `NodeProfiler`: time each node of a model's graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from instrument.errors import ConfigError, GraphError
from instrument.fx.graph_capture import Inputs, Traced, misfit, outcome, signature, trace
from instrument.fx.interpreter import NodeInterpreter
from instrument.fx.node_table import NodeTable, labels
from instrument.fx.result import GraphProfile, Overhead
from instrument.fx.side_effects import unchanged
from instrument.fx.tensor_sizes import Inspection, counted_flops
from instrument.trace.events import Ints


def profile_graph(
    model: nn.Module,
    *inputs: Any,
    runs: int = 10,
    warmup: int = 2,
    sync: bool = False,
    **kwargs: Any,
) -> GraphProfile:
    """Run a model node by node of its graph, and tell what each node took, made and computed.

        print(profile_graph(model, x).nodes.sort("mean_ns").head(10))

    Buffers, modules' attributes, generators (torch's, NumPy's, Python's) and tensors among the inputs are put back.
    Hooks see every run, and what a forward writes into parameters, files or its own lists stays. Where the forward
    waits for other ranks, all must call this alike. The model's modes are respected: call this under `torch.no_grad()`
    and after `model.eval()` for inference. Each run is followed by one of the model as it is, so that `overhead` can
    tell the difference.

    Args:
        model: a module; nothing is done to it.
        inputs: of its forward, as `kwargs` are: tensors and plain values, also in dicts, lists and tuples.
        runs: how many are counted.
        warmup: how many come before and are not.
        sync: wait for the device around each node, so that no node runs beside another. Without it, times are the
            device's own, by events in its stream; they hold a node's launch only where the device waits for that.
        kwargs: of the model's forward.

    Cost: the model runs `2 * (runs + warmup) + 6` times at most, once of that under torch's profiler for the FLOPs.

    Raises:
        GraphError: neither `torch.fx` nor `torch.export` can capture the model, or a call does what no graph does
            again: it takes other objects, changes the dicts and lists it is given, or checkpoints activations. The
            model's own errors pass.
        ConfigError: `runs` is not positive, or `warmup` negative.
    """
    if runs < 1 or warmup < 0:
        raise ConfigError(
            f"profile_graph was given runs={runs}, warmup={warmup}: at least 1 run, and 0 to warm up."
        )
    profiler = NodeProfiler(model, sync=sync)
    with unchanged(model, (inputs, kwargs)):
        profiler.run(*inputs, **kwargs)
        for _ in range(warmup):
            profiler.run_as_it_is(*inputs, **kwargs)
            profiler.run(*inputs, **kwargs)
        profiler.reset()
        for _ in range(runs):
            profiler.run_as_it_is(*inputs, **kwargs)
            profiler.run(*inputs, **kwargs)
    return profiler.profile()


@dataclass
class _Captured:
    """A graph, what runs it, and what was seen of it before any run that counts."""

    traced: Traced
    inspection: Inspection
    flops: list[int | None]
    node_ns: int
    device: str | None


class NodeProfiler:
    """Runs a model node by node of its graph, and adds up what each node took.

    `run` stands in for a call of the model, gradients and what it writes to buffers and inputs included. The first one
    captures the graph, for which the model runs a few times more; that is put back, as far as `profile_graph` does.
    Options are those of `profile_graph`. Each run keeps eight bytes a node.
    """

    def __init__(self, model: nn.Module, *, sync: bool = False) -> None:
        self._model = model
        self._sync = sync
        self._captured: _Captured | None = None
        self._interpreters: dict[
            Any, NodeInterpreter
        ] = {}  # by the signature of the calls whose graph that is
        self._outputs: list[Any] = []  # of the first run
        self._wait: Callable[[], object] = _nothing  # for the device, once it is known
        self.reset()

    def reset(self) -> None:
        """Forget all times so far."""
        self._times_ns: list[Ints] = []
        self._interpreted_ns: list[int] = []
        self._model_ns: list[int] = []

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model node by node and return its own result.

        Raises:
            GraphError: the model cannot be captured, or these inputs need another graph than the first ones.
        """
        traced, interpreter = self._graph_for((inputs, kwargs))
        values = traced.values((inputs, kwargs))
        output = self._clocked(self._interpreted_ns, lambda: interpreter.run_timed(values))
        self._times_ns.append(np.array(interpreter.times_ns, np.int64))
        result = traced.result(output)
        self._outputs = self._outputs or [tree_map(_detached, result)]
        return result

    def run_as_it_is(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model without its graph, for `overhead` to compare with, and return its result."""
        return self._clocked(self._model_ns, lambda: self._model(*inputs, **kwargs))

    def profile(self) -> GraphProfile:
        """What was measured so far.

        Raises:
            GraphError: nothing was run yet.
        """
        captured = self._captured
        if captured is None or not self._times_ns:
            raise GraphError(
                "NodeProfiler has run nothing yet: call its run with the model's inputs first."
            )
        graph, times_ns = captured.traced.graph, np.stack(self._times_ns)
        facts = {**captured.inspection.columns, "flops": captured.flops}
        overhead = _overhead(times_ns, self._interpreted_ns, self._model_ns, captured.node_ns)
        nodes = NodeTable(labels(graph, self._model), times_ns, facts)
        seen = captured.inspection
        return GraphProfile(
            nodes=nodes,
            how=captured.traced.how,
            overhead=overhead,
            outputs=self._outputs[0],
            storages=seen.storages,
            model_bytes=seen.model_bytes,
            device=captured.device or "cpu",
            model=type(self._model).__name__,
        )

    def _graph_for(self, inputs: Inputs) -> tuple[Traced, NodeInterpreter]:
        """The graph and what runs it: captured at the first call, compared with the model at each new kind of call.

        Each kind has its own interpreter, because an interpreter keeps the modules that the model had when it was made.
        """
        kind, captured = signature(self._model, inputs), self._captured
        if captured is None:
            captured = self._captured = self._capture(inputs)
        elif kind not in self._interpreters:
            expected = outcome(self._model, self._model, inputs, strict=True)
            why = misfit(captured.traced, self._model, inputs, expected)
            if why is not None:
                raise GraphError(
                    f"The graph of NodeProfiler's first run {why}: make another for these inputs."
                )
        if kind not in self._interpreters:
            interpreter = captured.traced.interpreter(
                self._model, device=captured.device, sync=self._sync
            )
            self._interpreters[kind] = interpreter
        return captured.traced, self._interpreters[kind]

    def _capture(self, inputs: Inputs) -> _Captured:
        model, traced = self._model, trace(self._model, inputs)
        device = _device(model, inputs)
        self._wait = getattr(torch, device).synchronize if device else _nothing
        plain = traced.interpreter(model)
        names = [node.name for node in traced.graph.nodes]
        inspection = traced.interpreter(model, Inspection)
        with unchanged(model, inputs):
            flops = counted_flops(lambda: plain.run_timed(traced.values(inputs)), names)
        graded = torch.is_grad_enabled()
        # without inference mode, whose tensors do not count how often they are written to, nor can be outside of it
        kept = any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        mode = torch.inference_mode(kept and torch.is_inference_mode_enabled())
        with unchanged(model, inputs), mode, torch.set_grad_enabled(graded):
            inspection.run_timed(traced.values(_normal(inputs)))
        return _Captured(traced, inspection, flops, _node_ns(device, self._sync), device)

    def _clocked(self, into: list[int], act: Callable[[], Any]) -> Any:
        self._wait()
        began_ns = perf_counter_ns()
        result = act()
        self._wait()
        into.append(perf_counter_ns() - began_ns)
        return result


def _overhead(
    times_ns: Ints, interpreted_ns: list[int], model_ns: list[int], node_ns: int
) -> Overhead:
    sums, nodes = times_ns.sum(axis=1).tolist(), times_ns.shape[1]
    pairs = [(total - nodes * node_ns) / model for total, model in zip(sums, model_ns) if model]
    quarters = quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else None
    return Overhead(
        model_ns=round(median(model_ns)) if model_ns else None,
        interpreted_ns=round(median(interpreted_ns)),
        nodes_ns=round(median(sums)),
        node_ns=node_ns,
        nodes=nodes,
        of_model=median(pairs) if pairs else None,
        quartiles=(quarters[0], quarters[2]) if quarters else None,
    )


def _detached(leaf: Any) -> Any:
    return (
        leaf.detach() if isinstance(leaf, Tensor) else leaf
    )  # else all that autograd saved lives with the profile


def _nothing(*_: Any) -> None:
    pass


def _node_ns(device: str | None, sync: bool) -> int:
    """What measuring adds to a node's time: what a node takes that does nothing."""
    graph = fx.Graph()
    for _ in range(200):
        graph.call_function(_nothing, ())
    graph.output(None)
    interpreter = NodeInterpreter(nn.Module(), graph, nn.Module(), device, sync)
    interpreter.run_timed([])
    interpreter.run_timed([])
    return round(median(interpreter.times_ns))


def _device(model: nn.Module, inputs: Inputs) -> str | None:
    """The kind of device that the model or its inputs are on, which runs beside the CPU; None for the CPU alone."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    kinds = (each.device.type for each in tensors if isinstance(each, Tensor))
    return next(
        (
            kind
            for kind in kinds
            if hasattr(getattr(torch, kind, None), "synchronize") and kind != "cpu"
        ),
        None,
    )


def _normal(inputs: Inputs) -> Inputs:
    copied: Inputs = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
        inputs,
    )
    return copied
