"""`TriggerRunner`: asks a run's triggers after each step, and has them polled between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any

from loguru import logger

from instrument import threads
from instrument.record.distributed import (
    POLL_SECONDS,
    AnnouncedWindow,
    RankCoordinator,
    TriggerRequest,
)
from instrument.record.loss_reader import LossReader
from instrument.triggers import Request, Step, Trigger, TriggerCallbacks

# How long the end of a run waits for its watcher's thread, which a store that does not answer may keep.
_JOIN_S = 5.0


@dataclass
class _Trigger:
    """One trigger of a run, with the windows that it may still have."""

    name: str
    hooks: TriggerCallbacks
    cooldown: int
    windows_left: int | None
    rests_until: int = 0
    refused: bool = False

    def admits(self, number: int) -> bool:
        """Whether it may have a window after this step. Says once when it has had its last."""
        if (
            0 < self.rests_until - number <= self.cooldown + 1
        ):  # not where the step's number was set back
            return False
        if self.windows_left == 0:
            if not self.refused:
                said = "The trigger {} fires again, but has had all windows that its max_windows gives: none is recorded."
                logger.warning(said, self.name)
            self.refused = True
            return False
        return True

    def count(self, number: int) -> None:
        """It gets a window after this step."""
        self.rests_until = number + 1 + self.cooldown
        if self.windows_left:
            self.windows_left -= 1


class TriggerRunner:
    """A run's triggers, from its start to its end; without triggers it costs nothing.

    With a `coordinator` of ranks, what fires on any of them is recorded by all, at the step that the leader says;
    cooldown and windows count there, once for the run.

    Attributes:
        asked: what is asked after each step, and of which trigger; one that raised is no more among them.
    """

    def __init__(
        self, triggers: Mapping[str, Any], folder: Path, coordinator: RankCoordinator | None = None
    ) -> None:
        self._coordinator = coordinator
        self._fired: dict[str, TriggerRequest] = {}  # here, and not yet told to the other ranks
        self._calls: list[AnnouncedWindow] = []  # for all ranks, whose steps are still to come
        self._begun: list[_Trigger] = []
        self._pending_requests: dict[
            str, Request
        ] = {}  # made between steps; of one trigger the last counts
        self._losses = LossReader()
        self._over = Event()
        for name, trigger in triggers.items():
            self._begin(name, trigger, folder)
        self.asked = [
            (each.hooks.fires, each) for each in self._begun if each.hooks.fires is not None
        ]
        polled = [each for each in self._begun if each.hooks.poll is not None]
        self._thread = Thread(
            target=self._poll, args=(polled,), name="instrument-triggers", daemon=True
        )
        if polled or coordinator is not None:
            without = [f"the trigger {each.name} is not asked between steps" for each in polled]
            without += (
                ["this rank records by itself what its triggers ask for"]
                if coordinator is not None
                else []
            )
            if not threads.start(self._thread, " and ".join(without)):
                self._coordinator = None

    def _begin(self, name: str, trigger: Any, folder: Path) -> None:
        begin = getattr(trigger, "begin", None)
        defaults = Trigger.model_fields
        cooldown, most = (
            getattr(trigger, option, defaults[option].default)
            for option in ("cooldown", "max_windows")
        )
        try:
            hooks = (
                begin(folder, partial(self._pending_requests.__setitem__, name))
                if begin is not None
                else TriggerCallbacks(trigger.fires)
            )
        except BaseException as error:
            _let_interrupt_through(error)
            logger.exception("The trigger {} could not begin and is not asked.", name)
            hooks = None
        self._begun.append(_Trigger(name, hooks or TriggerCallbacks(), cooldown, most))

    def after(
        self, number: int, took_ns: int, loss: Any, *, recorded: bool
    ) -> tuple[str, Request] | None:
        """The first trigger that fires after step `number` and may, with what it asks for. All are asked.

        `recorded` says that a window is open, so that none can be asked for.
        """
        known = self._losses.seen_after(number, loss)
        # a NamedTuple's own constructor takes twice as long
        step: Step = tuple.__new__(Step, (number, took_ns, *known, recorded))
        first = self._answered(number) if self._pending_requests and not recorded else None
        for fires, trigger in self.asked:
            try:
                request = _request(answer) if (answer := fires(step)) else None
            except BaseException as error:
                _let_interrupt_through(error)
                self._drop(trigger)
                continue
            if request is not None and first is None and not recorded and trigger.admits(number):
                first = trigger.name, request
        if first is not None:
            first = self._granted(number, *first)
        return (self._due(number, recorded=recorded) if self._calls else None) or first

    def _granted(self, number: int, name: str, request: Request) -> tuple[str, Request] | None:
        """What a trigger that fired asks for, if this rank may grant it; otherwise the leader is asked."""
        coordinator = self._coordinator  # which the watcher's thread may take away
        if coordinator is None:
            self._count(name, number)
            return name, request
        self._fired.setdefault(name, TriggerRequest(name, *request, coordinator.rank, number))
        return None

    def _due(self, number: int, *, recorded: bool) -> tuple[str, Request] | None:
        """What all ranks record from the step after this one on; an open window, which all have, puts it off."""
        call = self._calls[0]
        if number + 1 < call.begin:
            return None
        if number + 1 == call.begin and recorded:
            self._calls[0] = call._replace(begin=number + 2)
            return None
        del self._calls[0]
        if number + 1 == call.begin:
            return call.trigger, Request(call.why, call.steps)
        logger.warning(
            "The window that the trigger {} asked for ({}) is not recorded here: all ranks begin it with step {}, and "
            "this one is at step {} already.",
            call.trigger,
            call.why,
            call.begin,
            number + 1,
        )
        return None

    def _named(self, name: str) -> _Trigger | None:
        """The trigger of that name, which another rank may have and this one not."""
        return next((trigger for trigger in self._begun if trigger.name == name), None)

    def _count(self, name: str, number: int) -> None:
        if (trigger := self._named(name)) is not None:
            trigger.count(number)

    def _answered(self, number: int) -> tuple[str, Request] | None:
        """The first of the requests made between steps that may have a window; the others get none beside it."""
        pending = {name: self._pending_requests.pop(name) for name in list(self._pending_requests)}
        for trigger in self._begun:
            if trigger.name in pending and trigger.admits(number):
                try:
                    return trigger.name, _request(pending[trigger.name])
                except BaseException as error:
                    _let_interrupt_through(error)
                    self._drop(trigger)
        return None

    def failed(self, error: BaseException, number: int) -> None:
        """Tell the triggers of the exception that leaves the session's block in step `number`."""
        for trigger in self._begun:
            if trigger.hooks.failed is not None:
                self._do(trigger, partial(trigger.hooks.failed, error, number))

    def end(self) -> None:
        """The run is over: nothing is polled any more, and what the triggers put up is taken down."""
        self._over.set()
        if (
            self._coordinator is not None
        ):  # a thread in the store when the interpreter ends would abort the process
            self._thread.join(_JOIN_S)
        for trigger in self._begun:
            if trigger.hooks.end is not None:
                self._do(trigger, trigger.hooks.end)

    def _poll(self, polled: list[_Trigger]) -> None:
        while not self._over.wait(POLL_SECONDS):
            for trigger in list(polled):
                if trigger.hooks.poll is not None and not self._do(trigger, trigger.hooks.poll):
                    polled.remove(trigger)
            self.confer()
        if self._coordinator is not None:
            with suppress(Exception):  # the store may have gone first
                self._coordinator.end()

    def confer(self) -> None:
        """Tell the other ranks what fired here, and hear what all of them record; not for the training thread."""
        if (coordinator := self._coordinator) is None:
            return
        try:
            self._confer(coordinator)
        except Exception as error:  # whatever the store raises
            self._coordinator = None
            lost = "Rank {} records by itself what its triggers ask for from now on: {}."
            logger.log(
                "INFO" if coordinator.over else "WARNING",
                lost,
                coordinator.rank,
                str(error).rstrip("."),
            )
            self._pending_requests |= {
                ask.trigger: Request(ask.why, ask.steps)
                for ask in [*coordinator.unheard, *self._fired.values()]
            }
            self._fired.clear()
            with suppress(Exception):  # the store may be gone
                coordinator.end()

    def _confer(self, coordinator: RankCoordinator) -> None:
        for name in list(self._fired):
            coordinator.ask(self._fired[name])
            del self._fired[name]
        for ask in coordinator.asks():
            trigger = self._named(ask.trigger)
            if trigger is None or trigger.admits(ask.after_step):
                coordinator.call(ask)
        for call in coordinator.calls():
            self._count(call.trigger, call.begin - 1)
            self._calls.append(call)
        if coordinator.over:
            raise ConnectionError("the rank that leads has ended its session")

    def _do(self, trigger: _Trigger, act: Callable[[], None]) -> bool:
        try:
            act()
        except BaseException as error:
            _let_interrupt_through(error)
            self._drop(trigger)
            return False
        return True

    def _drop(self, trigger: _Trigger) -> None:
        """Called within `except`: log what the trigger raised, and ask it no more."""
        logger.exception("The trigger {} failed and is not asked again.", trigger.name)
        self.asked = [pair for pair in self.asked if pair[1] is not trigger]


def _let_interrupt_through(error: BaseException) -> None:
    """Raise what Ctrl-C raised; whatever else leaves a trigger, as by `sys.exit()`, is the trigger's failure."""
    if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
        raise error


def _request(answer: Any) -> Request:
    """What an answer asks for, in plain types, which can be told to other ranks."""
    if not isinstance(answer, Request):
        return Request(answer if isinstance(answer, str) else None)
    why, steps = answer
    return Request(None if why is None else str(why), None if steps is None else int(steps))
