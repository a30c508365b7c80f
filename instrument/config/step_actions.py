"""`StepActions`: a schedule given as a function, such as `torch.profiler.schedule(…)`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from instrument.base.errors import ConfigError, reason_of, reraise_signal
from instrument.base.log import logger
from instrument.config.instantiate import instantiated
from instrument.config.schedule import ACTIONS

_MOST_CACHED = 50_000  # a few MB
_EXPECTED = (
    "a function from steps to torch's ProfilerAction, such as torch.profiler.schedule(wait=1, "
    "warmup=1, active=3)"
)


class StepActions:
    """The name of torch's action for each step, computed by the user's function.

    `given` is the function, or a `_target_` mapping that builds the function.

    The function is called once per step; up to 50,000 results are cached. If the function raises,
    or returns something other than torch's actions, the error is logged and never reaches the
    training loop. All further results are then NONE. Pickling stores only `given`.

    Raises:
        ConfigError: `given` is neither a function nor a mapping, or fails for step 0.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._function: Any = given
        self._names: dict[int, str] = {}
        self._failed = False
        if isinstance(given, Mapping) and "_target_" in given:
            self._function = instantiated("profiler.schedule", given)
        if not callable(self._function):
            raise ConfigError(f"profiler.schedule is {given!r}, but it must be {_EXPECTED}.")
        try:
            self._names[0] = self._call(0)
        except (Exception, SystemExit) as error:
            why = f"fails for step 0 ({reason_of(error)})"
            raise ConfigError(f"profiler.schedule {why}: it must be {_EXPECTED}.") from error

    def __call__(self, step: int) -> str:
        """The name of the action for a step."""
        if step not in self._names:
            if len(self._names) >= _MOST_CACHED:
                self._names.clear()
            self._names[step] = self._guarded_call(step)
        return self._names[step]

    def __reduce__(self) -> tuple[Any, ...]:
        return StepActions, (self._given,)

    def described(self) -> Any:
        """What `capture.json` stores for the option `schedule`: the `_target_` mapping or a name.

        The name is that of the given function, or of the type of the given object.
        """
        if isinstance(self._given, Mapping):
            with suppress(TypeError, ValueError):  # JSON cannot hold the mapping
                return json.loads(json.dumps(dict(self._given)))
        kind = type(self._given)
        return str(getattr(self._given, "__qualname__", kind.__qualname__))

    def _guarded_call(self, step: int) -> str:
        """The name of the step's action; after an error, NONE for this step and all later steps."""
        if self._failed:
            return "NONE"
        try:
            return self._call(step)
        except BaseException as error:
            reraise_signal(error)
            self._failed = True
            logger.warning(
                "profiler.schedule fails for step {} ({}): no step is recorded from that step on.",
                step,
                reason_of(error),
            )
            return "NONE"

    def _call(self, step: int) -> str:
        action = self._function(step)
        name = getattr(action, "name", None)
        if name not in ACTIONS:
            raise ValueError(f"it returned {action!r}")
        return str(name)
