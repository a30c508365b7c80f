"""`StepLoop` holds the state of one run: it counts steps, and begins and ends windows."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from threading import RLock
from typing import Any, TypeVar

from instrument.annotate import backends
from instrument.base import queue
from instrument.base.errors import reason_of, to_trace
from instrument.base.log import logger
from instrument.base.signals import interruptibly, raised_by_handler, uninterrupted
from instrument.base.step_times import like_for_like
from instrument.record import observe, one_profiler, plan_text, worker_lines
from instrument.record.config import schedule
from instrument.record.config.schedule import NEVER, Window, next_window, requested_window
from instrument.record.config.schema import ProfilerConfig
from instrument.record.detail import Detail, detail_options
from instrument.record.distributed import StepProgress
from instrument.record.facts import Loaders, WindowFacts
from instrument.record.finisher import Finisher
from instrument.record.limits import Limits
from instrument.record.lines import LineSampler, Moment
from instrument.record.metrics import Metrics
from instrument.record.own_modules import own_modules
from instrument.record.parts import Parts
from instrument.record.preemption import Preemption
from instrument.record.recorder import RecordedWindow, Recorder
from instrument.record.timings import Timings
from instrument.record.trigger_runner import TriggerRunner
from instrument.record.triggers.trigger import Request

T = TypeVar("T")

# The steps of a window are compared with at most this many unrecorded steps before the window.
_STEPS_COMPARED = 50
# How long a step waits at most while another thread begins or ends a window.
_WAIT_S = 0.1
# While a window is exported, how often a step looks for news: a look takes 2 µs and more.
_LOOK_EVERY_NS = 10_000_000
# If a window ends early because the process is about to end, its reason begins with such a text.
_PROCESS_ENDS = ("SIGTERM", "exception ", "the interpreter ended")


class StepClock:
    """The durations of the steps of one phase, without the session's own work between two steps.

    Cost: one reading of the clock per step, about 0.2 µs.
    """

    def __init__(self) -> None:
        # the last steps outside windows; one more, because the oldest step is not used
        self.unrecorded: deque[int] = deque(maxlen=_STEPS_COMPARED + 1)
        self.resume()

    def resume(self) -> None:
        """Begin the next step now."""
        self.began_ns = time.perf_counter_ns()

    def end_step(self) -> int:
        """End the current step, begin the next, and return the ended step's duration in ns."""
        now = time.perf_counter_ns()
        took, self.began_ns = now - self.began_ns, now
        return took

    def since_step_ns(self) -> int:
        """How long ago the last step ended, and the current one began."""
        return time.perf_counter_ns() - self.began_ns

    def exclude(self, elapsed_ns: int) -> None:
        """Subtract the time of another phase from the duration of the current step."""
        self.began_ns += elapsed_ns

    def compared(self) -> tuple[int, ...]:
        """The durations of the last unrecorded steps, at most 50.

        The oldest stored step is left out, because it may be the first step of the run, in which
        data workers start and code is compiled.
        """
        return tuple(self.unrecorded)[1:]  # a copy: another thread may call this

    def unrecorded_ns(self) -> int | None:
        """The median of the steps that `compared` returns; None without such steps."""
        steps = self.compared()
        return int(median(steps)) if steps else None


@dataclass
class StepCounter:
    """Counts the steps of one phase, and plans the windows of this phase.

    Attributes:
        schedule: the config that says which steps of this phase are recorded; None if
            `profiler.phases` does not list the phase.
        step_number: the current step of the phase, counted from 0. While another phase runs, this
            is the step with which this phase continues.
        window: the open window, or the next window if none is open; None if no window is left.
        skipped: the last window that was skipped because its first step had passed.
        next_event_step: the next step at whose start a window may begin, continue or end.
        batch_open: whether `session.steps` has given a batch whose step has not ended yet.
        loop_left: whether the user's loop over `session.steps` has ended.
        loop: identifies the loop that gave the current batch, and holds its loader.
        batches_inside: the batches of other loops since then, which are no steps.
        loss: the loss that was passed to `session.step` for the current batch.
    """

    name: str
    schedule: ProfilerConfig | None = None
    step_number: int = 0
    began_at: int = 0
    window: Window | None = None
    skipped: Window | None = None
    next_event_step: int = NEVER
    batch_open: bool = False
    loop_left: bool = False
    loop: tuple[Any] | None = None
    batches_inside: int = 0
    loss: Any = None
    clock: StepClock = field(default_factory=StepClock)

    def begin(self, config: ProfilerConfig, step_number: int) -> None:
        """Begin a run at this step."""
        self.schedule = config if self.name in config.phases else None
        self.skipped, self.clock = None, StepClock()
        self.step_number = self.began_at = step_number
        self.next_event_step, self.window = NEVER, self._next_window(0)
        self.skip_to(step_number)

    def advance(self) -> None:
        """Plan the next window, because the planned window is over or cannot be recorded."""
        self.window = self.following()

    def following(self) -> Window | None:
        """The window after the planned one."""
        return None if self.window is None else self._next_window(self.window.first + 1)

    def skip_to(self, step: int) -> None:
        """Skip planned windows that begin before `step`, as after `step_number` was set."""
        if self.window is None or self.window.first >= step:
            return
        self.skipped, self.window = self.window, self._next_window(step)
        if self.window is None and self.schedule is not None:
            self.skipped = schedule.last_window(self.schedule) or self.skipped

    def _next_window(self, step: int) -> Window | None:
        return None if self.schedule is None else next_window(self.schedule, step)


