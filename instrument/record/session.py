"""`Session` records windows of a training run, between its `start` and its `stop`."""

from __future__ import annotations

import atexit
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack
from weakref import WeakSet

from torch import nn

from instrument.annotate import backends
from instrument.annotate.modules import ModuleFilter, forget, instrument_models, named_models
from instrument.annotate.profiled import profiled
from instrument.base import file_lock, queue, waiting
from instrument.base.errors import CaptureError, ConfigError
from instrument.base.files import FORMAT, WORK_VARIABLE, fill_standard_streams, lines_file
from instrument.base.log import logger
from instrument.base.rank_info import RankInfo, rank_info
from instrument.base.redact import redact
from instrument.base.signals import interruptibly
from instrument.base.units import counted
from instrument.base.user_metadata import as_json
from instrument.record import (
    distributed,
    facts,
    one_profiler,
    plan_text,
    torch_support,
    worker_lines,
)
from instrument.record.calls import RecordedCalls
from instrument.record.config.schema import NO_CONFIG, ProfilerConfig, as_config
from instrument.record.finisher import Finisher
from instrument.record.lines import LineSampler
from instrument.record.metrics import Metrics
from instrument.record.notebook import log_to_stdout
from instrument.record.recorder import import_early, refuse_options
from instrument.record.requests import RequestedWindow
from instrument.record.step_loop import Run, StepLoop
from instrument.record.timings import Timings
from instrument.record.trigger_runner import REQUEST, TriggerRunner
from instrument.record.triggers.trigger import Request

if TYPE_CHECKING:
    from instrument.read.capture import Capture
    from instrument.record.config.keywords import ProfilerOptions
    from instrument.record.config.schedule import Window

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | None


