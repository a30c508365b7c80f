"""A session in Accelerate's loop and as the profiler of an Accelerator, and what its trackers get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the extra torch-instrument[accelerate] is not installed")

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn

from instrument import ConfigError, Session, profiled
from instrument.integrations.accelerate import Trackers, profile_handler

pytestmark = pytest.mark.usefixtures("inline_export")

CYCLES = {"wait": 1, "warmup": 1, "active": 2, "repeat": 3}


class Remembers(GeneralTracker):
    """A tracker that keeps what it is given."""

    name = "remembers"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int | None, dict[str, Any]]] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.logged.append((step, values))


def accelerated(**options: Any) -> tuple[Accelerator, nn.Module, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(24, 4), batch_size=2)  # type: ignore[arg-type]
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train_step(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: torch.Tensor
) -> torch.Tensor:
    with accelerator.accumulate(model):
        with profiled("forward"):
            loss = model(batch).mean()
        with profiled("backward"):
            accelerator.backward(loss)
        with profiled("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return loss


def test_a_step_is_a_batch_or_with_sync_gradients_an_update(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = accelerated(gradient_accumulation_steps=3)
    with Session(wait=1, active=2, output_dir=tmp_path / "updates") as updates:
        for batch in loader:
            loss = train_step(accelerator, model, optimizer, batch)
            if accelerator.sync_gradients:
                updates.step(loss=loss)
    with Session(wait=3, active=4, model=model, output_dir=tmp_path / "batches") as batches:
        for batch in batches.steps(loader):
            train_step(accelerator, model, optimizer, batch)
    assert (updates.step_number, batches.step_number) == (4, 12)
    for session, steps, ran, updated in ((updates, [1, 2], 6, 2), (batches, [3, 4, 5, 6], 4, 1)):
        (capture,) = session.captures
        assert capture.steps.column("number") == steps
        calls = {row.name: row.calls for row in capture.ranges}
        assert (calls["backward"], calls["optimizer"]) == (ran, ran)
        assert calls["Optimizer.step#SGD.step"] == updated
    assert [row.calls for row in batches.captures[0].ranges.where(path="data")] == [4]


def test_each_window_reaches_the_trackers(tmp_path: Path) -> None:
    tracker = Remembers()
    accelerator, model, optimizer, loader = accelerated(log_with=[tracker])
    accelerator.init_trackers("training")
    trackers = Trackers(accelerator)
    with Session(CYCLES, sinks=["table"], on_capture=trackers, output_dir=tmp_path) as session:
        for batch in session.steps(loader):
            loss = train_step(accelerator, model, optimizer, batch)
            accelerator.log({"loss": loss.item()})
    assert len([values for _, values in tracker.logged if set(values) == {"loss"}]) == 12
    windows = {step: values for step, values in tracker.logged if step is not None}
    assert sorted(windows) == [3, 7, 11]
    for capture in session.captures:
        values = windows[capture.metadata["window"]["last_step"]]
        (backward,) = capture.ranges.where(name="backward")
        assert values["profiler/ranges/backward/cpu_ms"] == pytest.approx(
            backward.cpu_ns_per_step / 1e6
        )
        assert values["profiler/window/steps"] == 2
        assert (capture.folder / "table.txt").exists()
        assert (
            "Trackers"
            in json.loads((capture.folder / "capture.json").read_text())["config"]["on_capture"]
        )


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_profiler_of_an_accelerator_is_a_session(tmp_path: Path, by_hand: bool) -> None:
    handler = profile_handler(wait=1, active=2, output_dir=tmp_path)
    accelerator, model, optimizer, loader = accelerated(kwargs_handlers=[handler])
    with accelerator.profile() as session:
        assert session.running
        for batch in loader if by_hand else session.steps(loader, every=3):
            train_step(accelerator, model, optimizer, batch)
            if by_hand:
                session.step()
    assert not session.running
    assert session.step_number == (12 if by_hand else 4)
    assert session.capture.steps.column("number") == [1, 2]
    with pytest.raises(ConfigError, match=r"did you mean profiler\.active"):
        profile_handler(actve=1)


def test_a_disabled_profiler_of_an_accelerator_records_nothing(tmp_path: Path) -> None:
    with Accelerator(cpu=True, kwargs_handlers=[profile_handler(None)]).profile() as session:
        session.step()
    assert session.captures == []
