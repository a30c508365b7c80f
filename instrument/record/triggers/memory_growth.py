"""Requests a window when memory keeps growing."""

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

from instrument.base.units import size
from instrument.record.triggers.trigger import RequestWindow, Step, Trigger, TriggerCallbacks

_SAMPLES = 10  # number of samples in `over` steps


class MemoryGrowth(Trigger):
    """Fires when memory has grown by at least `at_least_bytes` in `over` steps.

    Memory is sampled ten times in `over` steps. No sample may be smaller than the previous sample,
    and at least half must be larger, so one large allocation is not enough.

    With a CUDA device, a sample is the memory that tensors occupy in torch's allocator at the end
    of a step. Without a CUDA device, a sample is the resident memory of the process (Linux only).
    Sampling starts again after each window, because recording itself takes memory.

    This trigger's windows are recorded with `profile_memory=true`, whatever the run's config says.
    In these windows, torch records only the thread that calls `session.step()`, also with
    `profile_all_threads`.
    """

    records: ClassVar[Mapping[str, Any]] = MappingProxyType({"profile_memory": True})

    over: int = Field(500, ge=10)
    """Steps over which memory must have grown."""

    at_least_bytes: int = Field(64 * 1024**2, ge=1)
    """The least growth over these steps, in bytes."""

    def begin(self, folder: Path, ask: RequestWindow) -> TriggerCallbacks:  # noqa: ARG002
        """Choose which memory to sample."""
        if torch.cuda.is_available():
            return TriggerCallbacks(self._grown(lambda step: step.allocated_bytes))
        resident: list[int | None] = [None]

        def poll() -> None:
            resident[0] = _resident_bytes()

        return TriggerCallbacks(self._grown(lambda _: resident[0]), poll)

    def _grown(self, sample: Callable[[Step], int | None]) -> Callable[[Step], str | None]:
        stride = self.over // _SAMPLES
        samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES + 1)
        next_sample = 0

        def fires(step: Step) -> str | None:
            nonlocal next_sample
            if step.recorded:
                samples.clear()
                return None
            if step.number < next_sample:
                return None
            next_sample = step.number + stride
            now = sample(step)
            if now is None:
                return None
            if samples and now < samples[-1][1]:
                samples.clear()
            samples.append((step.number, now))
            (first, before), grown = samples[0], now - samples[0][1]
            if len(samples) <= _SAMPLES or grown < self.at_least_bytes or _in_one_go(samples):
                return None
            samples.clear()
            return (
                f"memory grew by {size(grown)} from step {first} to {step.number}, "
                f"from {size(before)} to {size(now)}"
            )

        return fires


def _in_one_go(samples: deque[tuple[int, int]]) -> bool:
    """Whether fewer than half of the samples are larger than the previous sample."""
    sizes = [size for _, size in samples]
    return sum(later > earlier for earlier, later in pairwise(sizes)) < _SAMPLES // 2


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
