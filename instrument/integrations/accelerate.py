"""Accelerate: a plain `Session` works in its loop; this one sends its windows to the accelerator's trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from instrument.capture import Capture
from instrument.sinks import Sink
from instrument.sinks.scalars import scalars


class Trackers(Sink):
    """Logs each window's scalars by `accelerator.log`, at the window's last step: `sinks={"trackers": Trackers(…)}`.

    They are those of the TensorBoard sink, as `profiler/ranges/forward/cpu_ms`; only the main process logs, as ever in
    Accelerate. They come some seconds after the window, from a thread: a tracker that refuses steps behind its newest,
    as W&B does, loses them, and has a sink of its own.
    """

    inline: ClassVar[bool] = True  # the trackers are open in the training process

    accelerator: Any
    """The `Accelerator`, whose `init_trackers` was or will be called before the first window ends."""

    def write(self, capture: Capture, folder: Path) -> None:
        """Log the window."""
        values = {f"profiler/{tag}": value for tag, value in scalars(capture)}
        self.accelerator.log(values, step=capture.metadata["window"]["last_step"])
