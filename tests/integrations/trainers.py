"""How the conformance suite drives each trainer: the job is the same for all, a `Trainer` says how that one runs it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from instrument import Session, profiled

#: Validation batches are numbered from here, so that no training batch has such a number.
VALIDATION = 1000


class Net(nn.Linear):
    """A model whose ranges tell which batch ran: each row of batch k holds nothing but k."""

    def __init__(self, job: Job) -> None:
        super().__init__(2, 1)
        self._job = [job]  # in a list: no trainer looks for state in there

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        number = int(rows[0, 0])
        with profiled(f"batch {number}"):
            self._job[0].reached(number)
            return super().forward(rows * 1e-3)


@dataclass
class Job:
    """What a trainer is to run.

    Attributes:
        folder: for what the trainer itself writes.
        steps: training batches, 0 to `steps` - 1, in one epoch of batches of one row.
        validate_every: how many steps are between two validations of two batches each; None: no validation.
        raises_at: the training batch in which the model raises `error`.
        at_batch: called with each batch's number, from within the model.
        model: the one to train.
        optimizers: those that `optimizer` gave.
    """

    folder: Path
    steps: int = 12
    validate_every: int | None = None
    raises_at: int | None = None
    error: Exception = field(default_factory=lambda: ZeroDivisionError("mine"))
    at_batch: Callable[[int], None] = lambda number: None

    def __post_init__(self) -> None:
        self.model = Net(self)
        self.optimizers: list[torch.optim.Optimizer] = []

    def optimizer(self) -> torch.optim.Optimizer:
        """One for the model; the suite looks at its hooks."""
        self.optimizers.append(torch.optim.SGD(self.model.parameters(), lr=0.01))
        return self.optimizers[-1]

    def reached(self, number: int) -> None:
        """Told by the model, at the start of a batch."""
        self.at_batch(number)
        if number == self.raises_at:
            raise self.error

    def batches(self) -> DataLoader[Any]:
        """Those to train on, as a loader of tensors."""
        return _batches(range(self.steps))

    def validation(self) -> DataLoader[Any]:
        """Those to validate on."""
        return _batches(range(VALIDATION, VALIDATION + 2))


def _batches(numbers: range) -> DataLoader[Any]:
    rows = torch.tensor(numbers, dtype=torch.float32).unsqueeze(1).expand(-1, 2).clone()
    return DataLoader(TensorDataset(rows), batch_size=1)


@dataclass(frozen=True)
class Trainer:
    """How one trainer is driven.

    Attributes:
        name: shown in the tests' names.
        package: what must be installed; None: nothing but torch.
        make: our adapter, from what `Session` takes.
        fit: trains a job with the adapter, from its first step to its last, on the CPU; with None without any of ours.
        session: the adapter's session.
        calls_when_off: calls into this package that one training step may cost when profiling is off.
    """

    name: str
    package: str | None
    make: Callable[..., Any]
    fit: Callable[[Any | None, Job], None]
    session: Callable[[Any], Session] = attrgetter("session")
    calls_when_off: int = 0

    @property
    def missing(self) -> str | None:
        """Why it cannot be tested here."""
        found = self.package is None or find_spec(self.package)
        return None if found else f"the package {self.package} is not installed"


def fit_plainly(session: Session | None, job: Job) -> None:
    optimizer, steps = job.optimizer(), job.batches()
    with ExitStack() as stack:
        if session is not None:
            stack.push(session.start(job.model))
            steps = session.steps(steps)
        for number, (rows,) in enumerate(steps, start=1):
            job.model(rows).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session is not None and job.validate_every and number % job.validate_every == 0:
                with session.phase("validation"), torch.no_grad():
                    for (unseen,) in session.steps(job.validation()):
                        job.model(unseen)


def make_lightning(*config: Any, **options: Any) -> Any:
    from instrument.integrations.lightning import ProfilerCallback

    return ProfilerCallback(*config, **options)


def make_lightning_profiler(*config: Any, **options: Any) -> Any:
    from instrument.integrations.lightning import InstrumentProfiler

    return InstrumentProfiler(*config, **options)


def fit_lightning(adapter: Any, job: Job, package: str = "lightning.pytorch") -> None:
    lightning = import_module(package)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = job.model

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.net(batch[0]).mean()

        def validation_step(self, batch: list[torch.Tensor]) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer()

    is_callback = isinstance(adapter, lightning.Callback)
    trainer = lightning.Trainer(
        callbacks=[adapter] if is_callback else [],
        profiler=None if is_callback else adapter,
        max_epochs=1,
        val_check_interval=job.validate_every,
        limit_val_batches=None if job.validate_every else 0,
        num_sanity_val_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(job.folder),
    )
    trainer.fit(Module(), job.batches(), job.validation())


def fit_pytorch_lightning(adapter: Any, job: Job) -> None:
    fit_lightning(adapter, job, "pytorch_lightning")


def fit_transformers(session: Session | None, job: Job) -> None:
    import transformers

    from instrument.integrations.transformers import attach

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return named(job.batches())  # in their order

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return named(job.validation())

        def compute_loss(
            self, model: nn.Module, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
        ) -> Any:
            return model(**inputs).mean()

    def named(loader: DataLoader[Any]) -> DataLoader[Any]:
        return DataLoader([{"rows": rows} for (rows,) in loader.dataset])  # type: ignore[arg-type]

    arguments = transformers.TrainingArguments(
        output_dir=str(job.folder / "transformers"),
        num_train_epochs=1,
        eval_strategy="steps" if job.validate_every else "no",
        eval_steps=job.validate_every,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=job.model,
        args=arguments,
        optimizers=(job.optimizer(), None),
        eval_dataset=job.validation().dataset,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if session is not None:
        attach(trainer, session)
    trainer.train()


def fit_with_accelerate(session: Session | None, job: Job) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, steps, unseen = accelerator.prepare(
        job.model, job.optimizer(), job.batches(), job.validation()
    )
    with ExitStack() as stack:
        if session is not None:
            stack.push(session.start(model))
            steps = session.steps(steps)
        for number, (rows,) in enumerate(steps, start=1):
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).mean())
                optimizer.step()
                optimizer.zero_grad()
            if session is not None and job.validate_every and number % job.validate_every == 0:
                with session.phase("validation"), torch.no_grad():
                    for (rows,) in session.steps(unseen):
                        model(rows)


def fit_ignite(session: Session | None, job: Job) -> None:
    from ignite.engine import Engine, Events

    from instrument.integrations.ignite import attach

    optimizer = job.optimizer()

    def train(engine: Engine, batch: list[torch.Tensor]) -> float:
        loss = job.model(batch[0]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def validate(engine: Engine) -> None:
        evaluator.run(job.validation())

    trainer, evaluator = Engine(train), Engine(lambda engine, batch: job.model(batch[0]))
    if session is not None:
        attach(trainer, session, model=job.model)
        attach(evaluator, session, phase="validation")
    if job.validate_every:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.validate_every), validate)
    trainer.run(job.batches())


PYTORCH_LIGHTNING = Trainer(
    "pytorch_lightning", "pytorch_lightning", make_lightning, fit_pytorch_lightning
)
TRAINERS = [
    Trainer(
        "plain loop", None, Session, fit_plainly, session=lambda session: session, calls_when_off=20
    ),
    Trainer("lightning", "lightning", make_lightning, fit_lightning),
    Trainer(
        "lightning profiler", "lightning", make_lightning_profiler, fit_lightning, calls_when_off=60
    ),
    PYTORCH_LIGHTNING,
    Trainer(
        "transformers", "transformers", Session, fit_transformers, session=lambda session: session
    ),
    Trainer(
        "accelerate",
        "accelerate",
        Session,
        fit_with_accelerate,
        session=lambda session: session,
        calls_when_off=20,
    ),
    Trainer("ignite", "ignite", Session, fit_ignite, session=lambda session: session),
]
