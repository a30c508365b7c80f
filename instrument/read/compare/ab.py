"""The result of an A/B comparison: how B differs from A, by a test over blocks of runs.

`instrument.read.compare.statistics` describes the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from instrument.read.compare.ab_runs import Block, Label, Run, log_ratios, times
from instrument.read.compare.statistics import (
    Change,
    Floats,
    Verdict,
    blocks_missing,
    changes,
    level_of,
)

#: A step counts as the same if its time changes by at most this share.
MARGIN = 0.02
#: Only ranges that take at least this share of the step are compared, and of these only this many
#: longest. With more ranges, only clearer changes would be significant.
LEAST_SHARE, MOST_RANGES = 0.01, 19


class Quantity(NamedTuple):
    """The time of the step (`path` None) or of a range, as medians of runs, and its change."""

    path: str | None
    a_ns: float
    b_ns: float
    change: Change
    verdict: Verdict


class CounterValues(NamedTuple):
    """The lowest and the highest value of a counter in the steps of A and of B."""

    name: str
    a: tuple[int, int]
    b: tuple[int, int]

    @property
    def differs(self) -> bool:
        """Whether all values of one side are lower than all values of the other side."""
        return self.a[1] < self.b[0] or self.b[1] < self.a[0]


class Comparison:
    """The result of an A/B comparison.

    Attributes:
        blocks: at least one block.
        margin: a time counts as the same if it changes by at most this share.
        quantities: the step, then the compared ranges, the longest first: at most 19, which take
            time in all runs and at least 1 % of the step.
        continued: how often the comparison was continued.
        level: the share of comparisons of a program with itself that may report a change now.
    """

    def __init__(self, blocks: Sequence[Block], margin: float = MARGIN, continued: int = 0) -> None:
        self.blocks = blocks
        self.margin = margin
        self.continued = continued
        self.level = level_of(continued)
        self._runs = [run for block in blocks for run in block.runs]
        paths = [None, *self._common_ranges()[:MOST_RANGES]]
        found = changes(np.stack([self._log_ratios(path) for path in paths], axis=1), self.level)
        self.quantities = [
            Quantity(
                path,
                median(times(self._runs, "A", path)),
                median(times(self._runs, "B", path)),
                change,
                change.verdict(margin),
            )
            for path, change in zip(paths, found)
        ]

    @property
    def step(self) -> Quantity:
        """The whole step. Its verdict is the verdict of the comparison."""
        return self.quantities[0]

    @property
    def blocks_missing(self) -> int | None:
        """About how many more blocks a verdict on the step needs; None if there is one."""
        if self.step.verdict != "undecided":
            return None
        change, blocks, quantities = self.step.change, len(self.blocks), len(self.quantities)
        return blocks_missing(change, blocks, quantities, self.margin, self.level)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest change of the step in a block."""
        ratios = np.expm1(self._log_ratios(None))
        return float(ratios.min()), float(ratios.max())

    def only_in(self, label: Label) -> dict[str, float]:
        """The ranges that no run of the other side has, each with its median time in ns."""
        own, others = self.runs(label), self.runs("B" if label == "A" else "A")
        theirs = {path for run in others for path in run.ranges_ns}
        return {
            path: median(run.ranges_ns.get(path, 0) for run in own)
            for path in dict.fromkeys(path for run in own for path in run.ranges_ns)
            if path not in theirs
        }

    @property
    def counters(self) -> list[CounterValues]:
        """The counters that all runs recorded."""
        a, b = self._counter_values("A"), self._counter_values("B")
        return [CounterValues(name, a[name], b[name]) for name in a if name in b]

    def runs(self, label: Label) -> list[Run]:
        """The runs of one side, in their order."""
        return [run for run in self._runs if run.label == label]

    def _common_ranges(self) -> list[str]:
        runs = self._runs
        least_ns = LEAST_SHARE * median(run.step_ns for run in runs)
        middle_ns = {
            path: median(run.ranges_ns[path] for run in runs)
            for path in runs[0].ranges_ns
            if all(run.ranges_ns.get(path, 0) > 0 for run in runs)
        }
        long = [path for path, time_ns in middle_ns.items() if time_ns >= least_ns]
        return sorted(long, key=lambda path: -middle_ns[path])

    def _log_ratios(self, path: str | None) -> Floats:
        return log_ratios([block.runs for block in self.blocks], path)

    def _counter_values(self, label: Label) -> dict[str, tuple[int, int]]:
        runs = [run.counters for run in self.runs(label)]
        found = {name: [counts.get(name) for counts in runs] for name in runs[0]}
        return {
            name: (min(count.least for count in counts), max(count.most for count in counts))
            for name, values in found.items()
            if len(counts := [count for count in values if count is not None]) == len(runs)
        }
