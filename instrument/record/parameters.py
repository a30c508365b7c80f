"""What a window says about the parameters of the models whose submodules get ranges."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from instrument.annotate.modules import instrumented_models, selected_modules

T = TypeVar("T")
# Parameters that no optimizer trains, and that the program did not change, or changed by itself.
_NONE, _CHANGED = -1, -2


@contextmanager
def _unseen_by_modes() -> Iterator[None]:
    """In this block, modes such as the program's `TorchDispatchMode` see no operator."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class Parameters:
    """The parameters of the instrumented models, compared with those at its construction.

    Attributes:
        steps: the number of the optimizer of each step since `watch_steps`; None without a watch.
    """

    def __init__(self) -> None:
        self.steps: list[int] | None = None
        # by id, because a class may define __eq__ alone: the number of each
        self._optimizers: dict[int, tuple[int, Optimizer]] = {}
        self._end_watch: Callable[[], None] | None = None
        with _unseen_by_modes():
            self._versions_before, self._samples_before = _versions(), _samples(None)

    def watch_steps(self) -> None:
        """Keep the order in which optimizers step, until `end_watch`; 1 µs for each step."""
        self.steps = []
        self._end_watch = register_optimizer_step_pre_hook(self._keep_step).remove

    def end_watch(self) -> None:
        """End `watch_steps`."""
        if self._end_watch is not None:
            self._end_watch()

    def _keep_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.steps is not None:
            known = (len(self._optimizers), optimizer)
            self.steps.append(self._optimizers.setdefault(id(optimizer), known)[0])

    @_unseen_by_modes()
    def types(self) -> dict[str, int]:
        """How many numbers the parameters hold, by data type."""
        found = Counter[str]()
        for each in _parameters():
            if not nn.parameter.is_lazy(each):  # its shape is not known yet
                found[str(each.dtype).removeprefix("torch.")] += each.numel()
        return dict(found)

    @_unseen_by_modes()
    def owners(self, differentiating: Collection[str]) -> dict[str, dict[str, Any]] | None:
        """The topmost submodules whose parameters one optimizer trains, or none does.

        None trains those that require no gradient. The result is None if it is unknown which are in
        no optimizer: none holds any parameter, or one also holds tensors of no instrumented model,
        such as copies in float32. `differentiating` are the submodules that were called with inputs
        that require gradients.

        Cost: a search for optimizers, if some parameters are in none that has stepped.
        """
        every, now = _parameters(), _versions()
        if not now:
            return None
        known, held = (
            {id(each) for each in every},
            [_held(each) for _, each in self._optimizers.values()],
        )
        trains = bool(held) or any(each.grad is not None for each in every if each.is_leaf)
        if trains and known.difference(*held):
            held += [_held(each) for each in alive(Optimizer) if id(each) not in self._optimizers]
            ours = [keys for keys in held if keys & known]
            if not ours or not all(keys <= known for keys in ours):
                return None
        owner: dict[int, int | None] = {}  # by the id of a parameter; None if several have it
        for k, keys in enumerate(held):
            owner |= {key: None if key in owner else k for key in keys}
        if trains:
            free = (known - owner.keys()) | {id(each) for each in every if not each.requires_grad}
            same = {key for key, _ in now.items() & self._versions_before.items()}
            before, samples = self._samples_before, _samples(free)
            for key in free:
                is_known = key in samples and key in before
                is_same = key in same and is_known and torch.equal(samples[key], before[key])
                owner[key] = (_NONE if is_same else _CHANGED) if is_known else None
        found, inside = dict[str, tuple[int, list[nn.Parameter]]](), set[int]()
        for name, module in selected_modules():
            own = [*module.parameters()]
            number, *others = {owner.get(id(each)) for each in own} or {None}
            if number is not None and not others and id(module) not in inside:
                inside.update(id(each) for each in module.modules())
                found[name] = number, own
        sizes = {name: [each.shape for each in own] for name, (_, own) in found.items()}
        trained = [sizes[name] for name, (number, _) in found.items() if number >= 0]
        return {
            name: {
                "optimizer": None if number < 0 else number,
                "changed": number != _NONE,
                "gradients": sum(each.requires_grad for each in own),
                "differentiates": name in differentiating,
                "is_copy": number < 0 and sizes[name] in trained,
            }
            for name, (number, own) in found.items()
        }


def alive(kind: type[T]) -> list[T]:
    """The objects of a class in this process; takes 0.1 s for a million objects of any class."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _held(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def _parameters() -> set[nn.Parameter]:
    return {each for model in instrumented_models() for each in model.parameters()}


def _versions() -> dict[int, int]:
    """How often each parameter was written, by its id; empty if that is not known."""
    with suppress(Exception):  # of a class of tensors, or a model's own `parameters`
        written = (each for each in _parameters() if not nn.parameter.is_lazy(each))
        return {id(each): each._version for each in written if not each.is_inference()}
    return {}


def _samples(of: set[int] | None) -> dict[int, torch.Tensor]:
    """Some elements of the parameters with these ids (None: of all), by their ids.

    They show a change through `.data`, which torch does not count. Of a distributed parameter, they
    are of the local part, as reading the others needs all ranks.

    Cost: 10 µs for each parameter.
    """
    found = dict[int, torch.Tensor]()
    with suppress(Exception), torch.no_grad():
        for each in _parameters():
            local = getattr(each, "_local_tensor", each)
            if (
                (of is None or id(each) in of)
                and not nn.parameter.is_lazy(each)
                and type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
                and local.untyped_storage().nbytes()  # zero while its memory is given back
            ):
                local = local.data
                some = tuple(slice(None, None, size // 4 or 1) for size in local.shape)
                found[id(each)] = local[some].clone()
    return found
