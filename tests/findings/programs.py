"""Small trainings with one fault each, and the same trainings without it.

`benchmarks/savings.py` and nightly tests record them as `instrument run` does by default: five steps, and the ranges of
the model. A program has further options only where a first diagnosis asks for them, such as Python stacks.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    linear,
    smooth_l1_loss,
)
from torch.utils.data import DataLoader, Dataset

from findings.cpu_twins import augmented, augmented_together, other_programs
from findings.device_traces import python_between_kernels
from findings.twins import Twin
from instrument import profiled

CLASSES, PIXELS = 10, 32


def perceptron(width: int, depth: int, inputs: int = 64, outputs: int = CLASSES) -> nn.Sequential:
    sizes = [inputs, *[width] * depth]
    hidden = [
        layer for each in itertools.pairwise(sizes) for layer in (nn.Linear(*each), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def convolutions(channels: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * channels, CLASSES),
    )


class Training:
    """A classifier with its optimizer and one batch of random data."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor) -> None:
        self.model, self.inputs = model, inputs
        self.labels = torch.randint(CLASSES, (len(inputs),))
        self.optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model(inputs), self.labels)

    def step(self, inputs: torch.Tensor | None = None) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.inputs if inputs is None else inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


# Threads that wait for each other, on a machine with other work.

SMALL = Training(perceptron(256, 6), torch.randn(64, 64))


def with_threads(threads: int) -> Callable[[], object]:
    def step() -> object:
        torch.set_num_threads(threads)
        return SMALL.step()

    return step


# A policy that is called for each environment.

POLICY = perceptron(256, 2, inputs=8, outputs=4)
ENVIRONMENTS, ROUNDS = 64, 8
_of_policy = torch.optim.Adam(POLICY.parameters(), fused=True)


def moved(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    return (0.9 * states).roll(1, -1) + 0.1 * (actions - 1.5)


def chosen(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random actions with their probabilities, of one environment or of several."""
    likely = POLICY(states).log_softmax(-1)
    actions = torch.multinomial(likely.detach().exp(), 1)
    return actions, likely.gather(-1, actions)


def chosen_one_by_one(states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.stack, zip(*map(chosen, states), strict=True)))


def reinforces(
    choose: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
) -> Callable[[], object]:
    def step() -> object:
        states, losses = torch.randn(ENVIRONMENTS, 8), []
        with profiled("rollout"):
            for _ in range(ROUNDS):
                actions, likely = choose(states)
                states = moved(states, actions)
                losses.append(-(likely.squeeze(-1) * states.mean(-1)).sum())
        _of_policy.zero_grad()
        torch.stack(losses).sum().backward()
        _of_policy.step()
        return losses

    return step


# A game in Python.


# Validation, checkpoints and logs in each step.

IMAGES = torch.rand(32, 3, PIXELS, PIXELS)
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


# An evaluation that records for a backward.


class Gated(nn.Module):
    """A residual block of small operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) / 8 for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value, gate = (linear(inputs, weight) for weight in self.weights)
        scale = (value * value).mean(-1, keepdim=True) + 1e-5
        return inputs + value * scale.rsqrt() * gate.sigmoid() * gate.tanh()


EVALUATED = Training(
    nn.Sequential(*(Gated() for _ in range(12)), nn.Linear(64, CLASSES)), torch.randn(16, 64)
)


def evaluates(gradients: bool) -> Callable[[], object]:
    def step() -> object:
        EVALUATED.model.eval()
        with torch.set_grad_enabled(gradients):
            return [EVALUATED.loss(EVALUATED.inputs).item() for _ in range(8)]

    return step


# Numbers of twice the size.

WIDE = perceptron(512, 4)
_of_wide = torch.optim.SGD(WIDE.parameters(), lr=0.01)
_features, _labels = torch.randn(256, 64), torch.randint(CLASSES, (256,))


def computes_in(dtype: torch.dtype) -> Callable[[], object]:
    """A step in one type, to which the first step of a window converts the model."""

    def step() -> object:
        _of_wide.zero_grad()
        loss = cross_entropy(WIDE.to(dtype)(_features.to(dtype)), _labels)
        loss.backward()
        _of_wide.step()
        return loss.detach()

    return step


# Loops over samples: one that differs from round to round, and one with more than 16 operators.

AUGMENTED = Training(convolutions(), torch.rand(64, 3, PIXELS, PIXELS))


def augments_each_image() -> object:
    return AUGMENTED.step(torch.stack([augmented(image) for image in AUGMENTED.inputs]))


def augments_all_images() -> object:
    return AUGMENTED.step(augmented_together(AUGMENTED.inputs))


ANCHORS = 64
DETECTOR = convolutions()[:-1].append(nn.Linear(512, 5 * ANCHORS))
_of_detector = torch.optim.Adam(DETECTOR.parameters(), fused=True)
_boxes = torch.rand(32, 4) / 2
_anchors = torch.rand(ANCHORS, 4) / 2


def overlaps(boxes: torch.Tensor) -> torch.Tensor:
    """How much each anchor covers each box, as a share of both."""
    low = torch.maximum(boxes[..., None, :2], _anchors[:, :2])
    high = torch.minimum(
        (boxes[..., :2] + boxes[..., 2:])[..., None, :], _anchors[:, :2] + _anchors[:, 2:]
    )
    both = (high - low).clamp(min=0).prod(-1)
    return both / (boxes[..., 2:].prod(-1)[..., None] + _anchors[:, 2:].prod(-1) - both)


def loss_of_boxes(outputs: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """The loss of one image, or of a batch of images: one box in each."""
    outputs = outputs.unflatten(-1, (ANCHORS, 5))
    covered = overlaps(boxes)
    is_box = (covered > 0.5) | (covered == covered.amax(-1, keepdim=True))
    moved_by = outputs[..., :4] - (boxes[..., None, :] - _anchors)
    near = smooth_l1_loss(moved_by, torch.zeros_like(moved_by), reduction="none").sum(-1)
    sure = binary_cross_entropy_with_logits(outputs[..., 4], is_box.float(), reduction="none")
    return ((near * is_box).sum(-1) / is_box.sum(-1) + sure.mean(-1)).mean()


def detects(loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], object]:
    def step() -> object:
        _of_detector.zero_grad()
        of_batch = loss(DETECTOR(IMAGES))
        of_batch.backward()
        _of_detector.step()
        return of_batch.detach()

    return step


def loss_of_each_image(outputs: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [loss_of_boxes(each, box) for each, box in zip(outputs, _boxes, strict=True)]
    ).mean()


# A loader that computes, without workers.


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
def _batches(workers: int) -> Iterator[Any]:
    # A batch for each worker, so that no batches come from the time before a window.
    ahead = 1 if workers else None
    loader = DataLoader(
        Decoded(), 16, num_workers=workers, collate_fn=collated, prefetch_factor=ahead
    )
    return iter(loader)


def loads(workers: int) -> Callable[[], object]:
    def step() -> object:
        batch = torch.tensor(next(_batches(workers)))
        return FED.step(batch.repeat(32, 1))

    return step


# Memory that grows, in a program that also waits for data, and whose optimizer casts.


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


ROWS = 2048
KEPT = nn.Sequential(
    *(
        nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1))
        for _ in range(6)
    ),
    nn.Linear(256, CLASSES),
)
_of_kept = Momentum(KEPT)
_losses: list[Any] = []
_rows, _row_labels = torch.randn(ROWS, 256), torch.randint(CLASSES, (ROWS,))


