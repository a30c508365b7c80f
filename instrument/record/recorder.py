"""One window of torch's profiler: `Recorder` prepares, starts and stops it, `RecordedWindow` is what it recorded.

Built on `torch.profiler._KinetoProfile`, whose waiting costs nothing; `torch.profiler.profile.step()` opens a range of
over 11 µs on every step, also while it waits.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import torch
from loguru import logger
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from instrument.annotate import backends, module_calls
from instrument.annotate.modules import ModuleRanges, attach_ranges
from instrument.config.activities import chosen_types
from instrument.config.schema import ProfilerConfig
from instrument.errors import CaptureError, ConfigError
from instrument.range_names import STEP_PREFIX
from instrument.record import memory_categories, one_profiler, torch_support
from instrument.record.execution_trace import ExecutionTrace
from instrument.record.profile_hook import ProfileHook

# Below this much free space torch's export is not even tried: it would return as if all were well.
_LEAST_FREE_BYTES = 16 * 1024**2

# How many allocations and frees CUDA's allocator keeps of a window, the last ones; several kB each with their stacks.
_SNAPSHOT_EVENTS = 100_000

# Kineto opens no path that holds a quote, a backslash, a line break or the like, and torch none that is no UTF-8.
_PLAIN_PATH = re.compile(r"[^\"\\\x00-\x1f\x7f\ud800-\udfff]*")

# How long torch's callbacks, a microsecond each, may take to leave the profiler on all other threads. Of 900 windows
# beside busy threads on two cores 30 ms lost none, 10 ms one; without, nearly every process ended within 100.
_CALLBACKS_S = 0.05
# All that torch can switch off in the midst of a window; it warns, on each call, of a choice.
_TOGGLED = [
    member
    for name, member in ProfilerActivity.__members__.items()
    if name in ("CPU", "CUDA", "XPU")
]


class Recorder:
    """Records one window; a new one is made for each.

    Every thread is recorded, and any may go on with the window and stop it. Not so with `profile_memory`, or in a torch
    that cannot: only the thread that starts the window is recorded, and only there can torch be stopped. When another
    one goes on with the window, it is dropped, and `one_profiler.stop_abandoned` stops torch on the thread that can.

    `stop` waits for the device, and holds the GIL while torch collects: about 4 s per million events, 13–16 s with
    shapes.

    `folder` is where torch writes what it writes while it records, under names with the id of the `run`.

    Attributes:
        prepared: whether torch's profiler is on for this window.
        started_at: seconds since the epoch when recording began; None before.
        thread: the one that prepared it.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        activities: Sequence[str],
        emitting: backends.Backend,
        folder: Path,
        run: str = "",
    ) -> None:
        options = torch_support.experimental_options(config)
        self._all_threads = bool(options.get("profile_all_threads"))
        self._profile = _KinetoProfile(
            activities=torch_support.as_torch_takes(activities, chosen_types(config.activities)),
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_modules=config.with_modules,
            experimental_config=torch._C._profiler._ExperimentalConfig(**options),
        )
        self._emitting = emitting
        self._modules: ModuleRanges | None = None
        self.thread: Thread = current_thread()
        self._with_memory_categories = config.memory_categories
        self._takes_snapshot = config.memory_snapshot and "cuda" in activities
        self._snapshot: Any = None
        self._execution_trace_folder = folder if config.execution_trace else None
        self._run = run
        self._execution_trace: ExecutionTrace | None = None
        self._graphs_before = 0
        self.prepared = False
        self._disturbed = False
        self._profile_hook: ProfileHook | None = None
        self._step_range: Any = None
        self._step: int | None = None
        self.started_at: float | None = None

    def prepare(self) -> None:
        """Begin to warm up: the profiler's machinery is on and what it records is thrown away.

        Raises:
            CaptureError: another session records, or torch's own profiler is running.
        """
        with one_profiler.turn:
            one_profiler.refuse_company()
            with (
                warnings.catch_warnings()
            ):  # as torch 2.10's, that events of earlier windows are gone
                warnings.filterwarnings(
                    "ignore", message=".*clears events at the end of each cycle"
                )
                self._profile.prepare_trace()
            self.prepared = True
            self.thread = current_thread()
            one_profiler.take(self)
        self._graphs_before = _compiled_graphs()
        self._modules = attach_ranges()

    def start(self) -> None:
        """Begin to keep what is recorded; prepares first where nobody has.

        Raises:
            CaptureError: as `prepare`, or on another thread than that of `prepare`, as `stop`.
        """
        if not self.prepared:
            self.prepare()
        if not self.can_stop_here:
            self._refuse_other_thread()
        if self._execution_trace_folder is not None:
            self._execution_trace = ExecutionTrace(self._execution_trace_folder, self._run)
            self._profile.execution_trace_observer = self._execution_trace.observer
        self.started_at = time.time()
        with one_profiler.turn:
            self._start_trace()
        if self._takes_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        backends.arm(self._emitting)
        backends.mark("window begins")

    @property
    def can_stop_here(self) -> bool:
        """Whether the window can go on, and be ended, on this thread."""
        return self._all_threads or current_thread() is self.thread

    def next_step(self, number: int) -> None:
        """End the step that is open and open the next: `ProfilerStep#number`, as torch's own schedule writes it.

        Where several threads step at once, a number may be passed over: that step gets a range of no length.
        """
        self.end_step()
        for each in range(number if self._step is None else self._step + 1, number + 1):
            self._close_step()
            self._step_range, self._step = backends.torch_backend.open(f"{STEP_PREFIX}{each}"), each

    def end_step(self) -> None:
        """End the step that is open, if any. One never ended is marked unfinished in the trace.

        Raises:
            CaptureError: as `stop`.
        """
        if not self._all_threads and self.prepared and not self.can_stop_here:
            self._refuse_other_thread()
        self._close_step()

    def _close_step(self) -> None:
        if self._step_range is not None:
            backends.torch_backend.close(self._step_range)
            self._step_range = None

    def stop(self) -> RecordedWindow | None:
        """End the window and leave nothing of ours in the running program; gives what was recorded.

        None where nothing was: only the warm-up ran, or the window was stopped before.

        Raises:
            CaptureError: it is called on another thread, and this torch, or `profile_memory`, ties the profiler to one.
        """
        with one_profiler.turn:
            if not self.prepared or one_profiler.abandoned is self:
                return None
            if not self._all_threads and not self.can_stop_here:
                self._refuse_other_thread()
            self.stop_here()
        if self.started_at is None:
            return None
        return RecordedWindow(
            self.started_at,
            self._about_ranges(),
            self._profile,
            self._disturbed,
            self._with_memory_categories,
            self._snapshot,
            self._execution_trace,
        )

    def stop_here(self) -> None:
        """Stop on the thread that can; held by `one_profiler.turn`."""
        self._withdraw()
        if self._takes_snapshot and self.started_at is not None:
            self._take_snapshot()
        if self.started_at is None:
            self._start_trace()  # torch has no other way to leave the warm-up
        self._disturbed = not getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        if self._all_threads and not self._disturbed:
            self._let_callbacks_end()
        backends.end_recording()
        try:
            self._profile.stop_trace()
        except Exception:
            if not self._disturbed:  # else older torch raises here, and `save` says why
                self.let_go()
                raise
        self.let_go()  # not after KeyboardInterrupt: whoever cleans up stops once more
        self._close_step()
        backends.release_outlived()

    def _start_trace(self) -> None:
        if self._profile.with_stack:
            self._profile_hook = ProfileHook()
        with module_calls.unwrapped():
            self._profile.start_trace()

    def _withdraw(self) -> None:
        """Take our annotations and hooks out of the running program."""
        backends.mark("window ends")
        backends.disarm(self._emitting)
        if self._modules is not None:
            self._modules.__exit__()

    def _let_callbacks_end(self) -> None:
        """Have torch record nothing more, and wait until the other threads are out of its callbacks.

        torch frees what it has recorded when it stops; a thread that still writes there ends the process.
        """
        toggle = getattr(self._profile, "toggle_collection_dynamic", None)
        others_run = False
        for thread in threading.enumerate():
            others_run |= thread is not current_thread() and not thread.name.startswith(
                "instrument"
            )
        if toggle is None or not others_run:
            return
        device: Any = getattr(torch, self._profile.use_device or "", None)
        if hasattr(
            device, "synchronize"
        ):  # as torch does before it stops: what runs there is recorded to its end
            device.synchronize()
        toggle(False, _TOGGLED)
        time.sleep(_CALLBACKS_S)

    def _refuse_other_thread(self) -> None:
        """Abandon the window: this thread can neither be recorded nor stop it.

        Raises:
            CaptureError: always.
        """
        if one_profiler.abandoned is not self:
            one_profiler.abandon(self)
            self._withdraw()
        memory = self._profile.profile_memory
        raise CaptureError(
            f"A window began on one thread and another went on with it, but {'with profiler.profile_memory ' * memory}"
            f"torch {torch.__version__} records only the first and ends the window only there, so the window is "
            f"dropped: step on one thread{', or leave profile_memory out' * memory}."
        )

    def let_go(self) -> None:
        """Note that torch records no more."""
        self.prepared = False
        if self._profile_hook is not None:
            self._profile_hook.give_back()
        if self._execution_trace is not None:
            self._execution_trace.end()

    def _about_ranges(self) -> dict[str, Any]:
        graphs, modules = _compiled_graphs(), self._modules
        return {
            "compiled_ranges": backends.still_compiled_ranges(),
            "module_types": {} if modules is None else modules.types(),
            "modules_not_seen": []
            if modules is None
            else sorted(modules.unseen(of_marks=graphs > 0)),
            "graphs_compiled": graphs - self._graphs_before,
        }

    def _take_snapshot(self) -> None:
        """Keep what the allocator tells of the window, and end its history."""
        try:
            self._snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


