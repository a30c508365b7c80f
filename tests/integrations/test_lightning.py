from __future__ import annotations

import copy
import gzip
import inspect
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="the extra torch-instrument[lightning] is not installed")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch.optim import optimizer as optimizers

from instrument import Capture, Session, profiled
from instrument.integrations.lightning import InstrumentProfiler, ProfilerCallback

pytestmark = [
    pytest.mark.usefixtures("inline_export"),
    pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning.*"),
    # advice on workers and loggers, not about us
    pytest.mark.filterwarnings("ignore::Warning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Tiny(LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.fails_at = fails_at

    @profiled("training_step")
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fails_at:
            raise ZeroDivisionError("mine")
        return self.layer(batch).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)


class Unmarked(Tiny):
    """One in which the user has marked nothing."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).mean()


def loader(batches: int = 10) -> DataLoader[Any]:
    return DataLoader(torch.ones(4 * batches, 8), batch_size=4)  # type: ignore[arg-type]


def a_trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    return Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )


def fit(folder: Path, callback: ProfilerCallback, module: LightningModule, **options: Any) -> None:
    a_trainer(folder, callback, **options).fit(module, loader(), loader())


def calls(capture: Capture) -> dict[str, int | None]:
    return {row.name: row.calls for row in capture.ranges_by_name}


def numbers(*captures: Capture) -> list[list[int]]:
    return [capture.steps.column("number") for capture in captures]


def test_validation_is_a_phase_with_its_own_count(tmp_path: Path) -> None:
    options = {"at_steps": [1, 12], "active": 2, "phases": ["train", "validation"]}
    callback = ProfilerCallback(options, output_dir=tmp_path / "profile")
    fit(tmp_path, callback, Tiny(), num_sanity_val_steps=2, check_val_every_n_epoch=1, max_epochs=2)
    assert {c.name: c.steps.column("number") for c in callback.session.captures} == {
        "steps_000001-000002_rank0": [1, 2],
        "validation_steps_000001-000002_rank0": [1, 2],
        "steps_000012-000013_rank0": [12, 13],
        "validation_steps_000012-000013_rank0": [12, 13],
    }
    (training,) = callback.session.captures[0].metadata["environment"]["loaders"]
    assert (training["phase"], training["workers"], training["batch_size"]) == ("train", 0, 4)
    assert callback.session.step_number == 20


def test_the_loss_reaches_triggers(tmp_path: Path, log: Log) -> None:
    log.expect("The run ends with step", "before the first window")
    seen = []

    class Remembers:
        def fires(self, step: Any) -> bool:
            seen.append(step.loss)
            return False

    callback = ProfilerCallback(
        {"skip_first": 50, "active": 1, "output_dir": str(tmp_path / "profile")},
        triggers={"r": Remembers()},
    )
    fit(tmp_path, callback, Tiny())
    assert seen[0] is None
    assert all(isinstance(loss, float) for loss in seen[1:])
    assert len(seen) == 10


SINKS = """
import os
from instrument import Sink

class Where(Sink):
    tags: list[str] = []

    def write(self, capture, folder):
        (folder / "where.txt").write_text(f"{os.getpid()} {self.tags}")
"""


@pytest.mark.parametrize("kind", [ProfilerCallback, InstrumentProfiler])
def test_lightning_cli_can_build_it(kind: type[ProfilerCallback | InstrumentProfiler]) -> None:
    """It gives all parameters by name, and copies the defaults and writes them to a file."""
    (config, _) = inspect.signature(kind).parameters.values()
    assert OmegaConf.to_yaml(OmegaConf.create(copy.deepcopy({"config": config.default})))
    assert kind(config=config.default, active=2).session.config.active == 2
    assert kind(config="trace").session.config == Session("trace").config


@pytest.mark.usefixtures("warm_exporters")
@pytest.mark.parametrize(
    "is_run",
    [False, pytest.param(True, marks=pytest.mark.nightly)],  # an exporter loads all anew: 4 s
)
def test_trainer_from_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_run: bool) -> None:
    (tmp_path / "hydras_sinks.py").write_text(SINKS)
    monkeypatch.syspath_prepend(tmp_path)
    callback = {
        "_target_": "instrument.integrations.lightning.ProfilerCallback",
        "export": "process",
        "active": "${steps}",
        "metadata": {"tags": ["${steps}"]},
        "output_dir": f"{tmp_path}/profile",
        "sinks": {
            "table": {"rows": 3},
            "built": {"_target_": "instrument.export.sinks.table.TableSink", "columns": ["calls"]},
            "where": {"_target_": "hydras_sinks.Where", "tags": ["${steps}", "b"]},
        },
    }
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "max_epochs": 1, **dict.fromkeys(off, False)}
    for convert in ("all", "object", "partial", "none"):
        trainer = {"_target_": "lightning.pytorch.Trainer", "_convert_": convert, **options}
        node = {**trainer, "callbacks": [{**callback, "_convert_": convert}]}
        built = instantiate(OmegaConf.create({"steps": "2", "trainer": node}).trainer)
        (ours,) = (each for each in built.callbacks if isinstance(each, ProfilerCallback))
        config = ours.session.config
        assert (config.active, config.metadata) == (2, {"tags": ["2"]})
        assert [config.sinks[name].columns for name in ("table", "built")] == [None, ["calls"]]
    if not is_run:
        return
    built.fit(Tiny(), DataLoader(torch.ones(12, 8), batch_size=4))  # type: ignore[arg-type]
    (capture,) = ours.session.captures
    pid, tags = (capture.folder / "where.txt").read_text().split(" ", 1)
    assert (int(pid) != os.getpid(), tags) == (True, "['2', 'b']"), "the exporter built it again"


PARTS = {"data", "batch_to_device", "training_step", "backward", "optimizer_step"}


@pytest.mark.parametrize("kind", ["callback", "profiler"])
def test_a_step_of_an_unmarked_module_shows_its_parts(tmp_path: Path, kind: str) -> None:
    ours = (ProfilerCallback if kind == "callback" else InstrumentProfiler)(
        wait=4, active=2, output_dir=tmp_path / "p"
    )
    callbacks, profiler = ([ours], None) if kind == "callback" else ([], ours)
    trainer = a_trainer(tmp_path, *callbacks, profiler=profiler, val_check_interval=5)
    trainer.fit(Unmarked(), loader(), loader(3))
    (capture,) = ours.session.captures
    assert numbers(capture) == [[4, 5]]
    # validation ran between steps 4 and 5
    expected = {**dict.fromkeys(PARTS, 2), "validation": 1, "validation_step": 3}
    expected |= {"data": 2 + 3, "batch_to_device": 2 + 3}
    found = calls(capture)
    assert {name: found[name] for name in expected} == expected
    rows = {row.name: row for row in capture.ranges if row.name in PARTS}
    assert rows["training_step"].optimizer_ns == rows["backward"].optimizer_ns == 0
    assert rows["optimizer_step"].optimizer_ns == rows["optimizer_step"].cpu_ns > 0
    assert rows["training_step"].backward_ns > 0
    others = set(found) - PARTS - {"layer", "Unmarked", "validation", "validation_step"}
    assert {name.partition("]")[0] for name in others if "#" not in name} == (
        set() if kind == "callback" else {"[LightningModule", "[Strategy", "run_training_batch"}
    )


@pytest.mark.parametrize("manual", [False, True])
def test_ranges_nest_within_their_steps(tmp_path: Path, manual: bool) -> None:
    """From the raw trace: a range that is half in another would be put anywhere."""
    profiler = InstrumentProfiler(wait=3, active=4, output_dir=tmp_path / "p")
    module = Manual() if manual else Unmarked()
    options = {"max_epochs": 2, "val_check_interval": 2, "enable_checkpointing": True}
    a_trainer(tmp_path, profiler=profiler, **options).fit(module, loader(5), loader(1))
    (capture,) = profiler.session.captures
    assert numbers(capture) == [[3, 4, 5, 6]], "with the end of an epoch among them"
    (file,) = (tmp_path / "p").glob("*/trace.json.gz")
    trace = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    spans = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in trace
        if event.get("cat") == "user_annotation"
    ]
    halves = [(a, b) for a in spans for b in spans if a[0] < b[0] < a[1] < b[1]]
    assert not halves
    assert "[Callback]ModelCheckpoint.on_train_batch_end" in calls(capture), (
        "without what it is configured to do"
    )
    assert len(spans) > 100


class Manual(Tiny):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters())]


def test_manual_optimization_has_the_same_parts(tmp_path: Path) -> None:
    callback = ProfilerCallback(wait=1, active=3, output_dir=tmp_path / "p")
    fit(tmp_path, callback, Manual(), limit_val_batches=0)
    (capture,) = callback.session.captures
    found = calls(capture)
    assert {name: found[name] for name in PARTS} == {
        **dict.fromkeys(("data", "batch_to_device", "training_step"), 3),
        **dict.fromkeys(("backward", "optimizer_step"), 6),
    }
    paths = {
        f"training_step/{at}" for at in ("backward", "Optimizer.step#Adam.step/optimizer_step")
    }
    assert paths <= set(capture.ranges.column("path"))


def test_with_both_the_callback_and_the_profiler_one_session_records(tmp_path: Path) -> None:
    callback = ProfilerCallback(wait=1, active=2, output_dir=tmp_path / "p")
    profiler = InstrumentProfiler(active=1, output_dir=tmp_path / "q")
    a_trainer(tmp_path, callback, profiler=profiler).fit(Unmarked(), loader())
    assert profiler.session is callback.session
    (capture,) = callback.session.captures
    assert {name: calls(capture)[name] for name in PARTS} == dict.fromkeys(PARTS, 2)
    assert not (tmp_path / "q").exists()


def test_a_profiler_of_lightnings_own_keeps_its_place(tmp_path: Path) -> None:
    callback = ProfilerCallback(wait=1, active=2, output_dir=tmp_path / "p")
    theirs = SimpleProfiler()
    a_trainer(tmp_path, callback, profiler=theirs).fit(Unmarked(), loader(5))
    assert theirs.recorded_durations["run_training_batch"][4:]
    assert {"backward", "optimizer_step"} == PARTS & calls(callback.session.captures[0]).keys()


def test_batches_of_loaders_and_accumulation_count(tmp_path: Path, log: Log) -> None:
    callback = ProfilerCallback(at_steps=[2, 6], active=1, output_dir=tmp_path / "p")
    loaders = CombinedLoader({"a": loader(7), "b": loader(3)}, mode="max_size_cycle")

    class Several(Tiny):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return sum(self.layer(each).mean() for each in batch.values())

    a_trainer(tmp_path, callback, accumulate_grad_batches=3).fit(Several(), loaders)
    assert numbers(*callback.session.captures) == [[2], [6]]
    assert callback.session.step_number == 7
    assert [calls(capture).get("optimizer_step") for capture in callback.session.captures] == [1, 1]
    assert log.at("WARNING") == []


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        # three steps of the optimizer, the last after two batches
        ({"accumulate_grad_batches": 4}, 10),
        ({"limit_train_batches": 3, "max_epochs": 2}, 6),
        ({"max_epochs": 5, "max_steps": 6, "accumulate_grad_batches": 2}, 12),
        ({"max_epochs": -1, "max_steps": 4}, 4),
    ],
)
def test_total_steps_known(tmp_path: Path, log: Log, options: dict[str, Any], steps: int) -> None:
    callback = ProfilerCallback(at_steps=[steps - 1, steps], active=1, output_dir=tmp_path / "p")
    fit(tmp_path, callback, Tiny(), **options)
    assert numbers(*callback.session.captures) == [[steps - 1]]
    (said,) = log.at("WARNING")
    assert said.startswith(f"The run ends with step {steps - 1}, before the window of step {steps}")


BEFORE = ("setup", "on_fit_start")
WITHIN = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_start", "on_validation_batch_end", "on_validation_end", "on_train_epoch_end",
)  # fmt: skip
AFTER = ("on_train_end", "on_fit_end", "teardown")


@pytest.mark.parametrize("hook", [*BEFORE, *WITHIN, *AFTER])
def test_an_exception_in_any_hook(tmp_path: Path, hook: str, log: Log) -> None:
    if hook not in ("setup", "on_fit_start"):
        log.expect("The run ends with step", "is kept and labelled truncated")
    error, module = ZeroDivisionError("mine"), Tiny()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    setattr(module, hook, fails)
    callback = ProfilerCallback(active=50, output_dir=tmp_path / "p")
    trainer = a_trainer(tmp_path, callback, num_sanity_val_steps=0)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.fit(module, loader(3), loader(3))
    assert raised.value is error
    assert [capture.metadata["window"]["reason"] for capture in callback.session.captures] == {
        BEFORE: [],
        WITHIN: ["exception ZeroDivisionError"],
        AFTER: ["the run ended"],
    }[next(group for group in (BEFORE, WITHIN, AFTER) if hook in group)]
    assert isinstance(trainer.profiler, PassThroughProfiler)
    assert not optimizers._global_optimizer_post_hooks
    assert not module.layer._forward_hooks
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_keeps_the_window(tmp_path: Path, log: Log) -> None:
    log.expect("exception KeyboardInterrupt")

    class Interrupted(Tiny):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            if batch_idx == 3:
                raise KeyboardInterrupt

    callback = ProfilerCallback(active=8, output_dir=tmp_path / "p")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):  # what Lightning makes of it
        fit(tmp_path, callback, Interrupted())
    signal.signal(signal.SIGINT, handler)  # which Lightning leaves ignored
    (capture,) = callback.session.captures
    window = capture.metadata["window"]
    assert (window["last_step"], window["reason"]) == (2, "exception KeyboardInterrupt")


class Theirs(Callback):
    """Another profiler, which records the first steps.

    Not Lightning's own: it begins and ends inside the ranges of the trainer, and torch 2.13 may
    crash where a range ends in another profile than it began in.
    """

    def on_train_start(self, *_: Any) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.start()

    def on_train_batch_end(self, *arguments: Any) -> None:
        if arguments[-1] == 3:
            self.profile.stop()


def test_fit_beside_another_profiler(tmp_path: Path, log: Log) -> None:
    log.expect("no window begins until that profiler has stopped")
    callback = ProfilerCallback(at_steps=[1, 7], active=2, output_dir=tmp_path / "p")
    a_trainer(tmp_path, Theirs(), callback).fit(Tiny(), loader(), loader(1))
    assert [each.steps.column("number") for each in callback.session.captures] == [[7, 8]]
    assert any("torch's own profiler is running" in each for each in log.at("ERROR"))


def test_a_fit_that_goes_on_counts_on(tmp_path: Path, log: Log) -> None:
    log.expect("The run ends with step")
    first = ProfilerCallback(at_steps=[3, 13], active=1, output_dir=tmp_path / "p")
    trainer, module = a_trainer(tmp_path, first, enable_checkpointing=True), Tiny()
    trainer.fit(module, loader(), loader(1))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer.fit(module, loader(), loader(1))  # has nothing left to do
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(1))
    assert numbers(*first.session.captures) == [[3], [13]]
    assert first.session.step_number == 20
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]
    assert not any("Profiler" in key for key in saved)

    resumed = ProfilerCallback(at_steps=[3, 13], active=1, output_dir=tmp_path / "q")
    again = a_trainer(tmp_path, resumed, max_epochs=2)
    again.fit(Tiny(), loader(), loader(1), ckpt_path=tmp_path / "last.ckpt")
    assert numbers(*resumed.session.captures) == [[13]]


@pytest.mark.parametrize(
    ("run", "phase"), [("validate", "validation"), ("test", "test"), ("predict", "predict")]
)
def test_run_without_training(tmp_path: Path, log: Log, run: str, phase: str) -> None:
    without = ProfilerCallback(wait=1, active=2, output_dir=tmp_path / "without")
    callback = ProfilerCallback(
        wait=1, active=2, phases=["train", phase], output_dir=tmp_path / "with"
    )
    for each in (without, callback):
        trainer = a_trainer(tmp_path, each)
        for _ in range(2):
            getattr(trainer, run)(Tiny(), loader(4))
        assert isinstance(trainer.profiler, PassThroughProfiler)
    assert not (tmp_path / "without").exists()
    name = f"{phase}_steps_000001-000002_rank0"
    assert [capture.name for capture in callback.session.captures] == [name, f"{name}-2"]
    for capture in callback.session.captures:
        assert numbers(capture) == [[1, 2]]
        steps = {name: n for name, n in calls(capture).items() if name.endswith("_step")}
        assert steps == {f"{'validation' if run == 'validate' else run}_step": 2}
    assert log.at("WARNING") == []


def test_a_run_too_short_in_its_phase_is_told_of_that_phase(tmp_path: Path, log: Log) -> None:
    callback = ProfilerCallback(
        wait=8, active=2, phases=["train", "test"], output_dir=tmp_path / "p"
    )
    a_trainer(tmp_path, callback).test(Tiny(), loader(4))
    (said,) = log.at("WARNING")
    assert said.startswith("The run ended after 4 steps, before the first window (steps 8–9)")


def test_disabled_profiler_or_callback_does_nothing(tmp_path: Path) -> None:
    callback, profiler = ProfilerCallback(None), InstrumentProfiler(None)
    trainer = a_trainer(tmp_path, callback, profiler=profiler)
    trainer.fit(Tiny(), loader(2), loader(2))
    assert not [each for each in trainer.callbacks if isinstance(each, ProfilerCallback)]


class Watched(Unmarked):
    """One that notes how many hooks its layer has in each batch, and can fail in the middle of a forward."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.hooks: list[int] = []
        self.fails_at = fails_at
        self.layer = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.hooks.append(len(self.layer._forward_hooks) + len(self.layer._forward_pre_hooks))
        return self.layer(batch if batch_idx != self.fails_at else batch[:, :3]).mean()


def test_modules_bear_no_hooks_of_ours(tmp_path: Path) -> None:
    ours = Watched()
    a_trainer(tmp_path, ProfilerCallback(wait=9, active=2, output_dir=tmp_path / "p")).fit(
        ours, loader(12)
    )
    assert ours.hooks == [0] * 12


def test_exception_closes_module_ranges(tmp_path: Path, log: Log) -> None:
    log.expect("exception RuntimeError")
    callback = ProfilerCallback(active=None, output_dir=tmp_path / "p")
    module = Watched(fails_at=2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        a_trainer(tmp_path, callback).fit(module, loader(4))
    module.fails_at = None
    a_trainer(tmp_path, callback).fit(module, loader(4))
    failed, whole = (
        {row.path.removeprefix(STEP) for row in c.ranges} for c in callback.session.captures
    )
    layers = {f"training_step/{path}" for path in ("layer", "layer/layer.0", "layer/layer.1")}
    assert layers <= failed & whole
    assert not [
        path for path in failed | whole if "layer.0/" in path or path.count("training_step") > 1
    ]


STEP = "Optimizer.step#SGD.step/"


def test_the_profiler_serves_the_other_package_too(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Module(other.LightningModule):
        layer = property(lambda self: self.net)
        training_step, configure_optimizers = Unmarked.training_step, Unmarked.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

    profiler = InstrumentProfiler(wait=1, active=2, output_dir=tmp_path / "p")
    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = other.Trainer(profiler=profiler, accelerator="cpu", max_epochs=1, **off)
    trainer.fit(Module(), loader(4))
    (capture,) = profiler.session.captures
    assert {name: calls(capture)[name] for name in PARTS} == dict.fromkeys(PARTS, 2)


@pytest.mark.parametrize("place", ["callbacks", "profiler"])
def test_pickled_for_ddp_spawn(tmp_path: Path, place: str) -> None:
    kind = {"callbacks": ProfilerCallback, "profiler": InstrumentProfiler}[place]
    made = kind(active=2, output_dir=tmp_path / "profile")
    given = ([made], {}) if place == "callbacks" else ([], {"profiler": made})
    trainer = a_trainer(tmp_path, *given[0], **given[1])
    sent = pickle.loads(pickle.dumps(trainer))
    sent.fit(Tiny(), loader(4))
    (callback,) = (each for each in sent.callbacks if isinstance(each, ProfilerCallback))
    assert numbers(*callback.session.captures) == [[0, 1]]
    assert made.session.captures == []


def test_a_model_given_to_the_callback_is_the_one_with_ranges(tmp_path: Path) -> None:
    module = Tiny()
    callback = ProfilerCallback(
        "summary", active=2, output_dir=tmp_path / "profile", model=module.layer, export="inline"
    )
    fit(tmp_path, callback, module, num_sanity_val_steps=0, limit_val_batches=0)
    (capture,) = callback.session.captures
    assert {"Linear"} <= {row.name for row in capture.ranges}
    assert "Tiny" not in {row.name for row in capture.ranges}
