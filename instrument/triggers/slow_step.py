"""A slow step asks for a window."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from pydantic import Field

from instrument.triggers import Ask, Step, Trigger, TriggerCallbacks
from instrument.units import duration


class SlowStep(Trigger):
    """Fires after a step that took more than `factor` times the median of the steps before it.

    The median is of the last `over` steps outside windows; nothing is judged before `after` of them. A step that took
    less than `excess_ms` more than the median is not slow: steps of microseconds vary by more than any factor. What is
    recorded are the steps after the slow one: this finds what is slow again and again.
    """

    factor: float = Field(3.0, gt=1)
    excess_ms: float = Field(1.0, ge=0)
    over: int = Field(101, ge=3)
    after: int = Field(20, ge=2)

    def begin(self, folder: Path, ask: Ask) -> TriggerCallbacks:  # noqa: ARG002
        """Begin with no step known."""
        recent: deque[int] = deque(maxlen=self.over)
        excess_ns = self.excess_ms * 1e6
        limit, good_for = math.inf, min(self.after, self.over)

        def slow_from(median_ns: int) -> float:
            return max(self.factor * median_ns, median_ns + excess_ns)

        def fires(step: Step) -> str | None:
            nonlocal limit, good_for
            if step.recorded:
                return None
            took = step.duration_ns
            said = None
            if took > limit and took > slow_from(median_ns := sorted(recent)[len(recent) // 2]):
                said = _said(step.number, took, median_ns)
            recent.append(took)
            good_for -= 1
            if good_for == 0:
                least, good_for = _lower_bound(sorted(recent))
                limit = slow_from(least)
            return said

        return TriggerCallbacks(fires)


def _lower_bound(times: list[int]) -> tuple[int, int]:
    """What the median cannot fall below, and for how many steps: each step moves it by one place at most.

    So that the times are sorted at few steps, and at those that may be slow.
    """
    places = len(times) * 2 // 5
    return times[len(times) // 2 - places], places + 1


def _said(number: int, took_ns: int, median_ns: int) -> str:
    ratio = took_ns / max(median_ns, 1)
    return (
        f"step {number} took {duration(took_ns)}, {ratio:.1f} × the median of {duration(median_ns)}"
    )
