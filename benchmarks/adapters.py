"""What a training step costs with ours off, and waiting, beside the same trainer without it; run by `make bench`.

The model is as small as can be, so that a step is little but the trainer itself: on any real one the ratios are nearer
to 1. Fits with and without take turns; each gives the median CPU time of its steps, and the fastest fit counts, as the
one that other programs disturbed least.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loguru import logger
from rounds import Row, report

sys.path.append(str(Path(__file__).parent.parent / "tests" / "integrations"))

from trainers import TRAINERS, Job, Trainer

warnings.simplefilter("ignore")
STEPS, ROUNDS = 400, 25
WITH = {"without": None, "off": {"enabled": False}, "waiting": {"wait": 10**9, "active": 1}}


def step_ns(trainer: Trainer, config: dict[str, Any] | None, folder: Path) -> float:
    """The median CPU time of a step in one fit, from batch to batch."""
    began: list[int] = []
    job = Job(folder, steps=STEPS, at_batch=lambda number: began.append(time.process_time_ns()))
    adapter = None if config is None else trainer.make(config, output_dir=folder / "profile")
    trainer.fit(adapter, job)
    return median(
        after - before for before, after in zip(began[STEPS // 4 :], began[STEPS // 4 + 1 :])
    )


def rows(trainer: Trainer) -> list[Row]:
    """Two claims for a trainer."""
    times: dict[str, list[float]] = {name: [] for name in WITH}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(ROUNDS):
            names = list(WITH)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(step_ns(trainer, WITH[name], Path(folder)))
    took = {name: min(values) for name, values in times.items()}
    return [
        Row(
            f"{trainer.name}: a step, off",
            took["off"],
            "the same without it",
            took["without"],
            1.01,
        ),
        Row(
            f"{trainer.name}: a step, waiting",
            took["waiting"],
            "the same without it",
            took["without"],
            1.05,
        ),
    ]


def main() -> int:
    logger.remove()
    logging.disable(logging.WARNING)
    title = f"Steps of trainers: torch {torch.__version__}, Python {sys.version.split()[0]}, the best of {ROUNDS} fits"
    present = [trainer for trainer in TRAINERS if not trainer.missing]
    return 0 if report(title, [row for trainer in present for row in rows(trainer)]) else 1


if __name__ == "__main__":
    sys.exit(main())
