"""`Session`: one run's recorder, driven by `start`, `step` and `stop`."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, dropwhile
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from loguru import logger
from torch import nn

from instrument import emit, export, metadata, probe, schedule
from instrument.annotate import profiled
from instrument.capture import Capture
from instrument.config import ProfilerConfig, as_config
from instrument.cost import Cost
from instrument.delivery import Delivery
from instrument.errors import CaptureError, ConfigError, InstrumentError
from instrument.modules import forget, instrument_model, is_instrumented
from instrument.preemption import Preemption
from instrument.recorder import Recorder, refuse_company, refuse_options
from instrument.schedule import Window
from instrument.sinks.chrome_trace import as_json
from instrument.timings import Timings
from instrument.triggers import Watch

T = TypeVar("T")
_NEVER = sys.maxsize


class Steps(Generic[T]):
    """The batches of a loader, a step after each; as long as the loader."""

    def __init__(self, session: Session, loader: Iterable[T]) -> None:
        self._session = session
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        return self._session._batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type] # as the loader answers


class Session:
    """Records windows of a run and hands each to its sinks.

    `config` is anything `as_config` takes: a Hydra config, a mapping, a preset's name, a `ProfilerConfig`; keyword
    options win over it. Without either, the whole block is recorded; None records nothing. With `model`, every
    submodule gets a range while a window warms up or records. Use it as a context manager, or call `start`, `step` once
    after each training step, and `stop`.

    Attributes:
        config: the checked `ProfilerConfig`.
        captures: what was delivered so far, oldest first.
        step_number: the step that runs now, counted from 0; it names the recorded steps.
        activities: what is recorded; empty before the start.
        output_dir: the folder for captures; None before the start.
        timings: of the whole run, `timings.table()`; None before the start, and where the config has none.

    What fails while recording or writing is logged and never reaches the training loop. Cost: a step outside windows is
    a comparison; the end of a window costs what torch needs to stop and to write its trace, and the time of the sinks.

    Raises:
        ConfigError: from the constructor, for an option that cannot work.
    """

    def __init__(self, *config: Any, model: nn.Module | None = None, **options: Any) -> None:
        self.config: ProfilerConfig = as_config(*config, **options)
        self.captures: list[Capture] = []
        self.step_number = 0
        self.activities: list[str] = []
        self.output_dir: Path | None = None
        self.timings: Timings | None = None
        self._metadata = dict(self.config.metadata)  # of the user's own
        self._model = model
        self._running = False
        self._plan: Iterator[Window] = iter(())
        self._window: Window | None = None  # the one that is open, or else the next
        self._recorder: Recorder | None = None  # of the window that is open
        self._watch = Watch({})
        self._wakes_at = _NEVER  # the next step at whose start something is to be done
        self._instrumented: nn.Module | None = None  # by this session
        self._emitting = emit.torch_backend
        self._batch_open = False  # a batch of `steps` is out and its step not yet ended
        self._loop_left = False  # the loop that it was given to runs no more
        self._began_at = 0  # the step number at the start
        self._ended_at: int | None = None  # the one at the last stop; None: never stopped
        self._process = os.getpid()
        self._delivery: Delivery | None = None  # while it runs
        self._cost = Cost()
        self._preemption = Preemption(self.config.preemption_grace_s, lambda: self._recording, self._save_now)
        self._at_work = False  # within what `_safely` runs
        self._loss: Any = None  # given within that step
        self._said: set[str] = set()

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop(f"exception {kind.__name__}" if kind else None)

    def start(self, model: nn.Module | None = None) -> Session:
        """Say the plan, check the output folder, and begin with the first step.

        Raises:
            ConfigError: the output folder cannot be written, or this torch refuses an option of its own.
            CaptureError: the session runs already, another one records, or torch's own profiler is running.
        """
        if self._running:
            raise CaptureError("This session is already running: stop it before starting it again.")
        if not self.config.enabled:
            return self
        refuse_company()
        self.activities = probe.usable_activities(self.config.activities)
        self.output_dir = export.writable(export.output_dir(self.config))
        refuse_options(self.config, self.activities, self.output_dir)
        metadata.origin()  # asks git now, and not at the end of a window
        export.tidy(self.output_dir)
        self._delivery = Delivery(self.config, self.output_dir, self.captures)
        self._emitting = emit.backend_for(self.config.emit)
        timed = self.config.timings
        self.timings = Timings(timed, self.output_dir, metadata.rank()) if timed is not None else None
        self._take_model(model if model is not None else self._model)
        self._running = True
        if self.step_number == self._ended_at:  # a second run, unless its owner has set the number
            self.step_number = 0
        self._began_at, self._process = self.step_number, os.getpid()
        atexit.register(self._stop, "the interpreter ended")
        self._preemption.install()
        self._watch = Watch(self.config.triggers)
        self._plan, self._window = self._scheduled(), None  # nothing of an earlier run's plan
        self._skip_missed()
        if emit.disabled:
            logger.info("INSTRUMENT_DISABLE is set: annotations do nothing, and no named range will be recorded.")
        for note in self.config.notes:
            logger.info(note)
        ahead = dropwhile(lambda window: window.first < self.step_number, self._scheduled())
        what = schedule.in_words(ahead)
        logger.info("Profiler {} on {}, into {}", what, " and ".join(self.activities), self.output_dir)
        if self.config.memory_snapshot and "cuda" not in self.activities:
            logger.warning("profiler.memory_snapshot does nothing here: no CUDA device, whose allocator alone has any.")
        if self.timings is not None:
            self.timings.start()
        self._safely(self._begin_step)
        self._begin_timing()
        return self

    def step(self, loss: Any = None) -> None:
        """Tell that a training step has ended; `loss` (a number or a tensor of one element) is for triggers.

        A tensor is looked at one step later, so that training hardly ever waits for the device. Inside a loop over
        `steps`, which ends the steps itself, it only takes the loss.
        """
        if self._batch_open and self._loop_left:
            self._close_batch()
        if not self._batch_open:
            self._advance(loss)
        elif loss is None:
            self._say("session.step() does nothing inside session.steps(), which steps by itself.")
        else:
            self._loss = loss

    def steps(self, loader: Iterable[T]) -> Steps[T]:
        """The loader's batches; a step ends after each, and waiting for batch k is a range `data` in step k.

        `session.step(loss=…)` inside the loop tells triggers the loss. A loop within the loop, for validation, takes no
        steps of its own. The length is the loader's.
        """
        return Steps(self, loader)

    def _batches(self, loader: Iterable[T]) -> Iterator[T]:
        if self._batch_open and not self._loop_left:  # a loop within a loop
            yield from loader
            return
        self._close_batch()
        batches: Iterator[T] | None = None
        while True:
            with profiled("data"):
                batches = iter(loader) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self._batch_open, self._loop_left = True, False
            try:
                yield batch
            finally:
                self._loop_left = True  # by break or an exception, which a generator cannot tell apart
            self._close_batch()

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
            self._metadata |= as_json({key: value}, "The session's metadata")
        except ConfigError as error:
            self._say(str(error))

    def _take_model(self, model: nn.Module | None) -> None:
        """Instrument the session's model as the config says, unless its owner has done so already."""
        modules = self.config.modules
        if model is None or not modules.enabled or is_instrumented(model):
            return
        chosen = {name: getattr(modules, name) for name in ("include", "exclude", "types")}
        instrument_model(model, modules.depth, **chosen)
        self._instrumented = model

    def _close_batch(self) -> None:
        if self._batch_open:
            self._batch_open = False
            loss, self._loss = self._loss, None
            self._advance(loss)

    def _advance(self, loss: Any) -> None:
        self.step_number += 1
        if not self._running:
            if self.config.enabled and self._ended_at is None:
                self._say(
                    "The session was never started, so nothing is recorded: use `with session:`, or session.start()."
                )
            return
        self._cost.step_ended(recorded=self._recording)
        if self.timings is not None:
            self.timings.end_step(self.step_number - 1)
        if self.step_number >= self._wakes_at or self._watch:
            self._safely(self._end_step, loss)
            if self._preemption.noticed:
                self._save_now()
        self._begin_timing()

    def _begin_timing(self) -> None:
        """Count the next step from here: what the session does between two steps belongs to none."""
        if self.timings is not None:
            self.timings.begin_step()
        self._cost.resume()

    def _end_step(self, loss: Any) -> None:
        """Do what is due between step `step_number - 1` and step `step_number`."""
        if os.getpid() != self._process:  # in a forked child: the run is its parent's
            self._running, self._recorder = False, None
            return
        if self._recorder is not None:
            self._recorder.end_step()
        idle = self._recorder is None
        fired = self._watch.after(self.step_number - 1, loss) if self._watch else None
        if self._recording and self._window and self._window.last == self.step_number - 1:
            self._safely(self._end_window, None)  # what fails in it does not cost the next window
        elif self._recorder and self._recorder.overdue:
            self._safely(self._end_window, f"profiler.max_window_s={self.config.max_window_s:g} was reached")
        if fired is not None and idle:
            self._request_window(fired)
        self._begin_step()
        self._watch.resume()

    def _skip_missed(self) -> None:
        """Turn to the next window that is still ahead; a step number set from a checkpoint jumps over some."""
        if self._window is None:
            self._window = next(self._plan, None)
        while self._window and self._recorder is None and self._window.first < self.step_number:
            self._window = next(self._plan, None)

    def _begin_step(self) -> None:
        """Do what the plan says for the start of step `step_number`."""
        self._skip_missed()
        window = self._window
        if window is None or self.step_number < window.warmup_from:
            self._wakes_at = window.warmup_from if window else _NEVER
            return
        self._wakes_at = self.step_number + 1
        if self._recorder is None:
            self._recorder = Recorder(self.config, self.activities, self._emitting, self.output_dir or Path())
            with self._cost.standing_still("start"):
                self._recorder.prepare()
        if self.step_number >= window.first:
            if not self._recording:
                with self._cost.standing_still("start"):
                    self._recorder.start()
            self._recorder.next_step(self.step_number)

    @property
    def _recording(self) -> bool:
        return self._recorder is not None and self._recorder.started_at is not None

    def _end_window(self, cut: str | None) -> None:
        """Stop recording, deliver the capture, and turn to the next window. `cut` says why it ends early."""
        window, recorder = self._window, self._recorder
        if window is None or recorder is None or recorder.started_at is None:
            return
        if cut:
            self._warn_cut(window, cut)
        with self._cost.standing_still("stop"):
            recorder.stop()
        self._recorder, self._window = None, next(self._plan, None)
        facts = metadata.facts(window, self.step_number, cut)
        last = max(window.first, self.step_number - 1)
        name = f"steps_{window.first:06d}-{last:06d}_rank{metadata.rank()}"
        if self._delivery is not None:
            self._delivery.take(recorder, name, self._cost, lambda: self._about(recorder, facts))

    def _about(self, recorder: Recorder, facts: dict[str, Any]) -> dict[str, Any]:
        about = metadata.describe(facts, recorder.started_at or 0.0, self.activities, self.config.plain())
        about |= {"annotations_disabled": emit.disabled, **recorder.not_timed()}
        about["user_metadata"] = dict(self._metadata)
        _warn_compiled(about["graphs_compiled"], facts)
        return about

    def _save_now(self) -> None:
        """End the open window because SIGTERM came, and let the signal go on; not in the middle of work of ours."""
        if not self._at_work:
            if self._recording:
                self._safely(self._finish, "SIGTERM")
            self._preemption.pass_on()

    def _stop(self, cut: str | None) -> None:
        if cut is None:
            self._close_batch()  # the loop was left by break, its last batch done
        self._batch_open = False
        if self._running and os.getpid() == self._process:
            self._safely(self._finish, cut)
            if self.timings is not None:
                self._safely(self.timings.stop)
            self._preemption.uninstall()
            if self._preemption.noticed:
                self._preemption.pass_on()
            if self._delivery is not None:
                self._safely(self._delivery.close)
            self._running, self._ended_at = False, self.step_number
            atexit.unregister(self._stop)
            if self._instrumented is not None:
                forget(self._instrumented)
                self._instrumented = None

    def _finish(self, cut: str | None) -> None:
        window, recorder = self._window, self._recorder
        if window is None:
            return
        stepped = self.step_number > self._began_at
        just_begun = stepped and self.step_number == window.first and cut is None
        if recorder is None or not self._recording or just_begun:  # there is nothing to keep
            self._recorder = None
            if recorder is not None:
                recorder.stop()
            if self._delivery is None or not self._delivery.taken:
                self._warn_nothing_recorded(window)
            return
        if window.last is None:
            if cut is None and not stepped:  # the whole block is the one step
                self.step_number += 1
                recorder.end_step()
        else:
            cut = cut or ("the run ended" if stepped else "session.step() was never called")
        self._end_window(cut)

    def _warn_cut(self, window: Window, cut: str) -> None:
        planned = "" if window.last is None else f" of {window.last - window.first + 1}"
        how = f"was cut short after {self.step_number - window.first}{planned} steps ({cut})"
        logger.warning("The window of steps {} {}; it is kept and labelled truncated.", window, how)

    def _warn_nothing_recorded(self, window: Window) -> None:
        done = self.step_number - self._began_at
        logger.warning(
            "The run ended after {} steps, before the first window (steps {}) had recorded one: {}.",
            done,
            window,
            "lower profiler.wait, profiler.warmup or profiler.skip_first, or train longer"
            if done
            else "call session.step() after each training step, or loop over session.steps(loader)",
        )

    def _request_window(self, trigger: str) -> None:
        """Put a window before those of the schedule, which give way where they overlap."""
        first = self.step_number + self.config.warmup
        window = Window(self.step_number, first, first + (self.config.active or 1) - 1, trigger)
        logger.info("The trigger {} fired after step {}: records steps {}.", trigger, self.step_number - 1, window)
        self._plan = chain([self._window] if self._window else [], self._plan)
        self._window = window

    def _scheduled(self) -> Iterator[Window]:
        names = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
        return schedule.windows(**{name: getattr(self.config, name) for name in names})

    def _safely(self, act: Callable[..., None], *args: Any) -> None:
        """Do a part of ours; what goes wrong in it costs this window, is logged, and never reaches the caller."""
        recorder, outer, self._at_work = self._recorder, self._at_work, True
        try:
            act(*args)
        except Exception as error:
            self._recover(self._recorder or recorder)
            self._say(f"Recording failed and training goes on: {error}", error)
        finally:
            self._at_work = outer

    def _recover(self, recorder: Recorder | None) -> None:
        try:
            if recorder is not None:
                recorder.stop()
        except Exception as error:
            self._say(f"The profiler could not be stopped: {error}", error)
        if self._recorder is not None:  # otherwise the window was already turned away from
            self._recorder, self._window = None, next(self._plan, None)
        self._wakes_at = self.step_number + 1

    def _say(self, sentence: str, error: Exception | None = None) -> None:
        """Log a sentence once in a run; with its traceback where it is no error of our own."""
        if sentence not in self._said:
            self._said.add(sentence)
            unexpected = None if isinstance(error, InstrumentError) else error
            logger.opt(exception=unexpected).log("ERROR" if error else "WARNING", "{}", sentence)


def _warn_compiled(graphs: int, facts: dict[str, Any]) -> None:
    if graphs:
        logger.warning(
            "torch.compile compiled {} graphs inside the window of {}, whose times hold that: "
            "wait longer before the window (profiler.wait).",
            graphs,
            metadata.in_words(facts),
        )
