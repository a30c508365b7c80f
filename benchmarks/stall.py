"""How long training waits at the end of a window: in parts by `max_stall_ms`, beside one long window; run by `make bench`.

The loop is a storm of operators. A window of some seconds is requested; then the gaps between two steps are compared
with the budget, once in parts and once whole, in turns.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from statistics import quantiles
from typing import NamedTuple

import torch
from loguru import logger
from rounds import Row, report

from instrument import Session

warnings.simplefilter("ignore")
BUDGET_MS = 200.0
SECONDS = 3.0
EVENTS_PER_STEP = 1000
ROUNDS = 2


class Measured(NamedTuple):
    """Gaps between two steps at which a part ended, the share of the time that is recorded, and events."""

    gaps_ms: list[float]
    recorded: float
    events_per_s: float


def measured(budget_ms: float | None, seconds: float = SECONDS) -> Measured:
    """Record some seconds of a storm of operators."""
    torch.set_num_threads(1)
    x = torch.ones(2)
    with Session(
        at_steps=[], max_stall_ms=budget_ms, max_window_memory=None, output_dir=tempfile.mkdtemp()
    ) as session:
        gaps_s = list[float]()

        def step() -> None:
            for _ in range(EVENTS_PER_STEP):
                torch.add(x, x)
            ended, saved = time.perf_counter(), session.saved
            session.step()
            if session.saved > saved:
                gaps_s.append(time.perf_counter() - ended)

        for _ in range(20):
            step()
        asked, steps = session.request(seconds=seconds), 0
        step()  # the window begins
        began = time.perf_counter()
        while asked.state in ("waiting", "recording"):
            step()
            steps += 1
        took_s = time.perf_counter() - began
        running_s = took_s - sum(gaps_s)
        session.wait()
    return Measured(
        [each * 1e3 for each in gaps_s], running_s / took_s, steps * EVENTS_PER_STEP / running_s
    )


def main() -> int:
    logger.remove()
    measured(None, 0.01)  # the first window of a process takes a second longer
    parts, whole = list[Measured](), list[Measured]()
    for _ in range(ROUNDS):
        parts.append(measured(BUDGET_MS))
        whole.append(measured(None))
    gaps_ms = [gap for each in parts for gap in each.gaps_ms]
    longest_ms = max(gap for each in whole for gap in each.gaps_ms)
    for name, found in (("in parts", parts), ("whole", whole)):
        for each in found:
            print(
                f"{name}: {len(each.gaps_ms)} gaps, the longest {max(each.gaps_ms):.0f} ms; "
                f"{each.recorded:.0%} of the time recorded; {each.events_per_s:,.0f} events/s"
            )
    rows = [
        Row(
            "end of a part, 95 % of them",
            quantiles(gaps_ms, n=20)[-1],
            "budget",
            BUDGET_MS,
            1.2,
            "ms",
        ),
        Row("end of a part, the longest", max(gaps_ms), "end of one window", longest_ms, 1.0, "ms"),
    ]
    title = f"Training waits at the end of a window: torch {torch.__version__}"
    return 0 if report(title, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
