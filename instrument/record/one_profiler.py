"""Remembers which `Recorder` owns torch's profiler. A process has only one profiler."""

from __future__ import annotations

import atexit
import os
import weakref
from threading import RLock, current_thread
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from instrument.annotate import backends
from instrument.errors import CaptureError

if TYPE_CHECKING:
    from instrument.record.recorder import Recorder


#: Held while the profiler is prepared, started and stopped.
lock = RLock()
#: The recorder that left the profiler on, because only another thread can stop the profiler.
abandoned: Recorder | None = None
_owner: weakref.ref[Recorder] | None = None


def set_owner(owner: Recorder) -> None:
    """Remember that `owner` uses the profiler, for as long as `owner.prepared` is true."""
    global _owner
    _owner = weakref.ref(owner)


def current_owner() -> Recorder | None:
    """The recorder that uses the profiler now, or None."""
    owner = None if _owner is None else _owner()
    return owner if owner is not None and owner.prepared else None


def abandon(owner: Recorder) -> None:
    """Remember that `owner` could not stop the profiler on this thread, and left it on."""
    global abandoned
    abandoned = owner
    atexit.register(stop_abandoned)  # otherwise torch would crash at exit


def stop_abandoned() -> str | None:
    """Stop torch's profiler if a recorder left it on, and if this thread can stop it.

    Only the thread that prepared the recorder's window can stop the profiler. After that thread has
    ended, any thread can stop the profiler.

    Returns:
        None if no recorder had left the profiler on, or if it is stopped now; otherwise a sentence
            that says what is wrong.
    """
    global abandoned
    with lock:
        owner = abandoned
        if owner is None:
            return None
        if current_thread() is not owner.thread and owner.thread.is_alive():
            return (
                f"torch's profiler is still on in the thread {owner.thread.name}, where a window "
                "was dropped, and only that thread can stop it: call session.step() or "
                "session.stop() on that thread, or let the thread end."
            )
        on_its_thread = current_thread() is owner.thread
        if not on_its_thread:
            if current_owner() is owner:
                owner.release()
            backends.end_recording()
            if not _restart():
                return (
                    f"The thread {owner.thread.name} ended while torch's profiler was on, and "
                    f"torch {torch.__version__} now records nothing in this process: call "
                    "session.step() on a thread that does not end."
                )
            owner.free_ranges()
        abandoned = None
        atexit.unregister(stop_abandoned)
        if on_its_thread:
            owner.stop_here()
    return None


def _restart() -> bool:
    """Make torch drop a recording whose thread has ended; otherwise torch would crash at exit.

    Returns False if this version of torch cannot drop such a recording.
    """
    again = _KinetoProfile(activities=[ProfilerActivity.CPU])
    try:
        again.prepare_trace()
    except RuntimeError:
        return False
    again.start_trace()
    again.stop_trace()
    return True


def require_idle() -> None:
    """Raise if another profiler is active in this process.

    Raises:
        CaptureError: another session records, or torch's own profiler is running.
    """
    if why := stop_abandoned():
        raise CaptureError(why)
    if current_owner() is not None:
        raise CaptureError(
            "Another session is recording in this process, and only one can record at a time: stop "
            "that session first. If a trainer has two callbacks, use one callback with the windows "
            "(profiler.at_steps) and the sinks (profiler.sinks) of both."
        )
    if torch._C._autograd._profiler_enabled() or getattr(
        torch.autograd.profiler, "_is_profiler_enabled", False
    ):
        raise CaptureError(
            "torch's own profiler is running in this process, and only one profiler can run at a "
            "time: stop torch's profiler first."
        )


def _leave_to_parent() -> None:
    global lock, abandoned, _owner
    owner = current_owner()
    lock, abandoned, _owner = RLock(), None, None
    if owner is not None:
        owner.leave_to_parent()


# A forked child, such as a worker of a data loader, does not record, even if its parent does.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
