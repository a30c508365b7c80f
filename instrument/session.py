"""`Session`: one run's recorder, driven by `start`, `step` and `stop`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from loguru import logger
from torch import nn

from instrument import emit, export, metadata, schedule
from instrument.annotate import profiled
from instrument.capture import Capture
from instrument.config import ProfilerConfig, as_config
from instrument.errors import CaptureError, ConfigError, InstrumentError
from instrument.modules import forget, instrument_model, is_instrumented
from instrument.recorder import Recorder, available_activities, refuse_company
from instrument.schedule import Window
from instrument.triggers import Watch

T = TypeVar("T")
_NEVER = sys.maxsize


class Session:
    """Records windows of a run and hands each to its sinks.

    `config` is anything `as_config` takes: a Hydra config, a mapping, a preset's name, nothing; keyword options win
    over it. With `model`, every submodule gets a range while a window warms up or records. Use it as a context manager,
    or call `start`, `step` once after each training step, and `stop`.

    Attributes:
        config: the checked `ProfilerConfig`.
        captures: what was delivered so far, oldest first.
        step_number: the step that runs now, counted from 0; it names the recorded steps.

    What fails while recording or writing is logged and never reaches the training loop. Cost: a step outside windows is
    a comparison; the end of a window costs what torch needs to stop and to write its trace, and the time of the sinks.

    Raises:
        ConfigError: from the constructor, for an option that cannot work.
    """

    def __init__(self, config: Any = None, /, *, model: nn.Module | None = None, **options: Any) -> None:
        self.config: ProfilerConfig = as_config(config, **options)
        self.captures: list[Capture] = []
        self.step_number = 0
        self._model = model
        self._instrumented: nn.Module | None = None  # by this session
        self._running = False
        self._plan: Iterator[Window] = iter(())
        self._window: Window | None = None  # the one that is open, or else the next
        self._recorder: Recorder | None = None  # of the window that is open
        self._watch = Watch({})
        self._wakes_at = _NEVER  # the next step at whose start something is to be done
        self._batch_open = False  # a batch of `steps` is out and its step not yet ended
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
            ConfigError: the output folder cannot be written.
            CaptureError: the session runs already, another one records, or torch's own profiler is running.
        """
        if self._running:
            raise CaptureError("This session is already running: stop it before starting it again.")
        if not self.config.enabled:
            return self
        refuse_company()
        self._take_model(model if model is not None else self._model)
        emit.use(self.config.emit)
        self.activities = _usable_activities(self.config.activities)
        self.output_dir = _writable(_output_dir(self.config))
        self._running = True
        self._watch = Watch(self.config.triggers)
        self._plan = self._scheduled()
        self._window = next(self._plan, None)
        if emit.disabled:
            logger.info("INSTRUMENT_DISABLE is set: annotations do nothing, and no named range will be recorded.")
        for note in self.config.notes:
            logger.info(note)
        what = schedule.in_words(self._scheduled())
        logger.info("Profiler {} on {}, into {}", what, " and ".join(self.activities), self.output_dir)
        if self.config.memory_snapshot and "cuda" not in self.activities:
            logger.warning("profiler.memory_snapshot does nothing here: no CUDA device, whose allocator alone has any.")
        self._safely(self._begin_step)
        return self

    def step(self, loss: Any = None) -> None:
        """Tell that a training step has ended; `loss` (a number or a tensor of one element) is for triggers.

        A tensor is looked at one step later, so that training hardly ever waits for the device. Inside a loop over
        `steps`, which ends the steps itself, it only takes the loss.
        """
        if not self._batch_open:
            self._advance(loss)
        elif loss is None:
            self._say("session.step() does nothing inside session.steps(), which steps by itself.")
        else:
            self._loss = loss

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches and end a step after each; waiting for batch k is a range `data` in step k.

        `session.step(loss=…)` inside the loop tells triggers the loss.
        """
        if self._batch_open:  # an earlier loop was left by break
            self._close_batch()
        batches: Iterator[T] | None = None
        while True:
            with profiled("data"):
                batches = iter(loader) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self._batch_open = True
            yield batch
            self._close_batch()

    def stop(self) -> None:
        """End the session. A window that is still open is kept, and labelled truncated unless it was to have no end.

        Calling it twice is harmless.
        """
        self._stop(None)

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
        if self._running and (self.step_number >= self._wakes_at or self._watch):
            self._safely(self._end_step, loss)

    def _end_step(self, loss: Any) -> None:
        """Do what is due between step `step_number - 1` and step `step_number`."""
        if self._recorder is not None:
            self._recorder.end_step()
        if self._recording and self._window and self._window.last == self.step_number - 1:
            self._end_window(cut=None)
        if self._watch:
            name = self._watch.after(self.step_number - 1, loss)
            if name is not None and self._recorder is None:
                self._request_window(name)
        self._begin_step()

    def _begin_step(self) -> None:
        """Do what the plan says for the start of step `step_number`."""
        while self._window and self._recorder is None and self._window.first < self.step_number:
            self._window = next(self._plan, None)  # a step number set from a checkpoint jumps over windows
        window = self._window
        if window is None or self.step_number < window.warmup_from:
            self._wakes_at = window.warmup_from if window else _NEVER
            return
        self._wakes_at = self.step_number + 1
        if self._recorder is None:
            self._recorder = Recorder(self.config, self.activities)
            self._recorder.prepare()
        if self.step_number >= window.first:
            if not self._recording:
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
        self._recorder, self._window = None, next(self._plan, None)
        recorder.stop()
        facts = _facts(window, self.step_number, cut)
        last = max(window.first, self.step_number - 1)
        name = f"steps_{window.first:06d}-{last:06d}_rank{metadata.rank()}"
        about = metadata.describe(name, facts, recorder.started_at, self.activities, self.config.plain())
        about |= {"annotations_disabled": emit.disabled, **recorder.not_timed()}
        if about["graphs_compiled"]:
            logger.warning(
                "torch.compile compiled {} graphs inside the window of steps {}, whose times hold that: "
                "wait longer before the window (profiler.wait).",
                about["graphs_compiled"],
                window,
            )
        self.captures.append(self._deliver(recorder, about))
        logger.info("Recorded {} into {}", _recorded_words(facts), self.captures[-1].folder)

    def _deliver(self, recorder: Recorder, about: dict[str, Any]) -> Capture:
        staging = export.staging_folder(self.output_dir, about["name"])
        try:
            recorder.save(staging / "trace.json")
            return export.deliver(staging, self.output_dir, about, self.config.sinks)
        except Exception:
            with suppress(OSError):
                staging.rmdir()  # where nothing was written
            if staging.exists():
                logger.warning("What was written of {} is kept in {}", about["name"], staging)
            raise

    def _stop(self, cut: str | None) -> None:
        if cut is None:
            self._close_batch()  # the loop was left by break, its last batch done
        self._batch_open = False
        if self._running:
            self._safely(self._finish, cut)
            self._running = False
            if self._instrumented is not None:
                forget(self._instrumented)
                self._instrumented = None

    def _finish(self, cut: str | None) -> None:
        window, recorder = self._window, self._recorder
        if window is None:
            return
        if recorder is None or not self._recording:
            self._recorder = None
            if recorder is not None:
                recorder.stop()
            if not self.captures:
                self._warn_nothing_recorded(window)
            return
        if window.last is None:
            if cut is None and self.step_number == window.first:  # nobody stepped: the whole block is the step
                self.step_number += 1
                recorder.end_step()
        else:
            cut = cut or "the run ended"
        if cut:
            self._warn_cut(window, cut)
        self._end_window(cut)

    def _warn_cut(self, window: Window, cut: str) -> None:
        done = self.step_number - window.first
        planned = "" if window.last is None else f" of {window.last - window.first + 1}"
        logger.warning(
            "The window of steps {} was cut short after {}{} steps ({}); it is kept and labelled truncated.",
            window,
            done,
            planned,
            cut,
        )

    def _warn_nothing_recorded(self, window: Window) -> None:
        logger.warning(
            "The run ended after {} steps, before the first window (steps {}) began, and nothing was recorded: "
            "lower profiler.wait, profiler.warmup or profiler.skip_first, or train longer.",
            self.step_number,
            window,
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
        recorder = self._recorder
        try:
            act(*args)
        except Exception as error:
            self._recover(self._recorder or recorder)
            self._say(f"Recording failed and training goes on: {error}", error)

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


def _facts(window: Window, step_number: int, cut: str | None) -> dict[str, Any]:
    """What `capture.json` says of a window that ends before step `step_number`; `last_step` is the last whole step."""
    return {
        "first_step": window.first,
        "last_step": step_number - 1 if step_number > window.first else None,
        "steps": step_number - window.first,
        "planned_steps": None if window.last is None else window.last - window.first + 1,
        "truncated": cut is not None,
        "reason": cut,
        "trigger": window.trigger,
    }


def _recorded_words(facts: dict[str, Any]) -> str:
    if facts["last_step"] is None:
        return f"a part of step {facts['first_step']}"
    if facts["steps"] == 1:
        return f"step {facts['first_step']}"
    return f"steps {facts['first_step']}–{facts['last_step']}"


def _usable_activities(wanted: list[str] | None) -> list[str]:
    there = available_activities()
    if wanted is None:
        return there
    missing = [name for name in wanted if name not in there]
    usable = [name for name in wanted if name in there] or ["cpu"]
    if missing:
        logger.warning(
            "profiler.activities names {}, which this machine or this torch does not have: records {} only.",
            " and ".join(missing),
            " and ".join(usable),
        )
    return usable


def _output_dir(config: ProfilerConfig) -> Path:
    """The folder for captures: the one given, or `profile/` in Hydra's run folder or the current one."""
    if config.output_dir is not None:
        return Path(config.output_dir).expanduser().absolute()
    hydra = sys.modules.get("hydra.core.hydra_config")  # where Hydra runs, it is loaded
    if hydra is not None and hydra.HydraConfig.initialized():
        return Path(hydra.HydraConfig.get().runtime.output_dir) / "profile"
    return Path("profile").absolute()


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"profiler.output_dir is {str(folder)!r}, which cannot be written ({reason}): choose another folder."
        ) from error
