"""What the suite for all trainers does not ask: evaluation, accumulation, checkpoints and losses of Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log

pytest.importorskip(
    "transformers", reason="the extra torch-instrument[transformers] is not installed"
)

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from instrument import Session
from instrument.annotate import backends
from instrument.integrations.transformers import ProfilerCallback, attach
from instrument.read.capture import Capture

pytestmark = pytest.mark.usefixtures("inline_export")

EXAMPLE = {"input_ids": torch.arange(8), "labels": torch.arange(8)}


def tiny(
    folder: Path, *callbacks: Any, kind: type[Trainer] = Trainer, data: Any = None, **options: Any
) -> Trainer:
    """A trainer of twelve steps: three epochs of eight batches, two to a step."""
    given = {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "save_strategy": "no"}
    return kind(
        model=GPT2LMHeadModel(
            GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=16, n_positions=8)
        ),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            dataloader_pin_memory=False,
            **given | options,
        ),
        train_dataset=[EXAMPLE] * 16 if data is None else data,
        eval_dataset=[EXAMPLE] * 6,
        callbacks=list(callbacks),
    )


def numbers(session: Session) -> dict[str, list[int]]:
    return {capture.name: capture.steps.column("number") for capture in session.captures}


def calls(capture: Capture) -> dict[str, int]:
    return {row.path: row.calls for row in capture.ranges}


def test_the_callback_alone_records_steps_of_the_optimizer(tmp_path: Path) -> None:
    callback = ProfilerCallback(wait=2, active=3, output_dir=tmp_path / "profile")
    trainer = tiny(tmp_path, callback)
    trainer.train()
    trainer.evaluate()
    (capture,) = callback.session.captures
    assert capture.steps.column("number") == [2, 3, 4]
    assert callback.session.step_number == trainer.state.global_step == 12
    counted = calls(capture)
    assert counted["optimizer"] == 3
    assert counted["GPT2LMHeadModel"] == 6, "two batches to a step"
    assert "forward" not in counted


def test_a_step_is_one_of_the_optimizer_with_all_its_batches(tmp_path: Path) -> None:
    trainer = tiny(tmp_path)
    session = attach(trainer, wait=2, active=3, output_dir=tmp_path / "profile")
    trainer.train()
    (capture,) = session.captures
    assert capture.steps.column("number") == [2, 3, 4]
    (loader,) = capture.metadata["environment"]["loaders"]
    assert (loader["phase"], loader["workers"]) == ("train", 0)
    assert loader["batch_size"] == trainer.args.per_device_train_batch_size
    assert session.step_number == trainer.state.global_step == 12
    counted = calls(capture)
    expected = {"data": 3, "forward": 6, "backward": 6, "optimizer": 3}
    assert {name: counted[name] for name in expected} == expected
    assert counted["forward/GPT2LMHeadModel/transformer/transformer.h.0"] == 6
    (optimizer,) = capture.ranges.where(path="optimizer")
    (torchs_own,) = capture.ranges.where(path="optimizer/Optimizer.step#AdamW.step")
    assert torchs_own.calls == 3
    assert optimizer.cpu_ns > torchs_own.cpu_ns


def test_evaluation_is_a_phase_per_dataset(tmp_path: Path, log: Log) -> None:
    log.expect("the phase validation ended")
    trainer = tiny(tmp_path, eval_strategy="epoch", eval_on_start=True)
    options = {"at_steps": [4], "active": 4, "phases": ["train", "validation"]}
    session = attach(trainer, options, output_dir=tmp_path / "profile")
    trainer.eval_dataset = {"a": [EXAMPLE] * 6, "b": [EXAMPLE] * 4}
    trainer.train()
    assert numbers(session) == {
        # the second of two of the dataset b, at the start
        "validation_steps_000004-000004_rank0": [4],
        "steps_000004-000007_rank0": [4, 5, 6, 7],
    }
    train = session.captures[1]
    assert calls(train)["validation"] == 2
    assert calls(train)["validation/forward"] == 5


def test_evaluation_or_prediction_alone(tmp_path: Path, log: Log) -> None:
    trainer = tiny(tmp_path)
    session = attach(trainer, active=2, phases=["predict"], output_dir=tmp_path / "profile")
    trainer.evaluate()
    assert log.at("INFO") == []
    metrics = trainer.predict([EXAMPLE] * 6).metrics
    assert "test_loss" in metrics
    assert numbers(session) == {"predict_steps_000000-000001_rank0": [0, 1]}
    assert calls(session.captures[0])["GPT2LMHeadModel/transformer/transformer.h.0"] == 2
    assert not session.running
    assert log.at("WARNING") == []


def test_a_resumed_run_goes_on_with_the_steps_of_its_checkpoint(tmp_path: Path, log: Log) -> None:
    log.expect("The run ends with step")
    options = {"save_strategy": "steps", "save_steps": 6, "save_only_model": False}
    trainer = tiny(tmp_path, max_steps=6, **options)
    session = attach(trainer, at_steps=[1, 7], active=2, output_dir=tmp_path / "profile")
    trainer.train()
    assert [*numbers(session).values()] == [[1, 2]]
    trainer.args.max_steps = 12
    # at the very number with which the run before has ended
    trainer.train(resume_from_checkpoint=True)
    assert [*numbers(session).values()] == [[1, 2], [7, 8]]
    assert session.step_number == trainer.state.global_step == 12


def test_auto_find_batch_size_records_anew(tmp_path: Path, log: Log) -> None:
    log.expect("the run ended")

    class NotEnough(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self._train_batch_size == 2 and self.state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(*args, **kwargs)

    trainer = tiny(tmp_path, kind=NotEnough, auto_find_batch_size=True)
    session = attach(trainer, active=4, output_dir=tmp_path / "profile")
    trainer.train()
    first, second = session.captures
    assert (first.steps.column("number"), second.steps.column("number")) == ([0, 1], [0, 1, 2, 3])
    assert first.metadata["window"]["truncated"]
    assert not second.metadata["window"]["truncated"]


class Fails(TrainerCallback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self.fail)

    def fail(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step >= 3:
            raise ZeroDivisionError("mine")


@pytest.mark.parametrize("event", ["on_optimizer_step", "on_prediction_step"])
def test_exception_of_another_callback(tmp_path: Path, event: str, log: Log) -> None:
    log.expect("exception ZeroDivisionError")
    trainer = tiny(tmp_path, Fails(event), eval_strategy="steps", eval_steps=3, logging_steps=3)
    session = attach(trainer, active=12, output_dir=tmp_path / "profile")
    with pytest.raises(ZeroDivisionError, match=r"^mine$"):
        trainer.train()
    (capture,) = session.captures
    window = capture.metadata["window"]
    assert (window["last_step"], window["truncated"]) == (2, True)
    assert window["reason"] == "exception ZeroDivisionError"
    assert not {"training_step", "get_batch_samples", "compute_loss"} & set(vars(trainer))
    assert "backward" not in vars(trainer.accelerator)
    assert not any(module._forward_hooks for module in trainer.model.modules())
    assert not backends.armed


def test_a_method_that_a_user_has_put_on_the_trainer_is_called_and_stays(tmp_path: Path) -> None:
    trainer = tiny(tmp_path, max_steps=2)
    attach(trainer, active=1, output_dir=tmp_path / "profile")
    given, called = trainer.compute_loss, []

    def mine(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return given(*args, **kwargs)

    trainer.compute_loss = mine
    trainer.train()
    assert len(called) == 4
    assert trainer.compute_loss is mine


def test_nan_loss_reaches_its_trigger(tmp_path: Path) -> None:
    class Explodes(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (
                float("nan") if self.state.global_step == 5 else 1
            )

    trainer = tiny(tmp_path, kind=Explodes)
    options = {"active": 2, "triggers": ["non_finite_loss"], "at_steps": []}
    session = attach(trainer, options, output_dir=tmp_path / "profile")
    trainer.train()
    (capture,) = session.captures
    assert capture.metadata["window"]["trigger"] == "non_finite_loss"
    assert "step 5" in capture.metadata["window"]["trigger_reason"]


def test_dataset_without_length_and_early_stop(tmp_path: Path, log: Log) -> None:
    log.expect("the run ended")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return iter([EXAMPLE] * 10)

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 6

    trainer = tiny(tmp_path, Stops(), data=Stream(), max_steps=9)
    session = attach(trainer, at_steps=[1, 5], active=2, output_dir=tmp_path / "profile")
    trainer.train()
    assert list(numbers(session).values()) == [[1, 2], [5]]
    assert session.captures[1].metadata["window"]["reason"] == "the run ended"


def test_a_copied_trainer_has_a_session_of_its_own(tmp_path: Path) -> None:
    trainer = tiny(tmp_path, max_steps=3)
    session = attach(trainer, active=2, output_dir=tmp_path / "profile")
    other = deepcopy(trainer)
    other.train()
    assert session.captures == []
    copied = other.callback_handler.callbacks[-1].session
    assert list(numbers(copied).values()) == [[0, 1]]
    trainer.train()
    assert list(numbers(session).values()) == [[0, 1]]


def test_nothing_of_the_class_is_replaced(tmp_path: Path) -> None:
    before = dict(vars(Trainer))
    for config in ({"active": 1}, None):
        trainer = tiny(tmp_path, max_steps=1)
        attach(trainer, config, output_dir=tmp_path / "profile")
        assert vars(Trainer) == before
        assert ("train" in vars(trainer)) == (config is not None)