@dataclass
class OpenWindow:
    """The window of a run that warms up or is being recorded, with all of its state.

    Attributes:
        planned: the steps that the window should have.
        config: the options of the window, which a trigger may change.
        facts: the facts for `capture.json`; None during the warm-up.
        limits: checks the limits of time and memory; None during the warm-up.
        parts: the parts of the window, this one among them; None if it is recorded whole.
        detail: the detail window that this is; None if it is a window of its own.
        step_ns: the durations of the recorded steps.
        paused_ns: how long training waited, by the part of `pausing`.
    """

    counter: StepCounter
    planned: Window
    config: ProfilerConfig
    recorder: Recorder
    parts: Parts | None = None
    detail: Detail | None = None
    facts: WindowFacts | None = None
    limits: Limits | None = None
    step_ns: list[int] = field(default_factory=list)
    paused_ns: dict[str, int] = field(default_factory=dict)

    @property
    def recording(self) -> bool:
        """Whether the window is being recorded; False while it warms up."""
        return self.recorder.started_at is not None

    @contextmanager
    def pausing(self, part: str) -> Iterator[None]:
        """Measure how long training waits for the `with` block; `part` is start, stop or save."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self.paused_ns[part] = self.paused_ns.get(part, 0) + time.perf_counter_ns() - began

    def cost(self) -> dict[str, Any]:
        """The cost of the window, for `capture.json`, without the size of its trace."""
        others = self.counter.clock.compared()
        recorded_ns, unrecorded_ns = like_for_like(self.step_ns, others)
        return {
            "recorded_step_ns": recorded_ns,
            "unrecorded_step_ns": unrecorded_ns,
            "unrecorded_steps": len(others),
            **{f"{part}_ns": self.paused_ns.get(part, 0) for part in ("start", "stop", "save")},
        }

    def stop(self) -> RecordedWindow | None:
        """Stop recording; return None if only the warm-up ran, or if it was stopped before.

        Raises:
            CaptureError: this thread cannot stop the window; see `Recorder`.
        """
        if self.limits is not None:
            self.limits.closed.set()
        if self.facts is not None:
            self.facts.end()
        return self.recorder.stop()


@dataclass
class Run:
    """The parts of a run that do not change between the session's start and its stop."""

    activities: list[str]
    emitting: backends.Backend
    finisher: Finisher
    metadata: dict[str, Any]
    triggers: TriggerRunner
    timings: Timings | None
    metrics: Metrics | None
    lines: LineSampler | None


