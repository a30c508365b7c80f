"""The part of `instrument try` in the script's process: it runs the steps that it is asked for.

`instrument try` listens on the socket that INSTRUMENT_TRIAL names. Each rank connects at the end of
its first known step, and then waits between two steps until the next request. Both sides send a
JSON object per line; `Trial.step_ended` has the keys.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from instrument.base.errors import reason_of
from instrument.base.files import TRIAL_VARIABLE
from instrument.base.rank_info import rank_info
from instrument.record.applied_changes import AppliedChanges, program_of
from instrument.record.changes import Program, applicable, parse
from instrument.record.unedited import Watch
from instrument.record.work import Work


def begin(changes: str, *, observes: bool) -> Callable[[Watch], object]:
    """Prepare the changes that `--with` names; return what is called after each step.

    `observes` is whether `instrument try` gets the work of the script, which nobody may record.
    """
    applied = AppliedChanges(parse(changes))
    applied.prepare()
    if TRIAL_VARIABLE in os.environ:
        work = Work() if observes else None
        if work:
            work.begin()
        return Trial(applied, work).step_ended
    is_first = True

    def after_first_step(watch: Watch) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            applied.switch(program_of(watch))

    return after_first_step


class Trial:
    """Runs the script's steps in blocks, as `instrument try` asks for them."""

    def __init__(self, changes: AppliedChanges, work: Work | None) -> None:
        self._changes, self._work = changes, work
        self._program: Program | None = None
        self._lines: Any = None  # the connection
        self._steps = self._lead = 0  # of the block that runs, how many are left
        self._count, self._began_ns, self._until_captured = 0, 0, False
        self._collections = 0

    def step_ended(self, watch: Watch) -> None:
        """At the end of a block, answer its request, and wait for the next one.

        A request has `steps`, the number of steps to time; `lead`, how many run before these;
        `with`, the changes to switch on; and `captured`, whether to answer, and go on, as soon as
        the windows of the session are finished. The other answer has `step_ns`, the mean time of
        the timed steps, and `collections`, the full collections of garbage in them; or `error`, why
        the changes could not be made. The answer to `work` has `work`, what the script has done so
        far; after it, only losses are observed.
        """
        if self._lead:
            self._lead -= 1
            if not self._lead:
                self._begin()
            return
        try:
            if self._until_captured and _is_captured(watch):
                self._until_captured = False
                self._answer({})  # steps go on, because other ranks may wait for them
            if self._steps > 1:
                self._steps -= 1
                return
            if self._steps:
                self._steps = 0
                _synchronize()
                took_ns = time.perf_counter_ns() - self._began_ns
                ran = _full_collections() - self._collections
                self._answer({"step_ns": took_ns / self._count, "collections": ran})
            while not (self._steps or self._lead):
                self._next(watch)
        except Exception as error:  # the other side must not wait for ever
            with suppress(Exception):  # it has ended: the script must not go on alone
                self._answer({"error": reason_of(error)})
            os._exit(1)

    def _next(self, watch: Watch) -> None:
        if self._program is None:
            self._program = program_of(watch)
            self._connect(self._program)
        line = self._lines.readline()
        if not line:  # `instrument try` has ended: the script must not go on alone
            os._exit(1)
        asked = json.loads(line)
        if asked.get("work"):
            self._answer({"work": self._work.content() if self._work else None})
            if self._work:
                self._work.only_losses = True  # from now on, steps are timed
            return
        try:
            self._changes.switch(self._program, parse(asked.get("with", "")))
        except Exception as error:  # of torch, as the change does not fit
            self._answer({"error": reason_of(error)})
            return
        self._steps = self._count = asked["steps"]
        self._lead, self._until_captured = asked.get("lead", 0), asked.get("captured", False)
        if not self._lead:
            self._begin()

    def _connect(self, program: Program) -> None:
        own = socket.socket(socket.AF_UNIX)
        own.connect(os.environ[TRIAL_VARIABLE])
        self._lines = own.makefile("rw")
        self._changes.switch(program)
        rank = rank_info()
        ranks = {"rank": rank.rank, "ranks": rank.world_size}
        self._answer({**ranks, "changes": applicable(program)})

    def _begin(self) -> None:
        _synchronize()
        self._collections = _full_collections()
        self._began_ns = time.perf_counter_ns()

    def _answer(self, content: dict[str, Any]) -> None:
        self._lines.write(json.dumps(content) + "\n")
        self._lines.flush()


def _is_captured(watch: Watch) -> bool:
    """Whether all planned windows are finished."""
    session = watch.session
    if session is None or session.window is not None:
        return False
    return session.saved > 0 and not session.exporting


def _full_collections() -> int:
    """How often Python has collected garbage among old objects; Python 3.14 does so in parts."""
    collections: int = gc.get_stats()[1 if sys.version_info >= (3, 14) else 2]["collections"]
    return collections


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
