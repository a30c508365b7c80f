"""`Windows`: records what a run's plans ask for, one window at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, TypeVar

from loguru import logger

from instrument.annotate import backends
from instrument.config.schedule import NEVER, Window
from instrument.config.schema import ProfilerConfig
from instrument.errors import InstrumentError, reason_of
from instrument.record import metadata
from instrument.record.limits import Limits
from instrument.record.one_profiler import stop_abandoned
from instrument.record.phases import Phase, Phases
from instrument.record.recorder import Recorder, import_early
from instrument.worker.retention import Delivery

T = TypeVar("T")

# How long a step waits at most while another thread begins or ends a window.
_TURN_S = 0.1
# How the reasons begin for which a process is about to end.
_IN_HASTE = ("SIGTERM", "exception ", "the interpreter ended")


class Windows:
    """Opens windows, goes on with them and ends them, at the boundaries of steps; one for a run.

    `user_metadata` is looked at when a window ends, and `held` keeps signals away while torch starts, stops and saves.
    What is raised costs the window; called by `safely`, it is logged and goes no further. Any thread may call it, and a
    thread of the window's limits does: all but `recording` are to be called by `safely`, or with `lock` held.

    Attributes:
        lock: held by the thread that begins, goes on with or ends a window.
        recorder: of the window that is open or warming up; None: there is none.
        owner: the phase whose window that is, or was.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        activities: list[str],
        emitting: backends.Backend,
        phases: Phases,
        delivery: Delivery,
        user_metadata: dict[str, Any],
        held: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.lock = RLock()
        self.recorder: Recorder | None = None
        self.owner = Phase("train")
        self._config = config
        self._activities = activities
        self._emitting = emitting
        self._phases = phases
        self._delivery = delivery
        self._user_metadata = user_metadata
        self._held = held
        self._limits: Limits | None = None
        self._said: set[str] = set()
        if phases.may_record():
            import_early()
        if config.memory_snapshot and "cuda" not in activities:
            logger.warning("profiler.memory_snapshot does nothing here: no CUDA device, whose allocator alone has any.")

    @property
    def recording(self) -> bool:
        """Whether a window is open, and not only warming up."""
        recorder = self.recorder  # which another thread may take away
        return recorder is not None and recorder.started_at is not None

    def begin_step(self, phase: Phase) -> None:
        """Do what the plan says for the start of a phase's step; nothing where another phase's window is open."""
        if stop_abandoned():
            phase.wakes_at = phase.step_number + 1
            return
        if self.recorder is None:
            phase.plan.skip_to(phase.step_number)
        elif self.owner is not phase:
            phase.wakes_at = NEVER
            return
        window = phase.plan.window
        if window is None or phase.step_number < window.warmup_from:
            phase.wakes_at = window.warmup_from if window else phase.plan.known_until
            return
        phase.wakes_at = phase.step_number + 1
        if self.recorder is None and not self._delivery.has_room(phase.folder_name(window.first, window.last)):
            phase.plan.turn()
            return
        with self._held():
            self._begin_recorded_step(phase, window)

    def _begin_recorded_step(self, phase: Phase, window: Window) -> None:
        number = phase.step_number  # with which other threads may go on, where beginning takes long
        if self.recorder is None:
            phase.cost.begin_window()
            self.owner = phase
            self._delivery.lock.hold()
            delivery = self._delivery
            self.recorder = Recorder(
                self._config_of(window), self._activities, self._emitting, delivery.output_dir, delivery.run
            )
            with phase.cost.standing_still("start"):
                self.recorder.prepare()
        if number >= window.first:
            if not self.recording:
                with phase.cost.standing_still("start"):
                    self.recorder.start()
                self._limits = Limits(self._config, self._end_midway)
            self.recorder.next_step(number)

    def _config_of(self, window: Window) -> ProfilerConfig:
        """The run's options, but for those that the window's trigger has its windows recorded with."""
        trigger = self._config.triggers.get(window.trigger) if window.trigger else None
        records = getattr(trigger, "records", {})
        return self._config.model_copy(update=dict(records)) if records else self._config

    def end_step(self, phase: Phase) -> None:
        """End the range of a phase's step, if it is one of the window."""
        if self.recorder is not None and self.owner is phase:
            self.recorder.end_step()

    def end_if_over(self, phase: Phase) -> None:
        """End the window if the phase's step that has just ended was its last, or it has recorded for too long."""
        window, recorder = phase.plan.window, self.recorder
        if window is None or recorder is None or not self.recording or self.owner is not phase:
            return
        if window.last is not None and window.last < phase.step_number:
            self._end(None)
        elif self._limits is not None and (reason := self._limits.reached()):
            self._end(reason)

    def _end_midway(self, limits: Limits, reason: str) -> None:
        """End a window of which no step ends; called on a thread of its limits."""
        with self.lock:
            if self._limits is limits and self.recorder is not None and self.recorder.can_stop_here:
                self.safely(self._end, reason)

    def hold_something(self, cut: str | None) -> bool:
        """Whether a window is open that is worth keeping: not one that has just begun, unless `cut` ends the run."""
        phase = self.owner
        begun = phase.plan.window is not None and phase.began_at < phase.step_number <= phase.plan.window.first
        return self.recording and not (begun and cut is None)

    def finish(self, cut: str | None, ended: str) -> None:
        """End the window that is open, before its time: by `cut`, or else because the run or phase `ended`."""
        phase, recorder = self.owner, self.recorder
        window = phase.plan.window
        if recorder is None or window is None:
            return
        if not self.hold_something(cut):
            self.recorder = None
            self._stop(recorder)
            return
        stepped = phase.step_number > phase.began_at
        if window.last is None:
            if cut is None and not stepped:  # the whole block is the one step
                phase.step_number += 1
                recorder.end_step()
        else:
            cut = cut or (ended if stepped else "session.step() was never called")
        self._end(cut)

    def settle(self) -> None:
        """Stop the profiler that a dropped window left on, if it can be done here; otherwise say what is on."""
        if why := stop_abandoned():
            logger.warning("{}", why)

    def save(self) -> None:
        """End the window that is open because SIGTERM came."""
        if self.recording:
            with self._held():  # the signal goes on when all is said
                self.safely(self.finish, "SIGTERM", "")
                self._delivery.say_what_is_left()

    def leave(self, why: str) -> None:
        """Turn away from the plan's present place: end the open window, or drop it if it holds no whole step."""
        window = self.owner.plan.window
        if self.recording and window is not None and self.owner.step_number > window.first:
            self._end(why)
        elif self.recorder is not None:
            self._give_up(self.recorder)

    def in_turn(self, act: Callable[..., T], *args: Any) -> T | None:
        """Do what one thread at a time may do; not where another one is long about it, as it begins or ends a window.

        A step that is passed over so is made up for by the next.
        """
        if not self.lock.acquire(timeout=_TURN_S):
            return None
        try:
            return act(*args)
        finally:
            self.lock.release()

    def safely(self, act: Callable[..., None], *args: Any) -> None:
        """Do a part of ours; what goes wrong in it costs this window, is logged once, and never reaches the caller."""
        with self.lock:
            recorder = self.recorder
            try:
                act(*args)
            except Exception as error:
                self._recover(recorder)
                self._say(f"Recording failed and training goes on: {reason_of(error)}.", error)

    def _recover(self, recorder: Recorder | None) -> None:
        try:
            self._give_up(recorder)
        except Exception as error:
            self._say(f"The profiler could not be stopped: {reason_of(error)}.", error)
        self._phases.present.wakes_at = self._phases.present.step_number + 1

    def _say(self, sentence: str, error: Exception) -> None:
        """Log an error once in a run; with its traceback where it is none of our own."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.opt(exception=None if isinstance(error, InstrumentError) else error).error("{}", sentence)

    def _give_up(self, recorder: Recorder | None) -> None:
        """Turn away from the window in which something failed, whose recorder this was."""
        if self.recorder is not None:  # otherwise the window was already turned away from
            recorder, self.recorder = self.recorder, None
            self.owner.plan.turn()
        if recorder is not None:
            self._stop(recorder)

    def _stop(self, recorder: Recorder) -> None:
        if self._limits is not None:
            self._limits.close()
            self._limits = None
        with self._held():
            recorder.stop()

    def _end(self, cut: str | None) -> None:
        """Stop recording, deliver the capture, and turn to the next window. `cut` says why it ends early."""
        phase, recorder = self.owner, self.recorder
        window = phase.plan.window
        if window is None or recorder is None or recorder.started_at is None:
            return
        if cut:
            logger.warning("{}", window.cut_short(phase.step_number - window.first, cut))
        ended = phase.step_number if window.last is None else min(phase.step_number, window.last + 1)
        facts, config = metadata.facts(window, phase.name, ended, cut), self._config_of(window)
        name = phase.folder_name(window.first, max(window.first, ended - 1))
        with self._held():
            with phase.cost.standing_still("stop"):
                self._stop(recorder)
            self.recorder = None
            try:
                in_haste = cut is not None and cut.startswith(_IN_HASTE)
                self._delivery.take(recorder, name, phase.cost, lambda: self._about(recorder, facts, config), in_haste)
            finally:
                phase.plan.turn()
        self._delivery.finish_inline()

    def _about(self, recorder: Recorder, facts: dict[str, Any], config: ProfilerConfig) -> dict[str, Any]:
        about = metadata.describe(facts, recorder.started_at or 0.0, self._activities, config.plain())
        about |= {"annotations_disabled": backends.disabled, **recorder.about_ranges()}
        about["user_metadata"] = dict(self._user_metadata)
        _warn_compiled(about["graphs_compiled"], facts)
        return about


def _warn_compiled(graphs: int, facts: dict[str, Any]) -> None:
    if graphs:
        logger.warning(
            "torch.compile compiled {} graphs inside the window of {}, whose times hold that: "
            "wait longer before the window (profiler.wait).",
            graphs,
            metadata.in_words(facts),
        )
