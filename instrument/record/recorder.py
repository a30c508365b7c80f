"""One window of torch's profiler: `Recorder` records it, `RecordedWindow` holds and saves it.

`torch.profiler._KinetoProfile` costs nothing while no window is open. The public
`torch.profiler.profile.step()` opens a range on every step, which takes over 11 µs.
"""

from __future__ import annotations

import pickle
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile

from instrument.annotate import backends, module_calls
from instrument.annotate.modules import ModuleRanges, attach_ranges, instrumented_models
from instrument.base.errors import CaptureError, ConfigError
from instrument.base.log import logger
from instrument.base.range_names import STEP_PREFIX
from instrument.record import observe, one_profiler, torch_support
from instrument.record.config.activities import chosen_types
from instrument.record.config.schema import ProfilerConfig
from instrument.record.parameters import Parameters

if TYPE_CHECKING:
    from instrument.record.execution_trace import ExecutionTrace

# With less free space nothing is exported, because torch's export would fail without an error.
_LEAST_FREE_BYTES = 16 * 1024**2

# CUDA's allocator keeps this many of the last allocations and frees of a window, several kB each.
_SNAPSHOT_EVENTS = 100_000

# Kineto cannot open a path with quotes, backslashes or control characters. torch cannot open a path
# that is not UTF-8.
_PLAIN_PATH = re.compile(r"[^\"\\\x00-\x1f\x7f\ud800-\udfff]*")

# How long to wait until other threads have left torch's callbacks. A callback takes a microsecond.
# In 900 windows with busy threads on two cores, no process crashed with a wait of 30 ms, and one
# process crashed with 10 ms. Without the wait, nearly every process crashed within 100 windows.
_CALLBACKS_S = 0.05
# On a busy machine, a thread may get no CPU for longer: one of 4 processes of low priority crashed
# within 60 windows. So a thread that wants a CPU is waited for until it has run for 1 ms.
_NO_CPU_S, _RUN_NS = 1.0, 1_000_000
# All activities that torch can switch off within a window. torch logs a warning on each call that
# leaves out one of these activities.
_TOGGLED = [
    member
    for name, member in ProfilerActivity.__members__.items()
    if name in ("CPU", "CUDA", "XPU")
]


