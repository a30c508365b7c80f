"""What `Work` observes of a program, and that it changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from instrument.record.work import Work

STEPS = 6
INPUTS, LABELS = torch.randn(STEPS, 8, 16), torch.randint(0, 4, (STEPS, 8))
LINEAR_FLOPS = 2 * 8 * (16 * 32 + 32 * 4)
# without the gradients of the inputs
STEP_FLOPS = 2 * LINEAR_FLOPS + 2 * 8 * 32 * 4
PARAMETERS = 16 * 32 + 32 + 32 * 4 + 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(net: Any, loss: Callable[[Any, Any], torch.Tensor], every: int = 1) -> list[float]:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for number, (x, y) in enumerate(zip(INPUTS, LABELS), 1):
        value = loss(x, y)
        value.backward()
        losses.append(value.item())
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [sum(losses[at : at + every]) for at in range(0, STEPS, every)]


def plain() -> list[float]:
    net = model()
    return train(net, lambda x, y: F.cross_entropy(net(x), y))


def accumulated() -> list[float]:
    net = model()
    return train(net, lambda x, y: F.cross_entropy(net(x), y), every=2)


def checkpointed() -> list[float]:
    net = model()
    return train(net, lambda x, y: F.cross_entropy(checkpoint(net, x, use_reentrant=False), y))


def reentrant() -> list[float]:
    net = model()
    return train(
        net,
        lambda x, y: F.cross_entropy(
            checkpoint(net, x.clone().requires_grad_(), use_reentrant=True), y
        ),
    )


def autocast() -> list[float]:
    net = model()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(net(x), y)

    return train(net, loss)


def manual() -> list[float]:
    net, losses = model(), []
    for x, y in zip(INPUTS, LABELS):
        loss = F.cross_entropy(net(x), y)
        net.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for each in net.parameters():
                each.sub_(0.1 * each.grad)  # type: ignore[operator]
    return losses


def closure() -> list[float]:
    net, losses = model(), []
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for x, y in zip(INPUTS, LABELS):
        found = list[float]()

        def again(x: Any = x, y: Any = y, found: list[float] = found) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            found.append(loss.item())
            return loss

        optimizer.step(again)
        losses.append(sum(found))
    return losses


def adversarial() -> list[float]:
    maker, judge, losses = model(), nn.Linear(4, 1), []
    optimizers = [torch.optim.Adam(each.parameters()) for each in (judge, maker)]
    for x in INPUTS:
        for sign, optimizer in zip((1, -1), optimizers):
            optimizer.zero_grad()
            loss = sign * judge(maker(x)).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def observed(program: Callable[[], object]) -> tuple[dict[str, Any], list[float | None]]:
    """What is observed of a program."""
    work = Work()
    work.begin()
    try:
        program()
    finally:
        work.end()
    facts = work.facts()
    assert facts["failure"] is None
    assert json.loads(json.dumps(facts)) == facts
    return facts, [None if each is None else float.fromhex(each) for each in work.losses]


@pytest.mark.parametrize(
    "program", [plain, accumulated, checkpointed, reentrant, autocast, manual, closure, adversarial]
)
def test_same_losses_are_seen(program: Callable[[], list[float]]) -> None:
    torch.manual_seed(1)
    alone = program()
    before = nn.Module.__call__, torch.autograd.backward, _BaseDataLoaderIter.__next__
    torch.manual_seed(1)
    together: list[float] = []
    facts, losses = observed(lambda: together.extend(program()))
    assert together == alone
    assert losses == pytest.approx(alone, rel=1e-12)
    after = nn.Module.__call__, torch.autograd.backward, _BaseDataLoaderIter.__next__
    assert after == before
    assert not torch._C._len_torch_dispatch_stack()
    judge = 5 if program is adversarial else 0  # another step changes it
    assert facts["parameters"]["trained"] == PARAMETERS + judge
    assert facts["parameters"]["changed"] == facts["parameters"]["with_gradients"] == PARAMETERS
    assert facts["idle_steps"] == 0
    assert facts["counted_steps"] == 2 or program is accumulated  # only three steps


def test_steps_samples_and_operations_are_counted() -> None:
    facts, _ = observed(plain)
    assert facts["steps"] == facts["backwards"] == facts["training"]["calls"] == STEPS
    assert facts["training"]["samples"] == facts["training"]["distinct"] == INPUTS.shape[0] * 8
    assert facts["training"]["shapes"] == ["8×16"]
    assert facts["training"]["tokens"] is facts["evaluation"] is facts["batches"] is None
    assert facts["parameters"] == dict.fromkeys(
        ("trained", "with_gradients", "changed"), PARAMETERS
    )
    assert facts["flops"] == STEP_FLOPS
    assert facts["precision"] == {"float32": 1}
    assert facts["operators"]["addmm"] == 2
    norms = [float.fromhex(each) for each in facts["gradient_norms"]]
    net = model()
    F.cross_entropy(net(INPUTS[0]), LABELS[0]).backward()
    norm = torch.cat([each.grad.flatten() for each in net.parameters()]).norm().item()  # type: ignore[union-attr]
    assert norms[0] == pytest.approx(norm, rel=1e-6)
    assert len(norms) == STEPS


def test_all_samples_are_counted_also_while_steps_are_timed() -> None:
    work, net = Work(), model()
    work.begin()
    for number, inputs in enumerate(INPUTS):
        work.only_losses = number >= 2
        net(inputs).sum().backward()
    work.end()
    training = work.facts()["training"]
    assert training["calls"] * 8 == training["samples"] == STEPS * 8
    assert training["rows"] == 2 * 8


def test_batches_tokens_and_evaluation_are_counted() -> None:
    ids = torch.randint(0, 50, (12, 5))
    loader = DataLoader(TensorDataset(ids), batch_size=4)
    net = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(40, 1))

    def program() -> None:
        optimizer = torch.optim.Adam(net.parameters())
        for (batch,) in loader:
            net(batch).mean().backward()
            optimizer.step()
        with torch.no_grad():
            net(ids)

    facts, _ = observed(program)
    assert facts["batches"] == 3
    assert facts["loaders"] == [{"length": 3, "dataset": 12, "batches": 3}]
    assert facts["training"]["tokens"] == facts["evaluation"]["tokens"] == ids.numel()
    assert facts["evaluation"]["samples"] == 12
    # the order of the samples does not matter
    assert facts["training"]["digest"] == facts["evaluation"]["digest"]


def test_inference_is_known_by_its_outputs() -> None:
    net = model().eval()

    def program(net: nn.Module = net) -> None:
        with torch.inference_mode():
            for x in INPUTS:
                net(x)

    facts, outputs = observed(program)
    assert (facts["steps"], facts["backwards"]) == (None, 0)
    assert {*facts["parameters"].values()} == {None}
    assert facts["flops"] == LINEAR_FLOPS
    assert len(outputs) == STEPS
    negative = copy.deepcopy(net)
    for each in negative[-1].parameters():
        each.data.neg_()
    assert observed(lambda: program(negative))[1] != outputs


def test_a_step_that_changes_nothing_is_seen() -> None:
    net = model()

    def program() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for x in INPUTS:
            net(x).sum().backward()
            optimizer.step()

    facts, _ = observed(program)
    assert facts["parameters"]["changed"] == 0
    assert facts["idle_steps"] == facts["checked_steps"] > 0
    assert facts["steps"] == STEPS


def test_a_script_without_a_step_takes_none() -> None:
    net = model()
    facts, _ = observed(lambda: [net(x).sum().backward() for x in INPUTS])
    assert facts["steps"] == 0


def test_an_error_of_ours_does_not_reach_the_script() -> None:
    work = Work()
    work.begin()
    work._end_step = None  # type: ignore[assignment, method-assign]
    try:
        losses = plain()
    finally:
        work.end()
    assert len(losses) == STEPS
    assert "NoneType" in (work.failure or "")


def test_a_part_of_a_step_is_not_counted() -> None:
    net = model()

    def program() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in INPUTS[:2]:
            net(x).sum().backward()
            optimizer.step()
        net(INPUTS[2])

    facts, _ = observed(program)
    assert (facts["counted_steps"], facts["flops"]) == (1, STEP_FLOPS)


def test_models_that_follow_one_another_are_not_added_up() -> None:
    kept = list[object]()

    def program() -> None:
        for _ in range(3):
            net = model()
            kept.append(net)  # as garbage in a cycle that nobody has collected yet
            train(net, lambda x, y, net=net: F.cross_entropy(net(x), y))  # type: ignore[misc]

    facts, _ = observed(program)
    assert {*facts["parameters"].values()} == {PARAMETERS}


# torch itself warns
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize("part", ["loss", "step"])
def test_what_a_compiled_function_does_is_not_seen(part: str) -> None:
    net, losses = model(), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parts: dict[str, Any] = {
        "loss": lambda x, y: F.cross_entropy(net(x), y),
        "step": lambda: optimizer.step(),
    }
    parts[part] = torch.compile(parts[part], backend="aot_eager")

    def program() -> None:
        for x, y in zip(INPUTS, LABELS):
            optimizer.zero_grad()
            loss = parts["loss"](x, y)
            loss.backward()
            losses.append(loss.item())
            parts["step"]()

    facts, seen = observed(program)
    assert seen == losses
    assert facts["compiles"]
    assert facts["training"]["is_whole"] is (part == "step")
    assert facts["steps"] == (STEPS if part == "loss" else None)
    # but in the counted steps, compiled functions run eager
    assert facts["flops"] == STEP_FLOPS
