"""What the suite for all trainers does not ask: engines that are detached, interrupted, terminated, resumed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log

pytest.importorskip("ignite", reason="the extra torch-instrument[ignite] is not installed")

from ignite.engine import Engine, Events
from torch.utils.data import DataLoader

from instrument import Session
from instrument.annotate import backends
from instrument.base.errors import ConfigError
from instrument.integrations.ignite import attach, detach

pytestmark = pytest.mark.usefixtures("inline_export")


def engine(returned: Callable[[int], Any] = float) -> Engine:
    """One that works a little on each batch, a number."""

    def process(engine: Engine, batch: int) -> Any:
        torch.ones(4).sum()
        return returned(batch)

    return Engine(process)


def handlers(engine: Engine) -> int:
    return sum(len(each) for each in engine._event_handlers.values())


def numbers(session: Session) -> list[list[int]]:
    return [capture.steps.column("number") for capture in session.captures]


def test_the_settings_of_the_engines_loader_are_recorded(tmp_path: Path) -> None:
    trainer = engine(lambda _: 0.5)
    session = attach(trainer, wait=1, active=1, output_dir=tmp_path)
    trainer.run(DataLoader(range(8), batch_size=4), max_epochs=1)  # type: ignore[arg-type]
    (capture,) = session.captures
    (loader,) = capture.metadata["environment"]["loaders"]
    assert (loader["phase"], loader["workers"], loader["batch_size"]) == ("train", 0, 4)


def test_the_wait_for_a_batch_is_a_range_also_where_the_length_is_unknown(tmp_path: Path) -> None:
    def stream() -> Iterator[int]:
        yield from range(4)

    class Stream:
        def __iter__(self) -> Iterator[int]:
            return stream()

    trainer = engine()
    session = attach(trainer, wait=1, active=5, output_dir=tmp_path)
    trainer.run(Stream(), max_epochs=2)
    (capture,) = session.captures
    assert capture.steps.column("number") == [1, 2, 3, 4, 5]
    (data,) = capture.ranges.where(name="data")
    assert data.path == "data", "none within another"
    assert data.calls == 6, "one for each batch, and the one that found the first epoch over"


def test_detaching_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    trainer = engine()
    session = attach(trainer, active=1, output_dir=tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"^This engine has a session attached already: call detach\(engine\) first\.$",
    ):
        attach(trainer, active=1)
    detach(trainer)
    detach(trainer)
    assert "run" not in vars(trainer)
    assert handlers(trainer) == 0
    trainer.run(range(3))
    assert session.captures == []


def test_what_stood_in_the_place_of_run_is_called_and_comes_back(tmp_path: Path) -> None:
    trainer, called = engine(), []
    given = trainer.run

    def mine(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return given(*args, **kwargs)

    trainer.run = mine
    session = attach(trainer, active=1, output_dir=tmp_path)
    trainer.run(range(3))
    detach(trainer)
    assert trainer.run is mine
    assert (len(called), numbers(session)) == (1, [[0]])


def test_exception_handler_still_decides(tmp_path: Path, log: Log) -> None:
    log.expect("the run ended")

    def fails_at_3(batch: int) -> float:
        if batch == 3:
            raise ZeroDivisionError("mine")
        return 0.0

    trainer, handled = engine(fails_at_3), []
    session = attach(trainer, active=12, output_dir=tmp_path)
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda _, error: handled.append(error))
    trainer.run(range(6), max_epochs=2)  # each error ends an epoch, and none leaves the run
    assert [str(error) for error in handled] == ["mine", "mine"]
    assert numbers(session) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert session.captures[0].metadata["window"]["reason"] == "the run ended"
    assert not backends.armed


@pytest.mark.parametrize("terminate", ["terminate", "terminate_epoch"])
def test_a_terminated_run_ends_the_session(tmp_path: Path, terminate: str, log: Log) -> None:
    log.expect("The run ends with step", "the run ended")
    trainer = engine()
    session = attach(trainer, wait=1, active=20, output_dir=tmp_path)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=3), lambda: getattr(trainer, terminate)()
    )
    trainer.run(range(8), max_epochs=2)
    assert numbers(session) == [[1, 2] if terminate == "terminate" else [1, 2, 3, 4, 5]]
    assert not session.running


def test_resume_at_checkpoint_or_interruption(tmp_path: Path, log: Log) -> None:
    trainer = engine()
    session = attach(trainer, at_steps=[4, 9], active=2, output_dir=tmp_path)
    trainer.load_state_dict({"iteration": 4, "epoch_length": 6, "max_epochs": 2})
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=7), trainer.interrupt)
    trainer.run(range(6))
    assert (trainer.state.iteration, numbers(session)) == (7, [[4, 5]])
    assert not session.running
    trainer.run(range(6))
    assert (trainer.state.iteration, numbers(session)) == (12, [[4, 5], [9, 10]])
    assert session.step_number == 12
    assert log.at("WARNING") == []


def test_evaluator_is_a_phase_within_the_run(tmp_path: Path, log: Log) -> None:
    trainer, evaluator = engine(), engine()
    session = attach(trainer, active=2, phases=["validation"], output_dir=tmp_path)
    assert attach(evaluator, session, phase="validation") is session
    evaluator.run(range(3))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(range(3)))
    trainer.run(range(4), max_epochs=2)
    assert [capture.name for capture in session.captures] == [
        "validation_steps_000000-000001_rank0"
    ]
    assert session.step_number == 8
    assert log.at("WARNING") == []


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        (0.5, 0.5),
        (torch.tensor([[0.5]]), 0.5),
        ({"loss": 0.5, "accuracy": 1}, 0.5),
        ((0.5, 1), None),
        (torch.ones(2), None),
        (None, None),
    ],
)
def test_loss_reaches_triggers(tmp_path: Path, log: Log, output: Any, seen: float | None) -> None:
    losses = []

    class Remembers:
        def fires(self, step: Any) -> bool:
            losses.append(step.loss)
            return False

    trainer = engine(lambda batch: output)
    attach(trainer, at_steps=[], triggers={"mine": Remembers()}, output_dir=tmp_path)
    trainer.run(range(3))
    assert losses == [None, seen, seen]
    assert log.at("WARNING") == []


def test_options_beside_a_session_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be a mapping, a preset's name or a ProfilerConfig"):
        attach(engine(), Session(active=1), active=2)


@pytest.mark.parametrize("copied", [deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
def test_copied_engine_has_own_session(tmp_path: Path, copied: Callable[[Engine], Engine]) -> None:
    trainer = Engine(print)
    session = attach(trainer, wait=1, active=2, output_dir=tmp_path)
    other = copied(trainer)
    other.run(range(4))
    assert session.captures == []
    detach(other)
    assert handlers(other) == 0
    trainer.run(range(4))
    assert numbers(session) == [[1, 2]]
    assert len(list(tmp_path.glob("steps_*"))) == 2
