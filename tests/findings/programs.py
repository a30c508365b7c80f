"""Small programs with one fault each, and the same programs without it.

`TWINS` show one problem each; `PROGRAMS` are whole trainings, recorded as `instrument run` does by default: five steps,
and the ranges of the model. A program has further options only where a first diagnosis asks for them, such as Python
stacks. What a step needs, it makes at its first call, and keeps.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from findings.device_traces import python_between_kernels
from findings.twins import Twin
from instrument import profiled

Step = Callable[[], object]
CLASSES, PIXELS = 10, 32


def perceptron(width: int, depth: int, inputs: int = 64, outputs: int = CLASSES) -> nn.Sequential:
    hidden = [(nn.Linear(*each), nn.ReLU()) for each in pairwise([inputs, *[width] * depth])]
    return nn.Sequential(*(layer for pair in hidden for layer in pair), nn.Linear(width, outputs))


def convolutions(channels: int = 16) -> nn.Sequential:
    wide = 2 * channels
    return nn.Sequential(
        *(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * wide, CLASSES)),
    )  # fmt: skip


class Training:
    """A classifier with its optimizer and one batch of random data."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor) -> None:
        self.model, self.inputs = model, inputs
        self.labels = torch.randint(CLASSES, (len(inputs),))
        self.optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(inputs), self.labels)

    def step(self, inputs: torch.Tensor | None = None) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.inputs if inputs is None else inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


# Tiny layers: most of their time goes to calls, not to numbers.
WIDTH = 16
TINY = torch.ones(4, WIDTH)


def layers(count: int, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def train(model: nn.Module, inputs: torch.Tensor = TINY) -> None:
    model(inputs).sum().backward()


# Data


def generated(seconds: float) -> Step:
    """A step on data of an iterator that is no loader of torch's, as `session.steps` marks it."""

    def step() -> object:
        with profiled("data"):
            time.sleep(seconds)
        with profiled("train"):
            time.sleep(0.03)
            return torch.ones(4).sum()

    return step


class Decoded(Dataset[tuple[list[float], int]]):
    """Images that take CPU time, as those that Python decodes do."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[list[float], int]:
        state = bytes(10_000)
        for _ in range(160):
            state = hashlib.sha256(state).digest() * 312
        return [each / 255 for each in state[:768]], index % CLASSES


def collated(samples: list[tuple[list[float], int]]) -> list[list[float]]:
    # Lists: a tensor would come through a file descriptor, late on a busy machine.
    return [pixels for pixels, _ in samples]


FED = Training(perceptron(512, 6, inputs=768), torch.randn(512, 768))


@cache
def batches(workers: int) -> Iterator[Any]:
    # A batch for each worker, so that no batches come from the time before a window.
    more: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 1 if workers else None}
    return iter(DataLoader(Decoded(), 16, collate_fn=collated, **more))


def loads(workers: int) -> Step:
    return lambda: FED.step(torch.tensor(next(batches(workers))).repeat(32, 1))


# Loops over samples: in one line, of more than 16 operators that are not the same in each round, and in calls of a model


def rows() -> torch.Tensor:
    return torch.ones(150, 8)


def row_by_row() -> object:
    with profiled("rows"):
        return torch.stack([row.square().sum() for row in rows()])


def all_rows() -> object:
    with profiled("rows"):
        return rows().square().sum(1)


AUGMENTED = Training(convolutions(), torch.rand(64, 3, PIXELS, PIXELS))


@torch.no_grad()
def augmented(image: torch.Tensor) -> torch.Tensor:
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


@torch.no_grad()
def augmented_together(images: torch.Tensor) -> torch.Tensor:
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


def augments_each_image() -> object:
    return AUGMENTED.step(torch.stack([augmented(image) for image in AUGMENTED.inputs]))


def augments_all_images() -> object:
    return AUGMENTED.step(augmented_together(AUGMENTED.inputs))


POLICY = perceptron(256, 2, inputs=8, outputs=4)
of_policy = torch.optim.Adam(POLICY.parameters(), fused=True)


def chosen(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random actions with their probabilities, of one environment or of several."""
    likely = POLICY(states).log_softmax(-1)
    actions = torch.multinomial(likely.detach().exp(), 1)
    return actions, likely.gather(-1, actions)


def chosen_one_by_one(states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.stack, zip(*map(chosen, states), strict=True)))


