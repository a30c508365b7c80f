"""`Parts` cuts a window into parts, so that training never waits long at the end of one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from instrument.base.log import logger
from instrument.record.config.schedule import Window

# How much of the budget a part may take, because torch does not take the same time each time.
_SHARE_OF_BUDGET = 0.8
# The next part is as long as the slowest of so many parts before it allows.
_PARTS_COMPARED = 3


@dataclass
class Parts:
    """The parts of one window: each is a recording of its own, and a capture of its own.

    The first part is one step. How long training waited at the end of a part says how many steps
    the next one may have. No step is left out, but training waits between two parts.

    Attributes:
        whole: the steps that all parts have together.
        budget_ns: how long training may wait at the end of a part.
        number: the index of the current part.
        current: the steps of the current part.
        began_s: when the first part began, in seconds of `time.monotonic`.
    """

    whole: Window
    budget_ns: int
    number: int = 0
    began_s: float = 0.0
    _warned: bool = False

    def __post_init__(self) -> None:
        self._ns_per_step = deque[float](maxlen=_PARTS_COMPARED)
        self.current = self._from(self.whole.first, 1)

    def go_on(self, first: int, stall_ns: int) -> Window | None:
        """Plan the part from the step `first` on; None if the window is over.

        `stall_ns` is how long training waits at the end of the current part.
        """
        if self.whole.last is not None and first > self.whole.last:
            return None
        steps = first - self.current.first
        if steps == 1 and stall_ns > self.budget_ns and not self._warned:
            self._warned = True
            logger.warning(
                "The end of a window of one step takes {:.0f} ms, more than profiler.max_stall_ms="
                "{:g}: record less, or shorter steps.",
                stall_ns / 1e6,
                self.budget_ns / 1e6,
            )
        self._ns_per_step.append(max(1, stall_ns) / steps)
        fitting = int(_SHARE_OF_BUDGET * self.budget_ns / max(self._ns_per_step))
        self.number += 1
        self.current = self._from(first, max(1, fitting))
        return self.current

    def _from(self, first: int, steps: int) -> Window:
        last = first + steps - 1
        if self.whole.last is not None:
            last = min(last, self.whole.last)
        warmup_from = first if self.number else self.whole.warmup_from
        return replace(self.whole, warmup_from=warmup_from, first=first, last=last)
