"""What `instrument run` costs a step outside windows: a step of training and a call of inference of about 5 ms."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
from loguru import logger
from rounds import Row, medians, report
from torch import nn

from instrument.cli.run import config_of
from instrument.record.config.schema import ProfilerConfig
from instrument.record.unedited import Watch

warnings.simplefilter("ignore")
LAYERS, CALLS, ROUNDS, LEAST_NS = 50, 1, 400, 4_000_000


class Bare(torch.optim.SGD):
    """Its first instance is made before the watch begins, so that nothing watches its steps."""


class Watched(torch.optim.SGD):
    """The same optimizer, watched."""


def config() -> ProfilerConfig:
    """No window comes within the benchmark."""
    return config_of(
        "summary", ["profiler.wait=1000000000", f"profiler.output_dir={tempfile.mkdtemp()}"]
    )


def sized(act: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A batch with which the act takes 4 to 8 ms."""
    batch = torch.randn(1, 64)
    while _fastest_ns(act, batch) < LEAST_NS:
        batch = batch.repeat(2, 1)
    return batch


def _fastest_ns(act: Callable[[torch.Tensor], object], batch: torch.Tensor) -> int:
    took = []
    for _ in range(10):
        began = time.perf_counter_ns()
        act(batch)
        took.append(time.perf_counter_ns() - began)
    return min(took)


def training(model: nn.Module) -> Row:
    bare, watch = Bare(model.parameters(), lr=1e-6), Watch(config())

    def step(optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    batch = sized(lambda batch: step(bare, batch))
    watch.begin()
    watched = Watched(model.parameters(), lr=1e-6)
    contestants = {"bare": lambda: step(bare, batch), "watched": lambda: step(watched, batch)}
    took = medians(contestants, calls=CALLS, rounds=ROUNDS)
    assert watch.session is not None
    assert watch.session.step_number > CALLS
    watch.end(None)
    return Row(
        "a step of training", took["watched"], "the same without a watch", took["bare"], 1.02
    )


class Called(nn.Sequential):
    """Its calls end steps."""


class Other(nn.Sequential):
    """The same model, of a class that the watch has not seen before the first step."""


def inference(layers: nn.Sequential) -> Row:
    called, other, watch = Called(*layers), Other(*layers), Watch(config(), "forward")
    with torch.no_grad():
        batch = sized(other)
        watch.begin()
        for _ in range(3):
            called(batch)
        assert watch.session is not None
        contestants = {"bare": lambda: other(batch), "watched": lambda: called(batch)}
        took = medians(contestants, calls=CALLS, rounds=ROUNDS)
    assert watch.session.step_number > CALLS
    watch.end(None)
    return Row(
        "a call of inference", took["watched"], "the same without a watch", took["bare"], 1.02
    )


def main() -> int:
    logger.remove()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other would disturb more than a watch
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    title = f"instrument run, outside windows: torch {torch.__version__}, Python {sys.version.split()[0]}, medians of rounds"
    return 0 if report(title, [training(model), inference(model)]) else 1


if __name__ == "__main__":
    sys.exit(main())