def reinforces(choose: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Step:
    def step() -> object:
        states, losses = torch.randn(64, 8), []
        with profiled("rollout"):
            for _ in range(8):
                actions, likely = choose(states)
                states = (0.9 * states).roll(1, -1) + 0.1 * (actions - 1.5)
                losses.append(-(likely.squeeze(-1) * states.mean(-1)).sum())
        of_policy.zero_grad()
        torch.stack(losses).sum().backward()
        of_policy.step()
        return losses

    return step


CELL, LSTM = nn.LSTMCell(8, 16), nn.LSTM(8, 16)


def step_by_step() -> None:
    hidden = memory = torch.zeros(4, 16)
    for x in torch.ones(48, 4, 8):
        hidden, memory = CELL(x, (hidden, memory))
    hidden.sum().backward()


def in_one_call() -> None:
    LSTM(torch.ones(48, 4, 8))[0][-1].sum().backward()


IMAGES = torch.rand(32, 3, PIXELS, PIXELS)
ANCHORS = 64
DETECTOR = convolutions()[:-1].append(nn.Linear(512, 5 * ANCHORS))
of_detector = torch.optim.Adam(DETECTOR.parameters(), fused=True)
boxes_of_images, anchors = torch.rand(32, 4) / 2, torch.rand(ANCHORS, 4) / 2


def overlaps(boxes: torch.Tensor) -> torch.Tensor:
    """How much each anchor covers each box, as a share of both."""
    low = torch.maximum(boxes[..., None, :2], anchors[:, :2])
    ends = (boxes[..., :2] + boxes[..., 2:])[..., None, :]
    both = (torch.minimum(ends, anchors[:, :2] + anchors[:, 2:]) - low).clamp(min=0).prod(-1)
    return both / (boxes[..., 2:].prod(-1)[..., None] + anchors[:, 2:].prod(-1) - both)


def loss_of_boxes(outputs: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """The loss of one image, or of a batch of images: one box in each."""
    outputs = outputs.unflatten(-1, (ANCHORS, 5))
    covered = overlaps(boxes)
    is_box = (covered > 0.5) | (covered == covered.amax(-1, keepdim=True))
    moved_by = outputs[..., :4] - (boxes[..., None, :] - anchors)
    near = functional.smooth_l1_loss(moved_by, torch.zeros_like(moved_by), reduction="none")
    sure = functional.binary_cross_entropy_with_logits(
        outputs[..., 4], is_box.float(), reduction="none"
    )
    return ((near.sum(-1) * is_box).sum(-1) / is_box.sum(-1) + sure.mean(-1)).mean()


def loss_of_each_image(outputs: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    return torch.stack([*map(loss_of_boxes, outputs, boxes)]).mean()


def detects(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
    def step() -> object:
        of_detector.zero_grad()
        of_batch = loss(DETECTOR(IMAGES), boxes_of_images)
        of_batch.backward()
        of_detector.step()
        return of_batch.detach()

    return step


# Operators: of optimizers, of twice the size, instead of one, and the same again and again


def updated(**options: bool) -> Step:
    """A step of Adam on many small parameters."""

    @cache
    def optimizer() -> torch.optim.Optimizer:
        parameters = [nn.Parameter(torch.ones(8)) for _ in range(80)]
        for parameter in parameters:
            parameter.grad = torch.ones(8)
        return torch.optim.Adam(parameters, **options)  # type: ignore[arg-type]

    return lambda: optimizer().step()


def multiplied(dtype: torch.dtype) -> Step:
    """A step of two layers, forward and backward."""
    model = cache(lambda: nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to(dtype))

    def step() -> object:
        with profiled("train"):
            loss = (model()(torch.ones(64, 256, dtype=dtype)) * 2.0).square().mean()
            loss.backward()
            return loss

    return step


WIDE = perceptron(512, 4)
of_wide = torch.optim.SGD(WIDE.parameters(), lr=0.01)
features, labels = torch.randn(256, 64), torch.randint(CLASSES, (256,))


def computes_in(dtype: torch.dtype) -> Step:
    """A step in one type, to which the first step of a window converts the model."""

    def step() -> object:
        of_wide.zero_grad()
        loss = functional.cross_entropy(WIDE.to(dtype)(features.to(dtype)), labels)
        loss.backward()
        of_wide.step()
        return loss.detach()

    return step


@cache
def checked() -> nn.Module:
    model = layers(20)

    def check(_: nn.Module, __: object, output: torch.Tensor) -> None:
        if not torch.isfinite(output).all():
            raise ValueError

    for layer in model:
        layer.register_forward_hook(check)
    return model


deep = cache(layers)
points = cache(lambda: torch.randn(256, 64, requires_grad=True))


def all_differences() -> None:
    (points()[:, None] - points()[None]).pow(2).sum(-1).exp().sum().backward()


def all_distances() -> None:
    torch.cdist(points(), points()).pow(2).exp().sum().backward()


SIZE, TIMES = 256, 20
weight = cache(lambda: torch.randn(SIZE, SIZE))
weight_in_double = cache(lambda: weight().to(torch.float64))
weight_transposed = cache(lambda: weight().t().contiguous())
query = cache(lambda: torch.randn(1, 1, SIZE, 16))


def products(matrix: Callable[[], torch.Tensor]) -> Step:
    def step() -> None:
        hidden = torch.ones(1, SIZE, dtype=matrix().dtype)
        for _ in range(TIMES):
            hidden = hidden @ matrix()

    return step


def separate_attention() -> None:
    for _ in range(TIMES):
        torch.softmax(query() @ query().transpose(-2, -1) / 4, dim=-1) @ query()


def fused_attention() -> None:
    for _ in range(TIMES):
        functional.scaled_dot_product_attention(query(), query(), query())


# Work that does not train

VALIDATED = Training(convolutions(), IMAGES)


def validates() -> object:
    VALIDATED.step()
    VALIDATED.model.eval()
    with torch.no_grad():
        losses = [VALIDATED.loss(IMAGES).item() for _ in range(2)]
    VALIDATED.model.train()
    return losses


SAVED = Training(perceptron(512, 5), torch.randn(384, 64))


def saves() -> object:
    loss, file = SAVED.step(), io.BytesIO()
    torch.save({"model": SAVED.model.state_dict(), "optimizer": SAVED.optimizer.state_dict()}, file)
    return loss, file


LOGGED = Training(perceptron(256, 8), torch.randn(128, 64))


def log_metrics(file: io.StringIO) -> None:
    for name, parameter in LOGGED.model.named_parameters():
        for kind, values in (("weight", parameter.detach()), ("gradient", parameter.grad)):
            assert values is not None
            facts = {"norm": values.norm().item(), "mean": values.mean().item()}
            facts |= {"std": values.std().item(), "largest": values.abs().max().item()}
            print(json.dumps({"name": name, "kind": kind, **facts}), file=file)


def logs() -> object:
    loss, file = LOGGED.step(), io.StringIO()
    log_metrics(file)
    return loss, file


EVALUATED = layers(10)


def evaluates_its_model() -> None:
    train(EVALUATED)
    EVALUATED.eval()
    with torch.no_grad():
        for _ in range(3):
            EVALUATED(TINY)
    EVALUATED.train()


def measures(again: bool) -> Step:
    """A step that calls its model again for the metrics, or not."""

    def step() -> None:
        results = EVALUATED(TINY)
        results.sum().backward()
        with torch.no_grad():
            (EVALUATED(TINY) if again else results.detach()).mean()

    return step


# Autograd: graphs and gradients that nothing uses


def validates_with(gradients: Callable[[], Any]) -> Step:
    def step() -> None:
        train(deep(2))
        with profiled("validation"), gradients():
            deep(50)(TINY)

    return step


class Gated(nn.Module):
    """A residual block of small operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value, gate = (functional.linear(inputs, weight) for weight in self.weights)
        scale = (value * value).mean(-1, keepdim=True) + 1e-5
        return inputs + value * scale.rsqrt() * gate.sigmoid() * gate.tanh()


GATED = nn.Sequential(*(Gated() for _ in range(12)), nn.Linear(64, CLASSES))
INFERS = Training(GATED, torch.randn(16, 64))


def infers(gradients: bool) -> Step:
    def step() -> object:
        INFERS.model.eval()
        with torch.set_grad_enabled(gradients):
            return [INFERS.loss(INFERS.inputs).item() for _ in range(8)]

    return step


def sgd(model: nn.Module) -> Callable[[], torch.optim.Optimizer]:
    return cache(lambda: torch.optim.SGD(model.parameters(), lr=0.001))


BACKBONE = layers(4, 256)
PROBE = nn.Sequential(BACKBONE, nn.Linear(256, 4))
of_probe = sgd(PROBE[1])


def probes(gradients: bool) -> Step:
    """A step that trains the last layer of a model, with or without gradients of the others."""

    def step() -> None:
        of_probe().zero_grad()
        with torch.set_grad_enabled(gradients):
            results = PROBE[0](torch.ones(64, 256))
        PROBE[1](results).square().mean().backward()
        of_probe().step()

    return step


GENERATOR, CRITIC = perceptron(64, 1, 16, 256), perceptron(512, 1, 256, 1)
of_generator, of_critic = sgd(GENERATOR), sgd(CRITIC)


def generates(gradients: bool) -> Step:
    """A step of a critic and one of a generator, with or without the critic's gradients."""

    def step() -> None:
        made = GENERATOR(torch.ones(64, 16))
        of_critic().zero_grad()
        (CRITIC(made.detach()) - CRITIC(torch.ones(64, 256))).mean().backward()
        of_critic().step()
        of_generator().zero_grad()
        CRITIC.requires_grad_(gradients)
        CRITIC(made).mean().backward()
        CRITIC.requires_grad_(True)
        of_generator().step()

    return step


STUDENT, TEACHER = perceptron(32, 1, outputs=8), perceptron(256, 1, outputs=8)
of_student = sgd(STUDENT)


def distills(gradients: bool) -> Step:
    """A step of a student, with or without gradients of its teacher, which is called last."""

    def step() -> None:
        of_student().zero_grad()
        inputs = torch.ones(256, 64)
        results = STUDENT(inputs)
        TEACHER.requires_grad_(gradients)
        (results - TEACHER(inputs)).square().mean().backward()
        of_student().step()

    return step


ENCODER, READER = layers(6, 256).requires_grad_(False), nn.Linear(256, 4)
of_reader = sgd(READER)


@cache
def encoded() -> torch.Tensor:
    return ENCODER(torch.ones(64, 256))  # type: ignore[no-any-return]


def encodes(again: bool) -> Step:
    """A step of a layer on the results of a model that nothing trains, or on those of its first call."""

    def step() -> None:
        of_reader().zero_grad()
        READER(ENCODER(torch.ones(64, 256)) if again else encoded()).square().mean().backward()
        of_reader().step()

    return step


def looks_for_anomalies() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            train(deep(10))


# The run: the collector, compilation, memory, threads


def makes_objects() -> int:
    """More objects than the collector waits for, so that it runs again and again."""
    freeze()
    return len([[number] for number in range(30_000)])


@cache
def freeze() -> None:
    """Keep full collections short: a window with one is no measure of a window without."""
    gc.collect()
    gc.freeze()


def makes_objects_without_collector() -> int:
    gc.disable()
    try:
        return makes_objects()
    finally:
        gc.enable()


@cache
def compiled(*, dynamic: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x: (x.sin() + x.shape[0]).cos(), backend="eager", dynamic=dynamic)


sizes: Iterator[int] = iter(range(3, 10**9))


def compiles_again() -> None:
    torch._dynamo.config.recompile_limit = 10**6  # or else the function runs without compilation
    compiled(dynamic=False)(torch.ones(next(sizes)))


def compiles_once() -> None:
    compiled(dynamic=True)(torch.ones(next(sizes)))


graphs: list[torch.Tensor] = []


def exponents() -> torch.Tensor:
    return torch.ones(200_000, requires_grad=True).exp().sum()


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum that is stored in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                stored = self.state[each].get("momentum", torch.zeros_like(each))
                momentum = 0.9 * stored.float() + each.grad
                each -= group["lr"] * momentum
                self.state[each]["momentum"] = momentum.bfloat16()


# It also waits for data, and its optimizer casts.
ROWS = 2048
BLOCK = (lambda: nn.Linear(256, 256), nn.GELU, lambda: nn.LayerNorm(256), lambda: nn.Dropout(0.1))
KEPT = nn.Sequential(
    *(nn.Sequential(*(make() for make in BLOCK)) for _ in range(6)), nn.Linear(256, CLASSES)
)
of_kept = Momentum(KEPT)
losses_kept: list[Any] = []
kept_rows, kept_labels = torch.randn(ROWS, 256), torch.randint(CLASSES, (ROWS,))


def remembers(*, graphs: bool, waits: bool = True) -> Step:
    def step() -> object:
        with profiled("data"):
            inputs = torch.randn(ROWS, 256) if waits else kept_rows
        of_kept.zero_grad()
        loss = functional.cross_entropy(KEPT(inputs), kept_labels)
        loss.backward(retain_graph=graphs)
        of_kept.step()
        losses_kept.append(loss if graphs else loss.item())
        return losses_kept

    return step


@contextmanager
def forgotten() -> Iterator[None]:
    try:
        yield
    finally:
        losses_kept.clear()


@contextmanager
def other_programs() -> Iterator[None]:
    """Programs that use all CPUs."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    programs = [
        subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)
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


def on_threads(threads: int, run: Step) -> Step:
    def step() -> object:
        torch.set_num_threads(threads)
        return run()

    return step


numbers = cache(lambda: torch.ones(400_000))
small_model = cache(lambda: nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3))
matrix = cache(lambda size: torch.randn(size, size))


def mixed(size: int) -> Step:
    """Operators that are too small to be divided among threads, and a large one."""

    def run() -> object:
        train(small_model(), torch.ones(64, 256))
        return matrix(size) @ matrix(size)

    return run


SMALL = Training(perceptron(256, 6), torch.randn(64, 64))
SHAPES, STACKS = {"record_shapes": True}, {"with_stack": True}
OF_COLLECTOR = {**STACKS, "experimental_config": {"record_python_gc_info": True}}
TIMED: dict[str, Any] = {"turns": "window", "is_time": True}


def of(model: Any, **more: Any) -> dict[str, Any]:
    """The options of a session that marks this model."""
    return {"model": model, **more}


def windows(*given: Any, **more: Any) -> Twin:
    return Twin(*given, turns="window", **more)


# With the larger product, one thread may be slower than two, even beside other programs.
MIXED = [
    Twin(f"small operators and a product of size {size}, beside other programs",
         on_threads(2, mixed(size)), on_threads(1, mixed(size)), "thread-oversubscription",
         beside=other_programs, **TIMED)
    for size in (512, 2000)
]  # fmt: skip
TWINS = [
    Twin("an iterator", generated(0.03), generated(0), "loader-wait", 3, is_time=True),
    Twin("rows", row_by_row, all_rows, "loop"),
    Twin("a cell", step_by_step, in_one_call, "loop"),
    Twin("parameters", updated(foreach=False), updated(fused=True), "optimizer-not-fused"),
    Twin("foreach", updated(foreach=True), updated(fused=True), "optimizer-not-fused"),
    Twin("finite values", lambda: train(checked()), lambda: train(deep(20)), "in-pieces"),
    Twin("all pairs", all_differences, all_distances, "in-pieces", options=SHAPES),
    Twin("two layers", multiplied(torch.float64), multiplied(torch.float32), "float64", options=SHAPES),
    Twin("objects in each step", makes_objects, makes_objects_without_collector, "garbage-collection",
         options=OF_COLLECTOR),
    Twin("objects, recorded without stacks", makes_objects, makes_objects_without_collector,
         "garbage-collection", 4, **TIMED),
    Twin("validation with gradients", validates_with(nullcontext), validates_with(torch.no_grad),
         "unused-autograd", 10),
    Twin("a backbone that is not frozen", probes(True), probes(False), "unused-gradients", options=of(PROBE)),
    windows("gradients that are cleared before a step", generates(True), generates(False), "unused-gradients",
            options=of({"generator": GENERATOR, "critic": CRITIC})),
    windows("a teacher that is not frozen", distills(True), distills(False), "unused-gradients",
            options=of({"student": STUDENT, "teacher": TEACHER})),
    Twin("a frozen encoder", encodes(True), encodes(False), "frozen-modules",
         options=of({"encoder": ENCODER, "reader": READER})),
    Twin("a second call for the metrics", measures(True), measures(False), "not-training", options=of(EVALUATED)),
    Twin("validation", validates_with(torch.no_grad), lambda: train(deep(2)), "not-training"),
    Twin("a model called in eval mode", evaluates_its_model, lambda: train(EVALUATED), "not-training",
         options=of(EVALUATED)),
    Twin("detect_anomaly", looks_for_anomalies, lambda: train(deep(10)), "debug-modes"),
    Twin("a new shape in each step", compiles_again, compiles_once, "recompilation", 4),
    windows("a list of losses with their graphs", lambda: graphs.append(exponents()), lambda: exponents().item(),
            "memory-growth", options={"profile_memory": True}),
    Twin("32 threads", on_threads(32, lambda: [numbers().exp() for _ in range(20)]),
         on_threads(1, lambda: [numbers().exp() for _ in range(20)]), "thread-oversubscription", **TIMED),
    Twin("a weight cast at each use", products(lambda: weight().to(torch.float64)), products(weight_in_double),
         "layout-and-casts"),
    Twin("a weight copied at each use", products(lambda: weight().t().contiguous()), products(weight_transposed),
         "layout-and-casts"),
    Twin("attention", separate_attention, fused_attention, "attention-not-fused", options=SHAPES),
]  # fmt: skip
_PROGRAMS = [
    windows("one thread", on_threads(2, SMALL.step), on_threads(1, SMALL.step), "thread-oversubscription",
            options=of(SMALL.model), is_time=True, beside=other_programs),
    Twin("a policy for all environments", reinforces(chosen_one_by_one), reinforces(chosen), "loop",
         options=of(POLICY)),
    Twin("no validation in the step", validates, VALIDATED.step, "not-training", options=of(VALIDATED.model)),
    Twin("no checkpoint in the step", saves, SAVED.step, "not-training", options=of(SAVED.model, **STACKS)),
    Twin("no logs in the step", logs, LOGGED.step, "not-training", options=of(LOGGED.model, **STACKS)),
    Twin("no_grad in an evaluation", infers(True), infers(False), "unused-autograd", options=of(GATED)),
    windows("float32", computes_in(torch.float64), computes_in(torch.float32), "float64", options=of(WIDE)),
    Twin("augmentation of all images", augments_each_image, augments_all_images, "loop",
         options=of(AUGMENTED.model)),
    Twin("the loss of all images", detects(loss_of_each_image), detects(loss_of_boxes), "loop",
         options=of(DETECTOR)),
    windows("two workers", loads(0), loads(2), "loader-wait", options=of(FED.model), is_time=True),
    Twin("no Python between launches", partial(python_between_kernels, 4000), partial(python_between_kernels, 0),
         "device-idle", turns="written"),
    windows("losses without graphs", remembers(graphs=True), remembers(graphs=False), "memory-growth",
            options=of(KEPT, profile_memory=True), beside=forgotten, clean=remembers(graphs=False, waits=False)),
]  # fmt: skip
PROGRAMS = [replace(program, steps=5) for program in _PROGRAMS]
