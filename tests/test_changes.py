"""The changes that can be made to a script from outside: on, off, and what then is as if they had never been on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from instrument.record.changes import CHANGES, Change, Program

Step = Callable[[], float]
SAME, CLOSE = "same", "close"


def program(
    *models: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    loaders: Sequence[DataLoader[Any]] = (),
) -> Program:
    return Program({f"model{k}": each for k, each in enumerate(models)}, optimizers, loaders)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)]
    return nn.Sequential(*layers)


class Training:
    """A training whose steps draw their data from a seed of their own."""

    def __init__(self, kind: Callable[..., Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        self.model = network()
        self.optimizer = kind(self.model.parameters(), lr=0.01, **options)
        self.program = program(self.model, optimizers=[self.optimizer])
        self.steps = 0

    def step(self, times: int = 1) -> list[float]:
        losses = []
        for _ in range(times):
            torch.manual_seed(100 + self.steps)
            self.steps += 1
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(6, 3, 8, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> list[torch.Tensor]:
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*self.model.state_dict().values(), *states]


def switched(name: str, value: str, its: Program) -> Callable[[], None]:
    change = CHANGES[name]
    assert change.on is not None
    return change.on(its, value)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(one, other)
    )


SWITCHED = [
    ("threads", "1"),
    ("fused", ""),
    ("foreach", ""),
    ("gc-freeze", ""),
    ("no-anomaly", ""),
    ("no-deterministic", ""),
    ("no-validation", ""),
    ("non-blocking", ""),
    ("channels-last", ""),
    ("sdpa", "math"),
    ("tf32", ""),
    ("bf16", ""),
]


@pytest.mark.parametrize(("name", "value"), SWITCHED)
def test_a_change_that_is_off_again_has_left_nothing(name: str, value: str) -> None:
    twin, training = Training(), Training()
    assert twin.step(2) == training.step(2)
    before = copy.deepcopy(training.state())
    off = switched(name, value, training.program)
    try:
        if CHANGES[name].numbers == "same":
            assert training.step(2) == twin.step(2)
    finally:
        off()
    if CHANGES[name].numbers != "same":
        assert same(training.state(), before)
    assert training.step(3) == twin.step(3)
    assert same(training.state(), twin.state())
    assert "_compiled_call_impl" not in vars(training.model)


@pytest.mark.parametrize(
    ("name", "value"), [each for each in SWITCHED if CHANGES[each[0]].numbers != "same"]
)
def test_a_change_of_the_rounding_changes_no_more(name: str, value: str) -> None:
    twin, training = Training(), Training()
    twin.step(2)
    training.step(2)
    off = switched(name, value, training.program)
    tolerance = 0.05 if CHANGES[name].numbers == "precision" else 1e-4
    assert training.step(2) == pytest.approx(twin.step(2), rel=tolerance)
    off()
    assert training.step(2) == pytest.approx(twin.step(2), rel=tolerance)
    kinds = [[(each.dtype, each.stride()) for each in its.state()] for its in (training, twin)]
    assert kinds[0] == kinds[1]


def test_every_change_that_can_be_switched_is_tested() -> None:
    tested = {name for name, _ in SWITCHED} | {"compile"}
    assert tested == {name for name, each in CHANGES.items() if each.on is not None}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_change_is_made_in_one_way(change: Change) -> None:
    assert sum(each is not None for each in (change.on, change.prepare, change.environment)) == 1
    assert ("{value}" in change.by_hand) == bool(change.values)
    assert change.does.endswith(".")
