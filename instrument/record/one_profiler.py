"""Remembers which `Recorder` owns torch's profiler. A process has only one profiler.

If a second profiler starts, torch gives the first one's recording up without an error. So a window
does not begin while a profiler of the program is on or warms up, and ends before one starts.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock, current_thread, get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from instrument.annotate import backends
from instrument.base.errors import CaptureError

if TYPE_CHECKING:
    from instrument.record.recorder import Recorder


#: Held while the profiler is prepared, started and stopped.
lock = RLock()
#: The recorder that left the profiler on, because only another thread can stop the profiler.
abandoned: Recorder | None = None
#: The name of torch's own profiler, when the program starts one.
TORCHS = "torch.profiler"
#: Called with its name before the program starts a session, or its own torch.profiler.
before_start: list[Callable[[str], object]] = []
_owner: weakref.ref[Recorder] | None = None
# Whether a recorder has used the profiler, and so Kineto has a thread.
_kineto_runs = False
# The thread that prepares or starts torch's profiler for a recorder.
_our_thread: int | None = None
# Looked up now, because a forked child may wait for ever for the loader of libraries. The second
# function writes what C code has printed; the last one is called first.
_libc = ctypes.CDLL(None)
_AT_EXIT = [
    ctypes.cast(getattr(_libc, name), ctypes.c_void_p)
    for name in ("_exit", "fcloseall")
    if hasattr(_libc, "on_exit") and hasattr(_libc, name)
]
# Profilers of the program that warm up; torch itself says only whether one records.
_warming_up: weakref.WeakSet[Any] = weakref.WeakSet()


def set_owner(owner: Recorder) -> None:
    """Remember that `owner` uses the profiler, for as long as `owner.prepared` is true."""
    global _owner, _kineto_runs
    _owner, _kineto_runs = weakref.ref(owner), True


def current_owner() -> Recorder | None:
    """The recorder that uses the profiler now, or None."""
    owner = None if _owner is None else _owner()
    return owner if owner is not None and owner.prepared else None


@contextmanager
def starting() -> Iterator[None]:
    """Hold the lock while our own code prepares or starts torch's profiler."""
    global _our_thread
    with lock:
        before, _our_thread = _our_thread, get_ident()
        try:
            yield
        finally:
            _our_thread = before


@functools.cache
def watch_others() -> Callable[[], None]:
    """From now on, end our window before a profiler of the program warms up or starts.

    Also keep the steps of an idle profiler of the program out of our windows. Wraps two private
    functions of torch, which are called once per recording, because torch has no callback for this.
    If this version of torch lacks one of them, nothing is wrapped; `Recorder` then notices only
    profilers that stop within the window. The result undoes it.
    """
    module: Any = torch.autograd.profiler
    prepare = getattr(module.profile, "_prepare_trace", None)
    start = getattr(module, "_run_on_profiler_start", None)
    if prepare is None or start is None:
        return lambda: None

    @functools.wraps(prepare)
    def prepare_trace(profile: Any, *args: Any, **kwargs: Any) -> Any:
        if _our_thread == get_ident():
            return prepare(profile, *args, **kwargs)
        _warming_up.add(profile)  # first, so that no window begins meanwhile
        try:
            _end_window()
            return prepare(profile, *args, **kwargs)
        except BaseException:
            _warming_up.discard(profile)
            raise

    @functools.wraps(start)
    def run_on_profiler_start(*args: Any, **kwargs: Any) -> Any:
        if _our_thread != get_ident():
            _end_window()
        started = start(*args, **kwargs)
        _warming_up.clear()
        return started

    def record_steps(profile: Any) -> bool:
        # Within our window, the steps of a profiler that does not record would look like our steps.
        owner = current_owner()
        return vars(profile)["record_steps"] and (owner is None or owner.started_at is None)

    def set_record_steps(profile: Any, value: bool) -> None:
        vars(profile)["record_steps"] = value

    public: Any = torch.profiler.profile
    public.record_steps = property(record_steps, set_record_steps)
    module.profile._prepare_trace = prepare_trace
    module._run_on_profiler_start = run_on_profiler_start
    if not _is_on():
        _warming_up.update(filter(_is_warming_up, gc.get_referrers(module.profile)))

    def undo() -> None:
        if module.profile._prepare_trace is prepare_trace:  # else it is undone, or wrapped again
            del public.record_steps
            module.profile._prepare_trace, module._run_on_profiler_start = prepare, start
            watch_others.cache_clear()

    return undo


