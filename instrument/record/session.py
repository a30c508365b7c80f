"""`Session`: one run's recorder, driven by `start`, `step` and `stop`."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from loguru import logger
from torch import nn

from instrument.annotate import backends
from instrument.annotate.modules import forget, instrument_models, named_models
from instrument.annotate.profiled import profiled
from instrument.capture import Capture
from instrument.config.schema import ProfilerConfig, as_config
from instrument.config.user_metadata import as_json
from instrument.errors import CaptureError, ConfigError
from instrument.rank_info import RankInfo, rank_info
from instrument.record import distributed, metadata, plan_text, torch_support
from instrument.record.calls import RecordedCalls
from instrument.record.one_profiler import refuse_company
from instrument.record.recorder import import_early, refuse_options
from instrument.record.step_loop import Run, StepLoop
from instrument.record.timings import Timings
from instrument.record.trigger_runner import TriggerRunner
from instrument.redact import redact
from instrument.trace.capture_json import FORMAT
from instrument.worker import queue
from instrument.worker.capture_queue import CaptureQueue

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | None
PHASES = ("train", "validation", "test", "predict")


class Session:
    """Records windows of a run and hands each to its sinks.

    `config` is anything `as_config` takes: a Hydra config, a mapping, a preset's name, a `ProfilerConfig`; keyword
    options win over it. Without either, the whole block is recorded, and with triggers alone what they ask for; None
    records nothing. With `model`, every submodule gets a range while a window warms up or records; of a list or dict of
    models their names begin with `0.Generator` or the key. Use it as a context manager, or call `start`, `step` once
    after each training step, and `stop`.

    Attributes:
        config: the checked `ProfilerConfig`.
        captures: what this rank's windows delivered so far, oldest first.
        step_number: the training step that runs now, counted from 0; it names the recorded steps. Set from a
            checkpoint, before the start or later, it keeps the plan. Other phases do not move it.
        activities: what is recorded; empty before the start.
        output_dir: the folder for captures; None before the start.
        timings: of the whole run, `timings.table()`; None before the start, and where the config has none.

    A copy, by `copy` or `pickle`, is a session of the same config and model that was never started.

    What fails while recording or writing is logged and never reaches the training loop. Cost: a step outside windows is
    a comparison; the end of a window costs what torch needs to stop and to write its trace, and the time of the sinks.

    Raises:
        ConfigError: from the constructor, for an option that cannot work.
    """

    def __init__(self, *config: Any, model: Models = None, **options: Any) -> None:
        self.config: ProfilerConfig = as_config(*config, **options)
        self.captures: list[Capture] = []
        self.activities: list[str] = []
        self.output_dir: Path | None = None
        self.timings: Timings | None = None
        self._model = model
        named_models(model)  # now, and not at the start, where it is none
        self._loop = StepLoop(self.config)
        self._calls = RecordedCalls(self)
        self._instrumented: list[nn.Module] = []  # by this session

    @property
    def step_number(self) -> int:
        """The training step that runs now."""
        return self._loop.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._loop.go_to(number)

    @property
    def running(self) -> bool:
        """Whether it was started and has not been stopped."""
        return self._loop.running

    @property
    def loop(self) -> StepLoop:
        """The state of the run."""
        return self._loop

    def __repr__(self) -> str:
        captures = "1 capture" if len(self.captures) == 1 else f"{len(self.captures)} captures"
        plan = (
            plan_text.in_words(self.config, self._loop.train) if self.config.enabled else "disabled"
        )
        return f"<Session: {plan}; {'at' if self.running else 'not running, at'} step {self.step_number}, {captures}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.config, self._model, self._loop.user_metadata)

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        triggers = self._loop.run.triggers if self.running and self._loop.run is not None else None
        if error is not None and triggers is not None:
            triggers.failed(error, self.step_number)
        self._stop(f"exception {kind.__name__}" if kind else None)

    def start(self, model: Models = None, *, total_steps: int | None = None) -> Session:
        """Say the plan, check the output folder, and begin with the first step.

        `model` is for the ranges of submodules, unless the constructor was given one: a trainer's callback gives its
        own here. `total_steps` wins over the config's: the steps of the whole run, where known, to warn of windows
        without room.

        Raises:
            ConfigError: the output folder cannot be written, or this torch refuses an option of its own.
            CaptureError: the session runs already, another one records, or torch's own profiler is running.
        """
        if self.running:
            raise CaptureError("This session is already running: stop it before starting it again.")
        config, loop, place = self.config, self._loop, rank_info()
        if not config.enabled or not distributed.records(config.ranks, place):
            loop.records_nothing = True
            return self
        refuse_company()
        self.activities = torch_support.usable_activities(config.activities)
        self.output_dir, coordinator = distributed.join_ranks(config, place, loop.progress)
        refuse_options(config, self.activities, self.output_dir)
        queue.remove_stale(self.output_dir)
        capture_queue = CaptureQueue(
            config, self.output_dir, self.captures, place.rank, place.world_size
        )
        described = _described(config, self.activities, place)
        described |= {"run": capture_queue.run, "sinks_inline": list(capture_queue.inline)}
        emitting = backends.backend_for(config.emit)
        if loop.may_record():
            import_early()
        if config.memory_snapshot and "cuda" not in self.activities:
            logger.warning(
                "profiler.memory_snapshot does nothing here: no CUDA device, whose allocator alone has any."
            )
        self.timings = (
            Timings(config.timings, self.output_dir, place.rank) if config.timings else None
        )
        models = named_models(self._model if self._model is not None else model)
        if config.modules.enabled:
            self._instrumented = instrument_models(
                models, **config.modules.model_dump(exclude={"enabled"})
            )
        _sessions.add(self)
        atexit.register(self._stop, "the interpreter ended")
        triggers = (
            TriggerRunner(config.triggers, self.output_dir, coordinator)
            if config.triggers
            else None
        )
        run = Run(self.activities, emitting, capture_queue, described, triggers, self.timings)
        loop.in_turn(loop.begin, run, total_steps)  # no step of another thread comes between
        return self

    def step(self, loss: Any = None) -> None:
        """Tell that a training step has ended; `loss` (a number or a tensor of one element) is for triggers.

        A tensor is looked at one step later, so that training hardly ever waits for the device. Inside a loop over
        `steps`, which ends the steps itself, it only takes the loss.
        """
        loop = self._loop
        counter = loop.current
        if counter.batch_open and counter.loop_left:
            loop.close_batch(counter)
        if not counter.batch_open:
            loop.step(loss)
        elif loss is None:
            loop.warn_once(
                "session.step() does nothing inside session.steps(), which steps by itself."
            )
        else:
            counter.loss = loss

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the steps of the block by themselves: `with session.phase("validation"):`, "test" or "predict".

        `profiler.phases` says in which phases the schedule is followed; outside such blocks the phase is train, whose
        steps alone triggers see. A window that is open when another phase begins goes on: the block is a range of its
        name within the step that runs then, and its steps do not count for the window. A window of the phase's own ends
        with the block at the latest. The counter goes on when the phase comes again.
        """
        if name not in PHASES:
            known = ", ".join(PHASES)
            self._loop.warn_once(
                f"session.phase({name!r}) is never recorded: profiler.phases knows {known}."
            )
        began_ns, reason = time.perf_counter_ns(), None
        with profiled(name):
            before = self._loop.enter(name)
            try:
                yield
            except BaseException as error:
                reason = f"exception {type(error).__name__}"
                raise
            finally:
                self._loop.leave(before, time.perf_counter_ns() - began_ns, reason)

    def steps(self, loader: Iterable[T]) -> Batches[T]:
        """The loader's batches; a step ends after each, and waiting for batch k is a range `data` in step k.

        `session.step(loss=…)` inside the loop tells triggers the loss. A loop within the loop, for validation, takes no
        steps of its own. The length is the loader's.
        """
        loop = self._loop
        if loop.running and loop.total_steps is None and loop.current is loop.train:
            said = plan_text.unreachable_in_first_pass(self.config, loop.train, _length(loader))
            if said:
                logger.info("{}", said)  # no warning: most runs go over their loader again
        return Batches(loader, loop)

    def record(self, function: F, /, *, name: str | None = None) -> F:
        """Record calls of a function, each of which is a step: `@session.record` for inference, where no loop is.

        The first call starts the session, unless it runs already; the one that ends its last window stops it, and waits
        for the captures as `stop` does. Without a schedule the first call is the window. Each call is a range, `name`
        or the function's own. Calls count from any thread or asynchronous task, coroutines and generators when they are
        through, no call within another, and in a window none that began before it. A step lasts from one call's end to
        the next one's: where calls run side by side, their ranges tell how long each took. Once all is recorded a call
        costs the check of a flag. A function as schedule has no last window: the session goes on until it is stopped.

        Raises:
            ConfigError: it is a module, a class or an asynchronous generator.
        """
        return self._calls.of(function, name)  # type: ignore[return-value] # with the function's own signature

    def stop(self) -> None:
        """End the session. A window that is still open is kept, and labelled truncated unless it was to have no end.

        Calling it twice is harmless.
        """
        self._stop(None)

    def add_metadata(self, key: str, value: Any) -> None:
        """Put a key with a JSON value into `capture.json` and the trace of every window that ends from now on.

        Given again, it counts with its last value. What cannot be written is warned of, and left out.
        """
        try:
            self._loop.user_metadata.update(redact(as_json({key: value}, "The session's metadata")))
        except ConfigError as error:
            self._loop.warn_once(str(error))

    def _stop(self, reason: str | None) -> None:
        was_running = self.running
        self._loop.end(reason)
        if was_running:
            _sessions.discard(self)
            atexit.unregister(self._stop)
            for model in self._instrumented:
                forget(model)
            self._instrumented = []
            self._loop.deliver(reason)


