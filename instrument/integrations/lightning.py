"""Profile the runs of a Lightning Trainer, by a callback or by a profiler.

The callback is `Trainer(callbacks=[ProfilerCallback(…)])`. The profiler,
`Trainer(profiler=InstrumentProfiler(…))`, adds the callback and opens a range for each action of
Lightning.

If both `lightning` and `pytorch_lightning` are installed, the Trainer of each accepts both classes
of this module: they have base classes of both packages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any, Unpack

from torch.optim.optimizer import register_optimizer_step_post_hook

from instrument.annotate import backends
from instrument.annotate.profiled import Range
from instrument.annotate.wrapper import is_ranged
from instrument.base.errors import MissingPackage
from instrument.record.config.schema import NO_CONFIG
from instrument.record.session import Session

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.profilers import PassThroughProfiler, Profiler

    from instrument.record.config.keywords import ProfilerOptions
else:
    packages, missing = [], None
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            packages.append(import_module(package))
        except ImportError as error:
            missing = error
    if not packages:
        raise MissingPackage("The Lightning callback", "lightning", "lightning") from missing
    Callback = type("Callback", tuple(each.Callback for each in packages), {})
    Profiler = type("Profiler", tuple(each.profilers.Profiler for each in packages), {})
    PassThroughProfiler = tuple(each.profilers.PassThroughProfiler for each in packages)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_NOTHING: AbstractContextManager[None] = nullcontext()


class ProfilerCallback(Callback):
    """Records windows of `trainer.fit`; a step is a training batch.

    The callback takes the config and the options of `Session`, and raises the same errors;
    `session` is its session.

    The parts of a step are ranges: `data`, `batch_to_device`, `training_step`, `backward`,
    `optimizer_step` and `validation`. Lightning runs `training_step`, `backward` and
    `optimizer_step` inside torch's own range `Optimizer.step#…`. A `training_step` that the user
    marked with `@profiled` gets no second range. If the Trainer has one of Lightning's profilers
    (`Trainer(profiler=…)`), only this profiler measures `data`, `batch_to_device` and
    `training_step`.

    Validation within `fit` is the session's phase `validation`, whose batches count separately.
    `trainer.validate`, `test` and `predict` are separate runs, which are recorded if
    `profiler.phases` holds `validation`, `test` or `predict`. Sanity checking is not recorded. A
    resumed fit continues with the checkpoint's number of batches.

    If Lightning starts the processes itself (`ddp_spawn`), each process records with its own copy
    of the callback. The captures are then in the folder, but `session.captures` of the callback in
    the first process stays empty.

    While no window is open, a batch costs a few calls, each of which compares two numbers.
    """

    def __init__(self, config: Any = NO_CONFIG, **options: Unpack[ProfilerOptions]) -> None:
        self.session = Session(config, **options)
        self._phase: str | None = None
        self._open_phase = ExitStack()
        self._installed = ExitStack()  # removes hooks when the session stops
        self._backward, self._optimizer_step = Range("backward"), Range("optimizer_step")

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Remove a disabled callback, because a callback adds about 15 µs to each batch."""
        if not self.session.config.enabled:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Start the session, with ranges for the submodules that `profiler.modules` selects."""
        self.session.step_number = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self._start(
            trainer,
            pl_module,
            total_steps=_batches(trainer, pl_module),
            loaders={"train": trainer.train_dataloader},
        )

    def on_before_backward(self, *args: Any) -> None:
        """Open the range `backward`."""
        self._backward.__enter__()

    def on_after_backward(self, *args: Any) -> None:
        """Close the range `backward`."""
        self._backward.__exit__()

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Open the range `optimizer_step`; a hook of torch's optimizer closes it."""
        self._close_ranges()
        self._optimizer_step.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step; the loss comes from the result of `training_step`."""
        # if a gradient scaler skips the optimizer's step, the range `optimizer_step` is still open
        self._close_ranges()
        self.session.step(loss=outputs.get("loss") if isinstance(outputs, Mapping) else outputs)

    def on_train_end(self, *args: Any) -> None:
        """Stop the session."""
        self._stop(None)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin the phase `validation`, except for sanity checking."""
        if not trainer.sanity_checking:
            self._enter("validation", trainer, pl_module)

    def on_test_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin the phase `test`."""
        self._enter("test", trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin the phase `predict`."""
        self._enter("predict", trainer, pl_module)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """End a step of the phase `validation`, `test` or `predict`."""
        if self._phase:
            self.session.step()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """End the phase. Outside of `fit`, stop the session too."""
        self._open_phase.close()
        if self._phase and trainer.state.fn != "fit":
            self._stop(None)
        self._phase = None

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save the open window and label its capture truncated. The exception propagates."""
        self._stop(exception)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Stop the session if it still runs, for example when Lightning's tuner ends a run."""
        self._stop(None)

    def _start(self, trainer: Any, pl_module: LightningModule, **about: Any) -> None:
        self.session.start(pl_module, **about)
        self._installed.callback(
            register_optimizer_step_post_hook(lambda *_: self._close_ranges()).remove
        )
        if isinstance(trainer.profiler, PassThroughProfiler):
            self._installed.callback(setattr, trainer, "profiler", trainer.profiler)
            trainer.profiler = _Parts(pl_module)

    def _stop(self, error: BaseException | None) -> None:
        with self._installed:
            cause = (type(error) if error else None, error, error.__traceback__ if error else None)
            self._close_ranges()
            self._open_phase.__exit__(*cause)
            self.session.__exit__(*cause)
            self._phase = None

    def _enter(self, phase: str, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            if phase not in self.session.config.phases:
                return
            self._start(trainer, pl_module)
        self._phase = phase
        self._open_phase.enter_context(self.session.phase(phase))

    def _close_ranges(self) -> None:
        self._backward.close_all()
        self._optimizer_step.close_all()


class _Parts(Profiler):
    """Opens ranges for the parts of a step; the `PassThroughProfiler` it replaces costs more."""

    def __init__(self, module: LightningModule | None = None) -> None:
        super().__init__()
        self._ranges: dict[str, Range | None] = {}
        self._find_marked_steps(module)

    def _find_marked_steps(self, module: LightningModule | None) -> None:
        """Find the methods that the user marked with `@profiled`; they get no second range."""
        self._marked = {step for step in _STEPS if is_ranged(getattr(module, step, None))}
        self._ranges.clear()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """A context manager that opens a range for an action, or that does nothing."""
        if not backends.armed:
            return _NOTHING
        if action_name not in self._ranges:
            name = self._name(action_name)
            self._ranges[action_name] = Range(name) if name else None
        return self._ranges[action_name] or _NOTHING

    def start(self, action_name: str) -> None:
        """Open the range of an action."""
        self.profile(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        """Close the range of an action."""
        (self._ranges.get(action_name) or _NOTHING).__exit__(None, None, None)

    def _name(self, action: str) -> str | None:
        owner, _, hook = action.rpartition(".")
        if hook.endswith("_next"):
            return "data"
        own = hook in (*_STEPS, "batch_to_device") and hook not in self._marked
        return hook if own and owner.startswith("[Strategy]") else None


class InstrumentProfiler(_Parts):
    """Records windows as `ProfilerCallback` does, and opens a range for every action of Lightning.

    The profiler takes the arguments of `Session`. The ranges of `ProfilerCallback` keep their
    names, such as `training_step`. All other ranges have Lightning's names, such as
    `[Callback]ModelCheckpoint.on_train_batch_end`. If the trainer already has a `ProfilerCallback`,
    the profiler adds none, and its config applies. Unlike Lightning's profilers, this profiler
    prints no summary: the session's sinks write the results.
    """

    def __init__(self, config: Any = NO_CONFIG, **options: Unpack[ProfilerOptions]) -> None:
        super().__init__()
        self.callback = ProfilerCallback(config, **options)

    @property
    def session(self) -> Session:
        """The session that records."""
        return self.callback.session

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Add the callback to the trainer."""
        super().setup(stage, local_rank, log_dir)
        module: Any = self._lightning_module  # type: ignore[attr-defined] # the trainer sets it
        self._find_marked_steps(module)
        trainer = module.trainer
        callbacks = [each for each in trainer.callbacks if isinstance(each, ProfilerCallback)]
        if callbacks:
            self.callback = callbacks[0]
        elif self.session.config.enabled:
            trainer.callbacks = [*trainer.callbacks, self.callback]

    def _name(self, action: str) -> str | None:
        if part := super()._name(action):
            return part
        owner, _, hook = action.rpartition(".")
        own = owner == f"[Callback]{self.callback.state_key}"
        has_range = (
            hook in self._marked
            or action == "optimizer_step"
            or (hook == "backward" and "[Strategy]" in owner)
        )
        # `run_training_epoch` gets no range, because it contains many steps
        if own or has_range or action == "run_training_epoch":
            return None
        return re.sub(r"\{.*\}", "", action)  # without a callback's state, which can be long


def _batches(trainer: Any, module: LightningModule) -> int | None:
    """The maximum number of training batches in the whole fit; None if unknown."""
    epochs = (
        trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else inf
    )
    most = trainer.num_training_batches * epochs
    if module.automatic_optimization:  # otherwise the number of optimizer steps is unknown
        # Lightning raises here if gradient accumulation changes during the fit; the fit must go on
        with suppress(Exception):
            steps = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
            most = min(most, steps) if steps > 0 else most
    return int(most) if 0 < most < inf else None
