"""Ignite: `session = attach(trainer, cfg.profiler)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from instrument.annotate.profiled import profiled
from instrument.errors import ConfigError, MissingPackage
from instrument.record.session import Session

try:
    from ignite.engine import Engine, Events, State
except ImportError as error:
    raise MissingPackage("Attaching to an Ignite engine", "pytorch-ignite", "ignite") from error


def attach(
    engine: Engine,
    *config: Any,
    phase: str = "train",
    model: nn.Module | None = None,
    **options: Any,
) -> Session:
    """Record windows of each `engine.run`; a step is a completed iteration, counted from 0 as `state.iteration` is.

    Takes what `Session` takes, or a session, and returns the session. With that one and a phase, an engine is attached
    that runs in between: `attach(evaluator, session, phase="validation")`. Waiting for a batch is a range `data`, and
    with `model` so is each submodule. Triggers get the loss from `state.output`, if that is a number, a tensor of one
    element, or a mapping with such a `loss`. What handlers of ITERATION_COMPLETED do that were added before counts to
    the step, what those added afterwards do to the next. While no window is open an iteration costs a few µs.

    Raises:
        ConfigError: a session is attached to the engine, or an option cannot work.
    """
    if isinstance(vars(engine).get("run"), Attached):
        raise ConfigError("This engine has a session attached already: detach(engine) first.")
    given = config[0] if config and isinstance(config[0], Session) and not options else None
    session = given or Session(*config, **options)
    if session.config.enabled:
        engine.run = Attached(engine, session, phase, model)  # type: ignore[method-assign]
    return session


def detach(engine: Engine) -> None:
    """Leave the engine as it was before a session was attached; harmless where none is."""
    attached = vars(engine).get("run")
    if isinstance(attached, Attached):
        attached.remove()


class Attached:
    """Stands in for `engine.run`, and drives the session by the events within.

    Only around `run` is it known that an exception leaves it: a handler of EXCEPTION_RAISED would keep it inside.
    """

    def __init__(
        self, engine: Engine, session: Session, phase: str, model: nn.Module | None
    ) -> None:
        self._engine, self._session, self._phase, self._model = engine, session, phase, model
        self._own, self._run = vars(engine).get("run"), engine.run
        self._data = profiled("data")
        # None takes an argument, for which Ignite would keep a weak reference to this engine, in copies too.
        self._handlers: dict[Any, Callable[[], object]] = {
            Events.GET_BATCH_STARTED: self._data.__enter__,
            Events.GET_BATCH_COMPLETED: self._data.close_all,
            Events.EPOCH_COMPLETED: self._data.close_all,  # the wait that brought no batch, of a length not known
            Events.ITERATION_COMPLETED: self._step,
        }
        if phase == "train":
            self._handlers[Events.STARTED] = self._start
        for event, handler in self._handlers.items():
            engine.add_event_handler(event, handler)

    def __call__(self, *args: Any, **kwargs: Any) -> State:
        """Run the engine, with the session, or with a phase of it where it runs."""
        with ExitStack() as ends:
            if self._phase == "train":
                ends.push(self._session)
                if (
                    self._engine.last_event_name == Events.INTERRUPT
                ):  # it goes on without another STARTED
                    self._start()
            elif self._session.running:
                ends.enter_context(self._session.phase(self._phase))
            ends.callback(self._data.close_all)
            return self._run(*args, **kwargs)

    def remove(self) -> None:
        """Take the handlers and itself away."""
        for (
            event,
            handler,
        ) in self._handlers.items():  # Ignite's handles know no engine that was copied
            if self._engine.has_event_handler(handler, event):
                self._engine.remove_event_handler(handler, event)
        if self._own is None:
            del self._engine.run
        else:
            self._engine.run = self._own  # type: ignore[method-assign]

    def _start(self) -> None:
        state = self._engine.state
        if not self._session.running:
            self._session.step_number = state.iteration
            self._session.start(self._model, total_steps=_iterations(state))

    def _step(self) -> None:
        if self._session.running:
            self._session.step(loss=_loss(self._engine.state.output))


def _iterations(state: State) -> int | None:
    """The iterations of the whole run; None where nobody knows."""
    if state.max_epochs is not None and state.epoch_length is not None:
        return int(state.max_epochs * state.epoch_length)
    most: int | None = getattr(state, "max_iters", None)  # Ignite 0.5.4 has none
    return most


def _loss(output: Any) -> Any:
    """The loss that a process function returned, or None."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    single = isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1)
    return loss if single else None