class Recorder:
    """Records one window; each window needs a new `Recorder`.

    Only the thread that prepares the window is recorded, and only that thread can stop torch's
    profiler. If another thread runs the next step, the window is dropped, and
    `one_profiler.stop_abandoned` stops torch's profiler later. With `profile_all_threads`, all
    threads are recorded, and any thread may run the next step of the window and stop it.

    `stop` waits for the device. While torch collects the events, `stop` holds the GIL: about 4 s
    per million events, or 13–16 s with `record_shapes`.

    Attributes:
        all_threads: whether torch records all threads, so that any thread may stop the window.
        on_one_thread: whether each step so far ended on `thread`, outside of a backward, and called
            modules on one thread.
        prepared: whether torch's profiler is on for this window.
        started_at: seconds since the epoch when recording began; None before that.
        superseded: whether the program started another profiler while only another thread could
            stop this one; torch then drops this recording, and cannot stop it.
        thread: the thread that prepared the window.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        activities: Sequence[str],
        emitting: backends.Backend,
        folder: Path,
        run: str = "",
        end_window: Callable[[], None] = lambda: None,
    ) -> None:
        # torch writes the execution trace into `folder` while it records; its name holds `run`.
        # `end_window` is called when the program is about to start a profiler of its own.
        self.end_window = end_window
        options = torch_support.experimental_options(config)
        self.all_threads = bool(options.get("profile_all_threads"))
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
        self._parameters: Parameters | None = None
        self.thread: Thread = current_thread()
        self._with_memory_categories = config.memory_categories
        self._takes_snapshot = config.memory_snapshot and "cuda" in activities
        self._snapshot: Any = None
        self._execution_trace_folder = folder if config.execution_trace else None
        self._run = run
        self._execution_trace: ExecutionTrace | None = None
        self._graphs_before = 0
        self.prepared = self.superseded = False
        self.on_one_thread = True
        self._disturbed = False
        self._step_range: Any = None
        self._step: int | None = None
        self.started_at: float | None = None

    def prepare(self) -> None:
        """Begin to warm up: torch's profiler is on, and discards what it records.

        Raises:
            CaptureError: another session records, or torch's own profiler is running.
        """
        self._refuse_within_backward()
        with one_profiler.starting():
            one_profiler.require_idle()
            with warnings.catch_warnings():
                # torch 2.10 warns that the events of earlier windows are gone
                warnings.filterwarnings(
                    "ignore", message=".*clears events at the end of each cycle"
                )
                self._profile.prepare_trace()
            self.prepared = True
            self.thread = current_thread()
            one_profiler.set_owner(self)
        self._graphs_before = _compiled_graphs()
        self._modules = attach_ranges()
        self._parameters = Parameters() if instrumented_models() else None

    def start(self) -> None:
        """Begin to keep what torch records; calls `prepare` first if needed.

        Raises:
            CaptureError: as for `prepare`; or this thread cannot stop the window (see `Recorder`).
        """
        if not self.prepared:
            self.prepare()
        if not self.can_stop_here:
            self._abandon()
        self._refuse_within_backward()
        if self._execution_trace_folder is not None:
            from instrument.record.execution_trace import ExecutionTrace

            self._execution_trace = ExecutionTrace(self._execution_trace_folder, self._run)
            self._profile.execution_trace_observer = self._execution_trace.observer
        self.started_at = time.time()
        module_calls.called_on.clear()
        self._start_trace()
        if self._parameters is not None and not self._graphs_before:
            self._parameters.watch_steps()  # a compiled optimizer would be compiled again
        if self._takes_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_EVENTS)
        backends.arm(self._emitting)
        backends.mark("window begins")

    def _refuse_within_backward(self) -> None:
        # When a backward ends, torch restores the state of the thread, also that of a profiler that
        # began within it; it would crash when that profiler is stopped.
        if not self.all_threads and torch._C._current_graph_task_id() != -1:
            raise CaptureError(
                "session.step() was called within a backward, where a window can begin only with "
                "profiler.profile_all_threads=true and without profile_memory; or call it after "
                "the backward."
            )

    @property
    def can_stop_here(self) -> bool:
        """Whether this thread may run the next step of the window, and may end the window."""
        return self.all_threads or current_thread() is self.thread

    def next_step(self, number: int) -> None:
        """End the open step, and open the range `ProfilerStep#N` of the step `number`.

        If several threads call `session.step()` at once, `number` may be several steps ahead. Each
        step in between gets a range of length zero.
        """
        if number == self._step:  # it is still open
            return
        if self._step is not None:
            observe.next_step()
        self.end_step()
        for each in range(number if self._step is None else self._step + 1, number + 1):
            self._close_step()
            self._step_range, self._step = backends.torch_backend.open(f"{STEP_PREFIX}{each}"), each

    def end_step(self) -> None:
        """End the open step, if any. A step still open at `stop` is unfinished in the trace.

        Raises:
            CaptureError: as for `stop`.
        """
        if self.prepared and not self.can_stop_here:
            self._abandon()
        is_here = current_thread() is self.thread and torch._C._current_graph_task_id() == -1
        self.on_one_thread &= is_here and len(module_calls.called_on) < 2
        self._close_step()

    def _close_step(self) -> None:
        if self._step_range is not None:
            backends.torch_backend.close(self._step_range)
            self._step_range = None

    def stop(self) -> RecordedWindow | None:
        """End the window, stop opening ranges in the program, and return the recording.

        Returns None if only the warm-up ran, or if the window was already stopped.

        Raises:
            CaptureError: this thread cannot stop the window; see `Recorder`.
        """
        with one_profiler.lock:
            if not self.prepared or one_profiler.abandoned is self:
                return None
            if not self.can_stop_here:
                self._abandon()
            self.stop_here()
        if self.started_at is None:
            return None
        return RecordedWindow(
            self.started_at,
            self._range_metadata(),
            self._profile,
            self._disturbed,
            self._with_memory_categories,
            self._snapshot,
            self._execution_trace,
        )

    def stop_here(self) -> None:
        """Stop torch's profiler; needs `can_stop_here`, and `one_profiler.lock` held."""
        self._detach()
        if self._takes_snapshot and self.started_at is not None:
            try:
                self._snapshot = torch.cuda.memory._snapshot()
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        if self.started_at is None:
            self._start_trace()  # torch has no other way to leave the warm-up
        self._disturbed = not getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        if self.all_threads and not self._disturbed:
            self._wait_for_callbacks()
        backends.end_recording()
        try:
            self._profile.stop_trace()
        except Exception:
            # If another profiler ran in the window, older torch raises here, and `save` reports it.
            if not self._disturbed:
                self.release()
                self.free_ranges()
                raise
        # After Ctrl-C, this line is not reached, so that the cleanup can stop the profiler again.
        self.release()
        self.free_ranges()

    def forget_here(self) -> None:
        """Take a superseded recording off this thread, without Kineto, which has dropped it."""
        backends.end_recording()
        self._close_step()
        self.release()
        autograd: Any = torch._C._autograd
        with suppress(RuntimeError):  # it was only warming up
            autograd._disable_profiler_legacy(autograd._ProfilerDisableOptions(True, False))

    def leave_to_parent(self) -> None:
        """In a forked child: stop recording, and leave the window and its files to the parent.

        Otherwise torch would record the child until it ends, and never free the events. torch's
        profiler cannot be stopped in a child, because it would wait for threads that only the
        parent has. So this removes the callbacks of all tools from torch's operators. It does not
        touch the device.
        """
        self.prepared = False
        if self.started_at is None:
            return
        if self._parameters is not None:
            self._parameters.end_watch()
        autograd: Any = torch._C._autograd
        if self._profile.profile_memory:
            # Memory is recorded without a callback. This takes torch's profiler off the thread and
            # keeps its events. It raises if another thread began the window.
            with suppress(Exception):
                autograd._disable_profiler_legacy(autograd._ProfilerDisableOptions(True, False))
        autograd._clear_callbacks()
        if self._profile.with_stack and not callable(sys.getprofile()):  # torch's hook is in C
            sys.setprofile(None)
        if self._execution_trace is not None:
            self._execution_trace.leave_to_parent()

    def free_ranges(self) -> None:
        """Free the ranges that were open when the recording stopped; call it before the next one.

        torch writes the end of a range into the recording in which the range began. If that
        recording is already freed and another recording runs, this write corrupts memory.
        """
        self._step_range = None
        backends.release_outlived()

    def _start_trace(self) -> None:
        with one_profiler.starting(), module_calls.unwrapped():
            self._profile.start_trace()

    def _detach(self) -> None:
        backends.mark("window ends")
        backends.disarm(self._emitting)
        if self._parameters is not None:
            self._parameters.end_watch()
        if self._modules is not None:
            self._modules.__exit__()

    def _wait_for_callbacks(self) -> None:
        """Switch torch's recording off, and wait until other threads have left torch's callbacks.

        When torch's profiler stops, it frees the recorded events. A thread that still writes events
        would then crash the process.
        """
        toggle = getattr(self._profile, "toggle_collection_dynamic", None)
        others_run = False
        for thread in threading.enumerate():
            ours = thread is current_thread() or thread.name.startswith("instrument")
            others_run |= not ours
        if toggle is None or not others_run:
            return
        device: Any = getattr(torch, self._profile.use_device or "", None)
        # so that kernels are recorded to their end; torch does the same before its profiler stops
        if hasattr(device, "synchronize"):
            device.synchronize()
        toggle(False, _TOGGLED)
        before, deadline = _cpu_times(), time.monotonic() + _NO_CPU_S
        time.sleep(_CALLBACKS_S)
        while time.monotonic() < deadline and any(
            state in b"RD" and time_ns - before[thread][1] < _RUN_NS
            for thread, (state, time_ns) in _cpu_times().items()
            if thread in before
        ):
            time.sleep(_CALLBACKS_S / 5)

    def _abandon(self) -> None:
        """Abandon the window, because this thread cannot stop the profiler; raises CaptureError."""
        self.leave_on()
        off = " and profile_memory=false" * self._profile.profile_memory
        if not self.thread.is_alive():
            raise CaptureError(
                f"The thread {self.thread.name} began a window and has ended, so the window is "
                "dropped: stop the session on that thread, or record all threads "
                f"(profiler.profile_all_threads=true{off})."
            )
        raise CaptureError(
            f"A window began on the thread {self.thread.name} and continued on the thread "
            f"{current_thread().name}, so the window is dropped, because torch records only the "
            "first: call session.step() from one thread, or record all threads "
            f"(profiler.profile_all_threads=true{off})."
        )

    def leave_on(self) -> None:
        """Leave torch's profiler on until the thread that prepared the window stops it."""
        if one_profiler.abandoned is not self:
            one_profiler.abandon(self)
            self._detach()

    def release(self) -> None:
        """Set `prepared` to false, as torch's profiler has stopped; end the execution trace."""
        self.prepared = False
        if self._execution_trace is not None:
            self._execution_trace.end()

    def _range_metadata(self) -> dict[str, Any]:
        graphs, modules, parameters = _compiled_graphs(), self._modules, self._parameters
        threads = set() if self.all_threads else set(module_calls.called_on.values()) - {""}
        not_seen = set() if modules is None else modules.unseen(with_marked=graphs > 0)
        differentiating = () if modules is None else modules.differentiating()
        owners = parameters and torch_support.known(lambda: parameters.owners(differentiating))
        return {
            "compiled_ranges": backends.current_compiled_ranges(),
            "module_types": {} if modules is None else modules.types(),
            "modules_not_seen": sorted(not_seen),
            "eval_calls": {} if modules is None else modules.eval_calls(),
            "parameter_types": (parameters and torch_support.known(parameters.types)) or {},
            "repeated_calls": {} if modules is None else modules.repeated_calls(),
            "owners": owners,
            "optimizer_steps": parameters and parameters.steps,
            "threads_not_recorded": sorted(threads),
            "graphs_compiled": graphs - self._graphs_before,
        }


