"""The same scenarios for every trainer, against the real library."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from torch import nn
from torch.optim import optimizer as optimizers
from trainers import PYTORCH_LIGHTNING, TRAINERS, VALIDATION, Job, Trainer
from waits import end_of_thread, until

import instrument
from instrument import Capture, Session
from instrument.annotate import backends
from instrument.base.errors import ConfigError

pytestmark = [
    pytest.mark.usefixtures("inline_export"),
    # what trainers say about workers, loggers and each other's versions is not about us
    pytest.mark.filterwarnings("ignore::Warning:lightning.*"),
    pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


# the same code drives both names of Lightning
SECOND_NAME = pytest.param(PYTORCH_LIGHTNING, marks=pytest.mark.nightly)


@pytest.fixture(
    params=[*(each for each in TRAINERS if each is not PYTORCH_LIGHTNING), SECOND_NAME],
    ids=attrgetter("name"),
)
def trainer(request: pytest.FixtureRequest) -> Trainer:
    if request.param.missing:
        pytest.skip(request.param.missing)
    return request.param


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder for captures; the trainer's own is beside it."""
    return tmp_path / "profile"


def batches(capture: Capture) -> list[int]:
    """The training batches that ran within a capture, by the ranges of the model that they went through."""
    rows = capture.ranges_by_name.where("name like 'batch %'")
    numbers = {int(row.name.removeprefix("batch ")): row.calls for row in rows}
    assert set(numbers.values()) <= {1}, "no batch runs twice"
    return sorted(number for number in numbers if number < VALIDATION)


@pytest.mark.parametrize("trainer", TRAINERS, ids=attrgetter("name"), indirect=True)
def test_windows_hold_exactly_their_steps(trainer: Trainer, tmp_path: Path, out: Path) -> None:
    adapter = trainer.make({"wait": 2, "warmup": 1, "active": 2, "repeat": 2}, output_dir=out)
    trainer.fit(adapter, Job(tmp_path, validate_every=4))
    captures = trainer.session(adapter).captures
    assert [batches(capture) for capture in captures] == [[3, 4], [8, 9]]
    assert [capture.steps.column("number") for capture in captures] == [[3, 4], [8, 9]]
    assert not any(capture.metadata["window"]["truncated"] for capture in captures)
    assert trainer.session(adapter).step_number == 12


def test_windows_without_end_are_all_delivered(trainer: Trainer, tmp_path: Path, out: Path) -> None:
    adapter = trainer.make(wait=1, active=1, repeat=0, output_dir=out)
    trainer.fit(adapter, Job(tmp_path, steps=10))
    found = sorted(out.glob("steps_*"))
    assert [batches(Capture.load(folder)) for folder in found] == [[1], [3], [5], [7], [9]]
    assert [capture.name for capture in trainer.session(adapter).captures] == [
        folder.name for folder in found
    ]


def installed(job: Job) -> dict[str, Any]:
    """What somebody has put on the process, a job's optimizers and its model."""
    of_steps = [
        (len(each._optimizer_step_pre_hooks), len(each._optimizer_step_post_hooks))
        for each in job.optimizers
    ]
    return {
        "module hooks": [
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in job.model.modules()
        ],
        "calls of modules": nn.Module.__call__,
        "forward": ["forward" in vars(module) for module in job.model.modules()],
        # the first tells of all threads together, the second of this one
        "profiler": torch.autograd.profiler._is_profiler_enabled
        or torch.autograd._profiler_enabled(),
        "annotations": backends.armed,
        "signals": [
            signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
        ],
        "threads": {thread.name for thread in threading.enumerate()},
        "optimizer hooks": len(optimizers._global_optimizer_pre_hooks)
        + len(optimizers._global_optimizer_post_hooks),
        "hooks of an optimizer": sum(map(sum, of_steps)),
        "children": children(),
    }


