"""`TriggerRunner` calls a run's triggers after each step, and holds what is requested."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

from instrument.base import threads
from instrument.base.log import logger
from instrument.base.signals import raised_by_handler
from instrument.record.distributed import POLL_SECONDS, AnnouncedWindow, Announcements, uniform
from instrument.record.loss_reader import LossReader
from instrument.record.triggers.trigger import Request, Step, Trigger, TriggerCallbacks

#: What requests a window instead of a trigger.
REQUEST = "session.request"
# How long the end of a run waits for the polling thread, with other ranks and without. The thread
# hangs if the job's store, or a trigger's `poll`, does not respond.
_JOIN_S, _JOIN_POLLING_S = 5.0, 1.0


@dataclass
class _ActiveTrigger:
    name: str
    callbacks: TriggerCallbacks
    cooldown: int
    windows_left: int | None
    cooldown_until: int = 0
    warned: bool = False

    def may_record(self, number: int) -> bool:
        """Whether the trigger may get a window after this step; warns once if none is left."""
        # A larger difference means that the user has lowered the step number: no cooldown then.
        if 0 < self.cooldown_until - number <= self.cooldown + 1:
            return False
        if self.windows_left == 0:
            if not self.warned:
                logger.warning(
                    "The trigger {} fired again, but its max_windows allows no further window: no "
                    "window is recorded.",
                    self.name,
                )
            self.warned = True
            return False
        return True

    def count_window(self, number: int) -> None:
        self.cooldown_until = number + 1 + self.cooldown
        if self.windows_left:
            self.windows_left -= 1


class TriggerRunner:
    """The triggers of one run, from its start to its end.

    `after` must be called after a step if `calls_each_step` is true, or if there are `requests`.

    With `announcements`, all recording ranks record a window if a trigger of one rank requests it:
    this rank announces the step at which all begin it. All ranks read the same announcements in the
    same order, and decide alike which of them they record. The options `cooldown` and `max_windows`
    then apply to all recording ranks together.
    """

    def __init__(
        self, triggers: Mapping[str, Any], folder: Path, announcements: Announcements | None = None
    ) -> None:
        self._announcements = announcements
        # by trigger: a request of this rank that is not announced yet, and the step after which
        self._unsent: dict[str, tuple[Request, int]] = {}
        self._announced: list[AnnouncedWindow] = []  # windows of all ranks that have not begun yet
        self._last: AnnouncedWindow | None = None  # the last of them
        asked = _ActiveTrigger(REQUEST, TriggerCallbacks(), cooldown=0, windows_left=None)
        self._triggers = {REQUEST: asked}
        # by trigger: the last request made by its `poll` or from another thread
        self.requests: dict[str, Request] = {}
        self._losses = LossReader()
        self._over = Event()
        for name, trigger in triggers.items():
            self._begin(name, trigger, folder)
        # called after each step; a trigger that raises is removed
        self._checks = [
            (each.callbacks.fires, each)
            for each in self._triggers.values()
            if each.callbacks.fires is not None
        ]
        self.calls_each_step = bool(self._checks) or announcements is not None
        polled = [each for each in self._triggers.values() if each.callbacks.poll is not None]
        self._thread = Thread(
            target=self._poll, args=(polled,), name="instrument-triggers", daemon=True
        )
        if polled or announcements is not None:
            without = [f"the trigger {each.name} is not polled between steps" for each in polled]
            if announcements is not None:
                without.append("only this rank records the windows that its triggers request")
            if not threads.start(self._thread, " and ".join(without)):
                self._announcements = None

    def _begin(self, name: str, trigger: Any, folder: Path) -> None:
        begin = getattr(trigger, "begin", None)
        fields = Trigger.model_fields
        cooldown = getattr(trigger, "cooldown", fields["cooldown"].default)
        max_windows = getattr(trigger, "max_windows", fields["max_windows"].default)
        try:
            ask = partial(self.requests.__setitem__, name)
            callbacks = begin(folder, ask) if begin is not None else TriggerCallbacks(trigger.fires)
        except (Exception, SystemExit) as error:
            if raised_by_handler(error):
                raise
            logger.error(
                "The trigger {} could not begin and is never called.", name, exception=error
            )
            callbacks = None
        self._triggers[name] = _ActiveTrigger(
            name, callbacks or TriggerCallbacks(), cooldown, max_windows
        )

    def after(
        self, number: int, took_ns: int, loss: Any, recorded: bool
    ) -> tuple[str, Request] | None:
        """Call all triggers after step `number`; return the window that begins with the next step.

        `recorded` says whether a window is open or warming up; then no other window can begin. The
        window is a trigger's name and its request. A window that was announced to all ranks for the
        next step comes first. On a single rank, the next choice is the first new request whose
        trigger has windows left and no cooldown. With other ranks, a new request is announced
        first.
        """
        if self._unsent and self._announcements is None:
            self.requests |= {name: request for name, (request, _) in self._unsent.items()}
            self._unsent = {}
        ready, of_step = self._losses.after_step(number, loss)
        # the constructor of a NamedTuple takes twice as long
        step: Step = tuple.__new__(Step, (number, took_ns, ready, of_step, recorded))
        first = self._first_pending(number) if self.requests and not recorded else None
        for fires, trigger in self._checks:
            try:
                request = _as_request(answer) if (answer := fires(step)) else None
            except Exception as error:
                self._drop(trigger, error)
                continue
            may_begin = first is None and not recorded
            if request is not None and may_begin and trigger.may_record(number):
                first = trigger.name, request
        if first is not None and self._announcements is not None:
            name, request = first
            if not any(
                window.trigger == name and window.after_step <= number for window in self._announced
            ):  # otherwise the announced window answers this request too
                self._unsent.setdefault(name, (request, number))
            first = None
        elif first is not None:
            self._triggers[first[0]].count_window(number)
        return (self._next_announced(number, recorded) if self._announced else None) or first

    def is_pending(self, text: str) -> bool:
        """Whether a request whose reason contains `text` waits for its window to be planned."""
        unsent = (request for request, _ in list(self._unsent.values()))
        reasons = [each.why for each in (*list(self.requests.values()), *unsent)]
        reasons += [each.why for each in list(self._announced)]
        return any(text in (why or "") for why in reasons)

    def _next_announced(self, number: int, recorded: bool) -> tuple[str, Request] | None:
        """The announced window that all ranks begin with the next step; None if there is none.

        While a window is open, the announced window is delayed step by step, on all ranks alike.
        """
        window = min(self._announced, key=lambda window: window.begin)
        if number + 1 < window.begin:
            return None
        if number + 1 == window.begin and recorded:
            self._announced[self._announced.index(window)] = window._replace(begin=number + 2)
            return None
        self._announced.remove(window)
        if number + 1 == window.begin:
            return window.trigger, Request(window.why, window.steps)
        logger.warning(
            "The window that the trigger {} requested ({}) is not recorded on this rank: all ranks "
            "begin the window with step {}, but this rank is already at step {}.",
            window.trigger,
            window.why,
            window.begin,
            number + 1,
        )
        return None

    def _first_pending(self, number: int) -> tuple[str, Request] | None:
        """Take the request of the first trigger that may get a window; the others wait."""
        for trigger in self._triggers.values():
            if (request := self.requests.pop(trigger.name, None)) and trigger.may_record(number):
                try:
                    return trigger.name, _as_request(request)
                except Exception as error:
                    self._drop(trigger, error)
        return None

    def failed(self, error: BaseException, number: int) -> None:
        """Tell the triggers that an exception ended the session's `with` block in step `number`."""
        for trigger in self._triggers.values():
            if trigger.callbacks.failed is not None:
                self._call(trigger, partial(trigger.callbacks.failed, error, number))

    def end(self) -> None:
        """Stop polling, and let each trigger remove what it installed."""
        self._over.set()
        # wait, because the thread could install again what a trigger removes, and because the
        # process aborts if a thread uses the store when the interpreter ends
        if self._thread.is_alive() and current_thread() is not self._thread:
            self._thread.join(_JOIN_S if self._announcements is not None else _JOIN_POLLING_S)
        for trigger in self._triggers.values():
            if trigger.callbacks.end is not None:
                self._call(trigger, trigger.callbacks.end)

    def _poll(self, polled: list[_ActiveTrigger]) -> None:
        # random, so that the ranks of a job do not ask the store at the same moment
        slower_s = self._announcements.exchange_s - POLL_SECONDS if self._announcements else 0.0
        next_exchange_s = time.monotonic() + uniform(0, 1) * slower_s
        while not self._over.wait(uniform(0.5, 1) * POLL_SECONDS):
            for trigger in list(polled):
                poll = trigger.callbacks.poll
                if poll is not None and not self._call(trigger, poll):
                    polled.remove(trigger)
            now_s = time.monotonic()
            if self._unsent or now_s >= next_exchange_s:
                self.exchange()
                next_exchange_s = now_s + uniform(0.5, 1) * slower_s

    def exchange(self) -> None:
        """Read what all ranks have announced, and announce the requests that this has not met."""
        if (announcements := self._announcements) is None:
            return
        try:
            self._read(announcements)
            for name, (request, after_step) in list(self._unsent.items()):
                sent = self._is_answered(after_step) or announcements.announce(
                    name, request, after_step
                )
                self._read(announcements)
                if sent:  # only now: the request is pending all the time
                    del self._unsent[name]
        except Exception as error:  # the store raises errors of various types
            self._announcements = None
            logger.info(
                "From now on, only rank {} records the windows that its triggers request: {}.",
                announcements.rank,
                str(error).rstrip("."),
            )

    def _read(self, announcements: Announcements) -> None:
        for window in announcements.new():
            trigger = self._triggers.get(window.trigger)  # None: only other ranks have it
            if not self._is_answered(window.after_step) and (
                trigger is None or trigger.may_record(window.after_step)
            ):
                if trigger is not None:
                    trigger.count_window(window.begin - 1)
                self._announced.append(window)
                self._last = window

    def _is_answered(self, after_step: int) -> bool:
        """Whether a request after this step came before the last announced window ends.

        That window answers it. Not if the step number was lowered, so that the same numbers come
        again.
        """
        if (last := self._last) is None:
            return False
        return abs(after_step - last.after_step) <= last.end - last.after_step

    def _call(self, trigger: _ActiveTrigger, act: Callable[[], None]) -> bool:
        """Call a callback of a trigger; return whether it raised nothing."""
        try:
            act()
        except (Exception, SystemExit) as error:
            self._drop(trigger, error)
            return False
        return True

    def _drop(self, trigger: _ActiveTrigger, error: BaseException) -> None:
        """Log what a trigger raised; raise it again if it comes from the program's handler."""
        if raised_by_handler(error):
            raise error
        logger.error(
            "The trigger {} failed and is not called again.", trigger.name, exception=error
        )
        self._checks = [pair for pair in self._checks if pair[1] is not trigger]


def _as_request(answer: Any) -> Request:
    """Convert a trigger's answer to a request of plain types, which can be sent to other ranks."""
    if not isinstance(answer, Request):
        return Request(answer if isinstance(answer, str) else None)
    kinds = zip(answer, (str, int, float))
    return Request(*(x if x is None else kind(x) for x, kind in kinds))
