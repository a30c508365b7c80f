"""Transformers: `Trainer(callbacks=[ProfilerCallback(cfg.profiler)])`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

from instrument.annotate.profiled import profiled
from instrument.errors import MissingPackage
from instrument.record.session import Session

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise MissingPackage("The Transformers callback", "transformers", "transformers") from error


class ProfilerCallback(TrainerCallback):
    """Records windows of `trainer.train()`; a step is one of the optimizer, `state.global_step`, counted from 0.

    With gradient accumulation a step holds all its batches. What the Trainer does after a step, logging, evaluating and
    saving, lies in the next. Without a mark, `data`, `forward`, `backward` and `optimizer` are ranges, and so are the
    submodules. Evaluation is the session's phase `validation`, whose batches are counted by themselves;
    `trainer.evaluate` and `predict` outside of `train()` are runs of their own, for which `profiler.phases` must hold
    `validation` or `predict`. Triggers get the loss of the step's last batch, as `training_step` returns it.

    The first callback that is enabled replaces `Trainer.train` and `Trainer.evaluation_loop` for the rest of the
    process, as Transformers tells callbacks of no exception; Trainers without such a callback run as they did.

    Takes what `Session` takes, and raises what it raises. The session is `self.session`, its captures
    `self.session.captures`. While no window is open a step costs a few µs.
    """

    def __init__(self, *config: Any, **options: Any) -> None:
        self.session = Session(*config, **options)
        self._optimizer = profiled("optimizer")
        self._loss: Any = None
        self._evaluates = False
        if self.session.config.enabled:
            _accompany_trainers()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.session.config.enabled:  # the copy may be the first one in its process
            _accompany_trainers()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Start the session at the step of the checkpoint, with a range for each submodule."""
        self.session.stop()  # auto_find_batch_size begins anew after a batch that was too large
        self.session.step_number = state.global_step
        self.session.start(model, total_steps=state.max_steps)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Open the range."""
        self._optimizer.__enter__()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Close it."""
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
        """What is around `trainer.train`: ranges, and the end of the session also where an exception leaves it."""
        with ExitStack() as ends:
            ends.push(self.session)
            ends.callback(self._optimizer.close_all)
            ends.enter_context(_wrapped(trainer, "training_step", self._keeping_the_loss))
            ends.enter_context(_wrapped(trainer, "get_batch_samples", profiled("data")))
            ends.enter_context(_wrapped(trainer, "compute_loss", profiled("forward")))
            ends.enter_context(_wrapped(trainer.accelerator, "backward", profiled("backward")))
            yield

    @contextmanager
    def evaluation(
        self, trainer: Trainer, dataloader: Any, description: str, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        """What is around `trainer.evaluation_loop`: a phase, and outside of `train()` the session."""
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

    def _keeping_the_loss(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def keeps_the_loss(*args: Any, **kwargs: Any) -> Any:
            self._loss = training_step(*args, **kwargs)
            return self._loss

        return keeps_the_loss


@contextmanager
def _wrapped(owner: Any, method: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Put a wrapped method in the place of an object's, for the block."""
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
def _accompany_trainers() -> None:
    """Let each Trainer's runs take place within what its profiler callbacks put around them.

    Transformers tells a callback neither of the exception that ends the training nor that an evaluation begins, and
    never shows it the Trainer.
    """
    for method, around in (
        ("train", ProfilerCallback.training),
        ("evaluation_loop", ProfilerCallback.evaluation),
    ):
        setattr(Trainer, method, _accompanied(getattr(Trainer, method), around))


def _accompanied(
    run: Callable[..., Any], around: Callable[..., AbstractContextManager[None]]
) -> Callable[..., Any]:
    @wraps(run)
    def accompanied(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, ProfilerCallback) and callback.session.config.enabled:
                    stack.enter_context(around(callback, trainer, *args, **kwargs))
            return run(trainer, *args, **kwargs)

    return accompanied
