"""Sessions with Accelerate: as the profiler of an `Accelerator`, and a callback for its trackers.

A plain `Session` works in Accelerate's loop too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from instrument.base.errors import MissingPackage
from instrument.record.config.schema import NO_CONFIG
from instrument.record.session import Session

if TYPE_CHECKING:
    from instrument.record.config.keywords import ProfilerOptions

try:
    from accelerate.utils import ProfileKwargs
except ImportError as error:
    raise MissingPackage("The profiler of an Accelerator", "accelerate", "accelerate") from error


def profile_handler(
    config: Any = NO_CONFIG, /, **options: Unpack[ProfilerOptions]
) -> ProfileKwargs:
    """Have `accelerator.profile()` record with a session instead of torch's profiler.

    `Accelerator(kwargs_handlers=[profile_handler("trace", active=3)])` takes the config and the
    options of `Session`. In `with accelerator.profile() as session:`, the session runs: loop over
    `session.steps(loader)`, or call `session.step()`.

    Raises:
        ConfigError: an option cannot work.
    """
    session = Session(config, **options)
    # Not a subclass: Accelerate looks for handlers of exactly its own classes.
    handler = ProfileKwargs()
    handler.build = lambda: session
    return handler


class Trackers:
    """Logs the scalars of each capture with `accelerator.log`.

    Use it in `Session(…, on_capture=Trackers(accelerator))`; `init_trackers` of the accelerator
    must be called before the first window ends.

    The scalars are those of the TensorBoard sink, with `profiler/` before each name, and are logged
    for the window's last step. As usual in Accelerate, only the main process logs. A capture is
    complete some seconds after its window. If training has logged a newer step meanwhile, a
    tracker that refuses older steps, such as W&B, loses the scalars. For W&B, use
    `instrument.integrations.wandb` instead.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def __call__(self, folder: Path, scalars: dict[str, float]) -> None:
        """Log the scalars of a capture."""
        tags = {tag: value for tag, value in scalars.items() if tag not in ("rank", "step")}
        values = {f"profiler/{tag}": value for tag, value in tags.items()}
        self.accelerator.log(values, step=int(scalars["step"]))