@dataclass
class RecordedWindow:
    """One recorded window, in memory until it is saved.

    Attributes:
        ranges: entries for `capture.json` that the trace does not hold; see below.
        disturbed: whether the program stopped another torch profiler within the window.

    The keys of `ranges`:

    - `compiled_ranges`: the ranges that Dynamo traced into a compiled region, each with its name.
    - `module_types`: the classes of the submodules whose ranges opened.
    - `modules_not_seen`: the submodules whose ranges never opened, because they were not called or
      are inside a compiled region. Those that the user marked with `profiled` are listed only if
      Dynamo has compiled a graph in this process: only then can a compiled region hide them.
    - `eval_calls`: how often submodules were called in eval mode, of those called in both modes.
    - `parameter_types`: how many numbers the models' parameters hold, by data type.
    - `repeated_calls`: how often models were called with the same inputs as in the call before.
    - `owners`, `optimizer_steps`: which optimizer trains which submodules; see `Parameters`.
    - `threads_not_recorded`: the threads that called submodules, but are not recorded.
    - `graphs_compiled`: how many graphs Dynamo has compiled since the warm-up began.
    """

    started_at: float
    ranges: dict[str, Any]
    profile: _KinetoProfile
    disturbed: bool
    with_memory_categories: bool
    snapshot: Any
    execution_trace: ExecutionTrace | None

    def save(self, path: Path, *, quickly: bool = False) -> None:
        """Write the trace as plain JSON, and the window's other files into the same folder.

        Call this once: it frees the recording, and torch refuses a second export. Set `quickly` if
        the process is about to end: then the memory categories, which take long, are not written.
        Cost: holds the GIL for about 3.5 s per million events.

        Raises:
            CaptureError: the disk is full, torch wrote an incomplete file, torch was interrupted
                while it stopped its profiler, or another torch profiler ran within the window. In
                the last two cases torch's export would crash the process.
        """
        if self.disturbed:
            raise CaptureError(
                "torch.profiler was used inside the window, so torch discarded the recording: use "
                "either torch.profiler or this session."
            )
        if getattr(self.profile.profiler, "kineto_results", None) is None:
            raise CaptureError(
                "torch was interrupted while it stopped its profiler, and has no recording to save."
            )
        output_dir = path.parent.parent
        if shutil.disk_usage(output_dir).free < _LEAST_FREE_BYTES:
            raise CaptureError(
                f"Less than {_LEAST_FREE_BYTES >> 20} MiB are free in {output_dir}, so the window "
                "is lost: make room there."
            )
        with _torch_can_open(path) as plain:
            self.profile.export_chrome_trace(str(plain))
        if self.with_memory_categories and quickly:
            logger.warning(
                "The window is saved without memory categories, because the process is ending."
            )
        elif self.with_memory_categories and _ends_whole(path):
            from instrument.record import memory_categories

            memory_categories.write(self.profile, path.parent)
        # Frees the events. The caller measures how long `save` takes; about a tenth of it is here.
        self.profile.profiler = None
        if not _ends_whole(path):
            raise CaptureError(
                f"torch wrote an incomplete trace into {output_dir}, so the window is lost: check "
                "the free space and quota there."
            )
        trace = self.execution_trace
        if trace is not None and trace.observer is not None:
            if _ends_whole(trace.path):
                trace.path.replace(path.with_name("execution_trace.json"))
            else:
                logger.warning(
                    "torch wrote an incomplete execution trace: check the free space and quota of "
                    "{}.",
                    path.parent,
                )
        try:
            if self.snapshot is not None:
                path.with_name("memory_snapshot.pickle").write_bytes(pickle.dumps(self.snapshot))
        except OSError as error:  # the trace is already saved
            logger.error(
                "The memory snapshot cannot be written ({}): make room for the next window.", error
            )


