"""A sink for the trackers of Accelerate. `Session` works with Accelerate without integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from instrument.export.sinks.sink import Sink
from instrument.export.sinks.window_scalars import known_scalars
from instrument.read.capture import Capture


class Trackers(Sink):
    """Logs the scalars of each window with `accelerator.log`.

    Use it in `Session(…, sinks={"trackers": Trackers(accelerator=accelerator)})`.

    The scalars are those of the TensorBoard sink, with `profiler/` before each name, and are logged
    for the window's last step. As usual in Accelerate, only the main process logs. A thread logs
    the scalars some seconds after the window. If training has logged a newer step meanwhile, a
    tracker that refuses older steps, such as W&B, loses the scalars. For W&B, use the wandb sink
    instead.
    """

    inline: ClassVar[bool] = True  # the trackers are open in the training process

    accelerator: Any
    """The `Accelerator`; its `init_trackers` must be called before the first window ends."""

    def write(self, capture: Capture, folder: Path) -> None:
        """Log the window's scalars."""
        values = {f"profiler/{tag}": value for tag, value in known_scalars(capture).items()}
        self.accelerator.log(values, step=capture.metadata["window"]["last_step"])
