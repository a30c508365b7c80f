"""`Trigger`, the base class of triggers, and what a session and a trigger tell each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from instrument.base.errors import ConfigError
from instrument.base.options import Options


class Step(NamedTuple):
    """One finished training step, as triggers see it.

    Attributes:
        number: the number of the step, counted from 0.
        duration_ns: wall time since the previous training step ended, minus the time spent in other
            phases of the session, such as validation.
        loss: the newest loss that has arrived on the CPU since the previous step; None if no loss
            has arrived. A loss is copied from the device asynchronously, so `loss` is the loss of
            an earlier step, `loss_step`.
        loss_step: the number of the step that had this loss; None if `loss` is None.
        recorded: whether a window was open or warming up in this step; such steps are slower.
    """

    number: int
    duration_ns: int
    loss: float | None = None
    loss_step: int | None = None
    recorded: bool = False

    @property
    def allocated_bytes(self) -> int | None:
        """The bytes that tensors occupy in torch's allocator on the current CUDA device, or None.

        Cost: about 10 µs with a CUDA device, so do not read this after every step.
        """
        import torch  # not needed by `instrument trigger`

        return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else None


class Request(NamedTuple):
    """Why a window is requested, and how many steps to record; None: `profiler.active` steps.

    `seconds` replaces `steps`: the window ends as with `profiler.max_window_s`, but is complete.
    Ranks that agree on their windows ignore `seconds`.
    """

    why: str | None = None
    steps: int | None = None
    seconds: float | None = None


Answer = bool | str | Request | None
RequestWindow = Callable[[Request], None]


class TriggerCallbacks(NamedTuple):
    """The functions of one trigger in one run; each may be None.

    Attributes:
        fires: called on the training thread after each step. A window is requested if the result
            is True, a text or a `Request`.
        poll: called every half second on a separate thread, for work that is too slow for a step.
        failed: called with the exception and the number of the step if an exception leaves the
            session's `with` block.
        end: called when the session stops.
    """

    fires: Callable[[Step], Answer] | None = None
    poll: Callable[[], None] | None = None
    failed: Callable[[BaseException, int], None] | None = None
    end: Callable[[], None] | None = None


class Trigger(Options):
    """Base class of triggers. A trigger requests windows; the fields of its class are its options.

    A config names the class of a trigger by `_target_`. Your own trigger defines `fires`, or
    `begin` if it keeps state between steps. A session takes any object with a method `fires`. The
    options of a subclass of `Trigger` are checked before the first step.

    If the trigger fires while no window is open, the next `warmup` steps warm up, and the `active`
    steps after the warm-up are recorded. If the trigger raises, the error is logged and `fires` is
    not called again.

    Raises:
        ConfigError: the trigger is built with an unknown option or an invalid value.
    """

    records: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options of `ProfilerConfig` that replace the run's options in this trigger's windows."""

    cooldown: int = Field(100, ge=0)
    """Steps after a window of the trigger in which it gets no other."""

    max_windows: int | None = Field(5, ge=1)
    """How many windows the trigger gets in a run; None: any number."""

    def __init__(self, **options: Any) -> None:
        if type(self).fires is Trigger.fires and type(self).begin is Trigger.begin:
            raise ConfigError(f"The trigger {type(self).__name__} must define fires(self, step).")
        super().__init__(**options)

    def fires(self, step: Step) -> Answer:  # noqa: ARG002
        """Return whether to record the steps after `step`.

        True, a text (the reason) and a `Request` mean yes.
        """
        return None

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks | None:  # noqa: ARG002
        """Create the state of one run; called when a session starts.

        Several sessions can use the same config, so keep this state out of the trigger's fields.

        Args:
            folder: the session's folder for captures.
            ask: a function that requests a window. Any thread or signal handler may call it. The
                request waits until no window is open.

        Returns:
            The functions to call; None if the trigger cannot work here. If so, it logs why.
        """
        return TriggerCallbacks(self.fires)

    @classmethod
    def display_name(cls) -> str:
        """The name of the trigger in error messages."""
        return f"The {re.sub(r'(?<=[a-z])(?=[A-Z])', '_', cls.__name__).lower()} trigger"
