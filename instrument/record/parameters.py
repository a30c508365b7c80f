"""What a window says about the parameters of the models whose submodules get ranges."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from instrument.annotate.modules import instrumented_models, selected_modules

T = TypeVar("T")


@contextmanager
def _unseen_by_modes() -> Iterator[None]:
    """In this block, modes such as the program's `TorchDispatchMode` see no operator."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class Parameters:
    """The parameters of the instrumented models, compared with those at its construction."""

    def __init__(self) -> None:
        with _unseen_by_modes():
            self._versions_before, self._samples_before = _versions(), _samples(None)

    @_unseen_by_modes()
    def types(self) -> dict[str, int]:
        """How many numbers the parameters hold, by data type."""
        found = Counter[str]()
        for each in _parameters():
            if not nn.parameter.is_lazy(each):  # its shape is not known yet
                found[str(each.dtype).removeprefix("torch.")] += each.numel()
        return dict(found)

    @_unseen_by_modes()
    def unused_gradients(self) -> dict[str, int] | None:
        """The topmost submodules whose gradients nothing uses, and how many gradients each has.

        All their parameters that require gradients have one, are in no optimizer, and did not
        change since construction. None if that is unknown: no optimizer holds any parameter, or one
        also holds tensors of no instrumented model, such as copies in float32.

        Cost: a search for optimizers, if a parameter with a gradient did not change, or a fused
        optimizer did it, of which torch keeps no count.
        """
        every, now = _parameters(), _versions()
        if not now:
            return None
        same = {key for key, _ in now.items() & self._versions_before.items()}
        unused = {id(each) for each in every if each.is_leaf and each.grad is not None} & same
        if not unused:
            return {}
        known = {id(each) for each in every}
        groups = [each.param_groups for each in alive(Optimizer)]
        held = [{id(each) for group in all_of for each in group["params"]} for all_of in groups]
        held = [each for each in held if each & known]
        if not held or not all(each <= known for each in held):
            return None
        unused.difference_update(*held)
        before, samples = self._samples_before, _samples(unused)
        unused = {k for k in samples.keys() & before.keys() if torch.equal(samples[k], before[k])}
        found, inside = dict[str, int](), set[int]()
        for name, module in selected_modules():
            own = {id(each) for each in module.parameters() if each.requires_grad}
            if own and own <= unused and id(module) not in inside:
                found[name] = len(own)
                inside.update(id(each) for each in module.modules())
        return found


def alive(kind: type[T]) -> list[T]:
    """The objects of a class in this process; takes 0.1 s for a million objects of any class."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _parameters() -> set[nn.Parameter]:
    return {each for model in instrumented_models() for each in model.parameters()}


def _versions() -> dict[int, int]:
    """How often each parameter was written, by its id; empty if that is not known."""
    with suppress(Exception):  # of a class of tensors, or a model's own `parameters`
        written = (each for each in _parameters() if not nn.parameter.is_lazy(each))
        return {id(each): each._version for each in written if not each.is_inference()}
    return {}


def _samples(of: set[int] | None) -> dict[int, torch.Tensor]:
    """Some elements of the trainable parameters with these ids (None: of all), by their ids.

    They show a change through `.data`, which torch does not count. Of a distributed parameter, they
    are of the local part, as reading the others needs all ranks.

    Cost: 10 µs for each parameter.
    """
    found = dict[int, torch.Tensor]()
    with suppress(Exception), torch.no_grad():
        for each in _parameters():
            local = getattr(each, "_local_tensor", each)
            if (
                each.requires_grad
                and (of is None or id(each) in of)
                and type(local).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
                and local.untyped_storage().nbytes()  # zero while its memory is given back
            ):
                local = local.data
                some = tuple(slice(None, None, size // 4 or 1) for size in local.shape)
                found[id(each)] = local[some].clone()
    return found
