"""The limits of a window: how long it may record, and how much memory the process may gain."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL, Structure, c_size_t
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

from instrument.base import threads
from instrument.record.config.schema import ProfilerConfig

_LOOK_S = 0.5
# If no step ends, a window ends at twice its time limit, but at least this long after the limit.
_LEAST_EXTRA_S = 1.0
# A window may take at most this fraction of the machine's memory, because at the end of a window
# torch needs about six times the memory that the window has taken.
_SHARE_OF_MACHINE = 1 / 8


class Limits:
    """Checks the limits of one window, from its beginning until `closed` is set.

    `StepLoop` calls `reached` at the end of each step. If no step ends for a long time, as in a
    server without requests, a thread calls `end` with this object and the reason at twice a limit.
    `end` is None if only the thread that began the window can end it.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        seconds: float | None,
        end: Callable[[Limits, str], None] | None = None,
    ) -> None:
        limit = config.max_window_s
        self._is_whole = seconds is not None and (limit is None or seconds <= limit)
        self._max_s = seconds if self._is_whole else limit
        memory, machine = config.max_window_memory, machine_bytes()
        self._max_bytes: int | None = memory
        if memory is not None and machine is not None:
            self._max_bytes = min(memory, int(machine * _SHARE_OF_MACHINE))
        self.began_s, self._began_bytes = time.monotonic(), resident_bytes()
        self.closed = Event()
        if end is not None and (self._max_s is not None or self._max_bytes is not None):
            thread = Thread(target=self._watch, args=(end,), name="instrument-limits", daemon=True)
            threads.start(thread, "a window's limits are checked only when a step ends")

    def reached(self, times: int = 1, extra_s: float = 0) -> str | None:
        """Return why the window must end, "" if its `seconds` are over; None while it may continue.

        It must end at `times` times a limit, but no earlier than `extra_s` seconds after the time
        limit.
        """
        elapsed_s = time.monotonic() - self.began_s
        if self._max_s is not None and elapsed_s >= max(times * self._max_s, self._max_s + extra_s):
            return "" if self._is_whole else f"profiler.max_window_s={self._max_s:g} was reached"
        grown = resident_bytes() - self._began_bytes
        if self._max_bytes is not None and grown >= times * self._max_bytes:
            return (
                f"the memory of the process grew by {grown / 1e9:.2f} GB during the window, over "
                f"the limit of {self._max_bytes / 1e9:.2f} GB (profiler.max_window_memory)"
            )
        return None

    def _watch(self, end: Callable[[Limits, str], None]) -> None:
        while not self.closed.wait(_LOOK_S):
            if (reason := self.reached(2, _LEAST_EXTRA_S)) is not None:
                end(self, reason)
                return


def resident_bytes() -> int:
    """Memory of the process in bytes, without mapped files and free memory; 0 if not on Linux."""
    try:
        pages, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(pages) - int(shared)) * os.sysconf("SC_PAGE_SIZE") - _free_bytes()


class _Mallinfo(Structure):
    _fields_ = (("sizes", c_size_t * 10),)


def _free_bytes() -> int:
    """What glibc's malloc keeps for later: torch reuses the memory of earlier windows."""
    mallinfo2 = _mallinfo2()
    return 0 if mallinfo2 is None else int(mallinfo2().sizes[8])


@cache
def _mallinfo2() -> Callable[[], Any] | None:
    try:
        found = CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another library, or glibc before 2.33
        return None
    found.restype = _Mallinfo
    return found


def machine_bytes() -> int | None:
    """The memory in bytes of the machine, or of the container if that is less; None if unknown."""
    sizes = []
    with suppress(AttributeError, OSError, ValueError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file; "max"
            sizes.append(int(Path(file).read_text()))
    return min(sizes, default=None)
