"""The twins of the findings that need no device: data, operators, compilation, memory, threads, autograd, casts."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
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


def augmented(image: torch.Tensor) -> torch.Tensor:
    """More than 16 operators, not the same for each sample."""
    with torch.no_grad():
        if random.random() < 0.5:
            image = image.flip(-1)
        if random.random() < 0.4:
            image = image.roll(2, -1)
        mean = image.mean()
        image = (image - mean) * (0.8 + 0.4 * random.random()) + mean
        gray = image.mean(0, keepdim=True)
        image = gray + (image - gray) * random.random()
        image = image + 0.1 * torch.randn_like(image)
        image = (image.clamp(0, 1) - 0.5) / 0.5
        image[:, 2:4, 2:4] = 0
        return image


def augmented_together(images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        chance = torch.rand(len(images), 4, 1, 1)
        images = torch.where(chance[:, :1] < 0.5, images.flip(-1), images)
        images = torch.where(chance[:, 1:2] < 0.4, images.roll(2, -1), images)
        mean = images.mean((1, 2, 3), keepdim=True)
        images = (images - mean) * (0.8 + 0.4 * chance[:, 2:3]) + mean
        gray = images.mean(1, keepdim=True)
        images = gray + (images - gray) * chance[:, 3:]
        images = images + 0.1 * torch.randn_like(images)
        images = (images.clamp(0, 1) - 0.5) / 0.5
        images[:, :, 2:4, 2:4] = 0
        return images


@cache
def _images() -> torch.Tensor:
    return torch.rand(64, 3, 8, 8)


def augments_each_image() -> object:
    return torch.stack([augmented(image) for image in _images()]).sum()


def augments_all_images() -> object:
    return augmented_together(_images()).sum()


@cache
def _policy() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def acts_in_each_environment() -> None:
    logits, actions = [], []
    for observation in torch.ones(48, 8):
        with profiled("policy"):
            each = _policy()(observation)
        actions.append(torch.multinomial(each.detach().softmax(-1), 1))
        logits.append(each.log_softmax(-1)[actions[-1]])
    torch.stack(logits).sum().backward()


def acts_in_all_environments() -> None:
    logits = _policy()(torch.ones(48, 8))
    actions = torch.multinomial(logits.detach().softmax(-1), 1)
    logits.log_softmax(-1).gather(-1, actions).sum().backward()


@cache
def _cells() -> tuple[nn.Module, nn.Module]:
    return nn.LSTMCell(8, 16), nn.LSTM(8, 16)


def step_by_step() -> None:
    hidden = memory = torch.zeros(4, 16)
    for x in torch.ones(48, 4, 8):
        hidden, memory = _cells()[0](x, (hidden, memory))
    hidden.sum().backward()


def in_one_call() -> None:
    output, _ = _cells()[1](torch.ones(48, 4, 8))
    output[-1].sum().backward()


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


def converted(dtype: torch.dtype) -> Callable[[], object]:
    """A step of one model, whose parameters the first step of a window converts."""

    def step() -> object:
        with profiled("train"):
            loss = LAYERS.to(dtype)(torch.ones(64, 256, dtype=dtype)).square().mean()
            loss.backward()
            return loss

    return step


LAYERS = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))

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


@cache
def _freeze() -> None:
    """Keep full collections short: a window with one is no measure of a window without."""
    gc.collect()
    gc.freeze()


def makes_objects() -> int:
    """More objects than the collector waits for, so that it runs again and again."""
    _freeze()
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


@cache
def _marked() -> nn.Module:
    return profiled("net")(_deep())  # as `Session(model=…)` marks it


def validates_its_model(gradients: bool) -> Callable[[], None]:
    def step() -> None:
        _train(_marked(), _deep_input())
        with torch.set_grad_enabled(gradients):
            for _ in range(5):
                _marked()(_deep_input())

    return step


def validates() -> None:
    _train(_deep(2), _deep_input())
    with profiled("validation"), torch.no_grad():
        _deep()(_deep_input())


def trains() -> None:
    _train(_deep(2), _deep_input())


def trains_in_train_mode() -> None:
    _train(EVALUATED, _deep_input())


def evaluates_its_model() -> None:
    trains_in_train_mode()
    EVALUATED.eval()
    with torch.no_grad():
        for _ in range(3):
            EVALUATED(_deep_input())
    EVALUATED.train()


EVALUATED = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10)))


def looks_for_anomalies() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            _train(_deep(10), _deep_input())


def looks_for_none() -> None:
    _train(_deep(10), _deep_input())


BACKBONE = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
PROBE = nn.Sequential(BACKBONE, nn.Linear(256, 4))


@cache
def _probe_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(PROBE[1].parameters(), lr=0.001)


def probes(gradients: bool) -> Callable[[], None]:
    """A step that trains the last layer of a model, with or without gradients of the others."""

    def step() -> None:
        _probe_optimizer().zero_grad()
        with torch.set_grad_enabled(gradients):
            features = PROBE[0](torch.ones(64, 256))
        PROBE[1](features).square().mean().backward()
        _probe_optimizer().step()

    return step


GENERATOR = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 256))
CRITIC = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))


@cache
def _adversaries() -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.SGD(GENERATOR.parameters(), 0.01), torch.optim.SGD(CRITIC.parameters(), 0.01)


def generates(gradients: bool) -> Callable[[], None]:
    """A step of a critic and one of a generator, with or without the critic's gradients."""

    def step() -> None:
        of_generator, of_critic = _adversaries()
        made = GENERATOR(torch.ones(64, 16))
        of_critic.zero_grad()
        (CRITIC(made.detach()) - CRITIC(torch.ones(64, 256))).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        CRITIC.requires_grad_(gradients)
        CRITIC(made).mean().backward()
        CRITIC.requires_grad_(True)
        of_generator.step()

    return step


