"""What each node of a graph takes, makes and computes, seen in runs of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, fx, nn

from instrument.annotate import backends
from instrument.capture import Capture
from instrument.config.schema import ProfilerConfig
from instrument.errors import CaptureError
from instrument.fx.interpreter import NodeInterpreter
from instrument.fx.side_effects import tensors_of
from instrument.range_names import to_trace
from instrument.record.recorder import Recorder

#: The memory that a node's tensors lie in: a number for each storage that no parameter or buffer is, and its bytes.
Storages = tuple[tuple[int, int], ...]

#: What reads of its source only what it gives: modules, functions, methods and operators of these names.
_PICKING = frozenset({"embedding", "gather", "getitem", "index", "index_select", "take"})


class Inspection(NodeInterpreter):
    """Runs a graph once and notes the tensors of each node.

    Attributes:
        columns: of `NodeTable`, a cell for each node: `output_shape output_dtype output_bytes new_bytes moved_bytes`.
        storages: for each node, what its tensors lie in; a view lies in that of what it was made from.
        model_bytes: the memory of the model's parameters and buffers; what they share counts once.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: nn.Module) -> None:
        super().__init__(model, graph, constants)
        names = ("output_shape", "output_dtype", "output_bytes", "new_bytes", "moved_bytes")
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self.storages: list[Storages] = []
        self._of: dict[
            fx.Node, dict[int, int]
        ] = {}  # storages by address, which torch gives again once one is freed
        self._known = 0
        self._models = {_address(each) for holder in (model, constants) for each in _held(holder)}
        self.model_bytes = sum(
            {_address(each): each.untyped_storage().nbytes() for each in _held(model)}.values()
        )

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note what it took and gave."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        taken = _stored((args, kwargs))
        if n.op == "call_module":
            taken += _held(self._calls[n])
        written = [_version(tensor) for tensor in taken]
        result = self._calls[n](*args, **kwargs)
        wrote = written != [_version(tensor) for tensor in taken]
        self._note(n, taken, _stored(result), wrote)
        return result

    def _note(self, node: fx.Node, taken: list[Tensor], given: list[Tensor], wrote: bool) -> None:
        old = {
            address: number
            for each in node.all_input_nodes
            for address, number in self._of[each].items()
        }
        mine: dict[int, tuple[int, int]] = {}
        new_bytes = 0
        for tensor in given:
            address, size = _address(tensor), tensor.untyped_storage().nbytes()
            if address in self._models or address in mine:
                continue
            if address in old:
                mine[address] = old[address], size
            else:
                mine[address] = self._known, size
                self._known += 1
                new_bytes += size if node.op != "placeholder" else 0
        self._of[node] = {address: number for address, (number, _) in mine.items()}
        self.storages.append(tuple(mine.values()))
        works = node.op.startswith("call_") and (new_bytes or wrote)
        cells = {
            "output_shape": ", ".join(str(list(tensor.shape)) for tensor in given) or None,
            "output_dtype": ", ".join(
                dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in given)
            )
            or None,
            "output_bytes": _bytes(given) if given else None,
            "new_bytes": new_bytes,
            "moved_bytes": _read_bytes(self._calls[node], taken, given) + _bytes(given)
            if works
            else 0,
        }
        for name, cell in cells.items():
            self.columns[name].append(cell)


def _stored(value: Any) -> list[Tensor]:
    """Those that lie in one storage each; sparse and nested ones are not looked at."""
    return [
        leaf for leaf in tensors_of(value) if leaf.layout is torch.strided and not leaf.is_nested
    ]


def _read_bytes(call: Any, taken: list[Tensor], given: list[Tensor]) -> int:
    """What a node must read: each tensor once, and of one that it only picks from no more than it gives."""
    distinct = {(_address(t), t.storage_offset(), t.shape, t.stride()): t for t in taken}.values()
    name = getattr(call, "__name__", type(call).__name__)
    if name.partition(".")[0].lower() not in _PICKING:
        return _bytes(distinct)
    return sum(min(_bytes([tensor]), _bytes(given)) for tensor in distinct)


def _held(module: Any) -> list[Tensor]:
    return _stored([*module.parameters(), *module.buffers()])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def counted_flops(run: Callable[[], object], names: Sequence[str]) -> list[int | None]:
    """The FLOPs of each node of a graph, of which `run` runs every one in its range, once.

    None for a node none of whose operators has a rule, and for all where something else records in this process.
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
