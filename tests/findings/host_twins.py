"""The twins of the findings on the CPU: waiting for data, tiny operators, unmarked time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from findings.twins import Twin
from instrument import profiled

LOADS_S, WORKS_S = 0.05, 0.08  # with worker processes, which a busy machine may start late
SHORT_S = 0.03


class Slow(Dataset[float]):
    """Samples that take a while, as those that are read and decoded do."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> float:
        time.sleep(LOADS_S)
        return float(index)


@cache
def _batches(workers: int) -> Iterator[Any]:
    # A list of floats: a tensor would come through a file descriptor, late on a busy machine.
    return iter(DataLoader(Slow(), num_workers=workers, collate_fn=list))


def trained_on_batches(workers: int) -> Callable[[], object]:
    def step() -> object:
        batch = next(_batches(workers))
        with profiled("train"):
            time.sleep(WORKS_S)
            return torch.tensor(batch).square().sum()

    return step


def generated(seconds: float) -> Callable[[], object]:
    """A step on data of an iterator that is no loader of torch's, as `session.steps` marks it."""

    def step() -> object:
        with profiled("data"):
            if seconds:
                time.sleep(seconds)
        with profiled("train"):
            time.sleep(SHORT_S)
            return torch.ones(4).sum()

    return step


def _rows() -> torch.Tensor:
    return torch.ones(150, 8)


def row_by_row() -> object:
    with profiled("rows"):
        return torch.stack([row.square().sum() for row in _rows()])


def all_rows() -> object:
    with profiled("rows"):
        return _rows().square().sum(1)


def updated(**options: bool) -> Callable[[], object]:
    """A step of Adam on many small parameters."""

    @cache
    def optimizer() -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(80)]
        for parameter in parameters:
            parameter.grad = torch.ones(8)
        return torch.optim.Adam(parameters, **options)  # type: ignore[arg-type]

    def step() -> object:
        return optimizer().step()

    return step


def without_range() -> object:
    time.sleep(SHORT_S)
    with profiled("train"):
        return torch.ones(4).sum()


def within_range() -> object:
    with profiled("train"):
        time.sleep(SHORT_S)
        return torch.ones(4).sum()


def multiplied(dtype: torch.dtype) -> Callable[[], object]:
    """A step of two layers, forward and backward."""

    @cache
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)).to(dtype)

    def step() -> object:
        with profiled("train"):
            loss = (model()(torch.ones(64, 256, dtype=dtype)) * 2.0).square().mean()
            loss.backward()
            return loss

    return step


TWINS = (
    Twin(
        "two workers",
        trained_on_batches(0),
        trained_on_batches(2),
        "loader-wait",
        turns="window",
        steps=3,
        is_time=True,
    ),
    Twin("an iterator", generated(SHORT_S), generated(0.0), "loader-wait", steps=3, is_time=True),
    Twin("rows", row_by_row, all_rows, "operator-storm"),
    Twin("parameters", updated(foreach=False), updated(fused=True), "operator-storm"),
    Twin(
        "two layers",
        multiplied(torch.float64),
        multiplied(torch.float32),
        "float64",
        options={"record_shapes": True},
    ),
    Twin("a block in a range", without_range, within_range, "unmarked-time", steps=3, is_time=True),
)
