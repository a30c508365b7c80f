"""Twins for the findings about a run: the collector, compilation, memory, threads, autograd."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import nn

from findings.twins import Twin
from instrument import profiled

# Tiny layers: most of their time goes to calls, not to numbers.
WIDTH = 16


@cache
def _deep(layers: int = 50) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


@cache
def _deep_input() -> torch.Tensor:
    return torch.ones(4, WIDTH)


def _train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def makes_objects() -> int:
    """More objects than the collector waits for, so that it runs again and again."""
    return len([[number] for number in range(30_000)])


def makes_objects_without_collector() -> int:
    gc.disable()
    try:
        return makes_objects()
    finally:
        gc.enable()


def validates_with_gradients() -> None:
    _train(_deep(2), _deep_input())
    with profiled("validation"):
        _deep()(_deep_input())


def validates() -> None:
    _train(_deep(2), _deep_input())
    with profiled("validation"), torch.no_grad():
        _deep()(_deep_input())


def looks_for_anomalies() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            _train(_deep(10), _deep_input())


def looks_for_none() -> None:
    _train(_deep(10), _deep_input())


def _function(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + x.shape[0]).cos()


@cache
def _compiled(*, dynamic: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(_function, backend="eager", dynamic=dynamic)


_sizes: Iterator[int] = iter(range(3, 10**9))


def compiles_again() -> None:
    torch._dynamo.config.recompile_limit = 10**6  # or else the function runs without compilation
    _compiled(dynamic=False)(torch.ones(next(_sizes)))


def compiles_once() -> None:
    _compiled(dynamic=True)(torch.ones(next(_sizes)))


_kept: list[torch.Tensor] = []


def keeps_the_graph() -> None:
    _kept.append(torch.ones(200_000, requires_grad=True).exp().sum())


def keeps_a_number() -> None:
    torch.ones(200_000, requires_grad=True).exp().sum().item()


@cache
def _numbers() -> torch.Tensor:
    return torch.ones(400_000)


def _calculate(threads: int) -> None:
    torch.set_num_threads(threads)
    for _ in range(20):
        _numbers().exp()


def asks_for_many_threads() -> None:
    _calculate(32)


def asks_for_one_thread() -> None:
    _calculate(1)


TWINS = (
    Twin(
        "objects in each step",
        makes_objects,
        makes_objects_without_collector,
        "garbage-collection",
        options={"with_stack": True, "experimental_config": {"record_python_gc_info": True}},
    ),
    Twin(
        "objects, recorded without stacks",
        makes_objects,
        makes_objects_without_collector,
        "garbage-collection",
        turns="window",
        steps=4,
        is_time=True,
    ),
    Twin(
        "validation with gradients",
        validates_with_gradients,
        validates,
        "unused-autograd",
        steps=10,
    ),
    Twin("detect_anomaly", looks_for_anomalies, looks_for_none, "debug-modes"),
    Twin("a new shape in each step", compiles_again, compiles_once, "recompilation", steps=4),
    Twin(
        "a list of losses with their graphs",
        keeps_the_graph,
        keeps_a_number,
        "memory-growth",
        options={"profile_memory": True},
        turns="window",
    ),
    Twin(
        "32 threads",
        asks_for_many_threads,
        asks_for_one_thread,
        "thread-oversubscription",
        turns="window",
        is_time=True,
    ),
)