def import_early() -> None:
    """Import the modules that torch's first window would import: 818 modules, 1.4 s of CPU time."""
    with suppress(Exception):  # if this import fails, torch's profiler does not need the module
        import torch._inductor.config  # noqa: F401


def refuse_options(config: ProfilerConfig, activities: Sequence[str], folder: Path) -> None:
    """Check options that only torch can check, by recording an empty window if there are any.

    This takes about 1 ms. The first window of a process takes another 1 s, because Kineto
    initializes.

    Raises:
        ConfigError: torch refuses an option.
    """
    for each in (config, *map(config.of_trigger, config.triggers)):
        torch_support.refuse_unknown(each)
    if not config.experimental_config and not chosen_types(config.activities):
        return
    try:
        trial = Recorder(config, activities, backends.torch_backend, folder)
        trial.prepare()
        trial.stop()
    except CaptureError:  # the program's own profiler is on: the first window will tell
        return
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"torch {torch.__version__} refuses profiler.activities or "
            f"profiler.experimental_config: {reason}."
        ) from error


def _cpu_times() -> dict[str, tuple[bytes, int]]:
    """State and CPU time in ns of each other thread; empty where there is no Linux to say it."""
    times = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError, LookupError):  # the thread has ended
            state = (task / "stat").read_bytes().rpartition(b") ")[2][:1]
            if time_ns := int((task / "schedstat").read_bytes().split()[0]):  # 0: not counted
                times[task.name] = state, time_ns
    times.pop(str(current_thread().native_id), None)
    return times


def _compiled_graphs() -> int:
    """How many graphs Dynamo has compiled in this process; does not load Dynamo."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


@contextmanager
def _torch_can_open(path: Path) -> Iterator[Path]:
    """Yield `path`, or a path of a temporary file that is moved to it (see `_PLAIN_PATH`)."""
    if _PLAIN_PATH.fullmatch(str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, path.name)
        yield plain
        if plain.exists():
            shutil.move(plain, path)


def _ends_whole(path: Path) -> bool:
    """Whether a trace is complete. On a full disk, torch truncates a trace and raises no error."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
