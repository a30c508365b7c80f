"""Measure the tensor sizes and the FLOPs of each node of a graph, in separate runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn

from instrument.annotate import backends
from instrument.base.errors import CaptureError
from instrument.base.range_names import to_trace
from instrument.graph.interpreter import NodeInterpreter
from instrument.graph.side_effects import tensors_of
from instrument.read.capture import Capture
from instrument.record.config.schema import ProfilerConfig
from instrument.record.recorder import Recorder

#: Modules, functions, methods and operators that read only the elements that they return.
_SELECTING = frozenset({"embedding", "gather", "getitem", "index", "index_select", "take"})


class Inspection(NodeInterpreter):
    """Runs a graph once and records the tensors of each node.

    Attributes:
        columns: the columns `output_shape output_dtype output_bytes new_bytes moved_bytes`, with a
            cell for each node.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: nn.Module) -> None:
        super().__init__(model, graph, constants)
        names = ("output_shape", "output_dtype", "output_bytes", "new_bytes", "moved_bytes")
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        # The storages of each node's tensors, without those of the model.
        self._storages: dict[fx.Node, set[int]] = {}
        self._of_model = {*map(_address, _held(model)), *map(_address, _held(constants))}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and record the tensors that it takes and returns."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        taken = _stored((args, kwargs))
        if n.op == "call_module":
            taken += _held(self._calls[n])
        before = [_version(tensor) for tensor in taken]
        result = self._calls[n](*args, **kwargs)
        wrote = before != [_version(tensor) for tensor in taken]
        self._record(n, taken, _stored(result), wrote)
        return result

    def _record(self, node: fx.Node, taken: list[Tensor], given: list[Tensor], wrote: bool) -> None:
        sizes = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in given}
        self._storages[node] = sizes.keys() - self._of_model
        # The inputs of a node are alive, so an address that is not theirs is of new memory.
        old = self._of_model.union(*(self._storages[each] for each in node.all_input_nodes))
        new = sizes.keys() - old if node.op != "placeholder" else ()
        new_bytes = sum(sizes[address] for address in new)
        moved_bytes = 0
        if node.op.startswith("call_") and (new_bytes or wrote):
            moved_bytes = _read_bytes(self._calls[node], taken, given) + _bytes(given)
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in given)
        cells = (
            ", ".join(str(list(tensor.shape)) for tensor in given) or None,
            ", ".join(dtypes) or None,
            _bytes(given) if given else None,
            new_bytes,
            moved_bytes,
        )
        for column, cell in zip(self.columns.values(), cells):
            column.append(cell)


def _stored(value: Any) -> list[Tensor]:
    """The tensors in a value, without sparse and nested tensors."""
    return [
        leaf for leaf in tensors_of(value) if leaf.layout is torch.strided and not leaf.is_nested
    ]


def _held(module: Any) -> list[Tensor]:
    return _stored([*module.parameters(), *module.buffers()])


def _read_bytes(call: Any, taken: list[Tensor], given: list[Tensor]) -> int:
    """The bytes that a node reads, if the node reads each of its tensors once.

    A node that selects elements reads from each tensor at most as many bytes as the node returns.
    """
    distinct = {(_address(t), t.storage_offset(), t.shape, t.stride()): t for t in taken}.values()
    name = getattr(call, "__name__", type(call).__name__)
    if name.partition(".")[0].lower() not in _SELECTING:
        return _bytes(distinct)
    return sum(min(_bytes([tensor]), _bytes(given)) for tensor in distinct)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def counted_flops(run: Callable[[], object], names: Sequence[str]) -> list[int | None]:
    """Call and trace `run`, which must run each node once; return the FLOPs of each node.

    The FLOPs of a node are None if none of its operators has a formula for FLOPs. If another
    profiler is active in this process, the FLOPs of all nodes are None.
    """
    with TemporaryDirectory() as folder:
        config = ProfilerConfig(record_shapes=True)
        recorder = Recorder(config, ["cpu"], backends.torch_backend, Path(folder))
        try:
            recorder.start()
        except CaptureError:
            return [None] * len(names)
        try:
            run()
        finally:
            recorded = recorder.stop()
        trace = Path(folder, "window", "trace.json")
        trace.parent.mkdir()
        if recorded is not None:
            recorded.save(trace)
        found = {row.name: row.flops for row in Capture.load(trace).ranges.where(depth=0)}
    return [found.get(to_trace(name)) for name in names]
