from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median_high
from typing import Any

from instrument.record.triggers import Step
from instrument.record.triggers.slow_step import SlowStep


def judge(**options: Any) -> Callable[[Step], Any]:
    return SlowStep(**options).begin(Path(), [].append).fires


def test_it_fires_exactly_where_the_definition_says() -> None:
    random.seed(0)
    times = [random.choice([random.randint(1, 100), random.randint(1, 1000)]) for _ in range(500)]
    fires = judge(factor=2.5, over=31, after=7, excess_ms=200e-6)
    for number, took in enumerate(times):
        before = times[max(0, number - 31) : number]
        slow = len(before) >= 7 and took > max(2.5 * (median := median_high(before)), median + 200)
        assert bool(fires(Step(number, took))) == slow, number


def test_it_says_why() -> None:
    fires = judge(factor=3, after=5)
    assert [fires(Step(number, 740_000_000)) for number in range(812)] == [None] * 812
    assert fires(Step(812, 3_100_000_000)) == "step 812 took 3.100 s, 4.2 × the median of 740.0 ms"


def test_recorded_steps_are_neither_judged_nor_counted() -> None:
    fires = judge(factor=2, over=5, after=5, excess_ms=0)
    for number in range(5):
        fires(Step(number, 10))
    for number in range(5, 20):
        assert fires(Step(number, 1000, recorded=True)) is None
    assert fires(Step(20, 21))


def test_each_run_begins_with_no_step_known() -> None:
    trigger = SlowStep(factor=2, after=2, excess_ms=0)
    for _ in range(2):
        fires = trigger.begin(Path(), [].append).fires
        assert [
            bool(fires(Step(number, took))) for number, took in enumerate((1, 1000, 1, 3000))
        ] == [False, False, False, True]


def test_short_steps_vary_and_are_not_slow() -> None:
    random.seed(0)
    fires = judge()
    for number in range(2000):
        assert fires(Step(number, random.choice([30_000] * 50 + [400_000, 900_000]))) is None
    assert fires(Step(2000, 1_031_000)) == "step 2000 took 1.031 ms, 34.4 × the median of 30.00 µs"