def announce(name: str) -> None:
    """Say to those that record an unedited script what the script is about to start."""
    for call in before_start:
        call(name)


def _end_window() -> None:
    announce(TORCHS)
    stop_abandoned()
    owner = current_owner()
    if owner is not None:
        owner.end_window()
    if abandoned is not None:
        abandoned.superseded = True


def program_records(*, or_warms_up: bool = False) -> bool:
    """Whether a profiler of the program is on; call this while no recorder uses the profiler."""
    return _is_on() or (or_warms_up and bool(_warming_up))


def _is_on() -> bool:
    return torch._C._autograd._profiler_enabled() or getattr(
        torch.autograd.profiler, "_is_profiler_enabled", False
    )


def _is_warming_up(profile: Any) -> bool:
    is_profile = type(profile) is torch.autograd.profiler.profile
    # a disabled profile has neither attribute
    return is_profile and getattr(profile, "entered", False) and profile.kineto_results is None


def abandon(owner: Recorder) -> None:
    """Remember that `owner` could not stop the profiler on this thread, and left it on."""
    global abandoned
    abandoned = owner
    atexit.register(stop_abandoned)  # otherwise torch would crash at exit


def stop_abandoned() -> str | None:
    """Stop torch's profiler if a recorder left it on, and if this thread can stop it.

    Only the thread that prepared the recorder's window can stop the profiler, or any thread after
    that thread has ended. Returns a sentence that says what is wrong if the profiler is still on.
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
        if owner.superseded:
            owner.forget_here() if on_its_thread else owner.release()
        elif not on_its_thread:
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
        if on_its_thread and not owner.superseded:
            owner.stop_here()
        abandoned = None
        atexit.unregister(stop_abandoned)
    return None


def _restart() -> bool:
    """Make torch drop a recording whose thread has ended; otherwise torch would crash at exit.

    Returns False if this version of torch cannot do so.
    """
    again = _KinetoProfile(activities=[ProfilerActivity.CPU])
    with starting():
        try:
            again.prepare_trace()
        except RuntimeError:
            return False
        again.start_trace()
        again.stop_trace()
    return True


def refuse_second_session() -> None:
    """Raise if another session records.

    Raises:
        CaptureError: another session records.
    """
    if current_owner() is not None and current_owner() is not abandoned:
        raise CaptureError(
            "Another session is recording in this process, and only one can record at a time: stop "
            "that session first. If a trainer has two callbacks, use one callback with the windows "
            "(profiler.at_steps) and the sinks (profiler.sinks) of both."
        )


def require_idle() -> None:
    """Raise if another profiler is active, or warms up.

    Raises:
        CaptureError: another session records, or torch's own profiler is running.
    """
    if why := stop_abandoned():
        raise CaptureError(why)
    refuse_second_session()
    if program_records(or_warms_up=True):
        raise CaptureError(
            "torch's own profiler is running in this process, and only one profiler can run at a "
            "time: stop torch's profiler first."
        )


def leave_to_parent() -> None:
    """Forget the parent's recording in a forked child."""
    global lock, abandoned, _owner, _our_thread
    owner = current_owner()
    lock, abandoned, _owner, _our_thread = RLock(), None, None, None
    if _kineto_runs:
        _exit_before_destructors()
    if owner is not None:
        owner.leave_to_parent()


def _exit_before_destructors() -> None:
    """End this process with `_exit` once Python has ended, with the same status.

    Otherwise Kineto's destructor, which runs at the end of a process, would wait for ever for
    Kineto's thread, which a forked child does not have. glibc calls functions in reverse order, and
    passes each the status. Without glibc, nothing is done.
    """
    for function in _AT_EXIT:
        _libc.on_exit(function, None)
