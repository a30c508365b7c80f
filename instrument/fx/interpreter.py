"""`NodeInterpreter`: runs a captured graph node by node, each timed and in a range of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any

import torch
from torch import fx, nn

from instrument.annotate import backends
from instrument.range_names import to_trace


class NodeInterpreter(fx.Interpreter):
    """Runs `graph` with what `model` holds now, or what `constants` holds where the model does not.

    Each node's time is that of its call alone: what it takes is looked up before. Values are freed after their last
    use, and modes (training, gradients, autocast) are those of the caller. With `device`, times are the device's own,
    by events in its stream that are read once the run is over; `sync`, and a device without such events, wait for the
    device around each node instead, so that a time is the CPU's until the device is done.

    Attributes:
        times_ns: of the last run, one for each node in graph order.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: fx.Graph,
        constants: nn.Module,
        device: str | None = None,
        sync: bool = False,
    ) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False  # an error of the model stays as it is
        self.times_ns: list[int] = []
        self._constants = constants
        self._labels = {node: to_trace(node.name) for node in graph.nodes}
        self._calls = {node: self._call_of(node) for node in graph.nodes}
        self._device: Any = (
            getattr(torch, device) if device else None
        )  # its module: torch.cuda, torch.xpu, torch.mps
        self._marks: list[tuple[Any, Any]] = []
        if self._device is None:
            self._timed = self._by_cpu
        else:
            self._timed = (
                self._waiting if sync or not hasattr(self._device, "Event") else self._by_events
            )

    def run_timed(self, values: list[Any]) -> Any:
        """Run the graph on the values of its placeholders; `times_ns` tells what each node took."""
        self.times_ns = []
        self._marks = []
        try:
            result = self.run(*values, enable_io_processing=False)
        finally:
            self.env.clear()  # else its results live until the next run
        if self._marks:
            self._device.synchronize()
            self.times_ns = [round(begin.elapsed_time(end) * 1e6) for begin, end in self._marks]
        return result

    def run_node(self, n: fx.Node) -> Any:
        """Run one node in its range."""
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
        """What the base class would find anew at each run."""
        if node.op == "call_function":
            return node.target  # type: ignore[return-value]
        if node.op == "call_method":
            return _method(str(node.target))
        if node.op in ("call_module", "get_attr"):
            path, _, name = str(node.target).rpartition(".")
            owner = self._owner(path, name)
            return (
                getattr(owner, name) if node.op == "call_module" else lambda: getattr(owner, name)
            )
        act = self.placeholder if node.op == "placeholder" else self.output
        return lambda *args, **kwargs: act(node.target, args, kwargs)

    def _owner(self, path: str, name: str) -> nn.Module:
        """The module that holds an attribute: the model's, or else the graph's own for a constant of it."""
        with suppress(AttributeError):
            owner = self.module.get_submodule(path)
            if hasattr(owner, name):
                return owner
        return self._constants.get_submodule(path)

    def _by_cpu(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        began_ns = perf_counter_ns()
        result = call(*args, **kwargs)
        self.times_ns.append(perf_counter_ns() - began_ns)
        return result

    def _by_events(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begin, end = (self._device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call(*args, **kwargs)
        end.record()
        self._marks.append((begin, end))
        return result

    def _waiting(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._device.synchronize()
        began_ns = perf_counter_ns()
        result = call(*args, **kwargs)
        self._device.synchronize()
        self.times_ns.append(perf_counter_ns() - began_ns)
        return result


def _method(name: str) -> Callable[..., Any]:
    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)

    call.__name__ = name
    return call
