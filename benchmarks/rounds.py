"""Interleaved measurements, their medians, and a table of ratios."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def medians(
    contestants: Mapping[str, Callable[[], object]], *, calls: int, rounds: int = 25
) -> dict[str, float]:
    """Median nanoseconds per call of each contestant; all of them take turns in each round, in changing order."""
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:  # warm up
        _time(contestants[name], max(1, calls // 10))
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(_time(contestants[name], calls))
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def _time(act: Callable[[], object], calls: int) -> float:
    repeat = range(calls)
    start = time.perf_counter_ns()
    for _ in repeat:
        act()
    return (time.perf_counter_ns() - start) / calls


@dataclass
class Row:
    """One claim: what was measured, ours and the peer's nanoseconds, and the ratio that must be reached.

    With a unit of its own the two figures are in that unit instead, and shown with one decimal.
    """

    what: str
    ours_ns: float
    peer: str
    peer_ns: float
    at_most: float
    unit: str = ""

    @property
    def ratio(self) -> float:
        return self.ours_ns / self.peer_ns

    @property
    def reached(self) -> bool:
        return self.ratio <= self.at_most


def report(title: str, rows: Sequence[Row]) -> bool:
    """Print the rows; whether every ratio was reached."""
    print(f"\n{title}")
    print(f"{'what':<58}{'ours':>12}  {'peer':<44}{'theirs':>12}{'ratio':>10}{'at most':>10}")
    for row in rows:
        print(
            f"{row.what:<58}{_figure(row, row.ours_ns):>12}  {row.peer:<44}{_figure(row, row.peer_ns):>12}"
            f"{_ratio(row.ratio):>10}{_ratio(row.at_most):>10}  {'reached' if row.reached else 'MISSED'}"
        )
    return all(row.reached for row in rows)


def _figure(row: Row, value: float) -> str:
    return f"{value:.1f} {row.unit}" if row.unit else _unit(value)


def _unit(ns: float) -> str:
    return (
        f"{ns:.0f} ns" if ns < 1e4 else f"{ns / 1e3:.1f} µs" if ns < 1e7 else f"{ns / 1e6:.1f} ms"
    )


def _ratio(value: float) -> str:
    return f"1/{1 / value:.0f}" if 0 < value < 0.1 else f"{value:.3f}"
