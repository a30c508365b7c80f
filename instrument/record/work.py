"""`Work` observes what work a script does, so that two programs can be compared.

It costs time, so it is on only in runs, or steps, that are not timed. It changes no result: it
draws no random numbers, writes into no tensor of the script, and reads devices between steps only.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from random import Random
from threading import get_ident
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from instrument.annotate.module_calls import Depth, wrap_function
from instrument.base import files
from instrument.base.errors import reason_of
from instrument.base.log import logger
from instrument.base.rank_info import rank_info
from instrument.base.signals import raised_by_handler
from instrument.record.facts import _graphs, devices, dynamo_counts, thread_counts
from instrument.record.operator_counts import OperatorCounts
from instrument.record.parameters import _unseen_by_modes
from instrument.record.torch_support import known

# What ends a step, as in `unedited`: each kind takes over from those before it. Operators are
# counted in `_COUNTED` steps, after so many of the kind: a compiled backward is compiled by then.
_FORWARD, _BACKWARD, _STEP = range(3)
_COUNTED_AFTER, _COUNTED = (4, 2, 1), 2
_MOST_VALUES, _MOST_ROWS, _MOST_SHAPES, _MOST_LOADERS = 1 << 17, 1 << 19, 32, 16
# Of a batch, so many rows are compared, of each row so many numbers, and of inputs so many tensors.
_ROWS, _NUMBERS, _TENSORS = 4096, 32, 8
_MOST_PENDING, _MOST_CHANGED, _MOST_KEPT = 256, 20_000, 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOKENS = (torch.int32, torch.int64)
_WEIGHTS = [Random(each).getrandbits(62) | 1 for each in range(_NUMBERS)]
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_torch_call: Callable[..., Any] = nn.Module.__call__


@dataclass
class _Calls:
    """Calls of outermost modules that have parameters, in training or in evaluation."""

    calls: int = 0
    samples: int = 0
    tokens: int | None = None
    elements: int = 0
    rows: int = 0
    digest: int = 0
    shapes: dict[str, None] = field(default_factory=dict)
    digests: set[int] = field(default_factory=set)

    def add(self, digests: Any) -> None:
        """Take the digests of a batch's rows."""
        self.rows += len(digests)
        self.digest = (self.digest + sum(digests)) % (1 << 64)
        if len(self.digests) < _MOST_ROWS:
            self.digests.update(digests)

    def facts(self, is_whole: bool) -> dict[str, Any] | None:
        """JSON-able; None if there was no call."""
        found = {**vars(self), "digest": f"{self.digest:016x}", "shapes": [*self.shapes]}
        distinct = len(found.pop("digests"))
        more = {"distinct": distinct if distinct < _MOST_ROWS else None, "is_whole": is_whole}
        return {**found, **more} if self.calls else None