@dataclass
class RecordedWindow:
    """One window as torch recorded it, held in memory until it is saved.

    Attributes:
        started_at: seconds since the epoch when recording began.
        ranges: what the trace cannot tell of the ranges, for `capture.json`. `compiled_ranges` are ranges that Dynamo traced
            away, with the compiled region that holds them; `module_types` the classes of the submodules whose ranges
            were opened; `modules_not_seen` the submodules whose range never opened, as they were not called or lie
            inside a compiled region, and where this process compiles marked modules too; `graphs_compiled` how many
            graphs Dynamo compiled since the warm-up began, whose time the window holds.
        profile: torch's profiler with its recording.
        disturbed: whether another of torch's profilers ran within the window.
        with_memory_categories: whether the categories of memory are to be written.
        snapshot: the CUDA allocator's memory snapshot, or None.
        execution_trace: torch's execution trace, or None.
    """

    started_at: float
    ranges: dict[str, Any]
    profile: _KinetoProfile
    disturbed: bool
    with_memory_categories: bool
    snapshot: Any
    execution_trace: ExecutionTrace | None

    def save(self, path: Path, *, quickly: bool = False) -> None:
        """Write the trace as plain JSON, with the snapshot, the execution trace and the categories of memory beside.

        Possible once: torch refuses a second export, and the recording is freed. `quickly`, as the process is about to
        end, leaves out what takes long: the categories. Cost: holds the GIL about 3.5 s per million events.

        Raises:
            CaptureError: the disk is full, torch wrote no whole file, it was interrupted, or another of its profilers
                ran within the window: after these two its export would end the process.
        """
        if self.disturbed:
            raise CaptureError(
                "torch.profiler was used inside the window, which takes the recording away: leave one of the two out."
            )
        if (
            getattr(self.profile.profiler, "kineto_results", None) is None
        ):  # its export would end the process
            raise CaptureError(
                "torch was interrupted while it stopped, and has no recording to save."
            )
        place = path.parent.parent
        if shutil.disk_usage(place).free < _LEAST_FREE_BYTES:
            least = _LEAST_FREE_BYTES >> 20
            raise CaptureError(
                f"Less than {least} MiB are free in {place}, so the window is lost: make room there."
            )
        with _torch_can_open(path) as plain:
            self.profile.export_chrome_trace(str(plain))
        if self.with_memory_categories and quickly:
            logger.warning(
                "The window is saved without memory by category, as the run ends before its time."
            )
        elif self.with_memory_categories and _ends_whole(path):
            memory_categories.write(self.profile, path.parent)
        self.profile.profiler = (
            None  # frees its events, which takes a tenth of all this, while the caller times it
        )
        if not _ends_whole(path):
            raise CaptureError(
                f"torch wrote no whole trace into {place}, so the window is lost: look at the space and quota there."
            )
        if self.execution_trace is not None:
            self._keep_execution_trace(self.execution_trace, path.with_name("execution_trace.json"))
        try:
            if self.snapshot is not None:
                path.with_name("memory_snapshot.pickle").write_bytes(pickle.dumps(self.snapshot))
        except OSError as error:  # the trace is whole
            logger.error(
                "The memory snapshot cannot be written ({}): make room for the next.", error
            )

    def _keep_execution_trace(self, trace: ExecutionTrace, target: Path) -> None:
        if trace.observer is None:
            return
        if _ends_whole(trace.path):
            trace.path.replace(target)
        else:
            logger.warning(
                "torch wrote no whole execution trace: look at the free space and quota of {}.",
                target.parent,
            )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM out of the block: torch can neither stop nor save a second time.

    A signal that arrives meanwhile is raised again behind the block. On another thread than the main one, where no
    signal is handled, this does nothing.
    """
    if current_thread() is not threading.main_thread():
        yield
        return
    arrived: set[int] = set()
    before = {
        signal.SIGTERM: signal.getsignal(signal.SIGTERM),
        signal.SIGINT: signal.getsignal(signal.SIGINT),
    }
    process = os.getpid()

    def note(number: int, _: Any) -> None:
        if os.getpid() == process:
            arrived.add(number)
            return
        signal.signal(number, before[signal.Signals(number)])  # in a forked child
        signal.raise_signal(number)

    for number, handler in before.items():
        if handler is not None:  # else it was set in C, and cannot be set again from Python
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        for number in before:
            if number in arrived:
                signal.raise_signal(number)


def import_early() -> None:
    """Import what torch imports when it prepares its first window, in the loop: up to 818 modules, 1.4 s of CPU."""
    with suppress(
        Exception
    ):  # a torch without it, or one that cannot import it: then its profiler does not either
        import torch._inductor.config  # noqa: F401


def refuse_options(config: ProfilerConfig, activities: Sequence[str], folder: Path) -> None:
    """Have torch judge the options that are its own, in a window that holds nothing.

    Costs nothing where neither `experimental_config` nor types of an activity are given; else about a millisecond, and
    where it is the process's first window the second that Kineto takes to come up.

    Raises:
        ConfigError: torch refuses them.
    """
    torch_support.refuse_unknown(config)
    if not config.experimental_config and not chosen_types(config.activities):
        return
    try:
        trial = Recorder(config, activities, backends.torch_backend, folder)
        trial.prepare()
        trial.stop()
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"torch {torch.__version__} refuses profiler.activities or profiler.experimental_config: {reason}."
        ) from error


def _compiled_graphs() -> int:
    """How many graphs Dynamo has compiled in this process; asked only where Dynamo is loaded already."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


@contextmanager
def _torch_can_open(path: Path) -> Iterator[Path]:
    """The path, or where Kineto would garble it another file, which is moved there afterwards."""
    if _PLAIN_PATH.fullmatch(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, path.name)
        yield plain
        if plain.exists():
            shutil.move(plain, path)


def _ends_whole(path: Path) -> bool:
    """Whether a trace ends as JSON does; a full disk leaves it cut short and torch says nothing."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
