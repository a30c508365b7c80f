"""`Trigger`: what may ask for a window when training looks odd."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from loguru import logger


class Step(NamedTuple):
    """One finished training step, as triggers see it.

    Attributes:
        number: counted from 0.
        duration_ns: host time since the step before ended.
        loss: what was given to `session.step(loss=…)` for the step before this one; None where nothing was given. A
            step late, so that looking at it hardly ever makes the training wait for the device.
        allocated_bytes: what torch's allocator holds on the current device; None without a CUDA device.
    """

    number: int
    duration_ns: int
    loss: float | None
    allocated_bytes: int | None


@runtime_checkable
class Trigger(Protocol):
    """Anything with `fires(step) -> bool`; named in a config by `_target_`.

    It is asked after every step. When it fires while no window is open, the next steps are warmed up for and recorded,
    as many as the schedule's `warmup` and `active` say. One that raises is logged once and not asked again.
    """

    def fires(self, step: Step) -> bool:
        """Whether the steps after this one should be recorded."""
        ...


class Watch:
    """Asks a run's triggers after each step, and keeps what that takes from one step to the next."""

    def __init__(self, triggers: dict[str, Any]) -> None:
        self._triggers = dict(triggers)
        self._last_loss: Any = None
        self._warned = False
        self.resume()

    def __bool__(self) -> bool:
        return bool(self._triggers)

    def after(self, number: int, loss: Any) -> str | None:
        """The name of the first trigger that fires after step `number`; None where none does. All are asked."""
        duration_ns = time.perf_counter_ns() - self._began_ns
        seen, self._last_loss = self._last_loss, loss.detach() if isinstance(loss, torch.Tensor) else loss
        step = Step(number, duration_ns, self._number(seen), _allocated_bytes())
        fired = [name for name in list(self._triggers) if self._fires(name, step)]
        return fired[0] if fired else None

    def resume(self) -> None:
        """Count the next step's duration from now on: what a window's end takes is not the step's."""
        self._began_ns = time.perf_counter_ns()

    def _fires(self, name: str, step: Step) -> bool:
        try:
            return bool(self._triggers[name].fires(step))
        except Exception:
            del self._triggers[name]
            logger.exception("The trigger {} failed and is not asked again.", name)
            return False

    def _number(self, loss: Any) -> float | None:
        try:
            return None if loss is None else float(loss)
        except Exception as error:
            if not self._warned:
                self._warned = True
                logger.warning("session.step was given a loss that is no single number ({}): triggers see None.", error)
            return None


def _allocated_bytes() -> int | None:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None