class Session:
    """Records windows (consecutive steps) of a training run, and runs the sinks on each window.

    `config` is a Hydra config, a mapping, a preset's name or a `ProfilerConfig`; keyword options
    override it. `Session()` is the preset `summary`, which also says when to record if no option
    does. `Session(None)` records nothing, whatever the options. If only timings or triggers are
    given, a window is recorded only on request. `Session(active=None)` records everything from
    `start` to `stop`.

    With `model`, each submodule gets a range in every window. If `model` is a list, the names of
    the ranges begin with index and class, such as `0.Generator`; if it is a dict, with the key.

    Use the session as a context manager. Or call `start`, then `step` once after each training
    step, then `stop`.

    Attributes:
        config: the checked `ProfilerConfig`.
        step_number: the current training step, counted from 0; the trace shows this number. When
            training resumes from a checkpoint, set the number before or after the start; the
            schedule continues from there. Steps of validation and other phases do not count.
        activities: what is recorded, such as cpu and cuda; empty before the start.
        output_dir: the folder for captures; None before the start.
        timings: the timings of the whole run (see `timings.table()`). None before the start, or if
            the config has no timings.

    A copy, by `copy` or `pickle`, has the same config and model, and is not started.

    Errors while recording or writing are logged and never reach the training loop. A step outside
    windows costs one comparison and one reading of the clock. At the end of a window, training
    waits until torch has stopped and written its trace. With `export=inline`, training also waits
    for the sinks.

    Raises:
        ConfigError: from the constructor, for an option that cannot work.
    """

    def __init__(
        self,
        config: Any = NO_CONFIG,
        /,
        *,
        model: Models = None,
        **options: Unpack[ProfilerOptions],
    ) -> None:
        self.config: ProfilerConfig = as_config(config, **options)
        # what `stop` has not waited for
        self._deliver: Callable[[float | None], None] | None = None
        self._finishers: list[Finisher] = []  # one for each run
        self._captures: dict[tuple[queue.Origin, Path], Capture] = {}  # those that were loaded
        self.activities: list[str] = []
        self.output_dir: Path | None = None
        self.timings: Timings | None = None
        self._model = model
        named_models(model)  # so that a wrong model raises here, before the start
        self._loop = StepLoop(self.config)
        self._calls = RecordedCalls(self)
        # The models that this session instrumented.
        self._instrumented: WeakSet[nn.Module] = WeakSet()

    @property
    def step_number(self) -> int:
        """The current training step."""
        return self._loop.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._loop.go_to(number)

    @property
    def running(self) -> bool:
        """Whether the session was started and has not been stopped."""
        return self._loop.running

    @property
    def window(self) -> Window | None:
        """The open window, or the next one of the current phase; None if none is planned."""
        opened = self._loop.window
        return self._loop.current.window if opened is None else opened.planned

    @property
    def recording(self) -> bool:
        """Whether a window is open and no longer warms up."""
        return self._loop.recording

    @property
    def saved(self) -> int:
        """How many windows the current or last run has saved; see `exporting`."""
        return self._finishers[-1].saved if self._finishers else 0

    @property
    def exporting(self) -> bool:
        """Whether windows are saved, but are not finished captures yet."""
        return any(len(each.pending) > len(each.given_up) for each in self._finishers)

    @property
    def capture(self) -> Capture:
        """The newest finished capture of this rank.

        Raises:
            CaptureError: there is none yet; the message says what to wait for.
        """
        if captures := self.captures:
            return captures[-1]
        hint = "call session.wait()" if self.exporting else "let it run until then, or see the log"
        raise CaptureError(f"There is no capture yet of {self!r}: {hint}.")

    @property
    def captures(self) -> list[Capture]:
        """The finished captures of this rank, oldest first, without those that were removed."""
        from instrument.read.capture import Capture

        loaded, found = self._captures, {}
        for place in self._capture_folders():
            with suppress(CaptureError):  # removed from disk meanwhile
                found[place] = loaded.get(place) or Capture.load(place[1])
        self._captures = found
        return list(found.values())

    def _capture_folders(self) -> list[tuple[queue.Origin, Path]]:
        owners = defaultdict[tuple[Path, int], dict[str, int | None]](dict)
        for each in self._finishers:
            owners[each.output_dir, each.rank][each.run] = each.owner
        found = (queue.captures_of(*place, runs) for place, runs in owners.items())
        return list(chain.from_iterable(found))

    def __repr__(self) -> str:
        plan = (
            plan_text.in_words(self.config, self._loop.train) if self.config.enabled else "disabled"
        )
        at = "at" if self.running else "not running, at"
        captures = counted(len(self._capture_folders()), "capture")
        return f"<Session: {plan}; {at} step {self.step_number}, {captures}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.config, self._model, self._loop.user_metadata)

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run = self._loop.run
        if error is not None and self.running and run is not None:
            run.triggers.failed(error, self.step_number)
        try:
            self._stop(f"exception {kind.__name__}" if kind else None)
        except KeyboardInterrupt:
            if kind is not KeyboardInterrupt:
                raise
            # This is a second Ctrl-C. The first Ctrl-C ends the program, so that its traceback
            # shows only the training code. If the window is not saved, `_stop` runs again at exit.

    def start(
        self,
        model: Models = None,
        *,
        total_steps: int | None = None,
        loaders: Mapping[str, Any] = MappingProxyType({}),
        steps_done: int = 0,
    ) -> Session:
        """Log which steps will be recorded, check the output folder, and begin the first step.

        Args:
            model: its submodules get ranges, unless the constructor already got a model.
            total_steps: the number of steps of the whole run, for warnings of windows that do not
                fit into it; None means `profiler.total_steps`.
            loaders: the loaders over which a trainer iterates without `steps`, by phase, such as
                `{"train": loader}`; `capture.json` gets their settings.
            steps_done: how many steps this run has done before the start, if it starts late. After
                a checkpoint, set `step_number` instead.

        Raises:
            ConfigError: the output folder cannot be written, or torch refuses an option.
            CaptureError: the session is already running, or another session is recording.
        """
        if self.running:
            raise CaptureError("This session is already running: stop it before starting it again.")
        if self._deliver is not None:
            self.wait()  # for the windows of the run before
        log_to_stdout()
        config, loop, rank = self.config, self._loop, rank_info()
        if not config.enabled or not distributed.records(config.ranks, rank):
            loop.records_nothing = True
            return self
        if WORK_VARIABLE in os.environ:
            from instrument.record.work import observe_if_asked

            observe_if_asked()
        one_profiler.watch_others()
        one_profiler.announce("instrument.Session")
        one_profiler.refuse_second_session()
        if still_on := one_profiler.stop_abandoned():
            logger.warning("{}", still_on)
        elif one_profiler.program_records():
            logger.warning(
                "torch's own profiler is running in this process, and only one profiler can run at "
                "a time: no window begins until that profiler has stopped."
            )
        self._calls.restart()
        fill_standard_streams()
        self.activities = torch_support.usable_activities(config.activities)
        self.output_dir, announcements = distributed.join_ranks(config, rank, loop.progress)
        refuse_options(config, self.activities, self.output_dir)
        queue.remove_stale(self.output_dir)
        finisher = Finisher(config, self.output_dir, rank.rank, rank.world_size)
        emitting = backends.backend_for(config.emit)
        metadata = interruptibly(_run_metadata, config, self.activities, rank)
        if loop.may_record():
            interruptibly(import_early)
            interruptibly(finisher.begin)
        metadata["run"] = finisher.run
        if config.memory_snapshot and "cuda" not in self.activities:
            logger.warning(
                "profiler.memory_snapshot does nothing here: it needs CUDA's allocator, and there "
                "is no CUDA device."
            )
        self.timings = (
            Timings(config.timings, self.output_dir, rank.rank) if config.timings else None
        )
        metrics = None
        if config.metrics is not None and self.timings is not None:
            metrics = Metrics(config, self.timings, rank, self.output_dir)
        self._instrument(self._model if self._model is not None else model)
        triggers = TriggerRunner(config.triggers, self.output_dir, announcements)
        _sessions.add(self)
        atexit.register(self._stop, "the interpreter ended")
        if steps_done:
            self.step_number = steps_done
        for phase, loader in loaders.items():
            loop.loaders.add(loader, phase)
        lines = None
        if config.lines:
            path = self.output_dir / lines_file(rank.rank)
            worker_lines.begin()
            sampler = LineSampler(path, loop.moment, finisher.run, workers=worker_lines.collected)
            lines = sampler.start()
        run = Run(
            self.activities, emitting, finisher, metadata, triggers, self.timings, metrics, lines
        )
        self._finishers.append(finisher)
        loop.exclusively(loop.begin, run, total_steps)  # other threads take no step meanwhile
        loop.train.began_at -= steps_done
        return self

    def step(self, loss: Any = None) -> None:
        """End a training step; `loss` (a number or a tensor of one element) is for triggers.

        Triggers get a loss at least one step later, because a tensor is copied from the device
        asynchronously. So training hardly ever waits for the device. Inside a loop over
        `session.steps`, which ends its steps itself, `step` only passes the loss.
        """
        loop = self._loop
        counter = loop.current
        if counter.batch_open and counter.loop_left:
            loop.close_batch(counter)
        if not counter.batch_open:
            loop.step(loss)
        elif loss is None:
            loop.warn_once(
                "session.step() does nothing inside a loop over session.steps(), which ends each "
                "step itself."
            )
        else:
            counter.loss = loss

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the steps of the block separately: `with session.phase("validation"):`.

        `name` is any name, such as "validation", "predict" or "rollout"; outside such blocks the
        phase is "train". The schedule applies to the phases that `profiler.phases` lists. Triggers
        are called only after steps of the phase "train".

        A window that is open when the block begins stays open. The block is then a range within the
        current step, and its steps do not count for that window. A window that begins inside the
        block ends with the block at the latest. The next block of the same phase continues with the
        next step number.
        """
        began_ns, reason = time.perf_counter_ns(), None
        with profiled(name):
            before = self._loop.current
            try:
                self._loop.enter(name)
                yield
            except BaseException as error:
                reason = f"exception {type(error).__name__}"
                raise
            finally:
                self._loop.leave(before, time.perf_counter_ns() - began_ns, reason)

    def steps(self, loader: Iterable[T], *, every: int = 1) -> Batches[T]:
        """Iterate over the batches of a loader; after each batch, a step ends.

        With `every`, a step ends after so many batches, and with the last batch: for training that
        accumulates gradients.

        The wait for a batch is a range named `data`; the wait for batch k belongs to its step. Call
        `session.step(loss=…)` inside the loop to pass the loss to triggers. If such loops are
        nested, for example for validation, only the outer loop ends steps.

        Raises:
            ConfigError: `every` is not a positive number.
        """
        if not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"session.steps was given every={every!r}, but it must be a whole number from 1 on."
            )
        return Batches(loader, self._loop, every)

    def request(
        self, steps: int | None = None, *, seconds: float | None = None, why: str | None = None
    ) -> RequestedWindow:
        """Request a window from the end of the current training step on; any thread may call this.

        If the config has triggers, all ranks that record do so at the same steps. A request that
        cannot be met never raises: the state of the result is then `failed`, as it is while the
        session does not run, or while an earlier requested window has not begun.

        Args:
            steps: the steps to record, after `profiler.warmup` others; None: `profiler.active`.
            seconds: how long to record instead, on this rank only.
            why: a reason for `capture.json`.

        Raises:
            ConfigError: `steps` and `seconds` are both given, or one is not positive.
        """
        if (steps is not None and seconds is not None) or not all(
            each is None or each > 0 for each in (steps, seconds)
        ):
            raise ConfigError(
                f"session.request was given steps={steps} and seconds={seconds}, but it takes one "
                "of the two, which must be positive."
            )
        run = self._loop.run
        if not self.running or run is None:
            return self._refused("the session does not run")
        asked = RequestedWindow(self)
        reason = f"{why or 'session.request was called'}, id {asked.id}"
        request = Request(reason, steps, seconds)
        if run.triggers.requests.setdefault(REQUEST, request) is not request:
            return self._refused("an earlier requested window has not begun")
        return asked

    def _refused(self, why: str) -> RequestedWindow:
        if self.config.enabled:
            logger.info("A requested window is not recorded: {}.", why)
        return RequestedWindow(self, refused=why)

    def record(self, function: F, /, *, name: str | None = None) -> F:
        """Make each call of a function a step: `@session.record` for inference without a loop.

        The first call starts the session, unless it is already running. The call that ends the last
        window stops the session, and waits for the captures as `stop` does. With
        `active=None`, the first call is the only window.

        Each call is a range, named `name` or as the function. A coroutine or generator counts when
        it ends. A call inside another call, and a call that began before the open window, do not
        count. Calls on several threads need `profile_all_threads`. While an asynchronous call waits
        for the captures, its event loop goes on.

        A step lasts from the end of one call to the end of the next call. If calls overlap, their
        ranges show how long each call took. After the last window, a call costs the check of a
        flag.

        Raises:
            ConfigError: `function` is a class, a module or an asynchronous generator, or cannot be
                called.
        """
        return self._calls.wrap(function, name)  # type: ignore[return-value] # keeps the signature

    def stop(self, *, wait: bool = True) -> None:
        """End the session, and save the open window; a second call does nothing.

        If the schedule or a trigger plans a later end for this window, its capture is labelled
        truncated. A window without a finished step is dropped, except if `step` was never called.

        With `wait`, this waits until the captures are finished, at most `export_timeout_s` seconds.
        Otherwise call `session.wait()` later.
        """
        self._stop(None, wait=wait)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the saved windows are finished captures, and call `on_capture` for them.

        It waits at most `timeout_s` seconds; None: `profiler.export_timeout_s`. Call it on the
        thread that ends the steps.
        """
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(timeout_s)
            return
        self._loop.drop_detail()  # its steps would not end before this returns
        waiting.poll(
            self._all_delivered, self.config.export_timeout_s if timeout_s is None else timeout_s
        )

    def _all_delivered(self) -> bool:
        for each in self._finishers:
            interruptibly(each.deliver)
        return not self.exporting

    def drop_window(self) -> None:
        """Stop recording the open window, if any, and do not save it."""
        self._loop.drop_window()

    def add_models(self, models: Models) -> None:
        """Give the submodules of further models ranges in all windows that begin from now on.

        `models` is what the constructor takes as `model`. Without effect unless the session runs.

        Raises:
            ConfigError: as from the constructor.
        """
        if self.running:
            self._instrument(models)

    def _instrument(self, models: Models) -> None:
        modules = self.config.modules
        if modules.enabled:
            module_filter = ModuleFilter(**modules.model_dump(exclude={"enabled"}))
            self._instrumented.update(instrument_models(named_models(models), module_filter))

    def add_metadata(self, key: str, value: Any) -> None:
        """Add a key to `capture.json` and to the trace of every window that ends from now on.

        A later value replaces an earlier one. A value that JSON cannot hold is skipped with a
        warning.
        """
        try:
            self._loop.user_metadata.update(redact(as_json({key: value}, "The session's metadata")))
        except ConfigError as error:
            self._loop.warn_once(str(error))

    def _stop(self, reason: str | None, *, wait: bool = True) -> None:
        was_running = self.running
        try:
            self._loop.end(reason)
        finally:  # even if Ctrl-C ended a wait
            if was_running and not self.running:
                _sessions.discard(self)
                atexit.unregister(self._stop)
                for model in self._instrumented:
                    forget(model)
                self._instrumented.clear()
                self._deliver = partial(self._loop.deliver, reason)
                if wait:
                    self.wait()


