"""Cheats are no speedups: what differs in the work of two programs, and what may differ."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, TensorDataset

from instrument.read.compare.work import Work as WorkFile
from instrument.read.compare.work import compare_numbers, compare_values, differences
from instrument.record.work import Work

WORDS, WIDTH, LENGTH, SAMPLES, BATCH = 50, 16, 12, 48, 4


@dataclass(frozen=True)
class Program:
    """A small language model and how it is trained."""

    layers: int = 2
    length: int = LENGTH
    samples: int = SAMPLES
    keep: Callable[[int], bool] = lambda number: True
    repeats: bool = False
    lr: float = 1e-2
    decay: float = 0.0
    steps: bool = True
    clears: bool = False
    caches: bool = False
    evaluates: bool = True
    dtype: torch.dtype = torch.float32
    sleep_s: float = 0.0
    recomputes: bool = False
    fused_attention: bool = False
    foreach: bool = False
    compiled: bool = False
    workers: int = 0
    seeded: bool = True

    def __call__(self) -> None:
        torch.manual_seed(0) if self.seeded else torch.seed()
        data = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1))
        dataset = Subset(TensorDataset(data), range(self.samples))
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=self.workers)
        held_out = DataLoader(TensorDataset(torch.randint(0, WORDS, (16, LENGTH + 1))), BATCH)
        net: Any = Net(self)
        optimizer = torch.optim.AdamW(
            net.parameters(), lr=self.lr, foreach=self.foreach, weight_decay=self.decay
        )
        call = torch.compile(net, backend="aot_eager") if self.compiled else net
        for number, (ids,) in enumerate(self.batches(loader)):
            ids = ids[:, : self.length + 1]
            if not self.keep(number):
                continue
            time.sleep(self.sleep_s)
            optimizer.zero_grad()
            with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
                out = call(ids[:, :-1])
                loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            if self.clears:
                optimizer.zero_grad(set_to_none=False)
            if self.steps:
                optimizer.step()
        if self.evaluates:
            net.eval()
            with torch.no_grad():
                for (ids,) in held_out:
                    net(ids[:, :-1])

    def batches(self, loader: Any) -> Iterator[Any]:
        for _ in range(-(-SAMPLES // self.samples)):
            first = None
            for batch in loader:
                first = first or batch
                yield first if self.repeats else batch


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(program.fused_attention) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.program, self.cached = program, None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.program.caches and self.cached is not None and self.training:
            x = self.cached
        else:
            x = self.embed(ids)
            for layer in self.layers[: self.program.layers]:
                x = (
                    checkpoint(layer, x, use_reentrant=False)
                    if self.program.recomputes
                    else layer(x)
                )
            self.cached = x.detach()
        logits: torch.Tensor = self.head(x)
        return logits


class Layer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.mix(x).chunk(3, -1))
        if self.fused:
            found = F.scaled_dot_product_attention(q, k, v)
        else:
            found = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v
        y: torch.Tensor = x + self.out(found.transpose(1, 2).flatten(2))
        return y


PLAIN = Program(sleep_s=1e-4)
CHEATS = {
    "skipped batches": (Program(keep=lambda number: number % 2 == 0), "steps"),
    "smaller dataset": (Program(samples=SAMPLES // 2), "dataset"),
    "fewer layers": (Program(layers=1), "operations"),
    "lower precision": (Program(dtype=torch.bfloat16), "precision"),
    "one batch again and again": (Program(repeats=True), "training-distinct"),
    "no evaluation": (Program(evaluates=False), "evaluation-samples"),
    "shorter sequence": (Program(length=LENGTH // 2), "training-tokens"),
    "no step": (Program(steps=False), "steps"),
    "learning rate zero": (Program(lr=0.0), "changed"),
    "gradients cleared": (Program(clears=True, decay=0.1), "gradients"),
    "cached result": (Program(caches=True), "operations"),
}
HONEST = {
    "no sleep": Program(),
    "fused attention": Program(fused_attention=True),
    "foreach": Program(foreach=True),
    "compiled": Program(compiled=True),
    "workers": Program(workers=1),
}


def observed(program: Callable[[], object]) -> WorkFile:
    work = Work()
    work.begin()
    try:
        program()
    finally:
        work.end()
    return msgspec.json.decode(json.dumps(work.content()), type=WorkFile)


@pytest.fixture(scope="module")
def plain() -> WorkFile:
    return observed(PLAIN)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_refused(name: str, plain: WorkFile) -> None:
    program, reason = CHEATS[name]
    b = observed(program)
    numbers = compare_numbers(plain, b, plain)
    found = differences(plain.facts, b.facts, numbers, "same")
    refused = [each.what for each in found if each.refuses]
    assert reason in refused, [each.text for each in found]
    assert found[0].refuses


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_change_is_not_refused(name: str, plain: WorkFile) -> None:
    b = observed(HONEST[name])
    numbers = compare_numbers(plain, b, plain)
    found = differences(plain.facts, b.facts, numbers, "same")
    assert not [each.text for each in found if each.refuses]
    assert numbers.equality in ("bit-equal", "equal within rounding")


def test_work_that_changes_no_loss_may_be_left_out(plain: WorkFile) -> None:
    a = observed(Program(recomputes=True))
    numbers = compare_numbers(a, plain, a)
    assert numbers.equality == "bit-equal"
    found = differences(a.facts, plain.facts, numbers, "same")
    assert [each.what for each in found if each.refuses] == []
    (fewer,) = [each.text for each in found if each.what == "operations"]
    assert fewer.endswith("and the losses are equal.")


def test_a_program_whose_losses_differ_from_run_to_run(plain: WorkFile) -> None:
    a, b, again = (observed(Program(seeded=False)) for _ in range(3))
    numbers = compare_numbers(a, b, again)
    assert numbers.equality == "unknown"
    assert numbers.why.startswith("A's own losses differ from run to run: ")
    assert [
        each.text for each in differences(a.facts, b.facts, numbers, "same") if each.refuses
    ] == []


def test_a_declared_precision_is_not_refused(plain: WorkFile) -> None:
    b = observed(Program(dtype=torch.bfloat16))
    numbers = compare_numbers(plain, b, plain)
    assert numbers.equality == "different"
    found = differences(plain.facts, b.facts, numbers, "precision")
    assert [each.text for each in found if each.refuses] == []
    assert "precision" in [each.what for each in found]


def test_inference_that_reuses_a_result() -> None:
    inputs = torch.randn(8, 4, 16)[:1].expand(8, 4, 16)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4)).eval()
    made = list[torch.Tensor]()

    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made.append(made[0] if made else self.net(x))
            return made[0]

    def infer(model: nn.Module) -> None:
        with torch.no_grad():
            for x in inputs:
                model(x)

    a, b = observed(lambda: infer(net)), observed(lambda: infer(Reusing()))
    numbers = compare_numbers(a, b, a)
    assert numbers.equality == "bit-equal"
    refused = [each for each in differences(a.facts, b.facts, numbers, "same") if each.refuses]
    assert [each.what for each in refused] == ["operations"]
    assert "reuses results" in refused[0].text


def values(*numbers: float) -> list[str | None]:
    return [float(each).hex() for each in numbers]


@pytest.mark.parametrize(
    ("a", "b", "equality"),
    [
        (values(1, 2), values(1, 2), "bit-equal"),
        (values(1, 2), values(1, 2 + 1e-6), "equal within rounding"),
        (values(1, 2), values(1 + 1e-5, 2), "different"),  # the first step has the same weights
        (values(*[1] * 30), values(*[1] * 20, *[1.0001] * 10), "equal within rounding"),
        (values(*[1] * 30), values(*[1.0001] * 30), "different"),
        # training amplifies a difference until single losses say nothing
        (values(*[1] * 60), values(*[1] * 59, 1.5), "equal within rounding"),
        (values(*[1] * 60), values(*[1] * 40, *[1.5] * 20), "different"),
        (values(*[1] * 60), values(*[1] * 59, float("nan")), "different"),
        (values(*[1] * 60), values(*[1] * 59, float("inf")), "different"),
        (values(1, 2), values(1), "different"),
        (values(1, 2), values(1, float("nan")), "different"),
        (values(float("nan"), 2), values(float("nan"), 2), "bit-equal"),
        (values(1, 2), [values(1)[0], None], "different"),
        (values(1, 1e-9), values(1, -1e-9), "equal within rounding"),  # beside losses of one
        ([], [], "unknown"),
        ([None], [None], "unknown"),
        (["x"], values(1), "unknown"),
    ],
)
def test_losses(a: list[str | None], b: list[str | None], equality: str) -> None:
    assert compare_values(a, b, bits=23).equality == equality


def test_inference_amplifies_nothing() -> None:
    a, b = values(*[1] * 60), values(*[1] * 59, 1.00001)
    assert compare_values(a, b, 23).equality == "equal within rounding"
    assert compare_values(a, b, 23, "call", None).equality == "different"
