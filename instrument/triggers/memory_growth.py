"""Growing memory asks for a window."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from pydantic import Field

from instrument.triggers import Ask, Step, Trigger, TriggerCallbacks
from instrument.units import size

_LOOKS = 10  # parts of the steps over which memory must have grown


class MemoryGrowth(Trigger):
    """Fires when memory has grown by `at_least_bytes` over `over` steps, without ever falling, at ten looks or so.

    With a CUDA device it looks at what torch's allocator holds at the end of a step; on the CPU alone at the memory
    of the whole process, which only Linux tells. Windows, which take memory themselves, make it begin anew.

    Its own windows record memory with `profile_memory=true`, whatever the run's say; torch then records only the thread
    that takes the steps.
    """

    records: ClassVar[Mapping[str, Any]] = MappingProxyType({"profile_memory": True})

    over: int = Field(500, ge=10)
    at_least_bytes: int = Field(64 * 1024**2, ge=1)

    def begin(self, folder: Path, ask: Ask) -> TriggerCallbacks:  # noqa: ARG002
        """Choose where to look."""
        if torch.cuda.is_available():
            return TriggerCallbacks(self._grown(lambda step: step.allocated_bytes))
        resident: list[int | None] = [None]

        def poll() -> None:
            resident[0] = _resident_bytes()

        return TriggerCallbacks(self._grown(lambda _: resident[0]), poll)

    def _grown(self, look: Callable[[Step], int | None]) -> Callable[[Step], str | None]:
        stride = self.over // _LOOKS
        looks: deque[tuple[int, int]] = deque(maxlen=_LOOKS + 1)
        next_look = 0

        def fires(step: Step) -> str | None:
            nonlocal next_look
            if step.recorded:
                looks.clear()
                return None
            if step.number < next_look:
                return None
            next_look = step.number + stride
            now = look(step)
            if now is None:
                return None
            if looks and now < looks[-1][1]:
                looks.clear()
            looks.append((step.number, now))
            (first, before), grown = looks[0], now - looks[0][1]
            if len(looks) <= _LOOKS or grown < self.at_least_bytes or _in_one_go(looks):
                return None
            looks.clear()
            sizes = size(grown), size(before), size(now)
            return "memory grew by {} from step {} to {}, from {} to {}".format(
                sizes[0], first, step.number, *sizes[1:]
            )

        return fires


def _in_one_go(looks: deque[tuple[int, int]]) -> bool:
    """Whether memory grew at fewer than half of the looks, as where something large was made once."""
    sizes = [size for _, size in looks]
    return sum(later > earlier for earlier, later in pairwise(sizes)) < _LOOKS // 2


def _resident_bytes() -> int | None:
    """The memory that this process holds; None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
