"""What a step costs the training loop while no window is open, beside torch's own profiler; run by `make bench`."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from loguru import logger
from rounds import Row, medians, report
from torch.profiler import ProfilerActivity, profile, schedule

from instrument import Session
from instrument.base.presets import shipped

warnings.simplefilter("ignore")
FAR = 10**9
CALLS = 2000


def waiting() -> list[Row]:
    """`session.step()` and `torch.profiler.profile.step()`, both far before their first window."""
    with ExitStack() as stack:

        def session(**options: Any) -> Session:
            folder = tempfile.mkdtemp()
            return stack.enter_context(
                Session({"wait": FAR, "active": 1, "output_dir": folder}, **options)
            )

        # slow_step would be right to fire: other programs make some of these empty steps slow
        triggers = {
            name: {"factor": 1e9} if name == "slow_step" else {} for name in shipped("triggers")
        }
        bare, watched, given = session(), session(triggers=triggers), session(triggers=triggers)
        loss = torch.tensor(1.0)
        torchs = profile(
            activities=[ProfilerActivity.CPU], schedule=schedule(wait=FAR, warmup=0, active=1)
        )
        stack.enter_context(torchs)
        contestants: dict[str, Callable[[], object]] = {
            "bare": bare.step,
            "watched": watched.step,
            "given": lambda: given.step(loss),
            "torch": torchs.step,
        }
        took = medians(contestants, calls=CALLS)
    peer = "torch.profiler.profile.step(), waiting"
    return [
        Row("session.step(), waiting, no triggers", took["bare"], peer, took["torch"], 1 / 15),
        Row("session.step(), waiting, all triggers", took["watched"], peer, took["torch"], 1 / 5),
        Row(
            "session.step(loss=tensor), waiting, all triggers",
            took["given"],
            peer,
            took["torch"],
            1 / 3,
        ),
    ]


def main() -> int:
    logger.remove()
    title = f"Steps while waiting: torch {torch.__version__}, Python {sys.version.split()[0]}, medians of rounds"
    return 0 if report(title, waiting()) else 1


if __name__ == "__main__":
    sys.exit(main())
