"""Waits that end when what they wait for is there, however busy the machine, and clocks of which a test says how they go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from instrument.base import waiting
from instrument.record import finisher, session, step_loop, unedited


def until(ready: Callable[[], Any]) -> Any:
    """The first true result."""
    while not (answer := ready()):
        time.sleep(0.01)
    return answer


def end_of_thread(name: str) -> None:
    """Wait until no thread of this name is left."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


def end_of_run_in_leaps(monkeypatch: pytest.MonkeyPatch, leap_s: int) -> None:
    """At the end of a run, each look at the clock is so many seconds later than the one before."""
    now = count(0, leap_s)
    for module in (finisher, waiting):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The only element is what the clock of steps and phases shows, in nanoseconds."""
    now = [0]
    for module in (session, step_loop, unedited):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    return now
