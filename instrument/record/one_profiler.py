"""Torch has one profiler in a process: who has it, whose turn it is, and what is left on by whom."""

from __future__ import annotations

import atexit
import os
import weakref
from threading import RLock, Thread, current_thread
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from instrument.errors import CaptureError


class Owner(Protocol):
    """Who has the profiler; see `Recorder`."""

    prepared: bool
    thread: Thread

    def stop_here(self) -> None:
        """Stop the profiler on this thread."""

    def let_go(self) -> None:
        """Note that torch records no more."""


#: Held while the profiler is prepared, started and stopped.
turn = RLock()
#: Who left it on, as another thread went on with a window that its own alone can stop.
abandoned: Owner | None = None
_busy: weakref.ref[Owner] | None = None


def take(owner: Owner) -> None:
    """Note who has the profiler; who is prepared no more has let it go."""
    global _busy
    _busy = weakref.ref(owner)


def busy() -> Owner | None:
    """Who has the profiler now."""
    owner = None if _busy is None else _busy()
    return owner if owner is not None and owner.prepared else None


def abandon(owner: Owner) -> None:
    """Leave the profiler on, as it cannot be stopped here."""
    global abandoned
    abandoned = owner
    atexit.register(stop_abandoned)  # torch would end the process there


def stop_abandoned() -> str | None:
    """Stop the profiler that was left on, as can be done on its own thread, or once that has ended.

    None: nothing is left on; otherwise a sentence that says what is.
    """
    global abandoned
    with turn:
        owner = abandoned
        if owner is None:
            return None
        if current_thread() is not owner.thread and owner.thread.is_alive():
            return (
                f"torch's profiler is still on in the thread {owner.thread.name}, where a window was dropped, and can "
                "be stopped only there: take a step or stop a session on it, or let it end."
            )
        is_its_own = current_thread() is owner.thread
        if not is_its_own and busy() is owner:
            owner.let_go()
        if not is_its_own and not _restarted():
            return (
                f"The thread {owner.thread.name} ended while torch's profiler was on, after which torch "
                f"{torch.__version__} records nothing in this process: step on a thread that goes on."
            )
        abandoned = None
        atexit.unregister(stop_abandoned)
        if is_its_own:
            owner.stop_here()
    return None


def _restarted() -> bool:
    """Have torch let go of a recording whose thread has ended, which would fail at exit; not every torch can."""
    again = _KinetoProfile(activities=[ProfilerActivity.CPU])
    try:
        again.prepare_trace()
    except RuntimeError:
        return False
    again.start_trace()
    again.stop_trace()
    return True


def refuse_company() -> None:
    """Make sure that nobody else records in this process.

    Raises:
        CaptureError: another session records, or torch's own profiler is running.
    """
    if why := stop_abandoned():
        raise CaptureError(why)
    if busy() is not None:
        raise CaptureError(
            "Another session is recording in this process, and only one can: stop that one first; of two callbacks in "
            "a trainer make one, whose profiler.at_steps and profiler.sinks name the windows and sinks of both."
        )
    if torch._C._autograd._profiler_enabled() or getattr(
        torch.autograd.profiler, "_is_profiler_enabled", False
    ):
        raise CaptureError(
            "torch's own profiler is running in this process, and only one can: stop that one first."
        )


def _forget_parent() -> None:
    global turn, abandoned, _busy
    turn, abandoned, _busy = RLock(), None, None


# A forked child records nothing yet, whatever its parent does.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_parent)