def children() -> list[str]:
    """The processes that this one has started and that are still there, where the system tells them."""
    listed = Path("/proc/self/task").glob("*/children")
    return [each for file in listed for each in file.read_text().split()]


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is registered to run when the interpreter ends, from now on; `atexit` itself does not tell."""
    registered: list[Any] = []
    register, unregister = atexit.register, atexit.unregister

    def note(function: Any, *args: Any, **kwargs: Any) -> Any:
        registered.append(function)
        return register(function, *args, **kwargs)

    def forget(function: Any) -> None:
        registered[:] = [each for each in registered if each != function]
        unregister(function)

    monkeypatch.setattr(atexit, "register", note)
    monkeypatch.setattr(atexit, "unregister", forget)
    return registered


@cache
def fit_without_us(trainer: Trainer, folder: Path) -> None:
    """Let the trainer leave what it leaves by itself."""
    trainer.fit(trainer.make(None), Job(folder))


@pytest.mark.parametrize("raises_at", [None, 4])
def test_nothing_is_left_installed(
    trainer: Trainer,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    out: Path,
    at_exit: list[Any],
    raises_at: int | None,
    log: Log,
) -> None:
    if raises_at:
        log.expect("exception ZeroDivisionError")
    fit_without_us(trainer, tmp_path_factory.getbasetemp())
    job = Job(tmp_path, raises_at=raises_at)

    def present() -> dict[str, Any]:
        return installed(job) | {"atexit": list(at_exit)}

    before = present()
    during: list[dict[str, Any]] = []
    job.at_batch = lambda number: during.append(present()) if number == 3 else None
    # the exporter is a child, and has a thread, for one of them
    export = "process" if trainer.package is None else "inline"
    adapter = trainer.make(
        wait=1, active=4, export=export, triggers=["file", "signal"], output_dir=out
    )
    try:
        trainer.fit(adapter, job)
    except ZeroDivisionError:
        assert raises_at is not None
    until(lambda: children() == before["children"])  # the exporter ends by itself
    end_of_thread("instrument exporter")
    assert present() == before
    differs = {name for name in before if during[0][name] != before[name]}
    assert {
        "calls of modules", "profiler", "annotations", "signals", "atexit", "threads",
    } <= differs, "the test sees them"  # fmt: skip
    assert len(trainer.session(adapter).captures) == 1


def test_exception_is_unchanged(trainer: Trainer, tmp_path: Path, out: Path, log: Log) -> None:
    log.expect("exception ZeroDivisionError")
    job = Job(tmp_path, raises_at=5)
    adapter = trainer.make(wait=3, active=6, output_dir=out)
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.fit(adapter, job)
    assert raised.value is job.error
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    (capture,) = trainer.session(adapter).captures
    window = capture.metadata["window"]
    assert (window["first_step"], window["last_step"]) == (3, 4)
    assert (window["truncated"], window["reason"]) == (True, "exception ZeroDivisionError")
    assert batches(capture) == [3, 4, 5], "what ran until then, in part of a step too"


class Calls:
    """Counts the calls into this package, from batch to batch; ranges that the model marks are the user's own."""

    home = Path(instrument.__file__).parent
    marks = frozenset(
        {
            "annotate/profiled.py",
            "annotate/wrapper.py",
            "annotate/backends.py",
            "base/range_names.py",
        }
    )

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.seen = first, last, []

    def __call__(self, number: int) -> None:
        if number == self.first:
            sys.setprofile(self._note)
        elif number == self.last:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or self.home not in file.parents:
            return
        if file.relative_to(self.home).as_posix() not in self.marks:
            self.seen.append(f"{file.name}:{frame.f_code.co_name}")


@pytest.mark.parametrize("config", [None, "disabled", {"enabled": False}])
def test_a_session_is_off_in_three_ways(config: Any) -> None:
    assert not Session(config).config.enabled


def test_off_is_off(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job, calls = Job(tmp_path), Calls(2, 7)
    before = installed(job)
    during: list[dict[str, Any]] = []

    def at_batch(number: int) -> None:
        calls(number)
        if number == 8:
            during.append(installed(job))

    job.at_batch = at_batch
    adapter = trainer.make({"enabled": False, "active": 2})
    trainer.fit(adapter, job)
    ours = {
        "module hooks", "calls of modules", "forward", "profiler", "annotations", "optimizer hooks",
        "hooks of an optimizer",
    }  # fmt: skip
    assert {name: during[0][name] for name in ours} == {name: before[name] for name in ours}
    assert not [name for name in during[0]["threads"] if name.startswith("instrument")]
    assert len(calls.seen) <= 5 * trainer.calls_when_off, calls.seen
    assert trainer.session(adapter).captures == []
    assert not (tmp_path / "profile").exists()


def test_second_fit_is_recorded_alike(trainer: Trainer, tmp_path: Path, out: Path) -> None:
    adapter = trainer.make(wait=1, active=2, output_dir=out)
    for _ in range(2):
        trainer.fit(adapter, Job(tmp_path, steps=5))
    assert [batches(capture) for capture in trainer.session(adapter).captures] == [[1, 2], [1, 2]]
    assert len(list(out.glob("steps_*"))) == 2


def test_too_few_steps_are_a_warning(trainer: Trainer, tmp_path: Path, out: Path, log: Log) -> None:
    adapter = trainer.make(wait=50, active=1, output_dir=out)
    trainer.fit(adapter, Job(tmp_path, steps=3))
    assert trainer.session(adapter).captures == []
    assert [line for line in log.at("WARNING") if "profiler.wait" in line]


def test_an_unknown_argument_is_refused_in_a_sentence(trainer: Trainer) -> None:
    with pytest.raises(
        ConfigError, match=r"^profiler\.actve is not an option; did you mean profiler\.active\?$"
    ):
        trainer.make(actve=3)