class Batches(Generic[T]):
    """Iterates over a loader, whose attributes it has too, and ends a step after `every` batches.

    If the loader's length is unknown, a last range `data` shows the wait that ends without a batch.
    """

    __slots__ = ("_every", "_loader", "_loop")

    def __init__(self, loader: Iterable[T], loop: StepLoop, every: int = 1) -> None:
        self._loader: Any = loader
        self._loop, self._every = loop, every

    def __getattr__(self, name: str) -> Any:
        # while a copy is made, Python asks for special methods, and for slots that are not set yet
        if name.startswith("__") or name in Batches.__slots__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Batches.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getitem__(self, index: Any) -> Any:
        return self._loader[index]

    def __repr__(self) -> str:
        return repr(self._loader)

    def __iter__(self) -> Iterator[T]:
        with self._loop.loaders.iterating(self._loader, self._loop.current.name):
            yield from self._give_batches()

    def _give_batches(self) -> Iterator[T]:
        counter = self._loop.current
        if counter.batch_open and not counter.loop_left:  # inside another loop over `session.steps`
            if counter.loop is None or counter.loop[0] is not self._loader:
                for batch in self._loader:
                    counter.batches_inside += 1
                    yield batch
                return
            # A kept iterator over this loader, from which a batch was only taken to look at it.
            counter.batch_open = False
        self._loop.close_batch(counter)
        loop = (self._loader,)
        batches: Iterator[T] | None = None
        length, data = _length(self._loader), profiled("data")
        for number in count():
            with data if number != length else nullcontext():
                batches = iter(self._loader) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    break
            counter.batch_open, counter.loop_left = True, False
            counter.loop, counter.batches_inside = loop, 0
            try:
                yield batch
            finally:
                # after `break` and after an exception: a generator cannot distinguish the two
                counter.loop_left |= counter.loop is loop
            # otherwise a later loop ends the steps
            if counter.loop is loop and (number + 1) % self._every == 0:
                self._loop.close_batch(counter)
        if counter.loop is loop:
            self._loop.close_batch(counter)


