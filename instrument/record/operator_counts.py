"""`OperatorCounts` counts the operators of some steps, and their floating-point operations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from instrument.record.parameters import alive

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _shapes(tensors: Any) -> list[Any]:
    return [each.shape for each in tensors]


#: The operators that torch's counter does not know.
_OWN_FLOPS: dict[str, Callable[..., int]] = {
    _ATTENTION: lambda *args, **_: sdpa_flop_count(*_shapes(args[:3])),
    f"{_ATTENTION}_backward": lambda *args, **_: sdpa_backward_flop_count(*_shapes(args[:4])),
}


class OperatorCounts(TorchDispatchMode):
    """Counts what the thread runs that has entered it, and its backwards; compiled code runs eager.

    Attributes:
        is_on: whether operators are counted now.
        steps: how many steps were counted.
        counted: in the whole steps, the calls of each operator, and the operations of matrix
            products, convolutions and attention by dtype.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_on, self._paused, self._thread = False, False, 0
        self._stance: Any = None
        self.operators, self.flops = Counter[str](), Counter[str]()
        self.restart()

    @property
    def is_eager(self) -> bool:
        """Whether compiled functions run eager now."""
        return self._stance is not None

    def restart(self) -> None:
        """Forget what was counted."""
        self.leave()
        self.steps, self.is_known = 0, True
        self.operators.clear()
        self.flops.clear()
        self.counted = Counter[str](), Counter[str]()

    def end_step(self) -> None:
        """Keep what was counted until now: what follows may be no whole step."""
        self.steps += 1
        self.counted = self.operators.copy(), self.flops.copy()

    def enter(self) -> None:
        """Count from now on; not below a mode of the program, which could leave before this one."""
        if torch._C._len_torch_dispatch_stack():
            return
        self._thread, self._paused = get_ident(), False
        if "torch._dynamo" in sys.modules:  # to load it takes two seconds
            with suppress(Exception):
                self._stance = torch.compiler.set_stance("force_eager")
        self.is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """End the count, and leave the stack of modes, wherever this one is in it."""
        if not self.is_on:
            return
        self.is_on = False
        if self._stance is not None:
            with suppress(Exception):
                self._stance.__exit__(None, None, None)
            self._stance = None
        if self._thread != get_ident():  # it passes calls on there
            return
        above = list[Any]()
        while (mode := torch._C._pop_torch_dispatch_stack(None)) is not self:
            above.append(mode)
        torch._C._push_on_torch_dispatch_stack(self)
        self.__exit__(None, None, None)
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)
        # a graph that is replayed calls no operator
        self.is_known &= not alive(torch.cuda.CUDAGraph)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of this thread in this block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_on or self._paused:
            return function(*args, **kwargs)
        known = getattr(function, "_overloadpacket", function)  # or an operator of higher order
        own = _OWN_FLOPS.get(getattr(known, "__name__", ""))
        if known not in flop_registry and own is None and hasattr(function, "decompose"):
            with self:  # without gradients, an operator such as `linear` comes whole
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        name = str(known).removeprefix("aten.")
        if not name.startswith("profiler."):
            self.operators[name] += 1
        if own is not None or known in flop_registry:
            try:
                count = own(*args) if own else flop_registry[known](*args, **kwargs, out_val=result)
                self.flops[_precision(args[0], str(known))] += int(count)
            except Exception:  # arguments that torch's formula does not expect
                self.is_known = False
        return result


def _precision(operand: Any, name: str) -> str:
    """The dtype in which an operator multiplies."""
    kind = str(operand.dtype).removeprefix("torch.")
    with suppress(Exception):  # torch refuses to tell if it was set in two ways
        if kind == "float32" and operand.is_cuda:
            backend: Any = torch.backends.cudnn if "conv" in name else torch.backends.cuda.matmul
            return "tf32" if backend.allow_tf32 else kind
        if kind == "float32" and operand.device.type == "cpu":
            mkldnn: Any = torch.backends.mkldnn
            part = mkldnn.conv if "conv" in name else mkldnn.matmul
            return {"tf32": "tf32", "bf16": "bfloat16"}.get(part.fp32_precision, kind)
    return kind
