"""What recording costs the run that is recorded, for `capture.json`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

# Unrecorded steps that a window is compared with; those nearest to it.
_BESIDE = 50


class Cost:
    """Times every step, and what a window adds to the loop; one for each phase of a run.

    A step's time runs from the end of the one before, less what the session did in between. Cost: a reading of the
    clock a step, some 0.2 µs.
    """

    def __init__(self) -> None:
        self._unrecorded: deque[int] = deque(maxlen=_BESIDE + 1)  # of which the first is not compared with
        self._recorded: list[int] = []
        self._stood_still: dict[str, int] = {}
        self.resume()

    def resume(self) -> None:
        """Let the next step begin now."""
        self._began_ns = time.perf_counter_ns()

    def step_ended(self, *, recorded: bool | None) -> int:
        """Note the step that ends now and let the next begin; gives its time in ns. None: it was one of the warm-up."""
        now = time.perf_counter_ns()
        took, self._began_ns = now - self._began_ns, now
        if recorded is not None:
            (self._recorded if recorded else self._unrecorded).append(took)
        return took

    def leave_out(self, elapsed_ns: int) -> None:
        """Take time that was not the step's own, as that of another phase, out of the step that runs."""
        self._began_ns += elapsed_ns

    def begin_window(self) -> None:
        """Count what follows for a new window, whatever became of the one before."""
        self._recorded, self._stood_still = [], {}

    @contextmanager
    def standing_still(self, part: str) -> Iterator[None]:
        """Time a part of the work for which the loop waits."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._stood_still[part] = self._stood_still.get(part, 0) + time.perf_counter_ns() - began

    def unrecorded_ns(self) -> int | None:
        """The median of the last 50 unrecorded steps, without the first, which is like no other; None without any."""
        return _median(self._compared_with)

    @property
    def _compared_with(self) -> tuple[int, ...]:
        return tuple(self._unrecorded)[1:]  # at once: another thread may ask

    def window(self) -> dict[str, Any]:
        """What the window that ends now has cost so far.

        `recorded_step_ns` and `unrecorded_step_ns` are medians, the latter of the last 50 unrecorded steps before the
        window, of which there were `unrecorded_steps`; None where there is none. The first is none of them: workers
        start in it, and what is compiled. `start_ns`, `stop_ns` and `save_ns` (torch's own export) are what the loop
        waited for.
        """
        parts = {f"{part}_ns": self._stood_still.get(part, 0) for part in ("start", "stop", "save")}
        return {
            "recorded_step_ns": _median(self._recorded),
            "unrecorded_step_ns": self.unrecorded_ns(),
            "unrecorded_steps": len(self._compared_with),
            **parts,
        }


def _median(values: Any) -> int | None:
    return int(median(values)) if values else None
