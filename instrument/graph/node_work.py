"""Measure the tensor sizes and the FLOPs of each node of a graph, in a run of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instrument.graph.interpreter import NodeInterpreter
from instrument.read.facts.flops import RULES, UNKNOWN, evaluated

#: Modules, functions, methods and operators that read only the elements that they return.
_SELECTING = frozenset({"embedding", "gather", "getitem", "index", "index_select", "take"})
# The key of kernels that call other operators.
_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd


def node_work(module: fx.GraphModule, values: list[Any]) -> dict[str, list[Any]]:
    """Run the graph once and return the tensors and the work of each node, in graph order.

    The columns are `output_shape output_dtype output_bytes new_bytes moved_bytes flops`.
    """
    inspection = _Inspection(module)
    inspection.run_timed(values)
    return {name: [row[name] for row in inspection.rows] for name in inspection.rows[0]}


class _Inspection(NodeInterpreter):
    """Runs a graph and records the tensors that each node takes and returns, and its FLOPs."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.rows: list[dict[str, Any]] = []
        # The storages of each node's tensors, without those of the model.
        self._storages: dict[fx.Node, set[int]] = {}
        self._of_model = set(map(_address, _held(module)))

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = self.calls[n]
        with _Operators() as operators:
            result = call(*args, **kwargs)
        taken, given = _stored((args, kwargs)), _stored(result)
        if n.op == "call_module":
            taken += _held(call)
        sizes = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in given}
        self._storages[n] = sizes.keys() - self._of_model
        # The inputs of a node are alive, so an address that is not theirs is of new memory.
        old = self._of_model.union(*(self._storages[each] for each in n.all_input_nodes))
        new = sizes.keys() - old if n.op != "placeholder" else ()
        new_bytes = sum(sizes[address] for address in new)
        moved_bytes = 0
        if n.op.startswith("call_") and (new_bytes or operators.wrote):
            name = type(call).__name__ if n.op == "call_module" else _name(n.target)
            moved_bytes = _read_bytes(name, taken, given) + _bytes(given)
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in given)
        row = {
            "output_shape": ", ".join(str(list(tensor.shape)) for tensor in given) or None,
            "output_dtype": ", ".join(dtypes) or None,
            "output_bytes": _bytes(given) if given else None,
            "new_bytes": new_bytes,
            "moved_bytes": moved_bytes,
            "flops": operators.flops,
        }
        self.rows.append(row)
        return result


class _Operators(TorchDispatchMode):
    """Counts the FLOPs of the operators in a block, by the rules for traces.

    Attributes:
        flops: the FLOPs; None if no operator has a rule.
        wrote: whether an operator wrote to one of its arguments.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int | None = None
        self.wrote = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return NotImplemented  # such as flex_attention; its operators come here
        rule = RULES.get(func._schema.name)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        # In inference mode, operators come undivided. `func.decompose` may copy: it takes torch's
        # decompositions in Python, too.
        if rule is None and torch.is_inference_mode_enabled() and has_kernel(func.name(), _PARTS):
            with self:
                return func._op_dk(_PARTS, *args, **kwargs)
        result = func(*args, **kwargs)
        self.wrote |= func._schema.is_mutable
        if rule is not None:
            given = [*args, *kwargs.values()]
            flops = evaluated(rule, [_dims(value) for value in given], [*map(str, given)])
            if flops != UNKNOWN:
                self.flops = (self.flops or 0) + flops
        return result


def _dims(value: Any) -> list[Any]:
    """The shape of an argument, or the shapes in a list, as in a trace; [] for other values."""
    if isinstance(value, Tensor):
        return list(value.shape)
    return [_dims(each) for each in value] if isinstance(value, list | tuple) else []


def _stored(value: Any) -> list[Tensor]:
    """The tensors in a value, without sparse and nested tensors."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [each for each in tensors if each.layout is torch.strided and not each.is_nested]


def _held(module: Any) -> list[Tensor]:
    return _stored([*module.parameters(), *module.buffers()])


def _name(target: Any) -> str:
    return target if isinstance(target, str) else target.__name__


def _read_bytes(name: str, taken: list[Tensor], given: list[Tensor]) -> int:
    """The bytes that a node reads, if the node reads each of its tensors once.

    A node that selects elements reads from each tensor at most as many bytes as the node returns.
    """
    distinct = {(_address(t), t.storage_offset(), t.shape, t.stride()): t for t in taken}.values()
    if name.partition(".")[0].lower() not in _SELECTING:
        return _bytes(distinct)
    return sum(min(_bytes([tensor]), _bytes(given)) for tensor in distinct)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
