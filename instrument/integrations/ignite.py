"""Profile the runs of an Ignite engine: `session = attach(trainer, cfg.profiler)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn

from instrument.annotate.profiled import profiled
from instrument.base.errors import ConfigError, MissingPackage
from instrument.record.config.schema import NO_CONFIG
from instrument.record.session import Session

if TYPE_CHECKING:
    from instrument.record.config.keywords import ProfilerOptions

try:
    from ignite.engine import Engine, Events, State
except ImportError as error:
    raise MissingPackage("Attaching to an Ignite engine", "pytorch-ignite", "ignite") from error


def attach(
    engine: Engine,
    config: Any = NO_CONFIG,
    /,
    *,
    phase: str = "train",
    model: nn.Module | None = None,
    **options: Unpack[ProfilerOptions],
) -> Session:
    """Record windows of each `engine.run`; a step is an iteration, counted from 0.

    The wait for a batch is the range `data`. Triggers get the loss: `state.output`, or its `loss`
    if the output is a mapping; it must be a number or a tensor of one element. Handlers of
    ITERATION_COMPLETED that were added before this call run inside the step, later ones inside the
    next step. While no window is open, an iteration costs a few µs.

    Args:
        engine: the engine to attach to.
        config: as for `Session`, or a session. If a second engine runs inside the first, pass the
            session of the first engine: `attach(evaluator, session, phase="validation")`.
        phase: what the engine does: `train`, or any other name, such as `validation`. An engine
            with the phase `train` starts and stops the session. The runs of other engines are
            recorded only while the session runs. The steps of each phase are counted separately.
        model: a model whose submodules get ranges.
        options: as for `Session`.

    Raises:
        ConfigError: the engine has a session already, or an option cannot work.
    """
    if isinstance(vars(engine).get("run"), Attached):
        raise ConfigError("This engine has a session attached already: call detach(engine) first.")
    given = config if isinstance(config, Session) and not options else None
    session = given or Session(config, **options)
    if session.config.enabled:
        engine.run = Attached(engine, session, phase, model)  # type: ignore[method-assign]
    return session


def detach(engine: Engine) -> None:
    """Restore the engine as it was before `attach`; does nothing if no session is attached."""
    attached = vars(engine).get("run")
    if isinstance(attached, Attached):
        attached.remove()


class Attached:
    """Replaces `engine.run`, and starts, steps and stops the session at the engine's events.

    Wrapping `run` is the only way to see an exception that ends the run: a handler of
    EXCEPTION_RAISED would stop the exception.
    """

    def __init__(
        self, engine: Engine, session: Session, phase: str, model: nn.Module | None
    ) -> None:
        self._engine, self._session, self._phase, self._model = engine, session, phase, model
        self._own, self._run = vars(engine).get("run"), engine.run
        self._data = profiled("data")
        # These handlers take no arguments. For handlers with arguments, Ignite would keep a weak
        # reference to this engine, and copies of the engine would use the same reference.
        self._handlers: dict[Any, Callable[[], object]] = {
            Events.GET_BATCH_STARTED: self._data.__enter__,
            Events.GET_BATCH_COMPLETED: self._data.close_all,
            # if the loader has no length, the last wait ends without a batch and without
            # GET_BATCH_COMPLETED
            Events.EPOCH_COMPLETED: self._data.close_all,
            Events.ITERATION_COMPLETED: self._step,
        }
        if phase == "train":
            self._handlers[Events.STARTED] = self._start
        for event, handler in self._handlers.items():
            engine.add_event_handler(event, handler)

    def __call__(self, *args: Any, **kwargs: Any) -> State:
        """Run the engine, and with it the session or, if that is running, the engine's phase."""
        with ExitStack() as ends:
            if self._phase == "train":
                ends.push(self._session)
                # a run that continues after an interrupt has no second STARTED
                if self._engine.last_event_name == Events.INTERRUPT:
                    self._start()
            elif self._session.running:
                ends.enter_context(self._session.phase(self._phase))
            ends.callback(self._data.close_all)
            return self._run(*args, **kwargs)

    def remove(self) -> None:
        """Remove the handlers, and restore `engine.run`."""
        # handler by handler, because Ignite's `RemovableEventHandle` fails on a copied engine
        for event, handler in self._handlers.items():
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
            loaders = {"train": state.dataloader}
            self._session.start(self._model, total_steps=_iterations(state), loaders=loaders)

    def _step(self) -> None:
        if self._session.running:
            output = self._engine.state.output
            loss = output.get("loss") if isinstance(output, Mapping) else output
            single = isinstance(loss, Tensor) and loss.numel() == 1
            self._session.step(loss=loss if single or isinstance(loss, int | float) else None)


def _iterations(state: State) -> int | None:
    """The number of iterations in the whole run; None if unknown."""
    if state.max_epochs is not None and state.epoch_length is not None:
        return int(state.max_epochs * state.epoch_length)
    max_iters: int | None = getattr(state, "max_iters", None)  # Ignite 0.5.4 has none
    return max_iters
