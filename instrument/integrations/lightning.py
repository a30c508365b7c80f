"""Lightning: `Trainer(callbacks=[ProfilerCallback(cfg.profiler)])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from instrument.errors import MissingPackage
from instrument.session import Session

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingPackage("The Lightning callback", "lightning", "lightning") from error


class ProfilerCallback(Callback):
    """Records windows of `trainer.fit`; a step is a training batch, counted from 0. Sanity checking is not recorded.

    Takes what `Session` takes, and raises what it raises. The session is `self.session`, its captures
    `self.session.captures`. While no window is open a batch costs one call that compares two numbers.
    """

    def __init__(self, *config: Any, **options: Any) -> None:
        self.session = Session(*config, **options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the session, with a range for each submodule as `profiler.modules` says."""
        self.session.start(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step; the loss is what `training_step` returned."""
        self.session.step(loss=outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the session."""
        self.session.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the window that is open, labelled truncated; the exception goes on unchanged."""
        self.session.__exit__(type(exception), exception, exception.__traceback__)