class Work:
    """Observes the work of this process between `begin` and `end`.

    Attributes:
        only_losses: whether nothing but losses is observed from now on, which costs little.
        failure: why the observation has ended early; an error of ours never reaches the script.
    """

    def __init__(self) -> None:
        self.only_losses = False
        self.failure: str | None = None
        self._over, self._undo = True, list[Callable[[], object]]()
        self._kind, self._ended, self._backwards = _FORWARD, 0, 0
        # What is still on a device: the roots of backwards, the outputs of models, and other work.
        self._roots, self._outputs, self._evaluated = list[Any](), list[Any](), list[Any]()
        self._pending, self._read = list[Callable[[], object]](), [0, 0, 0]
        self._bounds = list[int]()  # how many roots there were at the ends of steps
        self._training, self._evaluation = _Calls(), _Calls()
        self._unseen, self._seen_at = 0, 0  # backwards without a call of a model
        self._owners = dict[int, Any]()  # the models called, and the optimizer, in this step
        self._stepping = list[Optimizer]()
        self._norms, self._last = list[float](), dict[int, Any]()
        # the largest of all steps, because objects of an earlier model may live on
        self._trained = self._changed = self._with_gradients = 0
        self._idle_steps = self._checked_steps = 0
        self._slept_s = self._sleeping_s = 0.0  # until the last step, and since then
        self._loaders = dict[tuple[int | None, int | None], int]()  # batches
        self._counts, self._depth = OperatorCounts(), Depth()

    # The functions of torch.

    def begin(self) -> None:
        """Observe from now on; torch is loaded."""
        self._over = False
        _alive.add(self)
        self._wrap(time, "sleep", self._noticing_sleeps)
        self._wrap(torch.autograd, "backward", self._noticing_backward)
        self._wrap(nn.Module, "__call__", self._noticing_calls)
        self._wrap(_BaseDataLoaderIter, "__next__", self._noticing_batches)
        before, after = map(self._noticing_steps, (self._before, self._after))
        self._undo.append(register_optimizer_step_pre_hook(before).remove)
        self._undo.append(register_optimizer_step_post_hook(after).remove)

    def end(self) -> None:
        """Leave torch as it was."""
        self._safely(self._flush)
        self._counts.leave()
        self._over = True
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        self._undo.append(wrap_function(owner, name, wrap))

    def _safely(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call a function of ours: no mode sees its operators, and its error ends `Work` alone."""
        if self._over or is_dynamo_compiling() or _is_traced():
            return None
        try:
            with _unseen_by_modes(), torch.no_grad():
                return act(*args)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.failure, self._over = reason_of(error), True
            logger.debug("The work of this process is not observed: {}.", self.failure)

    def _noticing_steps(self, act: Callable[..., Any]) -> Callable[..., None]:
        def noticed(optimizer: Optimizer, *_: object) -> None:
            if not is_dynamo_compiling():
                self._safely(act, optimizer)

        return noticed

    def _noticing_sleeps(self, sleep: Callable[[float], None]) -> Callable[[float], None]:
        thread = get_ident()

        def noticed(seconds: float, /) -> None:
            sleep(seconds)
            is_own = sys._getframe(1).f_globals.get("__name__", "").startswith("instrument.")
            if get_ident() == thread and not is_own:
                self._sleeping_s += seconds

        return noticed

    def _noticing_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            roots = args[0] if args else kwargs.get("tensors", ())
            self._safely(self._after_backward, roots)
            return result

        return noticed

    def _noticing_calls(self, call: Callable[..., Any]) -> Callable[..., Any]:
        depth = self._depth

        def noticed(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # as in `module_calls`
                return _torch_call(module, *args, **kwargs)
            if depth.inside or self._over:
                return call(module, *args, **kwargs)
            depth.inside = True
            try:
                result = call(module, *args, **kwargs)
            finally:
                depth.inside = False
            self._safely(self._after_call, module, (args, kwargs), result)
            return result

        return noticed

    def _noticing_batches(self, following: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(iterator: Any) -> Any:
            with self._counts.paused():  # workers, which nobody counts, may do the same
                batch = following(iterator)
            self._safely(self._count_batch, iterator)
            return batch

        return noticed

    # What happens in a step.

    def _count_batch(self, iterator: Any) -> None:
        key = _size(iterator), _size(iterator._dataset)
        if key in self._loaders or len(self._loaders) < _MOST_LOADERS:
            self._loaders[key] = self._loaders.get(key, 0) + 1

    def _after_call(self, module: nn.Module, given: Any, result: Any) -> None:
        is_replica = getattr(module, "_is_replica", False)  # of DataParallel
        if torch._C._current_graph_task_id() != -1 or is_replica:  # checkpointing calls modules
            return
        if next(module.parameters(), None) is None:  # a loss or a transform
            return
        output = [each for each in _tensors(result) if each.is_floating_point()]
        trains = any(each.requires_grad for each in output)
        if trains:
            self._owners[id(module)] = module
        calls = self._training if trains else self._evaluation
        calls.calls += 1
        values = self._outputs if trains else self._evaluated
        is_needed = not (trains and self.only_losses and self._backwards)  # in place of losses
        if is_needed and len(values) < _MOST_VALUES and output:
            values.append(_spread(output[0]))
        self._add_inputs(calls, [*islice(_tensors(given), _TENSORS)])
        self._end_step(_FORWARD)

    def _add_inputs(self, calls: _Calls, tensors: list[torch.Tensor]) -> None:
        of_rows = [each for each in tensors if each.ndim and each.shape[0]]
        if not of_rows:
            return
        first = of_rows[0]
        calls.samples += first.shape[0]
        calls.elements += first.numel()
        integers = (each for each in of_rows if each.ndim == 2 and each.dtype in _TOKENS)
        if (ids := next(integers, None)) is not None:
            calls.tokens = (calls.tokens or 0) + ids.numel()
        if self.only_losses:
            return
        if len(calls.shapes) < _MOST_SHAPES:
            calls.shapes["; ".join("×".join(map(str, each.shape)) for each in tensors)] = None
        digests = _digests([each for each in of_rows if each.shape[0] == first.shape[0]])
        self._pending.append(lambda: calls.add(digests.tolist()))

    def _after_backward(self, roots: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # checkpointing calls it in a backward
            return
        self._backwards += 1
        values = [_value(each) for each in _tensors(roots)]
        if len(self._roots) < _MOST_VALUES:
            self._roots.append(values[0] if len(values) == 1 else sum(values) if values else None)
        self._unseen += self._training.calls == self._seen_at
        self._seen_at = self._training.calls
        self._end_step(_BACKWARD)

    def _before(self, optimizer: Optimizer) -> None:
        if optimizer in self._stepping:  # its last step has raised an error
            del self._stepping[self._stepping.index(optimizer) :]
        if not self._stepping and not self.only_losses:
            scale = getattr(optimizer, "grad_scale", None)
            self._add_gradients(_STEP, _parameters(optimizer), scale)
        self._stepping.append(optimizer)

    def _after(self, optimizer: Optimizer) -> None:
        if optimizer in self._stepping:
            del self._stepping[self._stepping.index(optimizer) :]
        if self._stepping:  # a part of another optimizer
            return
        self._bounds.append(len(self._roots))
        # Dynamo leaves the hooks of a compiled step out: these may be there for the counted steps
        if self._kind < _STEP and self._counts.is_on and self._counts.is_eager:
            return
        self._owners[id(optimizer)] = optimizer
        self._end_step(_STEP)

    def _add_gradients(self, kind: int, parameters: list[torch.Tensor], scale: Any) -> None:
        found = [each for each in parameters if each.grad is not None]
        norms = [_norm(_local(each.grad)) for each in found]
        sizes = [each.numel() for each in found]

        def add() -> None:
            if kind != self._kind:
                return
            factor = 1.0 if scale is None else float(scale)
            values = [norm / factor for norm in _numbers(norms)]
            those = sum(size for size, norm in zip(sizes, values) if norm)  # nan too
            self._with_gradients = max(self._with_gradients, those)
            if len(self._norms) < _MOST_VALUES:
                self._norms.append(sum(norm**2 for norm in values) ** 0.5)

        self._pending.append(add)

    def _check_parameters(self) -> None:
        """Compare the parameters with those at the end of the step before."""
        owners, self._owners = [*self._owners.values()], {}
        parameters = {id(each): each for owner in owners for each in _parameters(owner)}
        if self._kind == _BACKWARD:
            self._add_gradients(_BACKWARD, [*parameters.values()], None)
        before, kind, now = self._last, self._kind, dict[int, Any]()
        for key, each in parameters.items():
            now[key] = ref(each), _bits(_local(each)), each.numel()
        both = [key for key in now if key in before and before[key][0]() is parameters[key]]
        # not all are there if the last step was one of another model
        stepping = (each for each in owners if isinstance(each, Optimizer))
        compared = {*both}
        is_known = all(id(each) in compared for owner in stepping for each in _parameters(owner))
        self._last = {**before, **now} if len(before) < _MOST_KEPT * len(now) else now

        def compare() -> None:
            bits = (_numbers([those[key][1] for key in both]) for those in (now, before))
            changed = sum(now[key][2] for key, x, y in zip(both, *bits) if x != y)
            self._trained = max(self._trained, sum(each[2] for each in now.values()))
            self._changed = max(self._changed, changed)
            if both and is_known and kind == self._kind:
                self._checked_steps += 1
                self._idle_steps += not changed

        self._pending.append(compare)

    def _end_step(self, kind: int) -> None:
        if kind < self._kind:
            return
        if kind > self._kind:
            self._kind, self._ended = kind, 0
            self._checked_steps = self._idle_steps = 0
            self._last, self._norms, self._with_gradients = {}, [], 0
            self._counts.restart()
        self._slept_s, self._sleeping_s = self._slept_s + self._sleeping_s, 0.0
        self._ended += 1
        since = self._ended - _COUNTED_AFTER[kind]
        if since == 0 and not self.only_losses:
            self._counts.enter()
        elif self._counts.is_on and since > 0:
            self._counts.end_step()
            if since >= _COUNTED:
                self._counts.leave()
        if kind != _FORWARD and not self.only_losses:
            self._check_parameters()
        if len(self._pending) + len(self._roots) - self._read[0] >= _MOST_PENDING:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for act in pending:
            act()
        for at, values in enumerate((self._roots, self._outputs, self._evaluated)):
            values[self._read[at] :] = _numbers(values[self._read[at] :])
            self._read[at] = len(values)

    # The result.

    @property
    def losses(self) -> list[str | None]:
        """The loss of each step as `float.hex` writes it; None for a step without a backward.

        It is the sum of the roots of the step's backwards; without an optimizer, that of a
        backward; in inference, a number that depends on all outputs of the model's call.
        """
        self._safely(self._flush)
        roots: list[Any] = self._roots[: self._read[0]]
        if self._kind == _STEP and roots:
            ends = zip([0, *self._bounds], self._bounds[:_MOST_VALUES])
            sums = ([x for x in roots[a:b] if x is not None] for a, b in ends)
            return [sum(each).hex() if each else None for each in sums]
        values = roots or self._outputs[: self._read[1]] or self._evaluated[: self._read[2]]
        return _hex(values)

    @property
    def evaluations(self) -> list[str | None]:
        """A number for each call of a model in evaluation, which depends on all its outputs."""
        self._safely(self._flush)
        return _hex(self._evaluated[: self._read[2]])

    def content(self) -> dict[str, Any]:
        """What was seen until now, as `instrument.read.compare.work` reads it from a file."""
        seen = {"losses": self.losses, "evaluations": self.evaluations}
        return {"format": 1, **seen, "facts": self.facts()}

    def facts(self) -> dict[str, Any]:
        """What work was done until now, JSON-able; what was not seen is None."""
        self._safely(self._flush)
        compiles, compared = bool(_graphs(dynamo_counts())), bool(self._checked_steps)
        counts, steps = self._counts, self._counts.steps
        operators, products = counts.counted
        flops = products.total() if steps and counts.is_known else None
        has_steps = self._kind == _STEP if self._bounds else compared and not self._changed
        most = (self._trained, self._with_gradients, self._changed)
        return {
            "steps": len(self._bounds) if has_steps else None,
            "backwards": self._backwards,
            "batches": sum(self._loaders.values()) if self._loaders else None,
            "loaders": [
                {"length": length, "dataset": dataset, "batches": batches}
                for (length, dataset), batches in self._loaders.items()
            ],
            # compiled functions may call models, too
            "training": self._training.facts(not (compiles and self._unseen)),
            "evaluation": self._evaluation.facts(is_whole=True),
            "parameters": {
                name: number if compared else None
                for name, number in zip(("trained", "with_gradients", "changed"), most)
            },
            "checked_steps": self._checked_steps,
            "idle_steps": self._idle_steps,
            "gradient_norms": _hex(self._norms),
            "counted_steps": steps,
            "flops": None if flops is None else flops / steps,
            "precision": {k: v / flops for k, v in products.items()} if flops else None,
            "operators": _per_step(operators, steps),
            "slept_s": self._slept_s,
            "compiles": compiles,
            "failure": self.failure,
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "system": platform.platform(),
                "processor": platform.processor(),
                "devices": devices(["cuda"]) if torch.cuda.is_initialized() else [],
                "threads": thread_counts()["intra_op"],
                "cpus": thread_counts()["cpus"],
            },
        }


def observe_if_asked() -> None:
    """Observe this process until its end, if `WORK_VARIABLE` names a file that does not exist."""
    name = os.environ.get(files.WORK_VARIABLE)
    if not name or rank_info().rank:
        return
    with suppress(OSError):
        Path(name).open("x").close()
        work = Work()
        work.begin()
        atexit.register(_write, work, Path(name), os.getpid())


def _write(work: Work, file: Path, process: int) -> None:
    if os.getpid() != process:
        return
    work.end()
    with suppress(OSError):
        files.write(file, json.dumps(work.content()))


_alive: WeakSet[Work] = WeakSet()


def _leave_to_parent() -> None:  # also in a worker of a data loader
    for each in [*_alive]:
        each._over = True
        each._counts.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


def _is_traced() -> bool:
    """Whether calls are traced, transformed or captured, and not run as they are."""
    return bool(
        torch._C._is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or a result, which are read; those of a subclass are left out."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)
        if type(local) in _PLAIN and local.layout is torch.strided and not local.is_meta:
            yield local
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors, value[:_MOST_PENDING]))
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_tensors, islice(value.values(), _MOST_PENDING)))


def _local(tensor: Any) -> Any:
    """The part of a distributed tensor that this rank holds."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _parameters(owner: nn.Module | Optimizer) -> list[torch.Tensor]:
    every = (
        chain.from_iterable(group["params"] for group in owner.param_groups)
        if isinstance(owner, Optimizer)
        else owner.parameters()
    )
    return [
        each
        for each in islice(every, _MOST_CHANGED)
        if each.requires_grad and next(_tensors(each), None) is not None
    ]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _value(tensor: torch.Tensor) -> torch.Tensor:
    return _wide(tensor.abs() if tensor.is_complex() else tensor).sum()


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """A number for the elements of a tensor; no two signs cancel."""
    wide = _wide(tensor)
    return (wide.abs() + wide / 2).sum()


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient._values() if gradient.layout is torch.sparse_coo else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(dense if dense.is_complex() else _wide(dense))
    return norm


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of a tensor: another one if a number has changed."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def _digests(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A number for each row of a batch, which depends on some numbers of each tensor."""
    rows = tensors[0].shape[0]
    found = torch.zeros((), dtype=torch.int64)
    for each in tensors:
        real = torch.view_as_real(each) if each.is_complex() else each
        flat = real.reshape(rows, -1)
        stride = -(-flat.shape[1] // _NUMBERS) or 1
        some = flat[:: -(-rows // _ROWS), ::stride].contiguous()
        bits = some.view(_INTEGERS[some.element_size()]).long()
        weights = torch.tensor(_WEIGHTS[: bits.shape[1]], device=bits.device)
        found = found.to(bits.device) * 1_000_003 + (bits * weights).sum(dim=1)
    return found


def _numbers(values: list[Any]) -> list[Any]:
    """Read numbers from their devices, with one copy from each."""
    found = [*values]
    places: dict[Any, list[int]] = {}
    for at, each in enumerate(values):
        if isinstance(each, torch.Tensor):
            places.setdefault((each.device, each.dtype), []).append(at)
    for where in places.values():
        for at, number in zip(where, torch.stack([values[at] for at in where]).tolist()):
            found[at] = number
    return found


def _hex(values: list[Any]) -> list[str | None]:
    return [None if each is None else float(each).hex() for each in values]


def _per_step(counts: Counter[str], steps: int) -> dict[str, float] | None:
    return {name: count / steps for name, count in counts.most_common(256)} if steps else None


def _size(owner: Any) -> int | None:
    size = known(lambda: len(owner))
    return size if isinstance(size, int) and size < 1 << 50 else None
