"""Edits beside reality: programs twice, with and without what an edit changes, recorded in turns.

An unedited replay proves nothing, because it repeats what was recorded. So each edit here has a program in which it was
really made. `tests/findings/twins.py` records slow and fixed steps in one process; the edit sees the slow steps alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from findings.twins import Twin

from instrument import profiled
from instrument.read.simulate.scenario import Scenario

_SIZE = 300
_NAP_S = 0.02


class MeasuredEdit(NamedTuple):
    """A program twice, and the edit that makes the first one the second."""

    twin: Twin
    edit: Callable[[Scenario], Scenario]


@cache
def _matrix() -> torch.Tensor:
    return torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0))


def _work(times: int = 20) -> None:
    for _ in range(times):
        _matrix() @ _matrix()


def _nap(seconds: float) -> None:
    with profiled("nap"):
        time.sleep(seconds)
    _work()


def _exponents(times: int) -> None:
    for _ in range(times):
        torch.exp(_matrix())
    _work()


def _beside(times: int) -> None:
    """A thread that naps while the training thread works, and for which it then waits."""

    def help_out() -> None:
        for _ in range(times):
            with profiled("helping"):
                time.sleep(3 * _NAP_S)

    helper = threading.Thread(target=help_out)
    helper.start()
    _work(5)
    helper.join()
    _work(5)


class _Fetcher:
    """A thread that fetches what the training thread asks for."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._fetched: queue.SimpleQueue[float] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            seconds = self._asked.get()
            if seconds:
                with profiled("fetch"):
                    time.sleep(seconds)
            self._fetched.put(seconds)

    def fetch(self, seconds: float) -> None:
        self._asked.put(seconds)
        self._fetched.get()
        _work()


@cache
def _fetcher() -> _Fetcher:
    return _Fetcher()


EDITS = [
    MeasuredEdit(
        Twin("a sleep halved", lambda: _nap(_NAP_S), lambda: _nap(_NAP_S / 2), code=""),
        lambda whatif: whatif.scale(range="nap", by=0.5),
    ),
    MeasuredEdit(
        Twin("an operator removed", lambda: _exponents(60), lambda: _exponents(0), code=""),
        lambda whatif: whatif.remove(operator="aten::exp"),
    ),
    MeasuredEdit(
        Twin("a helper thread twice as fast", lambda: _beside(2), lambda: _beside(1), code=""),
        lambda whatif: whatif.scale(range="helping", by=0.5),
    ),
    MeasuredEdit(
        Twin(
            "a wait removed", lambda: _fetcher().fetch(_NAP_S), lambda: _fetcher().fetch(0), code=""
        ),
        lambda whatif: whatif.remove(range="fetch"),
    ),
]
