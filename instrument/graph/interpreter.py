"""`NodeInterpreter`: runs a captured graph and times each node."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
from torch import fx


class NodeInterpreter(fx.Interpreter):
    """Runs a graph and times each node.

    The time of a node is the time of its call, without the look-up of its arguments. Values are
    freed after their last use. The modes of the caller apply (training, gradients, autocast).

    Without `device`, a node is timed by the clock of the CPU. With `device`, it is timed by events
    in the stream of the device, which are read after the run.

    Attributes:
        times_ns: the time of each node in the last run, in graph order.
    """

    def __init__(self, module: fx.GraphModule, device: str | None = None) -> None:
        super().__init__(module)
        self.extra_traceback = False  # add no text to errors of the model
        self.times_ns: list[int] = []
        self.calls = {node: self._call_of(node) for node in module.graph.nodes}
        # The module of the device, such as torch.cuda, torch.xpu or torch.mps.
        self._device: Any = getattr(torch, device) if device else None
        self._events: list[tuple[Any, Any]] = []  # the start and end of each node

    def run_timed(self, values: list[Any]) -> Any:
        """Run the graph on the values of its placeholders and set `times_ns`."""
        self.times_ns, self._events = [], []
        try:
            result = self.run(*values, enable_io_processing=False)
        finally:
            self.env.clear()  # otherwise the values of this run live until the next run
        if self._events:
            self._device.synchronize()
            self.times_ns = [round(begin.elapsed_time(end) * 1e6) for begin, end in self._events]
        return result

    def run_node(self, n: fx.Node) -> Any:
        """Run and time one node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = self.calls[n]
        if self._device is None:
            start_ns = perf_counter_ns()
            result = call(*args, **kwargs)
            self.times_ns.append(perf_counter_ns() - start_ns)
            return result
        begin, end = (self._device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call(*args, **kwargs)
        end.record()
        self._events.append((begin, end))
        return result

    def _call_of(self, node: fx.Node) -> Callable[..., Any]:
        """The callable of a node. It is looked up once; the base class looks it up in each run."""
        if node.op == "call_function":
            return node.target  # type: ignore[return-value]
        if node.op == "call_module":
            return self.module.get_submodule(str(node.target))
        method = getattr(self, node.op)  # placeholder, get_attr, call_method or output
        return lambda *args, **kwargs: method(node.target, args, kwargs)