STUDENT, TEACHER = (
    nn.Sequential(nn.Linear(64, 32 * k), nn.ReLU(), nn.Linear(32 * k, 8)) for k in (1, 8)
)


@cache
def _student_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(STUDENT.parameters(), lr=0.01)


def distills(gradients: bool) -> Callable[[], None]:
    """A step of a student, with or without gradients of its teacher, which is called last."""

    def step() -> None:
        _student_optimizer().zero_grad()
        inputs = torch.ones(256, 64)
        results = STUDENT(inputs)
        TEACHER.requires_grad_(gradients)
        (results - TEACHER(inputs)).square().mean().backward()
        _student_optimizer().step()

    return step


@cache
def _encoded() -> torch.Tensor:
    with torch.no_grad():
        return ENCODER(torch.ones(64, 256))


ENCODER, READER = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), nn.Linear(256, 4)
ENCODER.requires_grad_(False)


@cache
def _reader_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(READER.parameters(), lr=0.01)


def encodes(again: bool) -> Callable[[], None]:
    """A step of a layer on the results of a model that nothing trains, or on those of its first call."""

    def step() -> None:
        _reader_optimizer().zero_grad()
        READER(ENCODER(torch.ones(64, 256)) if again else _encoded()).square().mean().backward()
        _reader_optimizer().step()

    return step


def measures(again: bool) -> Callable[[], None]:
    """A step that calls its model again for the metrics, or not."""

    def step() -> None:
        inputs = _deep_input()
        results = EVALUATED(inputs)
        results.sum().backward()
        with torch.no_grad():
            (EVALUATED(inputs) if again else results.detach()).mean()

    return step


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


@cache
def _small_model() -> nn.Module:
    layers = [nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*layers * 3)


@contextmanager
def other_programs() -> Iterator[None]:
    """Programs that use all CPUs."""
    code = "print(flush=True)\nwhile True: pass"
    programs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def small_operators(threads: int) -> Callable[[], object]:
    """A step of a model that is too small to be divided among threads."""

    def step() -> None:
        torch.set_num_threads(threads)
        _train(_small_model(), torch.ones(64, 256))

    return step


@cache
def _matrix(size: int) -> torch.Tensor:
    return torch.randn(size, size)


def mixed_operators(threads: int, size: int) -> Callable[[], object]:
    """A step with operators that are too small to be divided among threads, and a large one."""

    def step() -> object:
        small_operators(threads)()
        return _matrix(size) @ _matrix(size)

    return step


SIZE = 256
TIMES = 20  # that a step does the same


@cache
def _weight() -> torch.Tensor:
    return torch.randn(SIZE, SIZE)


@cache
def _cast() -> torch.Tensor:
    return _weight().to(torch.float64)


@cache
def _stored() -> torch.Tensor:
    return _weight().t().contiguous()


@cache
def _query() -> torch.Tensor:
    return torch.randn(1, 1, SIZE, 16)


def cast_each_time() -> None:
    hidden = torch.ones(1, SIZE, dtype=torch.float64)
    for _ in range(TIMES):
        hidden = hidden @ _weight().to(torch.float64)


def cast_once() -> None:
    hidden = torch.ones(1, SIZE, dtype=torch.float64)
    for _ in range(TIMES):
        hidden = hidden @ _cast()