class Batches(Generic[T]):
    """The batches of a loader, a step after each; whatever else is asked of it, the loader answers.

    The wait for each batch is a range `data`. One more, which brings no batch, is there at the end of a loader whose
    length is not known.
    """

    __slots__ = ("_loader", "_loop")

    def __init__(self, loader: Iterable[T], loop: StepLoop) -> None:
        self._loader: Any = loader
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        if (
            name.startswith("__") or name in Batches.__slots__
        ):  # what copying asks for, and what a copy has not yet
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

    def __contains__(self, batch: object) -> bool:
        return batch in self._loader

    def __getitem__(self, index: Any) -> Any:
        return self._loader[index]

    def __repr__(self) -> str:
        return repr(self._loader)

    def __iter__(self) -> Iterator[T]:
        counter = self._loop.current
        if counter.batch_open and not counter.loop_left:  # a loop within a loop
            yield from self._loader
            return
        self._loop.close_batch(counter)
        batches: Iterator[T] | None = None
        length, data = _length(self._loader), profiled("data")
        for number in count():
            with data if number != length else nullcontext():
                batches = iter(self._loader) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            counter.batch_open, counter.loop_left = True, False
            try:
                yield batch
            finally:
                counter.loop_left = (
                    True  # by break or an exception, which a generator cannot tell apart
                )
            self._loop.close_batch(counter)


def _described(
    config: ProfilerConfig, activities: list[str], rank_info: RankInfo
) -> dict[str, Any]:
    try:
        return metadata.describe_run(config, activities, rank_info)
    except Exception:  # a trace is worth more than what is said of it
        logger.exception("What capture.json says of the run is not all that it should.")
        return {"format": FORMAT, "rank": rank_info.rank}


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # it has none, or the user's code does not know
        return None


def _again(
    kind: type[Session], config: ProfilerConfig, model: Models, user_metadata: dict[str, Any]
) -> Session:
    """A session like the one that was copied or pickled, never started."""
    made = kind(config, model=model)
    made.loop.user_metadata.update(user_metadata)
    return made


# Those that run in this process.
_sessions: WeakSet[Session] = WeakSet()


def _leave_to_parent() -> None:
    for session in _sessions:
        session.loop.leave_to_parent()
    _sessions.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
