"""`profile_graph` and `NodeProfiler`: time each node of the graph of a model."""

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
from instrument.fx.graph_capture import Inputs, Traced, mismatch, outcome, signature, trace
from instrument.fx.interpreter import NodeInterpreter
from instrument.fx.node_table import NodeTable, labels, module_types
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
    """Run the graph of a model, node by node; return the times, memory and FLOPs of its nodes.

        print(profile_graph(model, x).nodes.sort("mean_ns").head(10))

    The forward pass may change the model and other state. These are restored after the runs:
    buffers, attributes of modules, tensors among the inputs, and the random number generators of
    torch, NumPy and Python. These are not restored: parameters, files, and the content of lists and
    dicts that an attribute holds. Hooks see every run.

    If the forward pass waits for other ranks, all ranks must make the same call. For inference,
    call `model.eval()` first, and call this function under `torch.no_grad()`. Before each run of
    the graph, the model also runs once without the graph, so that `GraphProfile.overhead` can
    compare both times.

    Args:
        model: the module whose forward pass runs.
        inputs: positional arguments of the forward pass: tensors and plain values, also in dicts,
            lists and tuples.
        runs: the number of timed runs.
        warmup: the number of runs before the timed runs.
        sync: wait for the device before and after each node, so that no two nodes overlap. Without
            `sync`, the time of a node is its time on the device. The time that the CPU needs to
            launch the node then counts only while the device waits for this launch. For a model on
            the CPU, `sync` has no effect.
        kwargs: keyword arguments of the forward pass, of the same types as `inputs`.

    Cost: the model runs at most `2 * (runs + warmup) + 6` times, one of them under torch's profiler
    for the FLOPs.

    Raises:
        GraphError: neither `torch.fx` nor `torch.export` can capture the model; a graph cannot
            represent the call; or a tensor cannot be restored. A graph cannot represent a call that
            takes inputs of types that are not named above, changes dicts or lists among its inputs,
            or checkpoints or offloads activations. A graph cannot represent a model that is
            TorchScript, has lazy parameters, or has code compiled by torch.compile. Errors of the
            model itself are not caught.
        ConfigError: `runs` is not positive, or `warmup` is negative.
    """
    if runs < 1 or warmup < 0:
        raise ConfigError(
            f"profile_graph was given runs={runs}, warmup={warmup}: runs must be at least 1, and "
            "warmup at least 0."
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
    """A captured graph, and the measurements that are made before the timed runs."""

    traced: Traced
    inspection: Inspection
    flops: list[int | None]
    node_ns: int
    device: str | None


class NodeProfiler:
    """Runs the graph of a model, node by node, and collects the times of the nodes.

    Call the method `run` instead of the model. `run` computes the same result and gradients as the
    model, and writes the same values to buffers and inputs. The first call of `run` captures the
    graph. For this, the model runs a few more times; the changes of these runs are undone as in
    `profile_graph`. For `sync`, see `profile_graph`. Each run stores eight bytes for each node.
    """

    def __init__(self, model: nn.Module, *, sync: bool = False) -> None:
        self._model = model
        self._sync = sync
        self._captured: _Captured | None = None
        self._interpreters: dict[Any, NodeInterpreter] = {}  # by signature of a call
        self._outputs: list[Any] = []  # of the first run
        self._wait: Callable[[], object] = _nothing  # waits for the device, once it is known
        self.reset()

    def reset(self) -> None:
        """Discard all times so far."""
        self._times_ns: list[Ints] = []
        self._interpreted_ns: list[int] = []
        self._model_ns: list[int] = []

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model node by node and return its result.

        Raises:
            GraphError: the model cannot be captured, or its graph is not valid for these inputs.
        """
        traced, interpreter = self._graph_for((inputs, kwargs))
        values = traced.values((inputs, kwargs))
        output = self._timed(self._interpreted_ns, lambda: interpreter.run_timed(values))
        self._times_ns.append(np.array(interpreter.times_ns, np.int64))
        result = traced.result(output)
        self._outputs = self._outputs or [tree_map(_detached, result)]
        return result

    def run_as_it_is(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model without its graph, as a reference for `overhead`, and return its result."""
        return self._timed(self._model_ns, lambda: self._model(*inputs, **kwargs))

    def profile(self) -> GraphProfile:
        """Return the measurements of the runs so far.

        Raises:
            GraphError: there was no run yet.
        """
        captured = self._captured
        if captured is None or not self._times_ns:
            raise GraphError(
                "NodeProfiler has no run yet: first call its method run with the model's inputs."
            )
        graph, times_ns = captured.traced.graph, np.stack(self._times_ns)
        facts = {**captured.inspection.columns, "flops": captured.flops}
        overhead = _overhead(times_ns, self._interpreted_ns, self._model_ns, captured.node_ns)
        return GraphProfile(
            nodes=NodeTable(labels(graph, self._model), times_ns, facts),
            how=captured.traced.how,
            overhead=overhead,
            outputs=self._outputs[0],
            storages=captured.inspection.storages,
            model_bytes=captured.inspection.model_bytes,
            device=captured.device or "cpu",
            model=type(self._model).__name__,
            module_types=module_types(graph, self._model),
        )

    def _graph_for(self, inputs: Inputs) -> tuple[Traced, NodeInterpreter]:
        """Return the graph, and the interpreter for calls with the signature of `inputs`.

        Two calls have the same signature if everything that the graph depends on is equal, such as
        the shapes of the inputs and the modules of the model (see `graph_capture.signature`). The
        first call captures the graph. All later calls use this graph.

        Each signature has its own interpreter, because an interpreter keeps the modules that the
        model had when the interpreter was made.

        Raises:
            GraphError: the model cannot be captured, or a call has a new signature, and the graph
                does not agree with the model for this call.
        """
        key, captured = signature(self._model, inputs), self._captured
        if captured is None:
            captured = self._captured = self._capture(inputs)
        elif key not in self._interpreters:
            expected = outcome(self._model, self._model, inputs, strict=True)
            why = mismatch(captured.traced, self._model, inputs, expected)
            if why is not None:
                raise GraphError(
                    f"The graph of NodeProfiler's first run {why}: make a new "
                    "NodeProfiler for these inputs."
                )
        if key not in self._interpreters:
            self._interpreters[key] = captured.traced.interpreter(
                self._model, device=captured.device, sync=self._sync
            )
        return captured.traced, self._interpreters[key]

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
        # The inspection runs outside of inference mode, because torch does not count writes to
        # inference tensors. If the model holds inference tensors, it runs only in inference mode.
        needed = any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        mode = torch.inference_mode(needed and torch.is_inference_mode_enabled())
        with unchanged(model, inputs), mode, torch.set_grad_enabled(graded):
            inspection.run_timed(traced.values(_without_inference_tensors(inputs)))
        return _Captured(traced, inspection, flops, _node_ns(device, self._sync), device)

    def _timed(self, times_ns: list[int], call: Callable[[], Any]) -> Any:
        self._wait()
        start_ns = perf_counter_ns()
        result = call()
        self._wait()
        times_ns.append(perf_counter_ns() - start_ns)
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
    # Otherwise the tensors that autograd saved would live as long as the profile.
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _nothing(*_: Any) -> None:
    pass


def _node_ns(device: str | None, sync: bool) -> int:
    """The time that measuring adds to a node: the median time of nodes that do nothing."""
    graph = fx.Graph()
    for _ in range(200):
        graph.call_function(_nothing, ())
    graph.output(None)
    interpreter = NodeInterpreter(nn.Module(), graph, nn.Module(), device, sync)
    interpreter.run_timed([])
    interpreter.run_timed([])
    return round(median(interpreter.times_ns))


def _device(model: nn.Module, inputs: Inputs) -> str | None:
    """The kind of the device that the model or its inputs are on; None if it is the CPU."""
    for leaf in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)):
        kind = leaf.device.type if isinstance(leaf, Tensor) else "cpu"
        if kind != "cpu" and hasattr(getattr(torch, kind, None), "synchronize"):
            return kind
    return None


def _without_inference_tensors(inputs: Inputs) -> Inputs:
    copied: Inputs = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
        inputs,
    )
    return copied
