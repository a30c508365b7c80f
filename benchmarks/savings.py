"""Compare the savings that findings predict with those of the real fixes; run by `make bench`.

A twin is a step with a problem, and the same step without it (`tests/findings/`). Slow and fixed
steps are recorded in turns. The finding predicts a saving from the slow steps alone. The measured
saving is the difference between the medians of the slow and the fixed steps.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from loguru import logger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from findings.twins import Twin, all_twins, found, predicted_ns, recorded

warnings.simplefilter("ignore")
# Each twin is recorded this often, and the medians count: other programs disturb some recordings.
ROUNDS = 5
MEDIAN_AT_MOST = 0.2


class Compared(NamedTuple):
    """One twin: its slow step, the measured and the predicted saving, in nanoseconds.

    The predicted saving is None if a recording has no prediction.
    """

    twin: Twin
    slow_ns: float
    measured_ns: float
    predicted_ns: float | None

    @property
    def error(self) -> float | None:
        """The predicted minus the measured saving, as a share of the measured saving."""
        if self.predicted_ns is None:
            return None
        return (self.predicted_ns - self.measured_ns) / abs(self.measured_ns)

    @property
    def is_wrong_sign(self) -> bool:
        return self.predicted_ns is not None and self.predicted_ns * self.measured_ns <= 0


def compared(twin: Twin) -> Compared:
    """Record a twin `ROUNDS` times, and return the medians of these recordings."""
    slow, saved, predicted = [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            both = recorded(twin, Path(folder))
            slow.append(both.slow_ns)
            saved.append(both.saving_ns)
            predicted.append(predicted_ns(found(both.slow, twin.code)))
    known = [each for each in predicted if each is not None]
    return Compared(
        twin,
        slow_ns=statistics.median(slow),
        measured_ns=statistics.median(saved),
        predicted_ns=statistics.median(known) if len(known) == ROUNDS else None,
    )


def report(rows: list[Compared]) -> bool:
    """Print the table.

    Returns:
        Whether the median error is small enough, and no predicted saving has the wrong sign.
    """
    print(f"\nSavings, predicted and measured: torch {torch.__version__}, medians of steps")
    print(f"{'finding':<28}{'twin':<40}{'step':>12}{'predicted':>12}{'measured':>12}{'error':>9}")
    for row in rows:
        wrong = "  WRONG SIGN" if row.is_wrong_sign else ""
        predicted = "-" if row.predicted_ns is None else _ms(row.predicted_ns)
        error = "-" if row.error is None else f"{row.error:+.1%}"
        print(
            f"{row.twin.code:<28}{row.twin.name:<40}{_ms(row.slow_ns):>12}{predicted:>12}"
            f"{_ms(row.measured_ns):>12}{error:>9}{wrong}"
        )
    errors = [abs(row.error) for row in rows if row.error is not None]
    wrong = sum(row.is_wrong_sign for row in rows)
    median = statistics.median(errors) if errors else 0.0
    reached = median <= MEDIAN_AT_MOST and not wrong
    print(
        f"{len(errors)} of {len(rows)} savings are predicted: median error {median:.1%} (at most "
        f"{MEDIAN_AT_MOST:.0%}), {wrong} with the wrong sign  {'reached' if reached else 'MISSED'}"
    )
    return reached


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def main(only: str = "") -> int:
    logger.remove()
    return 0 if report([compared(twin) for twin in all_twins() if only in str(twin)]) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
