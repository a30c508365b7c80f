"""`NodeInterpreter`: runs a captured graph and times each node, in a range named after the node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

import torch
from torch import fx, nn

from instrument.annotate import backends
from instrument.base.range_names import to_trace


class NodeInterpreter(fx.Interpreter):
    """Runs `graph` with the parameters and modules of `model`, and times each node.

    The time of a node is the time of its call, without the look-up of its arguments. Values are
    freed after their last use. The modes of the caller apply (training, gradients, autocast).

    Without `device`, a node is timed by the clock of the CPU. With `device`, it is timed by events
    in the stream of the device, which are read after the run.

    Attributes:
        times_ns: the time of each node in the last run, in graph order.
    """

    def __init__(
        self, model: nn.Module, graph: fx.Graph, constants: nn.Module, device: str | None = None
    ) -> None:
        """`constants` holds the attributes that the graph uses and the model does not have."""
        super().__init__(model, graph=graph)
        self.extra_traceback = False  # add no text to errors of the model
        self.times_ns: list[int] = []
        self._constants = constants
        self._labels = {node: to_trace(node.name) for node in graph.nodes}
        self._calls = {node: self._call_of(node) for node in graph.nodes}
        # The module of the device, such as torch.cuda, torch.xpu or torch.mps.
        self._device: Any = getattr(torch, device) if device else None
        self._events: list[tuple[Any, Any]] = []  # the start and end of each node
        self._timed = self._by_events if device else self._by_clock

    def run_timed(self, values: list[Any]) -> Any:
        """Run the graph on the values of its placeholders and set `times_ns`."""
        self.times_ns = []
        self._events = []
        try:
            result = self.run(*values, enable_io_processing=False)
        finally:
            self.env.clear()  # otherwise the values of this run live until the next run
        if self._events:
            self._device.synchronize()
            self.times_ns = [round(begin.elapsed_time(end) * 1e6) for begin, end in self._events]
        return result

    def run_node(self, n: fx.Node) -> Any:
        """Run and time one node, in a range with its name."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not backends.armed:
            return self._timed(self._calls[n], args, kwargs)
        opens, closes, _ = backends.backend
        opened = opens(self._labels[n])
        try:
            return self._timed(self._calls[n], args, kwargs)
        finally:
            closes(opened)

    def _call_of(self, node: fx.Node) -> Callable[..., Any]:
        """The callable of a node. It is looked up once; the base class looks it up in each run."""
        if node.op == "call_function":
            return node.target  # type: ignore[return-value]
        if node.op == "call_method":
            return _method(str(node.target))
        if node.op in ("call_module", "get_attr"):
            path, _, name = str(node.target).rpartition(".")
            owner = self._owner(path, name)
            if node.op == "get_attr":
                return lambda: getattr(owner, name)
            module: Callable[..., Any] = getattr(owner, name)
            return module
        method = self.placeholder if node.op == "placeholder" else self.output
        return lambda *args, **kwargs: method(node.target, args, kwargs)

    def _owner(self, path: str, name: str) -> nn.Module:
        """Find the module that holds an attribute, in the model first and then in `constants`."""
        with suppress(AttributeError):
            owner = self.module.get_submodule(path)
            if hasattr(owner, name):
                return owner
        return self._constants.get_submodule(path)

    def _by_clock(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        start_ns = perf_counter_ns()
        result = call(*args, **kwargs)
        self.times_ns.append(perf_counter_ns() - start_ns)
        return result

    def _by_events(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begin, end = (self._device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call(*args, **kwargs)
        end.record()
        self._events.append((begin, end))
        return result


def _method(name: str) -> Callable[..., Any]:
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    call.__name__ = name
    return call
