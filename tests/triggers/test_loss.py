"""Losses on their way to the triggers, and the trigger for those that are no number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log

from instrument import Session
from instrument.record import loss_reader as arriving
from instrument.record.loss_reader import LossReader
from instrument.record.triggers import Step
from instrument.record.triggers.non_finite_loss import NonFiniteLoss

pytestmark = pytest.mark.usefixtures("inline_export")


def test_it_fires_when_the_loss_turns_bad_and_not_again_until_it_was_good() -> None:
    fires = NonFiniteLoss().begin(Path(), [].append).fires
    given = [None, 1.0, math.inf, math.nan, None, math.nan, 2.0, -math.inf]
    said = [fires(Step(number, 1, loss, number - 1)) for number, loss in enumerate(given)]
    assert said == [
        None, None, "the loss of step 1 is inf", None, None, None, None,
        "the loss of step 6 is -inf",
    ]  # fmt: skip


def test_a_run_whose_loss_turns_nan_records_what_comes_after(tmp_path: Path) -> None:
    options: dict[str, Any] = {"at_steps": [], "active": 2, "warmup": 1, "output_dir": tmp_path}
    weight = torch.ones(1, requires_grad=True)
    with Session(options, triggers=["non_finite_loss"]) as session:
        for number in range(10):
            loss = (weight * (math.nan if number >= 3 else number)).sum()
            session.step(loss=loss)
    (capture,) = session.captures
    assert capture.metadata["window"]["trigger_reason"] == "the loss of step 3 is nan"
    assert capture.steps.column("number") == [6, 7], "seen after step 4, warmed up for in step 5"


def test_a_loss_is_read_before_it_can_be_overwritten() -> None:
    losses, buffer = LossReader(), torch.tensor(1.5)
    losses.after_step(0, buffer)
    buffer.zero_()
    assert losses.after_step(1, None) == (1.5, 0)
    assert losses.after_step(2, None) == (None, None)


class Device:
    """A device whose copies end when a test says so; stands in for torch.cuda and its tensors."""

    def __init__(self) -> None:
        self.done = False
        self.recorded_on = ""
        self.synchronized = 0

    def Event(self) -> Device:  # noqa: N802
        return self

    def current_stream(self, device: torch.device) -> str:
        return f"the stream of {device}"

    def record(self, stream: str = "the stream of the current device") -> None:
        self.done, self.recorded_on = False, stream

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.synchronized += 1


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device."""

    is_cpu = False  # type: ignore[assignment]
    device = torch.device("cuda:1")  # type: ignore[assignment]


def test_device_loss_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, real_empty = Device(), torch.empty
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(
        arriving.torch, "empty", lambda *size, pin_memory, **options: real_empty(*size, **options)
    )  # pinning needs a device
    losses = LossReader()

    def on_device(value: float) -> torch.Tensor:
        return torch.tensor(value).as_subclass(OnDevice)

    assert losses.after_step(0, on_device(7.0)) == (None, None)
    assert device.recorded_on == "the stream of cuda:1"
    assert losses.after_step(1, on_device(8.0)) == (None, None), (
        "not there yet, and 8.0 is left out"
    )
    device.done = True
    assert losses.after_step(2, on_device(9.0)) == (7.0, 0)
    device.done = True
    assert losses.after_step(3, None) == (9.0, 2)
    assert losses.after_step(4, None) == (None, None)
    assert device.synchronized == 0


def test_a_loss_that_is_no_number_is_told_once(log: Log) -> None:
    losses = LossReader()
    for number in range(3):
        assert losses.after_step(number, torch.ones(3)) == (None, None)
    (warning,) = log.at("WARNING")
    assert warning.startswith("session.step was given a loss that is not a single number")