class StepLoop:
    """Counts the steps of a run, and begins, continues and ends windows between two steps.

    The thread that begins a window ends it; with `profile_all_threads`, any thread may, also one
    that watches the window's limits. So all code that changes a window holds `lock`. If recording
    fails, the window is lost, and `_guarded` logs the error once in a run. The error never reaches
    the caller.

    Attributes:
        over: whether no further window of the run begins, because the run is being ended.
        records_nothing: whether the config is disabled or excludes this rank.
        train: the `StepCounter` of the phase "train".
        current: the `StepCounter` of the current phase.
        window: the window that warms up or is being recorded; None if there is none.
        by_calls: whether a step is a call of a function instead of a training step.
        user_metadata: what the user adds to `capture.json`.
        total_steps: how many steps the run has; None if unknown.
        ended_at: the step number at the end of the last run; None before the first run has ended.
    """

    def __init__(self, config: ProfilerConfig) -> None:
        self.config = config
        self.lock = RLock()
        self.running = self.over = False
        self.records_nothing = not config.enabled
        self.total_steps: int | None = None
        self.run: Run | None = None
        self.train = self.current = StepCounter("train")
        self.window: OpenWindow | None = None
        self._parts: Parts | None = None  # those of the open window, and of the one just ended
        self._detail: Detail | None = None  # planned for the last window, or open
        self._with_detail: set[str] = set()  # the phases that have had a detail window
        self.by_calls = False
        self.user_metadata: dict[str, Any] = dict(config.metadata)
        self.ended_at: int | None = None
        self.loaders = Loaders()
        self._counters = {"train": self.train}
        # the last window that was skipped because the run begins after the window's first step
        self._skipped_at_start: Window | None = None
        self._preemption = Preemption(self)
        self._logged: set[str] = set()
        self._looks_at_ns = 0  # when the next look is due whether an export has news

    def __reduce__(self) -> tuple[Any, ...]:
        # `session.steps(loader)` may be pickled; the copy is not started
        return StepLoop, (self.config,)

    @property
    def recording(self) -> bool:
        """Whether a window is being recorded, and does not warm up; any thread may ask."""
        window = self.window  # read once, because another thread may set it to None
        return window is not None and window.recording

    @property
    def recording_detail(self) -> bool:
        """Whether a detail window is being recorded; any thread may ask."""
        window = self.window
        return window is not None and window.recording and window.detail is not None

    @property
    def step_number(self) -> int:
        """The current training step."""
        return self.train.step_number

    def progress(self) -> StepProgress:
        """The current training step and the median time of a step; any thread may call this."""
        return StepProgress(self.train.step_number, self.train.clock.unrecorded_ns())

    def moment(self) -> Moment | None:
        """Where the run is; None before its first step has ended. Any thread may call this."""
        counter = self.current
        if counter.step_number == counter.began_at:
            return None
        detail = self.recording_detail
        return Moment(counter.name, counter.step_number, self.recording and not detail, detail)

    def may_record(self) -> bool:
        """Whether a window is planned from the current step on, or a trigger may request one."""
        first = self.train.step_number if self.config.phases == ["train"] else 0
        return schedule.triggers_ask(self.config) or next_window(self.config, first) is not None

    # The entry points.

    def begin(self, run: Run, total_steps: int | None) -> None:
        """Begin a run at the current training step, and log which steps it will record."""
        self._preemption.install(self.config.preemption_grace_s)
        # a second run of this session begins at step 0, unless the user has set the number
        if self.step_number == self.ended_at:
            self.train.step_number = 0
        self.run, self._logged = run, set()
        # also the current phase: the session may start inside a `session.phase` block
        self._counters = {each.name: each for each in (self.train, self.current)}
        for counter in self._counters.values():
            counter.begin(self.config, counter.step_number if counter is self.train else 0)
        self._skipped_at_start = self.train.skipped
        self._with_detail = set()
        self.running, self.over = True, False
        self.total_steps = total_steps or self.config.total_steps
        self._log_plan(run)
        if run.timings is not None:
            run.timings.start()
        if run.metrics is not None:
            run.metrics.start()
        self._guarded(self._begin_next_step)
        if run.timings is not None:
            run.timings.begin_step()
        self.current.clock.resume()

    def step(self, loss: Any) -> None:
        """End the current step and begin the next."""
        counter, run = self.current, self.run
        if not self.running or run is None:
            counter.step_number += 1
            if one_profiler.abandoned is not None:  # another thread has stopped the session
                self._guarded(one_profiler.stop_abandoned)
            if not self.records_nothing and self.ended_at is None:
                self.warn_once(
                    "The session was never started, so nothing is recorded: use `with session:`, "
                    "or session.start()."
                )
            return
        if run.timings is not None and counter is self.train:
            run.timings.end_step(counter.step_number)
        # No lock is needed: these two lines call nothing, so no other thread runs between them.
        if counter.step_number + 1 < counter.next_event_step:
            counter.step_number += 1
            # not timed during a window of another phase, because recording makes the step slower
            if self.window is None:
                took_ns = counter.clock.end_step()
                counter.clock.unrecorded.append(took_ns)
                if run.finisher.pending and counter.clock.began_ns > self._looks_at_ns:
                    self._looks_at_ns = counter.clock.began_ns + _LOOK_EVERY_NS
                    if run.finisher.has_news:
                        self.exclusively(self._deliver)
                        counter.clock.resume()
                triggers = run.triggers
                if (triggers.calls_each_step or triggers.requests) and counter is self.train:
                    self.exclusively(self._ask_triggers, triggers, took_ns, loss)
        else:
            if not self.exclusively(self._pass_boundary, counter, run, loss):
                counter.step_number += 1
        if self._preemption.noticed:
            self._preemption.save()
        if run.timings is not None and counter is self.train:
            run.timings.begin_step()

    def close_batch(self, counter: StepCounter) -> None:
        """End the step of the newest batch from `session.steps`, with its loss, if still open."""
        if counter.batch_open:
            counter.batch_open = False
            loss, counter.loss = counter.loss, None
            self.step(loss)

    def enter(self, name: str) -> None:
        """Count the steps of the phase `name` from now on."""
        if name == self.current.name:
            return
        if name not in self._counters:
            self._counters[name] = StepCounter(name)
            self._counters[name].begin(self.config, 0)
        self.current = self._counters[name]
        if self.run is not None and self.run.timings is not None:
            self.run.timings.discard_step()
        if self.running and self.window is None:
            self._guarded(self._begin_next_step)
        self.current.clock.resume()

    def leave(self, before: StepCounter, elapsed_ns: int, reason: str | None) -> None:
        """End a `session.phase` block: end its open window, and count steps with `before` again.

        Nothing happens if the block has the same phase as the code around it. `elapsed_ns` is the
        duration of the block; `reason` says why the block ends early, or is None.
        """
        counter = self.current
        if counter is before:
            return
        try:
            if reason is None:
                self.close_batch(counter)  # `break` may have ended the loop over the batches
            counter.batch_open = False
            if self.running and self._is_recorded(counter):
                self._guarded(self._finish, reason, f"the phase {counter.name} ended")
        finally:  # even if a signal handler of the program raises
            self.current = before
            before.clock.exclude(elapsed_ns)
        self._deliver()

    def go_to(self, number: int) -> None:
        """Set the number of the current training step.

        An open window ends, because its steps must be consecutive.
        """
        counter = self.train
        if self.running and number != counter.step_number and self._is_recorded(counter):
            self._guarded(self._abandon_window, "session.step_number was set")
        if self.ended_at is not None:
            # Otherwise the next run would begin at step 0 if `number` equals `ended_at`.
            self.ended_at = -1
        if counter.began_at == counter.step_number:
            counter.began_at = number
        counter.step_number, counter.next_event_step = number, number + 1
        self._deliver()

    def end(self, reason: str | None) -> None:
        """End the run; `reason` says why it ends early, or is None. Call `deliver` afterwards."""
        if reason is None:
            counter = self.current
            if counter.batch_open and not counter.loop_left and counter.batches_inside:
                logger.warning(
                    "{} batches of session.steps() were no steps, because an iterator over other "
                    "batches of session.steps() was still in use: delete it before the next loop.",
                    counter.batches_inside,
                )
            self.close_batch(counter)  # `break` may have ended the loop after a whole batch
        self.current.batch_open = False
        run = self.run
        if not self.running or run is None:
            if one_profiler.abandoned is not None:
                self._guarded(one_profiler.stop_abandoned)
            return
        if not run.finisher.saved and not self._has_recorded_steps(reason):
            entered = [
                self._counters[each] for each in self.config.phases if each in self._counters
            ]
            unit = "call" if self.by_calls else "step"
            if sentence := plan_text.nothing_recorded(
                self.config, entered, self._skipped_at_start, unit
            ):
                logger.warning("{}", sentence)
        self._guarded(self._finish, reason, "the run ended")
        self._guarded(self._end_detail)
        self.over = True
        if still_on := self._guarded(one_profiler.stop_abandoned):
            logger.warning("{}", still_on)
        self._deliver()
        run.triggers.end()
        if run.timings is not None:
            self._logging_errors(run.timings.stop)
        self._preemption.uninstall()
        self.loaders.end_run()
        self.running, self.ended_at = False, self.step_number
        if run.lines is not None:
            self._logging_errors(run.lines.stop)
            self._logging_errors(worker_lines.end)
        if run.metrics is not None:  # last, because Ctrl-C may end its wait
            self._logging_errors(run.metrics.stop)
        if self._preemption.noticed:
            self._preemption.pass_on()

    def deliver(self, reason: str | None, timeout_s: float | None) -> None:
        """Wait until the captures are finished and uploaded, for less time after an early end."""
        if self.run is not None:
            self._logging_errors(self.run.finisher.close, reason, timeout_s)

    def drop_window(self) -> None:
        """Stop recording the open window without saving it."""
        if self.window is not None:
            self._guarded(self._drop_window, None)

    def drop_detail(self) -> None:
        """Give up the detail window, open or planned, so that the last window is exported."""
        if self.recording_detail:
            self.drop_window()
        self._guarded(self._end_detail)

    def save_window(self) -> None:
        """End and save the open window because SIGTERM arrived."""
        if self.recording and self.run is not None:
            with uninterrupted():  # so that a signal's handler runs after the last log message
                self._guarded(self._finish, "SIGTERM", "")
                self._deliver()
                self.run.finisher.warn_of_unfinished()

    def leave_to_parent(self) -> None:
        """In a forked child: leave the run, its window, signal handler and port to the parent."""
        self.running, self.window, self.lock = False, None, RLock()
        self._detail = None
        self._preemption.uninstall()
        if self.run is not None:
            self.run.finisher.leave_to_parent()
            if self.run.metrics is not None:
                self.run.metrics.leave_to_parent()

    def warn_once(self, sentence: str) -> None:
        """Log a warning once in a run."""
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.warning("{}", sentence)

    def exclusively(self, act: Callable[..., T], *args: Any, wait: bool = True) -> T | None:
        """Call `act` with the lock; None if another thread holds it (for 0.1 s, with `wait`)."""
        # A free lock is tried without a timeout first, because a timeout takes twice as long.
        if not (self.lock.acquire(blocking=False) or self.lock.acquire(timeout=_WAIT_S * wait)):
            return None
        try:
            return act(*args)
        finally:
            self.lock.release()

    def _guarded(self, act: Callable[..., T], *args: Any) -> T | None:
        """Call `act`. If it raises, drop the window, log the error once, and return None.

        No signal handler interrupts `act`, so what it raises is an error of recording.
        """
        with uninterrupted(), self.lock, own_modules():
            window = self.window
            try:
                return act(*args)
            except Exception as error:
                try:
                    self._drop_window(window)
                except Exception as second:
                    if window is not None and window.recorder.prepared:
                        one_profiler.abandon(window.recorder)  # the next step tries again
                    self._report(f"The profiler could not be stopped: {reason_of(second)}.", second)
                self.current.next_event_step = self.current.step_number + 1
                self._report(f"Recording failed and training goes on: {reason_of(error)}.", error)
                return None

    def _logging_errors(self, act: Callable[..., T], *args: Any) -> T | None:
        """Call `act`, which does not change the window; if it raises, log the error once.

        What a signal handler of the program raises goes through.
        """
        try:
            return interruptibly(act, *args)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._report(f"Recording failed and training goes on: {reason_of(error)}.", error)
            return None

    def _deliver(self) -> None:
        """Log what the exporter has logged, and call `on_capture` for the finished windows."""
        if self.run is not None and self.run.finisher.has_news:
            with own_modules():
                self._logging_errors(self.run.finisher.deliver)

    def _report(self, sentence: str, error: Exception) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.error("{}", sentence, exception=to_trace(error))

    def _log_plan(self, run: Run) -> None:
        if backends.disabled:
            logger.info(
                "INSTRUMENT_DISABLE is set: annotations do nothing, and no named range will be "
                "recorded."
            )
        for note in self.config.notes:
            logger.info(note)
        what, where = plan_text.in_words(self.config, self.train), " and ".join(run.activities)
        logger.info("Profiler {}, on {}, into {}", what, where, run.finisher.output_dir)
        if sentence := plan_text.unreachable_window(self.config, self.train, self.total_steps):
            logger.warning("{}", sentence)

    # Between two steps.

    def _pass_boundary(self, counter: StepCounter, run: Run, loss: Any) -> bool:
        """End the step; end the window too if it is over; then begin the next step.

        Returns True, because `exclusively` returns None if it could not call this method.
        """
        number, busy, requested = counter.step_number, self.window is not None, None
        triggers = run.triggers
        asks = (triggers.calls_each_step or triggers.requests) and counter is self.train
        begun, took_ns = None, counter.clock.end_step()
        try:
            begun = self._guarded(self._end_step, counter, took_ns, not asks)
            if not begun and self.window is None and run.finisher.has_news:
                self._deliver()
            if asks:
                requested = self._logging_errors(triggers.after, number, took_ns, loss, busy)
        finally:  # if a signal handler of the program raises, the program may go on
            if not begun and self.running:  # a trigger may stop the session
                self._guarded(self._begin_next_step, requested)
            counter.clock.resume()
        return True

    def _ask_triggers(self, triggers: TriggerRunner, took_ns: int, loss: Any) -> None:
        requested = triggers.after(self.train.step_number - 1, took_ns, loss, recorded=False)
        if requested is not None and self.running:
            self._guarded(self._begin_next_step, requested)
            self.train.clock.resume()

    def _end_step(self, counter: StepCounter, took_ns: int, begin_next: bool) -> bool:
        """Count the step, end its range, and the window if it is over or has reached a limit.

        If `begin_next`, and this thread has no window to finish, begin the next step; return
        whether it has begun.
        """
        counter.step_number += 1
        window = self.window
        if window is None:
            counter.clock.unrecorded.append(took_ns)
        elif window.counter is counter:
            if recording := window.recording:
                window.step_ns.append(took_ns)
            window.recorder.end_step()
            last = window.planned.last
            reason = None if window.limits is None else window.limits.reached()
            if recording and last is not None and last < counter.step_number:
                self._end_window(None, stepped=True, over=reason is not None)
            elif reason is not None:
                self._end_window(reason or None, stepped=True)
        finisher = None if self.run is None else self.run.finisher
        if not begin_next or (self.window is None and finisher is not None and finisher.has_news):
            return False
        self._begin_next_step()
        return True

    def _begin_next_step(self, requested: tuple[str, Request] | None = None) -> None:
        """Begin the next step of the current phase, and what is planned for this step.

        `requested` is a trigger's name and its request, which takes precedence over the schedule.
        """
        counter = self.current
        if self.window is None:
            observe.leave()
        if self.over:
            counter.next_event_step = NEVER
            return
        if requested is not None:
            trigger, (reason, steps, seconds) = requested
            window = requested_window(self.config, self.train.step_number, steps, trigger, reason)
            window = replace(window, last=None, seconds=seconds) if seconds else window
            self.train.window = window
            why = f" ({window.trigger_reason})" if window.trigger_reason else ""
            what = f"The trigger {window.trigger} fired{why} and records {window.in_words()}."
            logger.info("{}", what)
            if self.run is not None and self.run.metrics is not None:
                self.run.metrics.count(self.run.metrics.fired, trigger)
        if one_profiler.abandoned is not None and one_profiler.stop_abandoned():
            counter.next_event_step = counter.step_number + 1
            return
        if self.window is None:
            counter.skip_to(counter.step_number)
        elif self.window.counter is not counter:
            counter.next_event_step = NEVER
            return
        planned = counter.window
        if planned is None:
            counter.next_event_step = NEVER
        elif counter.step_number < planned.warmup_from:
            counter.next_event_step = planned.warmup_from
        else:
            counter.next_event_step = counter.step_number + 1
            self._begin_recorded_step(counter, planned)

    def _begin_recorded_step(self, counter: StepCounter, planned: Window) -> None:
        assert self.run is not None
        # other threads may count further steps while the profiler starts
        number = counter.step_number
        window = self.window or self._open_window(counter, planned, self.run)
        if not window.recording and number >= planned.first:
            self._start(window)
        if window.recording:
            window.recorder.next_step(number)

    def _open_window(self, counter: StepCounter, planned: Window, run: Run) -> OpenWindow:
        """Begin the warm-up of a window."""
        run.finisher.lock.hold()
        detail = self._detail
        if detail is not None and detail.planned is not planned:  # a trigger was faster
            self._end_detail()
            detail = None
        config = self.config.of_trigger(planned.trigger) if detail is None else detail.config
        recorder = Recorder(
            config,
            run.activities,
            run.emitting,
            run.finisher.output_dir,
            run.finisher.run,
            self._end_for_other_profiler,
        )
        if self._parts is not None and planned is not self._parts.current:
            self._parts = None  # the rest of a window in parts was skipped
        if self._parts is None and config.max_stall_ms is not None:
            self._parts = Parts(planned, int(config.max_stall_ms * 1e6))
            counter.window = planned = self._parts.current
        self.window = window = OpenWindow(counter, planned, config, recorder, self._parts, detail)
        with window.pausing("start"):
            recorder.prepare()
        return window

    def _start(self, window: OpenWindow) -> None:
        if window.detail is None:
            self.loaders.begin_window()
        with window.pausing("start"):
            if window.detail is None:
                window.facts = WindowFacts()
            window.recorder.start()
            if window.facts is not None:
                window.facts.begin(window.recorder.thread)
            if window.detail is not None:
                lines = None if self.run is None else self.run.lines
                window.detail.begin([] if lines is None else [lines.trace])
        end = self._end_within_step if window.recorder.all_threads else None
        window.limits = Limits(window.config, window.planned.seconds, end)
        if window.parts is not None and window.parts.number:
            window.limits.began_s = window.parts.began_s
        elif window.parts is not None:
            window.parts.began_s = window.limits.began_s

    # The end of a window.

    def _end_window(self, reason: str | None, *, stepped: bool = False, over: bool = True) -> None:
        """Stop recording, save the window, and plan the next window, or the next part of this one.

        `reason` says why the window ends early; None if the window ends as planned. `stepped` says
        whether a step has just ended, and `over` whether no further part may follow.
        """
        window, run, detail = self.window, self.run, None
        if window is None or not window.recording or run is None:
            return
        counter = window.counter
        is_kept = window.recorder.can_stop_here and window.detail is None
        if reason and is_kept:
            done = counter.step_number - window.planned.first
            logger.warning("{}", window.planned.cut_short(done, reason))
        try:
            with window.pausing("stop"):
                recorded = window.stop()
            self.window = None
            if recorded is not None and window.detail is not None:
                self._save_detail(recorded, window, window.detail, reason)
            elif recorded is not None:
                detail = self._save(recorded, window, run, reason, stepped)
        finally:
            if self.window is None:
                start_ns = window.paused_ns.get("start", 0)  # as the next part's start will take
                parts, clock = None if over else window.parts, counter.clock
                following = parts and parts.go_on(
                    counter.step_number, clock.since_step_ns() + start_ns
                )
                if following:
                    counter.window = following
                else:
                    self._advance(counter)
                    if detail is not None:
                        self._detail, counter.window = detail, detail.planned

    def _advance(self, counter: StepCounter) -> None:
        """Plan the next window, because this one, with all its parts, is over."""
        if self._parts is not None and counter.window is self._parts.current:
            counter.window = self._parts.whole
        self._parts = None
        counter.advance()
        self._end_detail()

    def _detail_after(self, window: OpenWindow, run: Run) -> tuple[Window, ProfilerConfig] | None:
        """The steps and options of the detail window that follows a complete window, if any."""
        counter, on_one_thread = window.counter, window.recorder.on_one_thread
        step_ns = max(window.step_ns, default=0)
        options = detail_options(
            window.config, run.activities, step_ns, on_one_thread=on_one_thread
        )
        has_one = counter.name in self._with_detail and self.config.keep != 1
        if options is None or has_one or counter.step_number == self.total_steps:
            return None
        first, end = counter.step_number, counter.step_number + options.detail
        following = counter.following()
        if following is not None and following.warmup_from < end:
            return None
        return Window(first, first, end - 1), options

    def _end_detail(self) -> None:
        """Have the last window exported, because its detail window is over or not recorded."""
        observe.leave()
        detail, self._detail = self._detail, None
        if detail is None or self.run is None:
            return
        for counter in self._counters.values():
            if counter.window is detail.planned:
                counter.advance()
        detail.end()
        self.run.finisher.release(detail.folder)

    def _save_detail(
        self, recorded: RecordedWindow, window: OpenWindow, detail: Detail, reason: str | None
    ) -> None:
        seen, first = detail.end(), detail.planned.first
        steps = min(window.counter.step_number, (detail.planned.last or first) + 1) - first
        if steps < 1 or (reason or "").startswith(_PROCESS_ENDS):
            return
        with window.pausing("save"):
            trace_bytes = detail.save(recorded)
        about = {"first_step": first, "steps": steps, "memory": detail.config.profile_memory}
        about |= {"trace_bytes": trace_bytes, "stall_ns": sum(window.paused_ns.values())}
        detail.describe(about | seen)
        self._with_detail.add(window.counter.name)

    def _save(
        self,
        recorded: RecordedWindow,
        window: OpenWindow,
        run: Run,
        reason: str | None,
        stepped: bool,
    ) -> Detail | None:
        """Write a window's raw trace and its metadata, and queue them for the exporter.

        Returns the detail window that follows, if any; the exporter then waits for it.
        """
        finisher, counter = run.finisher, window.counter
        first, ended = window.planned.first, counter.step_number
        if window.planned.last is not None:
            ended = min(ended, window.planned.last + 1)
        name = queue.capture_name(counter.name, first, max(first, ended - 1), finisher.rank)
        run_id = finisher.run if finisher.lock.handle is not None else ""
        staging = queue.stage(finisher.output_dir, name, run_id)
        try:
            quickly = reason is not None and reason.startswith(_PROCESS_ENDS)
            with window.pausing("save"):
                recorded.save(staging / queue.RAW, quickly=quickly)
            try:
                metadata = self._window_metadata(recorded, window, run, ended, reason)
            except Exception as error:  # keep the trace, even without its metadata
                logger.error(
                    "capture.json is incomplete for this window ({}).",
                    reason_of(error),
                    exception=to_trace(error),
                )
                metadata = dict(run.metadata)
            metadata["cost"] = window.cost() | {
                "stall_ns": counter.clock.since_step_ns() if stepped else None,
                "trace_bytes": (staging / queue.RAW).stat().st_size,
            }
            following = None if reason or not stepped else self._detail_after(window, run)
            queued = finisher.save(staging, metadata, hold=following is not None)
            if run.lines is not None:
                run.lines.write()
            if run.metrics is not None:
                folder = finisher.output_dir / queue.name_of(staging)
                run.metrics.count(run.metrics.recorded, window.planned.trigger, folder)
            if following is None:
                return None
            return Detail(*following, queued, metadata | {"name": queue.name_of(queued)})
        except Exception:
            # remove the incomplete trace, because a full disk may be the cause
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def _window_metadata(
        self,
        recorded: RecordedWindow,
        window: OpenWindow,
        run: Run,
        ended: int,
        reason: str | None,
    ) -> dict[str, Any]:
        """The content of `capture.json` for a window whose last complete step is `ended - 1`."""
        planned, first = window.planned, window.planned.first
        environment = None if window.facts is None else window.facts.environment()
        if environment is not None and self.loaders.seen:
            environment["loaders"] = list(self.loaders.seen.values())
        metadata = run.metadata | recorded.ranges
        metadata |= {
            "window": {
                "first_step": first,
                "last_step": ended - 1 if ended > first else None,
                "steps": ended - first,
                "planned_steps": None if planned.last is None else planned.last - first + 1,
                "truncated": reason is not None,
                "reason": reason,
                "trigger": planned.trigger,
                "trigger_reason": planned.trigger_reason,
                "phase": window.counter.name,
                "part": None if window.parts is None else window.parts.number,
                "part_of_step": None if window.parts is None else window.parts.whole.first,
            },
            "started_at": datetime.fromtimestamp(recorded.started_at, UTC).isoformat(),
            "environment": environment,
            "detail": None,
            "user_metadata": dict(self.user_metadata),
        }
        if planned.trigger is not None:
            metadata["config"] = window.config.plain()
        if others := recorded.ranges["threads_not_recorded"]:
            logger.warning(
                "Modules ran on the thread {}, which is not recorded, because torch records only "
                "the thread that began the window: record all threads "
                "(profiler.profile_all_threads=true{}), or call session.step() on that thread.",
                " and ".join(others[:3]),
                " and profile_memory=false" * window.config.profile_memory,
            )
        if graphs := recorded.ranges["graphs_compiled"]:
            logger.warning(
                "torch.compile compiled {} graphs inside the window of {} or its warm-up, so the "
                "window's times may include the compilation: wait longer before the window "
                "(profiler.wait).",
                graphs,
                planned.done_in_words(ended),
            )
        return metadata

    def _end_within_step(self, limits: Limits, reason: str) -> None:
        """End a window that has passed its limits while no step ended; runs on their thread."""
        with self.lock:
            window = self.window
            if window is not None and window.limits is limits:
                self._guarded(self._end_window, reason or None)

    def _end_for_other_profiler(self) -> None:
        """End the window before the program starts a profiler; any thread may call this."""
        self._guarded(self._abandon_window, "the program started another profiler")

    def _finish(self, reason: str | None, ended: str) -> None:
        """End the open window because the run or phase ends.

        `reason` says why it ends early, or is None; `ended` says what ends. If `reason` is None and
        the window was planned to end later, `capture.json` gives `ended` as the reason. But if no
        step has ended since the start, it says that `session.step` was never called.
        """
        window = self.window
        if window is None:
            return
        if not self._has_recorded_steps(reason):
            self.window = None
            window.stop()
            if window.detail is not None:
                self._end_detail()
            return
        counter = window.counter
        stepped = counter.step_number > counter.began_at
        if window.planned.last is not None or window.planned.seconds is not None:
            reason = reason or (ended if stepped else "session.step() was never called")
        elif reason is None and not stepped:  # no step has ended: the whole block is one step
            counter.step_number += 1
            window.recorder.end_step()
        self._end_window(reason)

    def _has_recorded_steps(self, reason: str | None) -> bool:
        """Whether a window is open and must be saved when the run or the phase ends.

        It is dropped only if `session.step` was called, the window has no complete step, and
        nothing ends early.
        """
        window = self.window
        if window is None or not window.recording:
            return False
        counter = window.counter
        just_begun = counter.began_at < counter.step_number <= window.planned.first
        return not (just_begun and reason is None)

    def _is_recorded(self, counter: StepCounter) -> bool:
        return self.window is not None and self.window.counter is counter

    def _abandon_window(self, reason: str) -> None:
        """End the open window, or drop it if it holds no complete step."""
        window = self.window
        if window is None:
            return
        may_stop = window.recorder.can_stop_here
        stepped = window.counter.step_number > window.planned.first
        if window.recording and stepped and may_stop:
            self._end_window(reason)
            return
        if window.detail is None:
            what = window.planned.in_words()
            logger.warning("The window of {} is not recorded: {}.", what, reason)
        if not may_stop:
            window.recorder.leave_on()
        self._drop_window(window)

    def _drop_window(self, window: OpenWindow | None) -> None:
        """Stop recording without saving.

        After an error in an action, `window` is the loop's window from before it, because the
        action may have removed it from the loop without stopping it.
        """
        if window is None or self.window is not None:
            window, self.window = self.window, None
            self._advance(self.current if window is None else window.counter)
        if window is not None:
            window.stop()
