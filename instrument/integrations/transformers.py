"""Profile a Transformers Trainer: `callbacks=[ProfilerCallback(cfg.profiler)]`, or `attach`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from instrument.annotate.profiled import profiled
from instrument.base.errors import MissingPackage
from instrument.record.config.schema import NO_CONFIG
from instrument.record.session import Session

if TYPE_CHECKING:
    from instrument.record.config.keywords import ProfilerOptions

try:
    from transformers import Trainer, TrainerCallback, TrainerState
except ImportError as error:
    raise MissingPackage("The Transformers callback", "transformers", "transformers") from error


class ProfilerCallback(TrainerCallback):
    """Records windows of training: `Trainer(callbacks=[ProfilerCallback("summary")])`.

    A step is an optimizer step, and its number is `state.global_step`. With gradient accumulation,
    a step includes all its batches. Logging, evaluating and saving after a step belong to the next
    step. The range `optimizer` and the submodules need no annotation.

    Transformers tells callbacks neither of losses, nor when an evaluation begins, nor of an
    exception; `attach` asks the trainer for them.

    Args:
        config: as for `Session`, or a session.
        options: as for `Session`.

    Raises:
        ConfigError: an option cannot work.
    """

    def __init__(self, config: Any = NO_CONFIG, /, **options: Unpack[ProfilerOptions]) -> None:
        given = config if isinstance(config, Session) and not options else None
        self.session = given or Session(config, **options)
        self.optimizer = profiled("optimizer")
        self.loss: Any = None
        self.evaluates = False

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Start the session. The first step number is that of the checkpoint, if there is one."""
        self.session.stop()  # with auto_find_batch_size, training may begin several times
        self.session.step_number = state.global_step
        loaders = {"train": kwargs.get("train_dataloader")}
        self.session.start(model, total_steps=state.max_steps, loaders=loaders)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Open the range `optimizer`."""
        self.optimizer.__enter__()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Close the range `optimizer`."""
        self.optimizer.__exit__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End the step."""
        self.session.step(loss=self.loss)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """End a step of evaluation."""
        if self.evaluates:
            self.session.step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the session."""
        self.session.stop()


def attach(
    trainer: Trainer, config: Any = NO_CONFIG, /, **options: Unpack[ProfilerOptions]
) -> Session:
    """Record windows of each `trainer.train()`, with all that `ProfilerCallback` cannot see.

    The ranges `data`, `forward`, `backward` and `optimizer` need no annotation, nor do the
    submodules. Evaluation is the session's phase `validation`, whose batches count separately.
    `trainer.evaluate` and `predict` outside of `train()` are separate runs, which are recorded if
    `profiler.phases` holds `validation` or `predict`. Triggers get the loss of the step's last
    batch, as `training_step` returns it.

    Methods of this trainer, but not of its class, are replaced, because Transformers does not call
    callbacks when an evaluation begins or an exception ends training. A copy of the trainer has a
    session of its own. While no window is open, a step costs a few µs.

    Args:
        trainer: the trainer to attach to.
        config: as for `Session`, or a session.
        options: as for `Session`.

    Raises:
        ConfigError: an option cannot work.
    """
    callback = ProfilerCallback(config, **options)
    session = callback.session
    if session.config.enabled:
        trainer.add_callback(callback)
        # partial objects, so that a copy of the trainer calls its own methods
        for method, run in (("train", _train), ("evaluation_loop", _evaluate)):
            setattr(trainer, method, partial(run, callback, trainer, getattr(trainer, method)))
    return session


def _train(
    callback: ProfilerCallback,
    trainer: Trainer,
    train: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Open ranges during `trainer.train`; at its end, or on an exception, stop the session."""

    def keeping_loss(training_step: Callable[..., Any]) -> Callable[..., Any]:
        def keep(*args: Any, **kwargs: Any) -> Any:
            callback.loss = training_step(*args, **kwargs)
            return callback.loss

        return keep

    with ExitStack() as ends:
        ends.push(callback.session)
        ends.callback(callback.optimizer.close_all)
        ends.enter_context(_wrapped(trainer, "training_step", keeping_loss))
        ends.enter_context(_wrapped(trainer, "get_batch_samples", profiled("data")))
        ends.enter_context(_wrapped(trainer, "compute_loss", profiled("forward")))
        ends.enter_context(_wrapped(trainer.accelerator, "backward", profiled("backward")))
        return train(*args, **kwargs)


def _evaluate(
    callback: ProfilerCallback,
    trainer: Trainer,
    evaluation_loop: Callable[..., Any],
    dataloader: Any,
    description: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Enter a phase during `trainer.evaluation_loop`.

    Outside of `train`, the session starts and stops with the phase, if `profiler.phases` holds it.
    """
    session = callback.session
    phase = "predict" if description == "Prediction" else "validation"
    with ExitStack() as ends:
        if not session.running and phase in session.config.phases:
            ends.push(session.start(trainer.model))
        if session.running:
            ends.enter_context(session.phase(phase))
            ends.callback(setattr, callback, "evaluates", False)
            callback.evaluates = True
        return evaluation_loop(dataloader, description, *args, **kwargs)


@contextmanager
def _wrapped(owner: Any, method: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method of `owner` by `wrap(method)` during the block."""
    own = vars(owner).get(method)
    setattr(owner, method, wrap(getattr(owner, method)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, method)
        else:
            setattr(owner, method, own)
