"""Profile a Transformers Trainer: `Trainer(callbacks=[ProfilerCallback(cfg.profiler)])`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

from instrument.annotate.profiled import profiled
from instrument.base.errors import MissingPackage
from instrument.record.session import Session

try:
    from transformers import Trainer, TrainerCallback, TrainerState
except ImportError as error:
    raise MissingPackage("The Transformers callback", "transformers", "transformers") from error


class ProfilerCallback(TrainerCallback):
    """Records windows of `trainer.train()`; a step is an optimizer step.

    The callback takes the arguments of `Session`, and raises the same errors; `session` is its
    session.

    The number of a step is `state.global_step`. With gradient accumulation, a step includes all its
    batches. Logging, evaluating and saving after a step belong to the next step. The callback opens
    the ranges `data`, `forward`, `backward` and `optimizer`, and a range for each submodule.

    Evaluation is the session's phase `validation`, whose batches count separately.
    `trainer.evaluate` and `predict` outside of `train()` are separate runs, which are recorded if
    `profiler.phases` holds `validation` or `predict`. Triggers get the loss of the step's last
    batch, as `training_step` returns it.

    The first enabled callback replaces `Trainer.train` and `Trainer.evaluation_loop` for the rest
    of the process. Trainers without such a callback behave as before. While no window is open, a
    step costs a few µs.
    """

    def __init__(self, *config: Any, **options: Any) -> None:
        self.session = Session(*config, **options)
        self._optimizer = profiled("optimizer")
        self._loss: Any = None
        self._evaluates = False
        if self.session.config.enabled:
            _wrap_trainer()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.session.config.enabled:  # an unpickled callback may be the first in its process
            _wrap_trainer()

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
        self._optimizer.__enter__()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Close the range `optimizer`."""
        self._optimizer.__exit__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End the step."""
        self.session.step(loss=self._loss)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """End a step of evaluation."""
        if self._evaluates:
            self.session.step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the session."""
        self.session.stop()

    @contextmanager
    def training(self, trainer: Trainer, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Open ranges during `trainer.train`; at its end, or on an exception, stop the session."""
        with ExitStack() as ends:
            ends.push(self.session)
            ends.callback(self._optimizer.close_all)
            ends.enter_context(_wrapped(trainer, "training_step", self._keep_loss))
            ends.enter_context(_wrapped(trainer, "get_batch_samples", profiled("data")))
            ends.enter_context(_wrapped(trainer, "compute_loss", profiled("forward")))
            ends.enter_context(_wrapped(trainer.accelerator, "backward", profiled("backward")))
            yield

    @contextmanager
    def evaluation(
        self, trainer: Trainer, dataloader: Any, description: str, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """Enter a phase during `trainer.evaluation_loop`.

        Outside of `train`, the session starts and stops with the phase, if `profiler.phases` holds
        it.
        """
        phase = "predict" if description == "Prediction" else "validation"
        with ExitStack() as ends:
            if not self.session.running:
                if phase not in self.session.config.phases:
                    yield
                    return
                ends.push(self.session.start(trainer.model))
            ends.enter_context(self.session.phase(phase))
            ends.callback(setattr, self, "_evaluates", False)
            self._evaluates = True
            yield

    def _keep_loss(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def keeping_loss(*args: Any, **kwargs: Any) -> Any:
            self._loss = training_step(*args, **kwargs)
            return self._loss

        return keeping_loss


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


@cache
def _wrap_trainer() -> None:
    """Wrap `Trainer.train` and `evaluation_loop` in context managers of the profiler callbacks.

    Transformers passes no Trainer to callbacks, and does not call them when an evaluation begins or
    an exception ends training.
    """
    for method, context in (
        ("train", ProfilerCallback.training),
        ("evaluation_loop", ProfilerCallback.evaluation),
    ):
        setattr(Trainer, method, _within(getattr(Trainer, method), context))


def _within(
    run: Callable[..., Any], context: Callable[..., AbstractContextManager[None]]
) -> Callable[..., Any]:
    @wraps(run)
    def within_contexts(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, ProfilerCallback) and callback.session.config.enabled:
                    stack.enter_context(context(callback, trainer, *args, **kwargs))
            return run(trainer, *args, **kwargs)

    return within_contexts
