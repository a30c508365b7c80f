"""`Observer` looks at the arguments of torch's functions in a detail window, for what no trace has.

It numbers values as a compiler does: calls of a function with equal arguments have equal results.
So it knows which calls compute the same again, without comparing their results. A tensor that no
call made, such as a parameter or a batch, is equal to itself while nobody writes into it; a small
one on the CPU is known by its content.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_char
from dataclasses import dataclass, field
from functools import cache
from itertools import count, groupby
from threading import get_ident
from time import time_ns
from types import CodeType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from instrument.base.log import logger
from instrument.base.signals import raised_by_handler
from instrument.record.lines import _file
from instrument.record.parameters import alive

# Of more calls, nothing is said. A call takes 20 µs longer.
_MOST_CALLS = 20_000
# The content of a tensor is read up to so many bytes; a larger one is compared at so many places of
# each dimension. A tensor of fewer numbers is no data, and a longer list is not compared.
_SMALL_BYTES, _MOST_BYTES, _PROBED, _FEW, _MOST_ITEMS = 1 << 16, 1 << 21, 32, 16, 10_000
# What takes a smaller share of the time in torch's functions is not kept.
_LEAST_SHARE, _MOST_GROUPS, _MOST_SPANS, _MOST_FACTS = 0.005, 16, 2_000, 64
# A line does mostly needless work; a cat mostly copies its own result; most of a result is unused.
_MOSTLY, _GROWN, _UNUSED = 0.98, 0.5, 0.5
_LEAST_ROWS, _LEAST_LENGTH, _NO_PADDING, _MASKED = 10_000, 8, 0.9, -1e4
# What a value was made of.
WEIGHT, DATA, GRADIENT = 1, 2, 4
_CLONES = frozenset({"clone", "__deepcopy__"})
# What makes a tensor of others, and what changes a part of a tensor in a copy.
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "vstack", "hstack"}) | frozenset(
    {"index_copy", "index_add", "index_fill", "index_put", "scatter", "scatter_add", "roll"}
)
_ORDERS, _PARTS = frozenset({"randperm", "sort", "argsort"}), frozenset({"__getitem__", "narrow"})
# Attributes that are tensors, and functions whose results depend on more than their arguments.
_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data", "grad"})
_IMPURE = frozenset({"backward", "item", "numpy", "requires_grad_", "grad", "gumbel_softmax"})
# They compute nothing: without what is written into their results, they are no repeated work.
_ALLOCATE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_DROPOUT = {"scaled_dot_product_attention": "dropout_p", "multi_head_attention_forward": "training"}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_REPEATED = ("each step", "twice")
_PADDED = ("what", "step", "rows", "length", "valid", "to_longest")
_TENSORS = torch.Tensor, torch.nn.Parameter


@dataclass(slots=True, eq=False, frozen=True)
class _Line:
    """A line of a code; one object each, because the hash of a code is that of all its bytes."""

    code: CodeType
    number: int


# The lines of the user's frames, the outermost first.
Stack = tuple[_Line, ...]


class _Unknown(Exception):  # noqa: N818
    """An argument that cannot be compared."""


@dataclass(slots=True, eq=False)
class _Value:
    """A tensor: its number, what it was made of, and the calls that made it, or wrote it last.

    In a later step, its number is that of `token` and of its content then.
    """

    tensor: ref[torch.Tensor]
    key: int
    made_of: int
    version: int
    pointer: int
    step: int
    token: int
    makers: tuple[int, ...] = ()


@dataclass(slots=True)
class _Call:
    """A call; `writers` write next into its result, `kept` is its share that a repair keeps."""

    step: int
    stack: Stack
    name: str
    key: int
    made_of: int
    is_pure: bool
    start_ns: int = 0
    end_ns: int = 0
    writers: set[int] = field(default_factory=set)
    kind: str = ""
    kept: float = 1.0

    @property
    def spent_ns(self) -> int:
        """How long the call took."""
        return self.end_ns - self.start_ns


class Observer(TorchFunctionMode):
    """Observes the calls of the thread on which it is entered, until `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: str | None = None
        self._lines: dict[tuple[int, int], _Line] = {}  # by code, and instruction or -number
        self.over, self.step, self.thread = False, 0, get_ident()
        self.calls: list[_Call] = []
        self._values: dict[int, _Value] = {}
        self._aliases: dict[int, set[int]] = defaultdict(set)  # ids of tensors by their memory
        self._tokens = count(2)  # because -1 and -2 have the same hash
        self._parameters: dict[int, int] = {}  # sizes by memory
        self._data: set[int] = set()  # the numbers of the tensors that no call made
        self._has_new_data = False  # whether a later step has others
        # the last result of `_JOINS`, its call, and what it was made of
        self._joined: dict[Stack, tuple[ref[torch.Tensor], int, set[int]]] = {}
        self._used: dict[int, float] = {}  # the share of the results of `_ORDERS`, by call
        self._padded: dict[tuple[Stack, tuple[Any, ...]], None] = {}
        self._rows: dict[tuple[Stack, int], dict[str, int]] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dynamo_compiling() or self.over or not _is_eager():  # Dynamo traces only the first
            return function(*args, **kwargs)
        call, inputs = self._safely(self._begin, function, args, kwargs) or (None, [])
        start_ns = time_ns()
        result = function(*args, **kwargs)
        if call is not None:
            call.start_ns, call.end_ns = start_ns, time_ns()
            self._safely(self._finish, call, inputs, args, kwargs, result)
        return result

    def _safely(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call a function; its error ends the observation, and does not reach the program."""
        try:
            with torch._C.DisableTorchFunctionSubclass():  # the program's own see no attribute read
                return None if self.over else act(*args)
        except Exception as error:
            if raised_by_handler(error):
                raise
            # not the error, whose traceback would keep the arguments alive
            self.over, self.failure = True, repr(error)

    # The values.

    def _begin(self, function: Any, args: Any, kwargs: Any) -> tuple[_Call, list[_Value]] | None:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            of = getattr(getattr(function, "__self__", None), "__name__", "")
            if name == "__set__":
                self._values.pop(id(args[0]), None)
            if name == "__set__" or of not in _ATTRIBUTES:
                return None
            name = of
        self.over = len(self.calls) >= _MOST_CALLS
        inputs, is_pure = list[_Value](), not _is_random(function, name, args, kwargs)
        if name == "__deepcopy__":  # its second argument holds all that is copied so far
            args, is_pure = args[:1], False
        try:
            parts = self._number(args, inputs), self._number(kwargs, inputs)
            key = hash((name, parts, torch.is_autocast_enabled("cpu")))
        except _Unknown:
            is_pure = False
        made_of = 0 if inputs else DATA
        for each in inputs:
            made_of |= each.made_of
        if name == "grad":
            made_of |= GRADIENT
        return _Call(
            self.step, self._stack(), name, key if is_pure else self._new(), made_of, is_pure
        ), inputs

    def _stack(self) -> Stack:
        frame, found = sys._getframe(3), list[_Line]()
        while frame is not None:
            code = frame.f_code
            if _file(code.co_filename)[0] == "user":
                key = id(code), frame.f_lasti
                if key not in self._lines:  # to ask for the number of a line takes 1 µs and more
                    number = frame.f_lineno
                    line = self._lines.setdefault((id(code), -number), _Line(code, number))
                    self._lines[key] = line
                found.append(self._lines[key])
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(reversed(found))

    def _new(self) -> int:
        return -next(self._tokens)

    def _number(self, value: Any, inputs: list[_Value]) -> Any:
        """What stands for an argument in the number of a call; `inputs` takes its tensors."""
        if isinstance(value, torch.Tensor):
            inputs.append(self._value(value))
            return inputs[-1].key
        if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
            return (type(value).__name__, *(self._number(each, inputs) for each in value))
        if isinstance(value, dict):
            return tuple((key, self._number(each, inputs)) for key, each in value.items())
        if isinstance(value, slice):
            return self._number((value.start, value.stop, value.step, slice.__name__), inputs)
        if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES and value.dtype != object:
            return value.tobytes(), value.shape, value.dtype.str
        if value is None or value is Ellipsis or isinstance(value, _PLAIN):
            return type(value).__name__, value
        raise _Unknown

    def _value(self, tensor: torch.Tensor) -> _Value:
        """The value of an argument; a new one if it was not made in this step."""
        found, version = self._values.get(id(tensor)), _version(tensor)
        if found is not None and found.tensor() is not tensor:
            found = None
        is_same = found is not None and found.version == version
        if found is not None and is_same and (found.step == self.step or found.made_of == WEIGHT):
            return found
        pointer, token = _pointer(tensor), found.token if found and is_same else self._new()
        is_weight = isinstance(tensor, torch.nn.Parameter) or pointer in self._parameters
        if is_weight and tensor.is_leaf and not tensor._is_view():
            self._parameters[pointer] = max(tensor.numel(), self._parameters.get(pointer, 0))
        key = token
        if not is_weight:
            key = self._content(tensor, token)
            is_new = self.step > 0 and found is None and tensor.numel() > _FEW
            self._has_new_data |= is_new and key not in self._data
            self._data.add(key)
        made_of = (WEIGHT if is_weight else DATA) | (0 if found is None else found.made_of)
        return self._put(tensor, key, made_of, pointer, token)

    def _content(self, tensor: torch.Tensor, token: int) -> int:
        """The number of a tensor that was not made in this step: that of its content.

        Of a large one, it is that of `token` and of the content at some places: numpy may have
        written into it. Who wrote into memory of a device is not known.
        """
        content = None if tensor.requires_grad else _content(tensor)
        if content is None:
            return self._new()
        if content.nbytes <= _SMALL_BYTES:
            return hash((content.tobytes(), content.shape, content.dtype.str))
        places = (slice(None, None, -(-size // _PROBED)) for size in content.shape)
        return hash((token, content[tuple(places)].tobytes()))

    def _put(
        self,
        tensor: torch.Tensor,
        key: int,
        made_of: int,
        pointer: int,
        token: int,
        makers: tuple[int, ...] = (),
    ) -> _Value:
        version = _version(tensor)
        made = _Value(ref(tensor), key, made_of, version, pointer, self.step, token, makers)
        self._values[id(tensor)] = made
        self._aliases[pointer].add(id(tensor))
        return made

    def _finish(
        self, call: _Call, inputs: list[_Value], args: Any, kwargs: Any, result: Any
    ) -> None:
        number, is_writing = len(self.calls), False
        self.calls.append(call)
        for each in inputs:
            tensor = each.tensor()
            now = -1 if tensor is None else _version(tensor)
            if now != each.version if now >= 0 else _writes(call.name, kwargs):
                self._write(each.pointer, number)
                is_writing = True
        outputs = [each for each in _flat(result) if isinstance(each, torch.Tensor)]
        call.is_pure &= bool(outputs or is_writing) and call.name not in _IMPURE
        for at, tensor in enumerate(outputs):
            known, pointer = self._values.get(id(tensor)), _pointer(tensor)
            if known is not None and known.tensor() is tensor:
                continue  # an argument
            makers = {each for value in inputs if value.pointer == pointer for each in value.makers}
            key = hash((call.key, at))
            self._put(tensor, key, call.made_of, pointer, key, (*sorted(makers), number))
        self._find_problems(call, number, inputs, args, kwargs, outputs)

    def _write(self, pointer: int, number: int) -> None:
        """Number the tensors of some memory anew, because a call has written into it."""
        call = self.calls[number]
        for name in [*self._aliases[pointer]]:
            each = self._values.get(name)
            tensor = None if each is None else each.tensor()
            if each is None or tensor is None or each.pointer != pointer:
                self._aliases[pointer].discard(name)
                continue
            for maker in each.makers:
                self.calls[maker].writers.add(number)
            each.key = each.token = hash((each.key, call.key))
            each.version = _version(tensor)
            each.made_of, each.makers = each.made_of | call.made_of, (number,)

    # The problems.

    def _find_problems(
        self,
        call: _Call,
        number: int,
        inputs: list[_Value],
        args: Any,
        kwargs: Any,
        outputs: list[torch.Tensor],
    ) -> None:
        name, of = call.name, {each.makers[-1] for each in inputs if each.makers}
        for order in of & self._used.keys():
            part = outputs[0].numel() / max(args[0].numel(), 1) if name in _PARTS else 1.0
            self._used[order] += part
        if not outputs:
            return
        result, size = outputs[0], outputs[0].numel()
        if name in _JOINS:
            last, before, parts = self._joined.get(call.stack, (lambda: None, number, set[int]()))
            at = 0 if (tensor := last()) is None else _pointer(tensor)
            own, old = 0, 0  # the sizes of its earlier result, and of what an earlier step joined
            for each in inputs:
                length = 0 if (tensor := each.tensor()) is None else tensor.numel()
                own = max(own, length * (each.pointer == at))
                old += length * (each.token in parts and self.calls[before].step < call.step)
            if size and (own >= _GROWN * size or _GROWN * size <= old < size):
                for joining in (self.calls[before], call):
                    joining.kind, joining.kept = "grows", max(1 - max(own, old) / size, 0.0)
            self._joined[call.stack] = ref(result), number, {each.token for each in inputs}
        elif name in _CLONES and inputs and self._parameters.get(inputs[0].pointer) == size:
            call.kind, call.kept = "parameters", 0.0
        elif name in _ORDERS:
            self._used[number] = 0.0
        elif name == "embedding" and result.requires_grad and not kwargs.get("sparse"):
            table, ids = args[1], _content(args[0], _MOST_BYTES)
            if table.is_leaf and len(table) >= _LEAST_ROWS and ids is not None:
                counts = {"indexed": len(np.unique(ids)), "rows": len(table)}
                self._rows[call.stack, id(table)] = counts | {"numbers": table.numel()}
        for what, valid in _padding(name, args, kwargs):
            rows, length = valid.shape
            if rows > 1 and length >= _LEAST_LENGTH and valid.mean() <= _NO_PADDING:
                cut = int(valid.any(axis=0).sum())
                padded = what, call.step, rows, length, int(valid.sum()), rows * cut
                self._padded[call.stack, padded] = None

    # The result.

    def end(self) -> dict[str, Any]:
        """What was seen, for `capture.json`; nothing unless all calls of two steps were seen."""
        is_whole, self.over = not self.over and self.step > 0 and bool(self.calls), True
        if self.failure:
            logger.debug("The calls of a detail window are not observed: {}.", self.failure)
        if not is_whole:
            return {}
        self._find_repeated()
        padded = [
            {**dict(zip(_PADDED, each)), "source": _source(stack)} for stack, each in self._padded
        ]
        rows = [{**counts, "source": _source(stack)} for (stack, _), counts in self._rows.items()]
        repairs = self._repairs()
        return {
            "observed": {
                "repairs": repairs[:_MOST_GROUPS],
                "padding": padded[:_MOST_FACTS],
                "embeddings": rows[:_MOST_FACTS],
            }
        }

    def _find_repeated(self) -> None:
        """Find the calls that compute the same in each step, or twice in a step.

        A result into which a call writes something else is needed each time. A model that computes
        the same from the same data, while no other data comes, is a benchmark.
        """
        keys = [Counter[int]() for _ in range(self.step + 1)]
        for number, call in enumerate(self.calls):
            keys[call.step][call.key] += call.is_pure
            if call.step and not call.is_pure and not call.made_of & (WEIGHT | GRADIENT):
                self._has_new_data = True
            if not call.kind and 0 < self._used.get(number, 1) <= _UNUSED:
                call.kind, call.kept = "unused", self._used[number]
        again, twice = set[int](), set[int]()
        for number, call in enumerate(self.calls):
            is_model = call.made_of & (WEIGHT | DATA) == WEIGHT | DATA
            times = [each[call.key] for each in keys] if call.is_pure else [0]
            if min(times) and (self._has_new_data or not is_model):
                again.add(number)
            if max(times) > 1 and times[call.step] > 1:
                twice.add(number)
        for kind, same in zip(_REPEATED, (again, twice)):
            for number in sorted(same, reverse=True):  # a call is written into by later ones
                call = self.calls[number]
                if not call.writers <= same or (call.name in _ALLOCATE and not call.writers):
                    same.remove(number)
            seen = set[tuple[int, int]]()
            for call in map(self.calls.__getitem__, sorted(same)):
                if not call.kind:
                    is_first = kind == "twice" and (call.step, call.key) not in seen
                    seen.add((call.step, call.key))
                    call.kind, call.kept = kind, float(is_first)

    def _repairs(self) -> list[dict[str, Any]]:
        """The calls of each kind by their place, those that take longest first.

        The place of repeated work is the outermost line that does nothing else, or else the
        innermost function; that of other work is the innermost line.
        """
        stacks = {call.stack for call in self.calls}
        # the lines of all calls are those of the loop
        loop = next((at for at, each in enumerate(zip(*stacks)) if len({*each}) > 1), sys.maxsize)
        spent_ns, found = Counter[tuple[str, Stack]](), defaultdict[Any, list[int]](list)
        innermost_ns = Counter[tuple[str, Stack]]()
        for call in self.calls:
            for kind in {"", call.kind}:
                innermost_ns[kind, call.stack] += call.spent_ns
        for (kind, stack), took_ns in innermost_ns.items():
            for depth in range(len(stack)):
                spent_ns[kind, stack[: depth + 1]] += took_ns
        for number, call in enumerate(self.calls):
            if call.kind:
                kind, stack = call.kind, call.stack
                lines = (stack[: depth + 1] for depth in range(loop, len(stack)))
                mostly = (e for e in lines if spent_ns[kind, e] >= _MOSTLY * spent_ns["", e])
                place = next(mostly, ()) if kind in _REPEATED else stack
                found[kind, place[-1] if place else stack and stack[-1].code].append(number)
        groups, whole_ns = [], sum(call.spent_ns for call in self.calls)
        for (kind, line), numbers in found.items():
            names, spans, saved_ns = Counter[str](), [], 0.0
            for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
                calls = [self.calls[number] for _, number in run]
                for (step, kept), part in groupby(calls, lambda each: (each.step, each.kept)):
                    row = [*part]
                    spans.append([step, row[0].start_ns, row[-1].end_ns, round(kept, 4)])
                    saved_ns += (1 - kept) * (row[-1].end_ns - row[0].start_ns)
                    for each in row:
                        names[each.name] += each.spent_ns
            if saved_ns >= _LEAST_SHARE * whole_ns and len(spans) <= _MOST_SPANS:
                longest = max(
                    (self.calls[each] for each in numbers), key=lambda each: each.spent_ns
                )
                source = _source((line,) if isinstance(line, _Line) else longest.stack)
                functions = [name for name, _ in names.most_common(3)]
                group = {"kind": kind, "source": source, "functions": functions, "spans": spans}
                groups.append((saved_ns, group))
        return [group for _, group in sorted(groups, key=lambda pair: -pair[0])]


_observer: Observer | None = None


def observe() -> Callable[[], Mapping[str, Any]]:
    """Observe the calls of this thread until the returned function is called.

    Not where Dynamo compiles functions: it would compile them again for the observer. Nor below a
    mode of the program, which could leave before the observer does. Nor where attention is in eval
    mode: below any mode, torch computes it in another way, with other results for padding.
    """
    global _observer
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    compiles = dynamo is not None and len(getattr(dynamo, "cached_backends", ())) > 1
    if compiles or torch._C._len_torch_function_stack():
        return dict
    if not all(each.training for each in alive(torch.nn.MultiheadAttention)):
        return dict
    _observer = observer = Observer()
    observer.__enter__()  # type: ignore[no-untyped-call]

    def end() -> Mapping[str, Any]:
        leave()
        try:
            return observer.end()
        except Exception as error:  # the detail window, and what else it has seen, are saved
            logger.debug("What a detail window has observed is lost: {!r}.", error)
            return {}

    return end


def next_step() -> None:
    """Tell the observer, if there is one, that a step begins."""
    if _observer is not None:
        _observer.step += 1


def leave() -> None:
    """End the observer, and take it off its thread, wherever it lies in the stack of modes.

    If another thread ends the window, the observer's thread takes it off at its next step.
    """
    global _observer
    observer = _observer
    if observer is None:
        return
    if observer.thread != get_ident():
        observer.over = True
        return
    _observer = None
    modes = [
        torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())
    ]
    for mode in reversed(modes):
        if mode is not observer:
            torch._C._push_on_torch_function_stack(mode)


os.register_at_fork(after_in_child=leave)  # in a worker of a data loader


def _is_eager() -> bool:
    """Whether a call runs as it is, and not to be traced, transformed, or differentiated."""
    return (
        torch._C._current_graph_task_id() == -1
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _source(stack: Stack) -> str | None:
    """The innermost line and its function."""
    for line in stack[-1:]:
        return f"{_file(line.code.co_filename)[1]}:{line.number} in {line.code.co_qualname}"
    return None


def _pointer(tensor: torch.Tensor) -> int:
    """The address of the memory of a tensor, or else a number of its own."""
    has_memory = type(tensor) in _TENSORS and tensor.layout is torch.strided
    return (tensor.untyped_storage().data_ptr() if has_memory else 0) or -id(tensor)


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was written; -1 if torch does not count it."""
    return -1 if tensor.is_inference() else tensor._version


def _content(tensor: torch.Tensor, most: int = 1 << 40) -> Any:
    """The numbers of a tensor on the CPU as an array; None if they are more than `most` bytes.

    No operator runs, because the trace would have it. `Tensor.numpy` would forbid `resize_`.
    """
    is_plain = type(tensor) in _TENSORS and tensor.layout is torch.strided
    size, strides = tensor.element_size(), tensor.stride() if is_plain else ()
    if not is_plain or tensor.device.type != "cpu" or not 0 < tensor.numel() * size <= most:
        return None
    try:
        kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:  # bfloat16
        return None
    places = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides))
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + places) * size:
        return None  # freed, as FSDP does with the parameters of a layer
    memory: Any = memoryview((c_char * (places * size)).from_address(tensor.data_ptr()))
    flat: Any = np.frombuffer(memory, kind)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [each * size for each in strides])


def _writes(name: str, kwargs: Any) -> bool:
    """Whether a function writes into its arguments, by its name."""
    is_dunder = name.endswith("__")
    return "out" in kwargs or name.startswith(("__i", "__set")) or (name.endswith("_") > is_dunder)


def _flat(result: Any) -> Iterator[Any]:
    if isinstance(result, list | tuple):
        for each in result[:_MOST_ITEMS]:
            yield from _flat(each)
    else:
        yield result


@cache
def _is_seeded(name: str) -> bool:
    """Whether an operator of torch draws random numbers."""
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, torch._ops.OpOverloadPacket) and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, each).tags
        for each in packet.overloads()
    )


def _is_random(function: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether the result of a call may depend on more than its arguments."""
    module = getattr(function, "__module__", None) or ""
    is_custom = module.startswith("torch._ops") and module != "torch._ops.aten"
    if name in _DROPOUT:
        return bool(kwargs.get(_DROPOUT[name]))
    if "dropout" in name:
        return bool(kwargs.get("training", args[2] if len(args) > 2 else True))
    return is_custom or module == "torch.nn.init" or _is_seeded(name)


def _padding(name: str, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Which numbers of an argument, in rows, are no padding."""

    def given(keyword: str, at: int, default: Any = None) -> Any:
        return kwargs.get(keyword, args[at] if len(args) > at else default)

    def read(value: Any) -> Any:
        return _content(value, _MOST_BYTES) if isinstance(value, torch.Tensor) else None

    if name == "embedding" and (ids := read(args[0])) is not None and ids.ndim == 2:
        padding = given("padding_idx", 2)
        if padding is not None:
            yield "padding_idx of an embedding", ids != padding % len(args[1])
        elif (valid := _without_ends(ids)) is not None:
            yield "equal numbers at the ends of rows", valid
    elif name == "multi_head_attention_forward":
        if (mask := read(kwargs.get("key_padding_mask"))) is not None and mask.ndim == 2:
            yield "key_padding_mask", ~mask if mask.dtype == bool else mask > _MASKED
    elif name == "scaled_dot_product_attention":
        if (mask := read(given("attn_mask", 3))) is not None and mask.ndim > 2:
            yield "attn_mask", _by_key(mask if mask.dtype == bool else mask > _MASKED)
    elif name in ("masked_fill", "masked_fill_"):
        if (mask := read(given("mask", 1))) is not None and mask.ndim > 2:
            yield "masked_fill", _by_key(~mask)
    elif name in ("mul", "__mul__"):
        mask = min(args, key=lambda each: each.numel() if isinstance(each, torch.Tensor) else 0)
        is_mask = isinstance(mask, torch.Tensor) and mask.ndim > 2 and mask.shape[-1] == 1
        if is_mask and (found := read(mask)) is not None and np.isin(found, (0, 1)).all():
            yield "mask of zeros and ones", _by_key(found != 0)


def _by_key(valid: Any) -> Any:
    """Which keys of each row any query may see."""
    if valid.shape[-1] == 1:
        valid = np.swapaxes(valid, -1, -2)
    return valid.reshape(len(valid), -1, valid.shape[-1]).any(axis=1)


def _without_ends(ids: Any) -> Any:
    """Which numbers are in no run of one number at the ends of rows; None if there is no run."""
    runs = np.cumprod(ids[:, ::-1] == ids[:, -1:], axis=1)[:, ::-1].astype(np.bool_)
    of_run = np.unique(ids[runs.sum(axis=1) > 1, -1])
    if len(of_run) != 1:
        return None
    runs &= (ids[:, -1] == of_run)[:, None]
    return ~runs if runs.sum() >= _NO_PADDING * (ids == of_run).sum() else None
