from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from collected import Log
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="the extra torch-instrument[lightning] is not installed")

from lightning.pytorch import LightningModule, Trainer

from instrument import profiled
from instrument.integrations.lightning import ProfilerCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:lightning.*"),  # advice on workers and loggers, not about us
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


def fit(folder: Path, callback: ProfilerCallback, module: Tiny, **options: Any) -> None:
    data = DataLoader(torch.ones(40, 8), batch_size=4)  # type: ignore[arg-type]
    trainer = Trainer(
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, data, data)


def test_every_window_of_a_real_fit_is_delivered(tmp_path: Path) -> None:
    options = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "output_dir": str(tmp_path / "profile")}
    callback = ProfilerCallback(options)
    fit(tmp_path, callback, Tiny(), num_sanity_val_steps=2)
    captures = callback.session.captures
    assert [(c.metadata["window"]["first_step"], c.metadata["window"]["last_step"]) for c in captures] == [
        (2, 3),
        (6, 7),
    ]
    for capture in captures:
        (row,) = capture.ranges.where(name="training_step")
        assert row.calls == 2
        assert row.host_ns > 0
        assert [s.number for s in capture.steps] == [
            capture.metadata["window"]["first_step"],
            capture.metadata["window"]["last_step"],
        ]


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
    assert callback.session.step_number == 20


@pytest.mark.parametrize(("most", "last"), [({"max_epochs": 1}, 9), ({"max_epochs": 3, "max_steps": 12}, 11)])
def test_a_fit_too_short_for_its_window_is_told_at_the_start(
    tmp_path: Path, log: Log, most: dict[str, int], last: int
) -> None:
    callback = ProfilerCallback(wait=12, active=1, output_dir=tmp_path / "profile")
    fit(tmp_path, callback, Tiny(), **most)
    sentence = f"The run ends with step {last}, before the window of step 12: lower profiler.wait, or train longer."
    assert log.at("WARNING")[0] == sentence


def test_an_exception_in_validation_comes_out_unchanged(tmp_path: Path) -> None:
    class Fails(Tiny):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            raise ZeroDivisionError("mine")

    callback = ProfilerCallback(active=12, output_dir=tmp_path / "profile")
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(tmp_path, callback, Fails(), num_sanity_val_steps=0)
    (capture,) = callback.session.captures
    assert capture.metadata["window"]["reason"] == "exception ZeroDivisionError"
    assert [row.name for row in capture.ranges.where(name="validation")] == ["validation"]


def test_the_loss_reaches_triggers(tmp_path: Path) -> None:
    seen = []

    class Remembers:
        def fires(self, step: Any) -> bool:
            seen.append(step.loss)
            return False

    callback = ProfilerCallback(
        {"skip_first": 50, "active": 1, "output_dir": str(tmp_path / "profile")}, triggers={"r": Remembers()}
    )
    fit(tmp_path, callback, Tiny())
    assert seen[0] is None
    assert all(isinstance(loss, float) for loss in seen[1:])
    assert len(seen) == 10


def test_an_exception_keeps_the_window_and_comes_out_unchanged(tmp_path: Path) -> None:
    callback = ProfilerCallback(active=8, output_dir=str(tmp_path / "profile"))
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(tmp_path, callback, Tiny(fails_at=3))
    (capture,) = callback.session.captures
    window = capture.metadata["window"]
    assert (window["last_step"], window["truncated"], window["reason"]) == (2, True, "exception ZeroDivisionError")


def test_disabled_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback = ProfilerCallback("disabled")
    fit(tmp_path, callback, Tiny())
    assert callback.session.captures == []
    assert not (tmp_path / "profile").exists()


def test_without_lightning_the_command_that_installs_it_is_named() -> None:
    code = textwrap.dedent("""
        import sys
        sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
        try:
            import instrument.integrations.lightning
        except ImportError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "The Lightning callback needs the package lightning: pip install 'torch-instrument[lightning]'."
    )
