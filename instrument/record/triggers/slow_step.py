"""A slow step requests a window."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from pydantic import Field

from instrument.base.units import duration
from instrument.record.triggers.trigger import RequestWindow, Step, Trigger, TriggerCallbacks


class SlowStep(Trigger):
    """Fires after a step that took more than `factor` times the median of the steps before it.

    The median is that of the last `over` steps outside windows. The step must also exceed the
    median by more than `excess_ms`, because the durations of very short steps vary by large
    factors. The trigger fires only after it has measured `after` steps outside windows. If `over`
    is smaller than `after`, `over` steps are enough. The window begins after the slow step, so the
    window shows the cause only if later steps are slow too.
    """

    factor: float = Field(3.0, gt=1)
    """A slow step takes more than this multiple of the median step."""

    excess_ms: float = Field(1.0, ge=0)
    """A slow step also takes over this many milliseconds more than the median."""

    over: int = Field(101, ge=3)
    """The median is taken over this many of the last steps."""

    after: int = Field(20, ge=2)
    """Steps of the run before the first check."""

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:  # noqa: ARG002
        """Start with an empty list of measured steps."""
        recent: deque[int] = deque(maxlen=self.over)
        excess_ns = self.excess_ms * 1e6
        # A step that takes at most `limit` ns is not slow, until `faster_left` steps took less than
        # `bound_ns`: then the median may be below `bound_ns`.
        limit, bound_ns, faster_left = math.inf, math.inf, min(self.after, self.over)

        def threshold(median_ns: int) -> float:
            return max(self.factor * median_ns, median_ns + excess_ns)

        def fires(step: Step) -> str | None:
            nonlocal limit, bound_ns, faster_left
            if step.recorded:
                return None
            took_ns, reason = step.duration_ns, None
            if took_ns > limit:
                median_ns = sorted(recent)[len(recent) // 2]
                if took_ns > threshold(median_ns):
                    reason = (
                        f"step {step.number} took {duration(took_ns)}, "
                        f"{took_ns / max(median_ns, 1):.1f} × the median of {duration(median_ns)}"
                    )
            recent.append(took_ns)
            faster_left -= took_ns < bound_ns
            if faster_left == 0 or (took_ns > limit and reason is None):
                bound_ns, faster_left = _lower_bound(sorted(recent))
                limit = threshold(bound_ns)
            return reason

        return TriggerCallbacks(fires)


def _lower_bound(times: list[int]) -> tuple[int, int]:
    """Return a lower bound of the median in ns, and how many faster steps make it invalid.

    A new step lowers the median only if it is faster than the bound, and then by at most one place
    in the sorted times. The bound saves sorting the times after every step.
    """
    places = len(times) * 2 // 5
    return times[len(times) // 2 - places], places + 1