def remembers(*, graphs: bool, waits: bool = True) -> Callable[[], object]:
    def step() -> object:
        with profiled("data"):
            rows = torch.randn(ROWS, 256) if waits else _rows
        _of_kept.zero_grad()
        loss = cross_entropy(KEPT(rows), _row_labels)
        loss.backward(retain_graph=graphs)
        _of_kept.step()
        _losses.append(loss if graphs else loss.item())
        return _losses

    return step


@contextmanager
def forgotten() -> Iterator[None]:
    try:
        yield
    finally:
        _losses.clear()


STACKS = {"with_stack": True}
WINDOWS: dict[str, Any] = {"turns": "window"}
_PROGRAMS = (
    Twin(
        "one thread",
        with_threads(2),
        with_threads(1),
        "thread-oversubscription",
        options={"model": SMALL.model},
        beside=other_programs,
        **WINDOWS,
    ),
    Twin(
        "a policy for all environments",
        reinforces(chosen_one_by_one),
        reinforces(chosen),
        "loop",
        options={"model": POLICY},
    ),
    Twin(
        "no validation in the step",
        validates,
        VALIDATED.step,
        "not-training",
        options={"model": VALIDATED.model},
    ),
    Twin(
        "no checkpoint in the step",
        saves,
        SAVED.step,
        "not-training",
        options={"model": SAVED.model, **STACKS},
    ),
    Twin(
        "no logs in the step",
        logs,
        LOGGED.step,
        "not-training",
        options={"model": LOGGED.model, **STACKS},
    ),
    Twin(
        "no_grad in an evaluation",
        evaluates(True),
        evaluates(False),
        "unused-autograd",
        options={"model": EVALUATED.model},
    ),
    Twin(
        "float32",
        computes_in(torch.float64),
        computes_in(torch.float32),
        "float64",
        options={"model": WIDE},
        **WINDOWS,
    ),
    Twin(
        "augmentation of all images",
        augments_each_image,
        augments_all_images,
        "loop",
        options={"model": AUGMENTED.model},
    ),
    Twin(
        "the loss of all images",
        detects(loss_of_each_image),
        detects(lambda outputs: loss_of_boxes(outputs, _boxes)),
        "loop",
        options={"model": DETECTOR},
    ),
    Twin(
        "two workers",
        loads(0),
        loads(2),
        "loader-wait",
        options={"model": FED.model},
        **WINDOWS,
    ),
    Twin(
        "no Python between launches",
        partial(python_between_kernels, 4000),
        partial(python_between_kernels, 0),
        "device-idle",
        turns="written",
    ),
    Twin(
        "losses without graphs",
        remembers(graphs=True),
        remembers(graphs=False),
        "memory-growth",
        options={"model": KEPT, "profile_memory": True},
        beside=forgotten,
        clean=remembers(graphs=False, waits=False),
        **WINDOWS,
    ),
)
#: With as many steps as the default preset records.
PROGRAMS = tuple(replace(program, steps=5) for program in _PROGRAMS)
