"""Lightning: `Trainer(callbacks=[ProfilerCallback(cfg.profiler)])`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from instrument.errors import MissingPackage
from instrument.session import Session

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingPackage("The Lightning callback", "lightning", "lightning") from error


class ProfilerCallback(Callback):
    """Records windows of `trainer.fit`; a step is a training batch, counted from 0. Sanity checking is not recorded.

    Validation within `fit` is the session's phase `validation`, whose batches are counted by themselves. Takes what
    `Session` takes, and raises what it raises. The session is `self.session`, its captures `self.session.captures`.
    While no window is open a batch costs one call that compares two numbers.
    """

    def __init__(self, *config: Any, **options: Any) -> None:
        self.session = Session(*config, **options)
        self._validation = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the session, with a range for each submodule as `profiler.modules` says."""
        self.session.start(pl_module, total_steps=_batches(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step; the loss is what `training_step` returned."""
        self.session.step(loss=outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the phase, except for sanity checking."""
        if not trainer.sanity_checking:
            self._validation.enter_context(self.session.phase("validation"))

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """End a step of validation."""
        if not trainer.sanity_checking:
            self.session.step()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the phase."""
        self._validation.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the session."""
        self.session.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the window that is open, labelled truncated; the exception goes on unchanged."""
        self._validation.__exit__(type(exception), exception, exception.__traceback__)
        self.session.__exit__(type(exception), exception, exception.__traceback__)


def _batches(trainer: Trainer) -> int | None:
    """The training batches of the whole fit, rounded up where gradients are accumulated; None where nobody knows."""
    try:
        steps = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
    except Exception:  # it refuses accumulation that changes; that is no reason to end a fit
        return None
    return int(steps) if 0 < steps < float("inf") else None
