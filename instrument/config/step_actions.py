"""What the user's own schedule says of each step: `torch.profiler.schedule(…)`, or any function like it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from loguru import logger

from instrument.config.instantiate import instantiated
from instrument.config.schedule import ACTIONS
from instrument.errors import ConfigError, reason_of

_MOST_KEPT = 50_000  # answers, in a few MB
_WANTED = "a function from steps to torch's ProfilerAction, as torch.profiler.schedule(wait=1, warmup=1, active=3)"


class StepActions:
    """The names of torch's actions by step, from a function or from a `_target_` mapping that makes one.

    Each step is asked for once, as far as 50,000 answers go. Where the function raises or gives none of torch's
    actions, that is logged and all further answers are NONE: it never reaches the training loop. A copy by pickle is
    made of what was given, and so needs a mapping or a function that can be pickled.

    Raises:
        ConfigError: it is neither function nor mapping, or cannot be asked for step 0.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._function: Any = given
        self._names: dict[int, str] = {}
        self._failed = False
        if isinstance(given, Mapping) and "_target_" in given:
            self._function = instantiated("profiler.schedule", given)
        if not callable(self._function):
            raise ConfigError(f"profiler.schedule is {given!r}, but it must be {_WANTED}.")
        try:
            self._names[0] = self._asked(0)
        except Exception as error:
            why = f"cannot be asked for step 0 ({reason_of(error)})"
            raise ConfigError(f"profiler.schedule {why}: it must be {_WANTED}.") from error

    def __call__(self, step: int) -> str:
        """The name of a step's action."""
        if step not in self._names:
            if len(self._names) >= _MOST_KEPT:
                self._names.clear()
            self._names[step] = self._safely_asked(step)
        return self._names[step]

    def __reduce__(self) -> tuple[Any, ...]:
        return StepActions, (self._given,)

    def described(self) -> Any:
        """For `capture.json`: the mapping, or the function's name."""
        if isinstance(self._given, Mapping):
            with suppress(TypeError, ValueError):  # it holds more than JSON can
                return json.loads(json.dumps(dict(self._given)))
        kind = type(self._given)
        return str(getattr(self._given, "__qualname__", kind.__qualname__))

    def _safely_asked(self, step: int) -> str:
        if self._failed:
            return "NONE"
        try:
            return self._asked(step)
        except Exception as error:
            self._failed = True
            what = "profiler.schedule cannot be asked for step {} ({}): no step is recorded from there on."
            logger.warning(what, step, reason_of(error))
            return "NONE"

    def _asked(self, step: int) -> str:
        action = self._function(step)
        name = getattr(action, "name", None)
        if name not in ACTIONS:
            raise ValueError(f"it gave {action!r}")
        return str(name)
