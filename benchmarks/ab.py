"""Measure how reliable `instrument ab` is on a noisy machine: false alarms and statistical power.

`data/blocks.npz` holds 400 recorded blocks of one program. They ran on two CPUs that other programs
used too; during half of the blocks, one more program kept a CPU busy. `data/record_blocks.py` wrote
the file.

A trial draws some of the blocks at random, and the order A B B A or B A A B of each block. So A and
B are the same program, and every reported change is a false alarm. To measure the power, a trial
multiplies the times of one range in the runs of B, and adds the same nanoseconds to the step. It
succeeds if this range is reported as slower, no other range is reported, and the interval contains
the planted change.

`instrument try` decides otherwise: on the step alone, after 8 blocks, or after 8 more at half of the
level. Here it compares the program with itself too, and what counts is how often it says "faster".

    python benchmarks/ab.py

It takes about 15 minutes of CPU time. It uses recorded times only, so other programs may run at the
same time.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from instrument.read.compare import tries
from instrument.read.compare.ab import LEAST_SHARE, MARGIN
from instrument.read.compare.statistics import LEVEL, Floats, changes

DATA = Path(__file__).with_name("data") / "blocks.npz"
TRIALS, POWER_TRIALS, TRY_TRIALS = 2_000, 200, 1_000
# For each planted change, the share of trials that must succeed with STATED blocks.
WANTED = {0.05: 0.50, 0.10: 0.80, 0.20: 0.95}
STATED = 280
BLOCKS = (10, 25, 50, 100, 200, STATED)
ALARMED = ("slower", "faster")
STEP = 0  # the column of the whole step; the columns of the ranges follow
PLACES = np.array([[0, 1, 1, 0], [1, 0, 0, 1]])  # the orders of a block: 0 is A, 1 is B


def load(path: Path = DATA) -> tuple[list[str], Floats]:
    """The names of the compared quantities, and their times in ns by block, run and quantity.

    A time is the median over the steps of a run without its first step.
    """
    with np.load(path) as data:
        step_ns = np.median(data["step_us"][:, :, 1:], axis=2) * 1e3
        times = np.concatenate([step_ns[:, :, None], data["range_ns"]], axis=2).astype(np.float64)
        names = np.array(["step", *data["ranges"]])
    middle_ns = np.median(times, axis=(0, 1))
    is_long = middle_ns >= LEAST_SHARE * middle_ns[STEP]
    return names[is_long].tolist(), times[:, :, is_long]


def trial(
    times: Floats, rng: np.random.Generator, blocks: int, column: int = STEP, planted: float = 0.0
) -> Floats:
    """The log-ratios of one comparison of a program with itself, or with a planted change."""
    order = rng.permutation(len(times))[:blocks]
    chosen = times[order]
    is_b = PLACES[rng.integers(0, 2, blocks)].astype(bool)
    if planted:
        chosen[is_b, STEP] += planted * chosen[is_b, column]
        chosen[is_b, column] *= 1 + planted
    logs = np.log(chosen)
    return np.where(is_b[:, :, None], logs, -logs).sum(axis=1) / 2


def alarms(times: Floats, blocks: int, trials: int = TRIALS) -> float:
    """The share of comparisons of the program with itself that report any change."""
    rng = np.random.default_rng(0)
    found = [
        any(each.verdict(MARGIN) in ALARMED for each in changes(trial(times, rng, blocks)))
        for _ in range(trials)
    ]
    return sum(found) / trials


def says_faster(log_ratios: Floats) -> bool:
    """Whether `instrument try` says "faster" of these blocks; see `tries._compare`."""
    blocks = len(log_ratios) // 2
    change = changes(log_ratios[:blocks])[0]
    if change.verdict(tries.MARGIN) == "undecided" and change.share <= 0:
        change = changes(log_ratios, LEVEL / 2)[0]
    return change.verdict(tries.MARGIN) == "faster"


def false_faster(times: Floats, trials: int = TRY_TRIALS) -> float:
    """The share of comparisons of the program with itself in which `instrument try` says "faster"."""
    rng = np.random.default_rng(2)
    step = times[:, :, [STEP]]
    blocks = 2 * tries._BLOCKS
    return sum(says_faster(trial(step, rng, blocks)) for _ in range(trials)) / trials


def power(
    times: Floats, blocks: int, column: int, planted: float, trials: int = POWER_TRIALS
) -> float:
    """The share of trials that find the planted change in the right range and of the right size."""
    rng = np.random.default_rng(1)
    succeeded = 0
    for _ in range(trials):
        found = changes(trial(times, rng, blocks, column, planted))
        alarmed = [k for k, each in enumerate(found) if each.verdict(MARGIN) in ALARMED]
        change = found[column]
        is_sized = change.low is not None and change.low <= planted <= (change.high or math.inf)
        succeeded += set(alarmed) - {STEP} == {column} and change.share > 0 and is_sized
    return succeeded / trials


def main() -> int:
    names, times = load()
    print(
        f"{len(times)} blocks of four runs; median step {np.median(times[..., STEP]) / 1e6:.1f} ms"
    )
    # The share is a random sample, so it may exceed LEVEL by two standard errors.
    limit = LEVEL + 2 * math.sqrt(LEVEL * (1 - LEVEL) / TRIALS)
    print(
        f"\nFalse alarms in {TRIALS:,} comparisons of the program with itself (limit: {limit:.1%})"
    )
    reached = True
    for blocks in BLOCKS[:3]:
        share = alarms(times, blocks)
        reached &= share <= limit
        print(f"{blocks:>4} blocks  {share:.1%}", flush=True)
    share = false_faster(times)
    reached &= share <= LEVEL
    print(
        f"\n`instrument try` says faster in {share:.1%} of {TRY_TRIALS:,} comparisons of the program "
        f"with itself (limit: {LEVEL:.0%})",
        flush=True,
    )
    print(
        "\nShare of planted changes that are found in the right range and of the right size "
        f"({POWER_TRIALS} comparisons each)"
    )
    print(f"{'range':<44}{'change':>8}" + "".join(f"{blocks:>5} blocks" for blocks in BLOCKS))
    for column, name in enumerate(names):
        if column == STEP:
            continue
        for planted, wanted in WANTED.items():
            curve = [power(times, blocks, column, planted) for blocks in BLOCKS]
            text = "".join(f"{share:>12.0%}" for share in curve)
            at_stated = curve[BLOCKS.index(STATED)]
            reached &= at_stated >= wanted
            mark = "" if at_stated >= wanted else f"  MISSED: {wanted:.0%} at {STATED} blocks"
            print(f"{name:<44}{planted:>8.0%}{text}{mark}", flush=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