def copy_each_time() -> None:
    hidden = torch.ones(1, SIZE)
    for _ in range(TIMES):
        hidden = hidden @ _weight().t().contiguous()


def copy_once() -> None:
    hidden = torch.ones(1, SIZE)
    for _ in range(TIMES):
        hidden = hidden @ _stored()


def separate_attention() -> None:
    query = _query()
    for _ in range(TIMES):
        torch.softmax(query @ query.transpose(-2, -1) / 4, dim=-1) @ query


def fused_attention() -> None:
    query = _query()
    for _ in range(TIMES):
        scaled_dot_product_attention(query, query, query)


@cache
def _checked() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(20)))

    def check(_: nn.Module, __: object, output: torch.Tensor) -> None:
        if not torch.isfinite(output).all():
            raise ValueError

    for layer in model:
        layer.register_forward_hook(check)
    return model


def checks_each_layer() -> None:
    _train(_checked(), _deep_input())


def checks_no_layer() -> None:
    _train(_deep(20), _deep_input())


@cache
def _points() -> torch.Tensor:
    return torch.randn(256, 64, requires_grad=True)


def all_differences() -> None:
    (_points()[:, None] - _points()[None]).pow(2).sum(-1).exp().sum().backward()


def all_distances() -> None:
    torch.cdist(_points(), _points()).pow(2).exp().sum().backward()


# With the larger product, one thread may be slower than two, even beside other programs.
MIXED = [
    Twin(
        f"small operators and a product of size {size}, beside other programs",
        mixed_operators(2, size),
        mixed_operators(1, size),
        "thread-oversubscription",
        turns="window",
        is_time=True,
        beside=other_programs,
    )
    for size in (512, 2000)
]
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
    Twin("rows", row_by_row, all_rows, "loop"),
    Twin("images", augments_each_image, augments_all_images, "loop"),
    Twin("a policy", acts_in_each_environment, acts_in_all_environments, "loop"),
    Twin("a cell", step_by_step, in_one_call, "loop"),
    Twin("parameters", updated(foreach=False), updated(fused=True), "optimizer-not-fused"),
    Twin("finite values", checks_each_layer, checks_no_layer, "in-pieces"),
    Twin(
        "all pairs",
        all_differences,
        all_distances,
        "in-pieces",
        options={"record_shapes": True},
    ),
    Twin("foreach", updated(foreach=True), updated(fused=True), "optimizer-not-fused"),
    Twin(
        "two layers",
        multiplied(torch.float64),
        multiplied(torch.float32),
        "float64",
        options={"record_shapes": True},
    ),
    Twin(
        "parameters, without recorded types",
        converted(torch.float64),
        converted(torch.float32),
        "float64",
        options={"model": LAYERS},
        turns="window",
    ),
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
    Twin(
        "a model called with gradients, and no backward",
        validates_its_model(True),
        validates_its_model(False),
        "unused-autograd",
        steps=10,
    ),
    Twin(
        "a backbone that is not frozen",
        probes(True),
        probes(False),
        "unused-gradients",
        options={"model": PROBE},
    ),
    Twin(
        "gradients that are cleared before a step",
        generates(True),
        generates(False),
        "unused-gradients",
        options={"model": {"generator": GENERATOR, "critic": CRITIC}},
        turns="window",
    ),
    Twin(
        "a teacher that is not frozen",
        distills(True),
        distills(False),
        "unused-gradients",
        options={"model": {"student": STUDENT, "teacher": TEACHER}},
        turns="window",
    ),
    Twin(
        "a frozen encoder",
        encodes(True),
        encodes(False),
        "frozen-modules",
        options={"model": {"encoder": ENCODER, "reader": READER}},
    ),
    Twin(
        "a second call for the metrics",
        measures(True),
        measures(False),
        "not-training",
        options={"model": EVALUATED},
    ),
    Twin("validation", validates, trains, "not-training"),
    Twin(
        "a model called in eval mode",
        evaluates_its_model,
        trains_in_train_mode,
        "not-training",
        options={"model": EVALUATED},
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
    Twin(
        "two threads beside other programs",
        small_operators(2),
        small_operators(1),
        "thread-oversubscription",
        turns="window",
        is_time=True,
        beside=other_programs,
    ),
    Twin("a weight cast at each use", cast_each_time, cast_once, "layout-and-casts"),
    Twin("a weight copied at each use", copy_each_time, copy_once, "layout-and-casts"),
    Twin(
        "attention",
        separate_attention,
        fused_attention,
        "attention-not-fused",
        options={"record_shapes": True},
    ),
)
