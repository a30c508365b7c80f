"""`StepLoop`: all state of one run, moved on by each step, and the windows that it opens and ends on the way."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median
from threading import RLock
from typing import Any, TypeVar

from loguru import logger

from instrument.annotate import backends
from instrument.config import schedule
from instrument.config.schedule import NEVER, Idle, Window, next_window
from instrument.config.schema import ProfilerConfig
from instrument.errors import InstrumentError, reason_of
from instrument.record import one_profiler, plan_text
from instrument.record.distributed import StepProgress
from instrument.record.limits import Limits
from instrument.record.recorder import RecordedWindow, Recorder, uninterrupted
from instrument.record.signals import Preemption
from instrument.record.timings import Timings
from instrument.record.trigger_runner import TriggerRunner
from instrument.triggers import Request
from instrument.worker import queue
from instrument.worker.capture_queue import CaptureQueue

T = TypeVar("T")

# Unrecorded steps that a window is compared with; those nearest to it.
_STEPS_COMPARED = 50
# How long a step waits at most while another thread begins or ends a window.
_LOCK_WAIT_S = 0.1
# How the reasons begin for which a window is cut short because the process is about to end.
_PROCESS_ENDS = ("SIGTERM", "exception ", "the interpreter ended")


class OverheadTimer:
    """Times every step, and what a window adds to the loop; one for each phase of a run.

    A step's time runs from the end of the one before, less what the session did in between. Cost: a reading of the
    clock a step, some 0.2 µs.
    """

    def __init__(self) -> None:
        self._unrecorded: deque[int] = deque(
            maxlen=_STEPS_COMPARED + 1
        )  # of which the first is not compared with
        self._recorded: list[int] = []
        self._paused_ns: dict[str, int] = {}
        self.resume()

    def resume(self) -> None:
        """Let the next step begin now."""
        self._began_ns = time.perf_counter_ns()

    def step_ended(self, *, recorded: bool | None) -> int:
        """Note the step that ends now and let the next begin; gives its time in ns. None: it was one of the warm-up."""
        now = time.perf_counter_ns()
        took, self._began_ns = now - self._began_ns, now
        if recorded is not None:
            (self._recorded if recorded else self._unrecorded).append(took)
        return took

    def leave_out(self, elapsed_ns: int) -> None:
        """Take time that was not the step's own, as that of another phase, out of the step that runs."""
        self._began_ns += elapsed_ns

    def begin_window(self) -> None:
        """Count what follows for a new window, whatever became of the one before."""
        self._recorded, self._paused_ns = [], {}

    @contextmanager
    def pausing(self, part: str) -> Iterator[None]:
        """Time a part of the work for which the training loop waits: `start`, `stop` or `save`."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self._paused_ns[part] = self._paused_ns.get(part, 0) + time.perf_counter_ns() - began

    def unrecorded_ns(self) -> int | None:
        """The median of the last 50 unrecorded steps, without the first, which is like no other; None without any."""
        steps = tuple(self._unrecorded)[1:]  # copied at once: another thread may ask
        return int(median(steps)) if steps else None

    def of_window(self) -> dict[str, Any]:
        """What the window that ends now has cost so far, for `capture.json`.

        `recorded_step_ns` and `unrecorded_step_ns` are medians, the latter of the last 50 unrecorded steps before the
        window, of which there were `unrecorded_steps`; None where there is none. The first step of a run is not
        counted: workers start in it, and code is compiled. The loop waited `start_ns`, `stop_ns` and `save_ns` (torch's
        own export).
        """
        return {
            "recorded_step_ns": int(median(self._recorded)) if self._recorded else None,
            "unrecorded_step_ns": self.unrecorded_ns(),
            "unrecorded_steps": max(0, len(self._unrecorded) - 1),
            "start_ns": self._paused_ns.get("start", 0),
            "stop_ns": self._paused_ns.get("stop", 0),
            "save_ns": self._paused_ns.get("save", 0),
        }


@dataclass
class StepCounter:
    """The steps of one phase, and which of them are recorded next.

    Attributes:
        name: train, validation, test or predict.
        schedule: the config whose schedule the phase follows; None where it follows none.
        step_number: the step that runs now, or runs next when the phase comes again; counted from 0.
        began_at: the step number at the session's start.
        planned: the window that is open, or else the next one; `Idle` where it is not known yet, None where none is
            left.
        skipped: the last window that was left out because its first step lay behind; None: none was.
        next_event_step: the next step at whose start something is to be done.
        batch_open: whether a batch of `session.steps` is out and its step not yet ended.
        loop_left: whether the loop that it was given to runs no more.
        loss: what was given to `session.step` within that step.
        overhead: the times of its steps.
    """

    name: str
    schedule: ProfilerConfig | None = None
    step_number: int = 0
    began_at: int = 0
    planned: Window | Idle | None = None
    skipped: Window | None = None
    next_event_step: int = NEVER
    batch_open: bool = False
    loop_left: bool = False
    loss: Any = None
    overhead: OverheadTimer = field(default_factory=OverheadTimer)
    _following: tuple[Window | Idle | None, Window | Idle | None] = (None, None)

    @property
    def window(self) -> Window | None:
        """The window that is open, or else the next; None: there is none left, or it is not known yet."""
        return self.planned if isinstance(self.planned, Window) else None

    def begin(self, schedule: ProfilerConfig | None, step_number: int) -> None:
        """A run starts with this step."""
        self.schedule, self.skipped, self.overhead = schedule, None, OverheadTimer()
        self.step_number = self.began_at = step_number
        self.next_event_step, self.planned = NEVER, self._from(0)
        self.skip_to(step_number)

    def go_to(self, number: int) -> None:
        """Let the step that runs now have this number."""
        self.began_at = number if self.began_at == self.step_number else self.began_at
        self.step_number, self.next_event_step = number, number + 1

    def advance(self) -> None:
        """Go on to the next window: this one is over, or cannot be recorded."""
        if self.planned is not self._following[0]:
            self.look_ahead()
        self.planned = self._following[1]

    def look_ahead(self) -> None:
        """Find out which window follows on the present one, so that its end has one thing less to do."""
        planned = self.planned
        self._following = (
            planned,
            self._from(planned.first + 1) if isinstance(planned, Window) else None,
        )

    def skip_to(self, step: int) -> None:
        """Leave out the windows whose first step lies before this one; a step number from a checkpoint jumps."""
        planned = self.planned
        if planned is None or (
            planned.until > step if isinstance(planned, Idle) else planned.first >= step
        ):
            return
        self.planned = self._from(step)
        last = (
            schedule.last_window(self.schedule)
            if self.planned is None and self.schedule is not None
            else None
        )
        self.skipped = last or (planned if isinstance(planned, Window) else None) or self.skipped

    def insert_next(self, window: Window) -> None:
        """Put a window before all others; those that it runs into are left out when their turn comes."""
        self.planned = window

    def _from(self, step: int) -> Window | Idle | None:
        return None if self.schedule is None else next_window(self.schedule, step)

    def folder_name(self, first: int, last: int | None, rank: int) -> str:
        """What the capture of these steps is called; without a last one that of the first."""
        prefix = "" if self.name == "train" else f"{self.name}_"
        return f"{prefix}steps_{first:06d}-{first if last is None else last:06d}_rank{rank}"


@dataclass
class Run:
    """What is fixed from a session's start to its stop.

    Attributes:
        activities: what is recorded, as the config names it.
        emitting: the tools that ranges are told.
        capture_queue: takes the windows that have been saved.
        described: what `capture.json` says of every window of the run.
        triggers: asks for windows; None where the config has no triggers.
        timings: of the whole run; None where the config has none.
    """

    activities: list[str]
    emitting: backends.Backend
    capture_queue: CaptureQueue
    described: dict[str, Any]
    triggers: TriggerRunner | None
    timings: Timings | None


class StepLoop:
    """Counts the steps of a run, and opens, continues and ends windows at their boundaries.

    Any thread may take a step, and a thread of the window's limits may end a window: all that changes a window happens
    with `lock` held. What fails costs the window, is logged once in a run, and never reaches the caller: each way in
    passes through `_guarded`. Cost: a step outside windows is a comparison and a reading of the clock.

    Attributes:
        lock: held by the thread that begins, continues or ends a window.
        running: whether a run has begun and not ended.
        records_nothing: whether that is as the config says, on this rank.
        run: what is fixed for the run; None before the first.
        train: the counter outside any `session.phase` block.
        current: the counter of the phase that runs now.
        recorder: of the window that is open or warming up; None: there is none.
        owner: the counter whose window that is, or was.
        by_calls: whether the steps are calls of functions, and not training steps.
        user_metadata: what the user adds to `capture.json`.
        total_steps: how many steps the run has, where that is known.
        ended_at: the step number at the end of the last run; None: there was none yet.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self.config = config
        self.lock = RLock()
        self.running = False
        self.records_nothing = not config.enabled
        self.total_steps: int | None = None
        self.run: Run | None = None
        self.train = self.current = self.owner = StepCounter("train")
        self.recorder: Recorder | None = None
        self.by_calls = False
        self.user_metadata: dict[str, Any] = dict(config.metadata)
        self.ended_at: int | None = None
        self._counters = {"train": self.train}
        self._limits: Limits | None = None
        self._known_skipped: Window | None = (
            None  # the last window that lay behind train's first step
        )
        self._preemption = Preemption(self)
        self._said: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return StepLoop, (self.config,)  # a pickled one, as `session.steps` holds it, has never run

    @property
    def recording(self) -> bool:
        """Whether a window is open, and not only warming up."""
        recorder = self.recorder  # which another thread may take away
        return recorder is not None and recorder.started_at is not None

    # The ways in.

    def begin(self, run: Run, total_steps: int | None) -> None:
        """Begin a run with the present step of train, and say the plan; nothing of an earlier run is left."""
        if self.step_number == self.ended_at:  # a second run, unless its owner has set the number
            self.train.step_number = 0
        self.run, self._said = run, set()
        self._counters = {
            each.name: each for each in (self.train, self.current)
        }  # it may start within a phase
        for counter in self._counters.values():
            counter.begin(
                self._schedule_of(counter.name),
                self.train.step_number if counter is self.train else 0,
            )
        self._known_skipped = self.train.skipped
        self._preemption.install(self.config.preemption_grace_s)
        self.running = True
        self.total_steps = total_steps or self.config.total_steps
        self._say_plan(run)
        if run.timings is not None:
            run.timings.start()
        self._guarded(self._begin_next_step)
        if run.timings is not None:
            run.timings.begin_step()
        self.current.overhead.resume()

    def step(self, loss: Any) -> None:
        """End the step that runs, and begin the next."""
        counter, run = self.current, self.run
        if not self.running or run is None:
            counter.step_number += 1
            if not self.records_nothing and self.ended_at is None:
                self.warn_once(
                    "The session was never started, so nothing is recorded: use `with session:`, or session.start()."
                )
            return
        if run.timings is not None and counter is self.train:
            run.timings.end_step(counter.step_number)
        if (
            counter.step_number + 1 < counter.next_event_step
        ):  # no lock, nor a call in which another thread could come
            counter.step_number += 1
            if (
                self.recorder is None
            ):  # no step within the window of another phase, which would not count
                took_ns = counter.overhead.step_ended(recorded=False)
                if run.triggers is not None and counter is self.train:
                    self.in_turn(self._ask_triggers, run.triggers, took_ns, loss)
        elif not self.in_turn(self._pass_boundary, counter, run, loss):
            counter.step_number += 1
        if self._preemption.noticed:
            self._preemption.save()
        if run.timings is not None and counter is self.train:
            run.timings.begin_step()

    def close_batch(self, counter: StepCounter) -> None:
        """End the step of the batch that is out, if any, with the loss given within it."""
        if counter.batch_open:
            counter.batch_open = False
            loss, counter.loss = counter.loss, None
            self.step(loss)

    def enter(self, name: str) -> StepCounter:
        """Count the steps of another phase from now on, where its counter was left; gives the counter of before."""
        before = self.current
        if name != before.name:
            if name not in self._counters:
                self._counters[name] = StepCounter(name)
                self._counters[name].begin(self._schedule_of(name), 0)
            self.current = self._counters[name]
            if self.run is not None and self.run.timings is not None:
                self.run.timings.leave_out_step()
            if self.running and self.recorder is None:
                self._guarded(self._begin_next_step)
            self.current.overhead.resume()
        return before

    def leave(self, before: StepCounter, elapsed_ns: int, reason: str | None) -> None:
        """Go back to the counter of before `enter`; a window of the phase that is left ends here, at the latest."""
        counter = self.current
        if counter is before:  # a block of train within train
            return
        if reason is None:
            self.close_batch(counter)  # its loop was left by break
        counter.batch_open = False
        if self.running and self.owner is counter:
            self._guarded(self._finish, reason, f"the phase {counter.name} ended")
        self.current = before
        before.overhead.leave_out(elapsed_ns)

    def go_to(self, number: int) -> None:
        """Let the present step of train have this number; an open window ends, as its steps must be consecutive."""
        counter = self.train
        if self.running and number != counter.step_number and self.owner is counter:
            self._guarded(self._abandon_window, "session.step_number was set")
        if self.ended_at is not None:
            self.ended_at = (
                -1
            )  # the next start keeps the number, also where it is that of the last stop
        counter.go_to(number)

    def end(self, reason: str | None) -> None:
        """End the run; `reason` says why before its time. `deliver` then waits for what was recorded."""
        if reason is None:
            self.close_batch(self.current)  # the loop was left by break, its last batch done
        self.current.batch_open = False
        run = self.run
        if not self.running or run is None:
            return
        if not run.capture_queue.taken and not self._has_recorded_steps(reason):
            came = [self._counters[name] for name in self.config.phases if name in self._counters]
            unit = "call" if self.by_calls else "step"
            if sentence := plan_text.nothing_recorded(self.config, came, self._known_skipped, unit):
                logger.warning("{}", sentence)
        self._guarded(self._finish, reason, "the run ended")
        self._guarded(self._stop_abandoned)
        if run.triggers is not None:
            run.triggers.end()
        if run.timings is not None:
            self._guarded(run.timings.stop)
        self._preemption.uninstall()
        if self._preemption.noticed:
            self._preemption.pass_on()
        self.running, self.ended_at = False, self.step_number

    def deliver(self, reason: str | None) -> None:
        """Finish and send what was recorded, and wait for that as long as the config allows."""
        if self.run is not None:
            self._guarded(self.run.capture_queue.close, reason)

    def save_window(self) -> None:
        """End the window that is open because SIGTERM came."""
        if self.recording and self.run is not None:
            with uninterrupted():  # the signal goes on when all is said
                self._guarded(self._finish, "SIGTERM", "")
                self.run.capture_queue.warn_of_unfinished()

    def leave_to_parent(self) -> None:
        """In a forked child: the run, its window and what watches signals for it are its parent's."""
        self.running, self.recorder, self.lock = False, None, RLock()
        self._preemption.uninstall()

    def warn_once(self, sentence: str) -> None:
        """Warn of something once in a run."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("{}", sentence)

    def in_turn(self, act: Callable[..., T], *args: Any) -> T | None:
        """Do what one thread at a time may do; None, and nothing done, while another one begins or ends a window.

        A step that is passed over so is made up for by the next.
        """
        if not self.lock.acquire(timeout=_LOCK_WAIT_S):
            return None
        try:
            return act(*args)
        finally:
            self.lock.release()

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Do a part of ours; what goes wrong in it costs this window, is logged once, and never reaches the caller."""
        with self.lock:
            recorder = self.recorder
            try:
                act(*args)
            except Exception as error:
                self._recover(recorder)
                self._report(f"Recording failed and training goes on: {reason_of(error)}.", error)

    def _recover(self, recorder: Recorder | None) -> None:
        try:
            self._drop_window(recorder)
        except Exception as error:
            self._report(f"The profiler could not be stopped: {reason_of(error)}.", error)
        self.current.next_event_step = self.current.step_number + 1

    def _report(self, sentence: str, error: Exception) -> None:
        """Log an error once in a run; with its traceback where it is none of our own."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.opt(exception=None if isinstance(error, InstrumentError) else error).error(
                "{}", sentence
            )

    # Between two steps.

    def _pass_boundary(self, counter: StepCounter, run: Run, loss: Any) -> bool:
        """Do what is due between two steps; gives True, so that the caller knows that it had its turn."""
        counter.step_number += 1
        busy, recorded = self.recorder is not None, self.recording
        took_ns = counter.overhead.step_ended(recorded=None if busy and not recorded else recorded)
        self._guarded(self._end_step, counter)
        if run.triggers is not None and counter is self.train:
            self._guarded(self._ask_before_next_step, run.triggers, took_ns, loss, busy)
        else:
            self._guarded(self._begin_next_step)
        counter.overhead.resume()
        return True

    def _ask_triggers(self, triggers: TriggerRunner, took_ns: int, loss: Any) -> None:
        """Ask the triggers after a step of train outside windows."""
        asked = triggers.after(self.train.step_number - 1, took_ns, loss, recorded=False)
        if asked is not None:
            self._guarded(self._begin_next_step, asked)
            self.train.overhead.resume()

    def _ask_before_next_step(
        self, triggers: TriggerRunner, took_ns: int, loss: Any, recorded: bool
    ) -> None:
        self._begin_next_step(
            triggers.after(self.train.step_number - 1, took_ns, loss, recorded=recorded)
        )

    def _end_step(self, counter: StepCounter) -> None:
        """End the range of a counter's step, and the window if that was its last, or it has recorded for too long."""
        recorder, window = self.recorder, counter.planned
        if recorder is None or self.owner is not counter:
            return
        recorder.end_step()
        if recorder.started_at is None or not isinstance(window, Window):
            return
        if window.last is not None and window.last < counter.step_number:
            self._end_window(None)
        elif self._limits is not None and (reason := self._limits.reached()):
            self._end_window(reason)

    def _begin_next_step(self, asked: tuple[str, Request] | None = None) -> None:
        """Begin the next step of the present phase: nothing, a step of the warm-up, or one that is recorded.

        `asked` is a trigger and what it asks for, which is recorded before the windows of the schedule.
        """
        counter = self.current
        if asked is not None:
            logger.info("{}", self._insert_asked(*asked))
        if one_profiler.abandoned is not None and one_profiler.stop_abandoned():
            counter.next_event_step = counter.step_number + 1
            return
        if self.recorder is None:
            counter.skip_to(counter.step_number)
        elif self.owner is not counter:
            counter.next_event_step = NEVER
            return
        planned = counter.planned
        if not isinstance(planned, Window):
            counter.next_event_step = NEVER if planned is None else planned.until
        elif counter.step_number < planned.warmup_from:
            counter.next_event_step = planned.warmup_from
        else:
            counter.next_event_step = counter.step_number + 1
            self._begin_recorded_step(counter, planned)

    def _insert_asked(self, trigger: str, request: Request) -> str:
        """Plan what a trigger asks for from train's present step on; gives the sentence that says so."""
        begin, (why, steps) = self.train.step_number, request
        first = begin + self.config.warmup
        window = Window(
            begin, first, first + max(1, steps or self.config.active or 1) - 1, trigger, why
        )
        self.train.insert_next(window)
        return (
            f"The trigger {trigger} fired{f' ({why})' if why else ''}: records {window.in_words()}."
        )

    def _begin_recorded_step(self, counter: StepCounter, window: Window) -> None:
        assert self.run is not None
        capture_queue = self.run.capture_queue
        if self.recorder is None and not capture_queue.has_room(
            counter.folder_name(window.first, window.last, capture_queue.rank)
        ):
            counter.advance()
            return
        number = (
            counter.step_number
        )  # with which other threads may go on, where beginning takes long
        with uninterrupted():
            if self.recorder is None:
                counter.look_ahead()
                counter.overhead.begin_window()
                self.owner = counter
                capture_queue.lock.hold()
                config, output_dir = self._config_of(window), capture_queue.output_dir
                self.recorder = Recorder(
                    config, self.run.activities, self.run.emitting, output_dir, capture_queue.run
                )
                with counter.overhead.pausing("start"):
                    self.recorder.prepare()
            if number < window.first:
                return
            if not self.recording:
                with counter.overhead.pausing("start"):
                    self.recorder.start()
                self._limits = Limits(self.config, self._end_midway)
            self.recorder.next_step(number)

    def _config_of(self, window: Window) -> ProfilerConfig:
        """The run's options, but for those that the window's trigger has its windows recorded with."""
        trigger = self.config.triggers.get(window.trigger) if window.trigger else None
        records = getattr(trigger, "records", {})
        return self.config.model_copy(update=dict(records)) if records else self.config

    # The end of a window.

    def _end_window(self, reason: str | None) -> None:
        """Stop recording, save what was recorded, and plan the next window. `reason` says why it ends early."""
        counter, recorder, run = self.owner, self.recorder, self.run
        window = counter.planned
        if (
            recorder is None
            or recorder.started_at is None
            or not isinstance(window, Window)
            or run is None
        ):
            return
        if reason:
            logger.warning("{}", window.cut_short(counter.step_number - window.first, reason))
        with uninterrupted():
            try:
                with counter.overhead.pausing("stop"):
                    recorded = self._stop(recorder)
                self.recorder = None
                if recorded is not None:
                    self._save(recorded, counter, window, run, reason)
            finally:
                if self.recorder is None:
                    counter.advance()
        if run.capture_queue.exporter is None:
            run.capture_queue.finish_inline()

    def _stop(self, recorder: Recorder) -> RecordedWindow | None:
        if self._limits is not None:
            self._limits.closed.set()
            self._limits = None
        return recorder.stop()

    def _save(
        self,
        recorded: RecordedWindow,
        counter: StepCounter,
        window: Window,
        run: Run,
        reason: str | None,
    ) -> None:
        """Write a window's raw trace and what is known of it, and hand it over.

        Raises:
            CaptureError: the trace cannot be saved.
            OSError: as for `CaptureError`.
        """
        capture_queue, first = run.capture_queue, window.first
        if capture_queue.sinks_here:
            capture_queue.notice()
        ended = (
            counter.step_number
            if window.last is None
            else min(counter.step_number, window.last + 1)
        )
        name = counter.folder_name(first, max(first, ended - 1), capture_queue.rank)
        run_id = capture_queue.run if capture_queue.lock.handle is not None else ""
        staging = queue.stage(capture_queue.output_dir, name, run_id)
        try:
            with counter.overhead.pausing("save"):
                recorded.save(
                    staging / queue.RAW,
                    quickly=reason is not None and reason.startswith(_PROCESS_ENDS),
                )
            try:
                about = self._described(recorded, counter, window, run, ended, reason)
            except Exception:  # the trace is there, and is worth more than what is said of it
                logger.exception("What capture.json says of a window is not all that it should.")
                about = dict(run.described)
            about["cost"] = counter.overhead.of_window() | {
                "trace_bytes": (staging / queue.RAW).stat().st_size
            }
            if not capture_queue.taken:
                capture_queue.remember(staging)
            folder = queue.queue(staging, about)
        except Exception:
            shutil.rmtree(
                staging, ignore_errors=True
            )  # half a trace, whose space may be what is missing
            raise
        capture_queue.taken += 1
        if capture_queue.exporter is None:
            capture_queue.to_finish.append(folder)
            return
        try:
            capture_queue.exporter.submit(folder)
        except (OSError, RuntimeError) as error:
            capture_queue.finish_without_exporter(folder, error)

    def _described(
        self,
        recorded: RecordedWindow,
        counter: StepCounter,
        window: Window,
        run: Run,
        ended: int,
        reason: str | None,
    ) -> dict[str, Any]:
        """The content of `capture.json`. The window ended before step `ended`; `last_step` is the last whole step."""
        first = window.first
        about = run.described | recorded.ranges
        about |= {
            "window": {
                "first_step": first,
                "last_step": ended - 1 if ended > first else None,
                "steps": ended - first,
                "planned_steps": None if window.last is None else window.last - first + 1,
                "truncated": reason is not None,
                "reason": reason,
                "trigger": window.trigger,
                "trigger_reason": window.trigger_reason,
                "phase": counter.name,
            },
            "started_at": datetime.fromtimestamp(recorded.started_at, timezone.utc).isoformat(),
            "user_metadata": dict(self.user_metadata),
        }
        if window.trigger is not None:
            about["config"] = self._config_of(window).plain()
        if graphs := recorded.ranges["graphs_compiled"]:
            logger.warning(
                "torch.compile compiled {} graphs inside the window of {}, whose times hold that: "
                "wait longer before the window (profiler.wait).",
                graphs,
                window.done_in_words(ended),
            )
        return about

    def _end_midway(self, limits: Limits, reason: str) -> None:
        """End a window of which no step ends; called on a thread of its limits."""
        with self.lock:
            if self._limits is limits and self.recorder is not None and self.recorder.can_stop_here:
                self._guarded(self._end_window, reason)

    def _finish(self, reason: str | None, ended: str) -> None:
        """End the window that is open, before its time: for `reason`, or else because the run or phase `ended`."""
        counter, recorder = self.owner, self.recorder
        window = counter.window
        if recorder is None or window is None:
            return
        if not self._has_recorded_steps(reason):
            self.recorder = None
            with uninterrupted():
                self._stop(recorder)
            return
        stepped = counter.step_number > counter.began_at
        if window.last is None:
            if reason is None and not stepped:  # the whole block is the one step
                counter.step_number += 1
                recorder.end_step()
        else:
            reason = reason or (ended if stepped else "session.step() was never called")
        self._end_window(reason)

    def _has_recorded_steps(self, reason: str | None) -> bool:
        """Whether a window is open that is worth keeping: not one that has just begun, unless `reason` ends the run."""
        counter, window = self.owner, self.owner.window
        just_begun = window is not None and counter.began_at < counter.step_number <= window.first
        return self.recording and not (just_begun and reason is None)

    def _stop_abandoned(self) -> None:
        """Stop the profiler that a dropped window left on, if that is possible here; otherwise say what is on."""
        if still_on := one_profiler.stop_abandoned():
            logger.warning("{}", still_on)

    def _abandon_window(self, reason: str) -> None:
        """End the open window, or drop it if it holds no whole step."""
        window = self.owner.window
        if self.recording and window is not None and self.owner.step_number > window.first:
            self._end_window(reason)
        elif self.recorder is not None:
            self._drop_window(self.recorder)

    def _drop_window(self, recorder: Recorder | None) -> None:
        """Keep nothing of the window that this recorder recorded, or that failed before it had one."""
        if recorder is None or self.recorder is not None:
            recorder, self.recorder = self.recorder, None
            self.owner.advance()
        if recorder is not None:
            with uninterrupted():
                self._stop(recorder)

    # What is planned.

    def _say_plan(self, run: Run) -> None:
        if backends.disabled:
            logger.info(
                "INSTRUMENT_DISABLE is set: annotations do nothing, and no named range will be recorded."
            )
        for note in self.config.notes:
            logger.info(note)
        what, where = plan_text.in_words(self.config, self.train), " and ".join(run.activities)
        logger.info("Profiler {} on {}, into {}", what, where, run.capture_queue.output_dir)
        if sentence := plan_text.unreachable_window(self.config, self.train, self.total_steps):
            logger.warning("{}", sentence)

    @property
    def step_number(self) -> int:
        """The training step that runs now."""
        return self.train.step_number

    def progress(self) -> StepProgress:
        """How far training is, and how fast; may be asked on any thread."""
        return StepProgress(self.train.step_number, self.train.overhead.unrecorded_ns())

    def in_endless_window(self) -> bool:
        """Whether train's present step is recorded in a window that only the session's stop ends."""
        window = self.train.window
        return window is not None and window.last is None and window.first <= self.train.step_number

    def in_window_begun_after(self, step: int) -> bool:
        """Whether train's present step is recorded in a window that began after this step."""
        window = self.train.window
        return window is not None and step < window.first <= self.train.step_number

    def nothing_ahead(self) -> bool:
        """Whether train has no window left, and neither triggers nor timings need further steps."""
        needed = schedule.triggers_ask(self.config) or self.config.timings is not None
        return self.train.planned is None and not needed

    def may_record(self) -> bool:
        """Whether any window is planned from the present step on, or may be asked for; known before the start."""
        first = self.train.step_number if self.config.phases == ["train"] else 0
        return schedule.triggers_ask(self.config) or next_window(self.config, first) is not None

    def _schedule_of(self, name: str) -> ProfilerConfig | None:
        return self.config if name in self.config.phases else None
