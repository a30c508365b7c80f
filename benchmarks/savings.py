"""Compare the savings that findings predict with those of the real fixes; run by `make bench`.

A twin is a step with a problem, and the same step without it (`tests/findings/`). Slow and fixed
steps are recorded in turns. The finding predicts a saving from the slow steps alone. The measured
saving is the difference between the medians of the slow and the fixed steps.

Programs are small trainings with one fault. Of each, the table also shows whether the log names the
fault first, and what it names without the fault.

    python benchmarks/savings.py [PART_OF_A_NAME [ROUNDS]]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from loguru import logger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from findings.programs import PROGRAMS, TWINS
from findings.twins import (
    Twin,
    found,
    headline,
    named,
    predicted,
    recorded,
    without_problem,
)

from instrument.read.advise.finding import Saving

warnings.simplefilter("ignore")
# Each twin is recorded this often, and the medians count: other programs disturb some recordings.
ROUNDS = 5
MEDIAN_AT_MOST = 0.2
# A promise is near if it is at most this many times the measured saving, and at least its inverse.
NEAR = 1.5


class Named(NamedTuple):
    """What the log names in most recordings of a program, as codes; caveats are left out.

    Attributes:
        first: the headline with the fault; "nothing" if there is none.
        clean: all that is named without the fault.
    """

    first: str
    clean: list[str]


class Compared(NamedTuple):
    """One twin: its slow step, the measured and the predicted saving, in nanoseconds.

    The prediction is None if a recording has none; `named` is None unless the twin is a program.
    """

    twin: Twin
    slow_ns: float
    measured_ns: float
    predicted: Saving | None
    named: Named | None

    @property
    def ratio(self) -> float | None:
        """The predicted through the measured saving."""
        return None if self.predicted is None else self.predicted.saving_ns / self.measured_ns

    @property
    def is_near(self) -> bool:
        return self.ratio is not None and 1 / NEAR <= self.ratio <= NEAR

    @property
    def is_wrong_sign(self) -> bool:
        return self.ratio is not None and self.ratio <= 0

    @property
    def is_first(self) -> bool:
        return self.named is not None and self.named.first == self.twin.code


def compared(twin: Twin, rounds: int) -> Compared:
    """Record a twin several times, and return the medians of these recordings."""
    slow, saved, promised = [], [], []
    first, clean = Counter[str](), Counter[str]()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            both = recorded(twin, Path(folder) / "both")
            slow.append(both.slow_ns)
            saved.append(both.saving_ns)
            promised.append(predicted(found(both.slow, twin.code)))
            if twin in PROGRAMS:
                fixed = without_problem(twin, both, Path(folder) / "clean")
                first[headline(both.slow)] += 1
                clean.update({each.code for each in named(fixed)})
    known = sorted((each for each in promised if each is not None), key=lambda each: each.saving_ns)
    most = [code for code, count in clean.items() if 2 * count > rounds]
    return Compared(
        twin,
        slow_ns=statistics.median(slow),
        measured_ns=statistics.median(saved),
        predicted=known[rounds // 2] if len(known) == rounds else None,
        named=Named(first.most_common(1)[0][0], most) if first else None,
    )


def report(rows: list[Compared]) -> bool:
    """Print the table.

    Returns:
        Whether the median error is small enough, and no predicted saving has the wrong sign.
    """
    print(f"\nSavings, predicted and measured: torch {torch.__version__}, medians of steps in ms")
    print(
        f"{'finding':<24}{'twin':<50}{'step':>10}{'predicted':>10}{'bounds':>20}{'measured':>10}"
        f"{'ratio':>7}"
    )
    for row in rows:
        print(_line(row))
    programs = [row for row in rows if row.named is not None]
    if programs:
        _print_programs(programs)
    errors = [abs(row.ratio - 1) for row in rows if row.ratio is not None]
    wrong = sum(row.is_wrong_sign for row in rows)
    median = statistics.median(errors) if errors else 0.0
    reached = median <= MEDIAN_AT_MOST and not wrong
    print(
        f"{len(errors)} of {len(rows)} savings are predicted: median error {median:.1%} (at most "
        f"{MEDIAN_AT_MOST:.0%}), {wrong} with the wrong sign  {'reached' if reached else 'MISSED'}"
    )
    return reached


def _line(row: Compared) -> str:
    saving, ratio = row.predicted, row.ratio
    known, bounds = "-", ""
    if saving is not None:
        known, bounds = _ms(saving.saving_ns), f"{_ms(saving.low_ns)} to {_ms(saving.high_ns)}"
    return (
        f"{row.twin.code:<24}{row.twin.name:<50}{_ms(row.slow_ns):>10}{known:>10}{bounds:>20}"
        f"{_ms(row.measured_ns):>10}{'-' if ratio is None else f'{ratio:.2f}':>7}"
        f"{'  WRONG SIGN' if row.is_wrong_sign else ''}"
    )


def _print_programs(rows: list[Compared]) -> None:
    """Print what the log names on each program, and how many programs meet each demand."""
    print(f"\n{'program':<50}{'named first':<32}without the fault")
    clean = 0
    for row in rows:
        assert row.named is not None
        first = "yes" if row.is_first else f"no, but {row.named.first}"
        print(f"{row.twin.name:<50}{first:<32}{', '.join(row.named.clean) or 'only caveats'}")
        clean += not row.named.clean
    print(
        f"Of {len(rows)} programs: {sum(row.is_first for row in rows)} faults named first; "
        f"{sum(row.is_near for row in rows)} savings within a factor of {NEAR}, "
        f"{sum(row.is_wrong_sign for row in rows)} with the wrong sign; "
        f"{clean} name only caveats without the fault\n"
    )


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f}"


def main(only: str = "", rounds: str = str(ROUNDS)) -> int:
    logger.remove()
    twins = [twin for twin in [*PROGRAMS, *TWINS] if only in str(twin)]
    return 0 if report([compared(twin, int(rounds)) for twin in twins]) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
