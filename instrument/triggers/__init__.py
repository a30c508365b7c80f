"""What may ask for a window: the `Trigger` base, one file for each trigger that ships.

The options are fields of the class; what a trigger keeps from step to step is made anew for each run by `begin`, so
that one config can serve several sessions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from instrument.config.options import Options
from instrument.errors import ConfigError

__all__ = ["Trigger"]


class Step(NamedTuple):
    """One finished training step, as triggers see it.

    Attributes:
        number: counted from 0.
        duration_ns: CPU time since the step before ended, without that spent in another phase.
        loss: the newest loss that is known and was not seen before; None where there is none. It comes a step late, and
            from a device as soon as that has it, so that looking at it never makes the training wait.
        loss_step: the step whose loss it is.
        recorded: whether a window was open or warming up in this step, which makes steps slower.
    """

    number: int
    duration_ns: int
    loss: float | None = None
    loss_step: int | None = None
    recorded: bool = False

    @property
    def allocated_bytes(self) -> int | None:
        """What torch's allocator holds on the current device now; None without a CUDA device.

        Costs some 10 µs where there is one: not to be asked after every step.
        """
        import torch  # not needed by `instrument trigger`

        return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else None


class Request(NamedTuple):
    """A window asked for: why, in words, and of how many steps (None: as many as `profiler.active` says)."""

    why: str | None = None
    steps: int | None = None


Answer = bool | str | Request | None
Ask = Callable[[Request], None]


class TriggerCallbacks(NamedTuple):
    """What one trigger does in one run; None for what it does not.

    Attributes:
        fires: asked on the training thread after each step; anything true asks for a window.
        poll: called every half second on a thread of its own, for what takes longer than a step may.
        failed: told of the exception that leaves the session's block, and the step that it ended.
        end: called when the session stops.
    """

    fires: Callable[[Step], Answer] | None = None
    poll: Callable[[], None] | None = None
    failed: Callable[[BaseException, int], None] | None = None
    end: Callable[[], None] | None = None


class Trigger(Options):
    """Asks for a window; named in a config by `_target_`. Its fields are its options.

    One of your own defines `fires`, or `begin` where it keeps something from step to step. A session takes any object
    with a method `fires`; deriving from this class adds options that are checked before the first step.

    When it fires while no window is open, the next steps are warmed up for and recorded, as many as the schedule's
    `warmup` and `active` say. One that raises is logged once and not asked again.

    Attributes:
        cooldown: steps after a firing in which it gets no further window.
        max_windows: windows that it gets in a run at most; None: any number.

    Raises:
        ConfigError: when built with an option that does not exist or has a value that cannot work.
    """

    records: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options of `ProfilerConfig` that its windows are recorded with, in place of the run's."""

    cooldown: int = Field(100, ge=0)
    max_windows: int | None = Field(5, ge=1)

    def __init__(self, **options: Any) -> None:
        if type(self).fires is Trigger.fires and type(self).begin is Trigger.begin:
            raise ConfigError(f"The trigger {type(self).__name__} must define fires(self, step).")
        super().__init__(**options)

    def fires(self, step: Step) -> Answer:  # noqa: ARG002
        """Whether the steps after this one should be recorded; a sentence says yes and why."""
        return None

    def begin(self, folder: Path, ask: Ask) -> TriggerCallbacks | None:  # noqa: ARG002
        """Called when a session starts, with its folder for captures. None: it cannot work here, and has said so.

        `ask` asks for a window from any thread or a signal's handler; the request is kept until no window is open.
        """
        return TriggerCallbacks(self.fires)

    @classmethod
    def display_name(cls) -> str:
        """What error sentences call it."""
        return f"The {re.sub(r'(?<=[a-z])(?=[A-Z])', '_', cls.__name__).lower()} trigger"