def _run_metadata(
    config: ProfilerConfig, activities: list[str], rank_info: RankInfo
) -> dict[str, Any]:
    try:
        return facts.run_metadata(config, activities, rank_info)
    except Exception as error:  # keep the trace, even without its metadata
        logger.error("capture.json will not describe the run.", exception=error)
        return {"format": FORMAT, "rank": rank_info.rank}


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # the loader has no length, or its code raises
        return None


def _restored(
    kind: type[Session], config: ProfilerConfig, model: Models, user_metadata: dict[str, Any]
) -> Session:
    session = kind(config, model=model)
    session._loop.user_metadata.update(user_metadata)
    return session


# The running sessions of this process.
_sessions: WeakSet[Session] = WeakSet()


def _leave_to_parent() -> None:
    """Record nothing in a forked child, such as a worker of a data loader: its parent records."""
    parts = [
        backends.disarm,
        one_profiler.leave_to_parent,
        # drops the recorder, which one_profiler knows weakly
        *(session._loop.leave_to_parent for session in _sessions),
        _sessions.clear,
        facts.leave_to_parent,
        file_lock.leave_to_parent,
    ]
    with ExitStack() as calling:  # each part is called, even if another one raises
        for part in reversed(parts):
            calling.callback(part)


os.register_at_fork(after_in_child=_leave_to_parent)
