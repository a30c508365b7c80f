"""`Session`: one run's recorder, driven by `start`, `step` and `stop`."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

from loguru import logger
from torch import nn

from instrument.annotate import backends
from instrument.annotate.modules import forget, instrument_chosen, named_models
from instrument.annotate.profiled import profiled
from instrument.capture import Capture
from instrument.config.schema import ProfilerConfig, as_config
from instrument.errors import CaptureError, ConfigError
from instrument.record import distributed, metadata, torch_support
from instrument.record.calls import Calls
from instrument.record.one_profiler import refuse_company
from instrument.record.phases import NAMES, Phase, Phases, Steps
from instrument.record.recorder import refuse_options
from instrument.record.signals import Preemption
from instrument.record.timings import Timings
from instrument.record.trigger_runner import Watch
from instrument.record.windows import Windows
from instrument.redact import blanked
from instrument.sinks.chrome_trace import as_json
from instrument.triggers import Request
from instrument.worker import queue
from instrument.worker.retention import Delivery

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | None


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
        self._metadata = dict(self.config.metadata)  # of the user's own
        self._model = model
        named_models(model)  # now, and not at the start, where it is none
        self._running, self._idle = False, not self.config.enabled  # idle: nothing is recorded, as the config says
        self._phases = Phases(self.config)
        self._total_steps: int | None = None
        self._windows: Windows  # from the start on
        self._watch: Watch | None = None
        self._instrumented: list[nn.Module] = []  # by this session
        self._ended_at: int | None = None  # the one at the last stop; None: never stopped
        self._delivery: Delivery | None = None
        self._preemption = Preemption(
            self.config.preemption_grace_s, lambda: self._windows.recording, lambda: self._windows.save()
        )
        self._said: set[str] = set()
        in_turn = lambda act, *args: self._windows.in_turn(act, *args)  # noqa: E731 # of windows that are not there yet
        self._calls = Calls(self._phases, self.start, self.step, self.stop, lambda: self._running, in_turn)

    @property
    def step_number(self) -> int:
        """The training step that runs now."""
        return self._phases.train.step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        phase = self._phases.train
        if self._running and number != phase.step_number and self._windows.owner is phase:
            self._windows.safely(self._windows.leave, "session.step_number was set")
        if self._ended_at is not None:
            self._ended_at = -1  # the next start keeps the number, also where it is that of the last stop
        phase.go_to(number)

    @property
    def running(self) -> bool:
        """Whether it was started and has not been stopped."""
        return self._running

    def __repr__(self) -> str:
        captures = "1 capture" if len(self.captures) == 1 else f"{len(self.captures)} captures"
        plan = self._phases.in_words() if self.config.enabled else "disabled"
        return f"<Session: {plan}; {'at' if self._running else 'not running, at'} step {self.step_number}, {captures}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,), {"_model": self._model, "_metadata": self._metadata}

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._watch is not None:
            self._watch.failed(error, self.step_number)
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
        if self._running:
            raise CaptureError("This session is already running: stop it before starting it again.")
        place = metadata.place()
        if not self.config.enabled or not distributed.records(self.config.ranks, place):
            self._idle = True
            return self
        refuse_company()
        self.activities = torch_support.usable_activities(self.config.activities)
        self.output_dir, team = distributed.gather(self.config, place, self._phases.pace)
        refuse_options(self.config, self.activities, self.output_dir)
        metadata.origin()  # asks git now, and not at the end of a window
        queue.tidy(self.output_dir)
        self._delivery = Delivery(self.config, self.output_dir, self.captures, place)
        emitting = backends.backend_for(self.config.emit)
        self._windows = Windows(
            self.config, self.activities, emitting, self._phases, self._delivery, self._metadata, self._preemption.held
        )
        self.timings = Timings(self.config.timings, self.output_dir, place.rank) if self.config.timings else None
        models = named_models(self._model if self._model is not None else model)
        self._instrumented = instrument_chosen(models, self.config.modules)
        self._windows.in_turn(
            self._begin, self.output_dir, team, total_steps
        )  # no step of another thread comes between
        return self

    def _begin(self, output_dir: Path, team: distributed.Team | None, total_steps: int | None) -> None:
        self._running = True
        if self.step_number == self._ended_at:  # a second run, unless its owner has set the number
            self.step_number = 0
        _sessions.add(self)
        atexit.register(self._stop, "the interpreter ended")
        self._preemption.install()
        self._watch = Watch(self.config.triggers, output_dir, team) if self.config.triggers else None
        self._phases.begin()
        if backends.disabled:
            logger.info("INSTRUMENT_DISABLE is set: annotations do nothing, and no named range will be recorded.")
        for note in self.config.notes:
            logger.info(note)
        what, where = self._phases.in_words(), " and ".join(self.activities)
        logger.info("Profiler {} on {}, into {}", what, where, output_dir)
        self._total_steps = total_steps or self.config.total_steps
        _warn(self._phases.misfit(self._total_steps))
        if self.timings is not None:
            self.timings.start()
        self._windows.safely(self._grant, None)
        if self.timings is not None:
            self.timings.begin_step()
        self._phases.present.cost.resume()

    def step(self, loss: Any = None) -> None:
        """Tell that a training step has ended; `loss` (a number or a tensor of one element) is for triggers.

        A tensor is looked at one step later, so that training hardly ever waits for the device. Inside a loop over
        `steps`, which ends the steps itself, it only takes the loss.
        """
        phase = self._phases.present
        if phase.batch_open and phase.loop_left:
            phase.close_batch(self._advance)
        if not phase.batch_open:
            self._advance(loss)
        elif loss is None:
            self._say("session.step() does nothing inside session.steps(), which steps by itself.")
        else:
            phase.loss = loss

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the steps of the block by themselves: `with session.phase("validation"):`, "test" or "predict".

        `profiler.phases` says in which phases the schedule is followed; outside such blocks the phase is train, whose
        steps alone triggers see. A window that is open when another phase begins goes on: the block is a range of its
        name within the step that runs then, and its steps do not count for the window. A window of the phase's own ends
        with the block at the latest. The counter goes on when the phase comes again.
        """
        before, began_ns, cut = self._phases.present, time.perf_counter_ns(), None
        with profiled(name):
            self._enter(name)
            try:
                yield
            except BaseException as error:
                cut = f"exception {type(error).__name__}"
                raise
            finally:
                self._leave(before, began_ns, cut)

    def steps(self, loader: Iterable[T]) -> Steps[T]:
        """The loader's batches; a step ends after each, and waiting for batch k is a range `data` in step k.

        `session.step(loss=…)` inside the loop tells triggers the loss. A loop within the loop, for validation, takes no
        steps of its own. The length is the loader's.
        """
        if self._running and self._total_steps is None and (said := self._phases.misfit_of_first_pass(loader)):
            logger.info("{}", said)  # no warning: most runs go over their loader again
        return Steps(loader, self._phases, self._advance)

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
            self._metadata.update(blanked(as_json({key: value}, "The session's metadata")))
        except ConfigError as error:
            self._say(str(error))

    def _enter(self, name: str) -> None:
        if name not in NAMES:
            self._say(f"session.phase({name!r}) is never recorded: profiler.phases knows {', '.join(NAMES)}.")
        if name == self._phases.present.name:
            return
        self._phases.enter(name)
        if self.timings is not None:
            self.timings.leave_out_step()
        if self._running and self._windows.recorder is None:
            self._windows.safely(self._grant, None)
        self._phases.present.cost.resume()

    def _leave(self, before: Phase, began_ns: int, cut: str | None) -> None:
        phase = self._phases.present
        if phase is before:  # a block of train within train
            return
        if cut is None:
            phase.close_batch(self._advance)  # its loop was left by break
        phase.batch_open = False
        if self._running and self._windows.owner is phase:
            self._windows.safely(self._windows.finish, cut, f"the phase {phase.name} ended")
        self._phases.present = before
        before.cost.leave_out(time.perf_counter_ns() - began_ns)

    def _advance(self, loss: Any) -> None:
        phase = self._phases.present
        if not self._running:
            phase.step_number += 1
            if not self._idle and self._ended_at is None:
                self._say(
                    "The session was never started, so nothing is recorded: use `with session:`, or session.start()."
                )
            return
        if self.timings is not None and phase is self._phases.train:
            self.timings.end_step(phase.step_number)
        if phase.step_number + 1 < phase.wakes_at:  # without a lock, nor a call in which another thread could come in
            phase.step_number += 1
            if self._windows.recorder is None:  # no step within the window of another phase, which would not count
                took_ns = phase.cost.step_ended(recorded=False)
                if self._watch is not None and phase is self._phases.train:
                    self._windows.in_turn(self._ask_triggers, self._watch, phase, took_ns, loss)
        elif not self._windows.in_turn(self._pass_boundary, phase, loss):
            phase.step_number += 1
        if self._preemption.noticed:
            self._preemption.save()
        if self.timings is not None and phase is self._phases.train:
            self.timings.begin_step()

    def _pass_boundary(self, phase: Phase, loss: Any) -> bool:
        phase.step_number += 1
        warming_up = self._windows.recorder is not None and not self._windows.recording
        took_ns = phase.cost.step_ended(recorded=None if warming_up else self._windows.recording)
        self._windows.safely(self._end_step, phase, took_ns, loss)
        phase.cost.resume()
        return True

    def _ask_triggers(self, watch: Watch, phase: Phase, took_ns: int, loss: Any) -> None:
        asked = watch.after(phase.step_number - 1, took_ns, loss, recorded=False)
        if asked is not None:
            self._windows.safely(self._grant, asked)
            phase.cost.resume()

    def _end_step(self, phase: Phase, took_ns: int, loss: Any) -> None:
        """Do what is due between step `step_number - 1` of a phase and its next."""
        busy, asked = self._windows.recorder is not None, None
        self._windows.end_step(phase)
        if self._watch is not None and phase is self._phases.train:
            asked = self._watch.after(phase.step_number - 1, took_ns, loss, recorded=busy)
        self._windows.safely(self._windows.end_if_over, phase)  # what fails in it does not cost the next window
        self._grant(asked)

    def _grant(self, asked: tuple[str, Request] | None) -> None:
        """Begin the next step; with a window before those of the schedule, where a trigger asked for one."""
        if asked is not None:
            logger.info("{}", self._phases.put_first(*asked))
        self._windows.begin_step(self._phases.present)

    def _stop(self, cut: str | None) -> None:
        if cut is None:
            self._phases.present.close_batch(self._advance)  # the loop was left by break, its last batch done
        self._phases.present.batch_open = False
        if self._running:
            if not (self._delivery and self._delivery.taken) and not self._windows.hold_something(cut):
                _warn(self._phases.nothing_recorded())
            self._windows.safely(self._windows.finish, cut, "the run ended")
            self._windows.safely(self._windows.settle)
            if self._watch is not None:
                self._watch.end()
                self._watch = None
            if self.timings is not None:
                self._windows.safely(self.timings.stop)
            self._preemption.uninstall()
            if self._preemption.noticed:
                self._preemption.pass_on()
            self._running, self._ended_at = False, self.step_number
            _sessions.discard(self)
            atexit.unregister(self._stop)
            for model in self._instrumented:
                forget(model)
            self._instrumented = []
            if self._delivery is not None:
                self._windows.safely(self._delivery.close, cut)

    def _say(self, sentence: str) -> None:
        """Warn once."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("{}", sentence)


# Those that run in this process.
_sessions: WeakSet[Session] = WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the runs, their windows and what watches signals for them are its parent's."""
    for session in _sessions:
        session._running, session._windows.recorder, session._windows.lock = False, None, RLock()
        session._preemption.uninstall()
    _sessions.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)


def _warn(sentence: str | None) -> None:
    if sentence:
        logger.warning("{}", sentence)
