"""Statistical tests of times: `changes` for blocks of `instrument ab`, `is_higher` for windows.

docs/compare.md describes the blocks, the permutation test over all quantities and the estimate. The
sums of ranks are compared for all patterns of signs, or, of more than 17 blocks, for 10,000 random
ones. The interval inverts the test (Hollander and Wolfe, Nonparametric Statistical Methods, 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

Rational = int | Fraction
Floats = npt.NDArray[np.float64]
Verdict = Literal["slower", "faster", "same", "undecided"]

#: The significance level: the share of comparisons of a program with itself that may report a
#: change.
LEVEL = 0.05
# The level of `is_higher`. It is exact, because three windows on each side can reach exactly 1/20.
_LEVEL_OF_WINDOWS = Fraction(1, 20)
# Up to `_MOST_EXACT` blocks, all patterns of signs are counted. With more blocks, `_PATTERNS`
# random patterns are made with the seed `_SEED`.
_MOST_EXACT, _PATTERNS, _SEED = 17, 10_000, 0


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one quantity from A to B, as a share: 0.05 is 5 % more in B.

    Attributes:
        share: the estimate of the change.
        low, high: the interval, of 95 % if the level is `LEVEL`, which holds for all quantities
            together; None if there are too few blocks for an interval.
        p_value: the probability that at least one quantity shows a change at least as clear as this
            one, if A and B do not differ.
    """

    share: float
    low: float | None
    high: float | None
    p_value: float

    def verdict(self, margin: float) -> Verdict:
        """Return "same" if the interval lies within ± `margin`, as in an equivalence test.

        Otherwise, "slower" and "faster" mean that the interval does not contain 0.
        """
        if self.low is None or self.high is None:
            return "undecided"
        if -margin <= self.low and self.high <= margin:
            return "same"
        if self.low > 0:
            return "slower"
        return "faster" if self.high < 0 else "undecided"


def changes(log_ratios: Floats, level: float = LEVEL) -> list[Change]:
    """Estimate and test the change of each quantity.

    `log_ratios` has a row for each block and a column for each quantity; all values are finite.
    Cost: at most 0.1 s for 20 quantities.
    """
    blocks = len(log_ratios)
    # Equal values get different ranks. This is valid, because the ranks do not depend on signs.
    ranks = 1 + np.argsort(np.argsort(np.abs(log_ratios), axis=0), axis=0)
    observed = np.abs((np.sign(log_ratios) * ranks).sum(axis=0))
    signed = np.where(log_ratios < 0, -ranks, ranks).astype(np.float64)
    largest = np.sort(np.abs(_signs(blocks) @ signed).max(axis=1))
    at_least = len(largest) - np.searchsorted(largest, observed, "left")
    left_out = _left_out(blocks, largest, level)
    return [
        _change(column, left_out, float(count / len(largest)))
        for column, count in zip(log_ratios.T, at_least)
    ]


def blocks_missing(
    change: Change, blocks: int, quantities: int, margin: float, level: float = LEVEL
) -> int:
    """Estimate how many more blocks an undecided change needs for a verdict at half of its `level`.

    The result is rough: it assumes that the estimate of the change stays the same, and that the
    interval shrinks with the square root of the number of blocks. At half of the level, it is wider
    by the ratio of the normal distribution's quantiles.
    """
    least = least_blocks(quantities, level / 2)
    if change.low is None or change.high is None:
        return max(least - blocks, 1)
    share, low, high = (math.log1p(value) for value in (change.share, change.low, change.high))
    wanted = max(abs(share), math.log1p(margin) - abs(share))
    now, then = (NormalDist().inv_cdf(1 - each / 2 / quantities) for each in (level, level / 2))
    needed = blocks * (then / now * max(share - low, high - share) / wanted) ** 2
    return max(math.ceil(needed) - blocks, least - blocks, 1)


def level_of(continued: int) -> float:
    """The level of a comparison that was continued so many times.

    Each look at a result can report a change by chance. As each level is half of the one before, at
    most 10 % of comparisons of a program with itself report a change, however often they go on.
    """
    return math.ldexp(LEVEL, -continued)


def least_blocks(quantities: int, level: float = LEVEL) -> int:
    """The fewest blocks that can show a significant change if this many quantities are tested.

    By chance, all n blocks have the same sign in 2 of 2**n patterns, for each quantity.
    """
    return math.ceil(math.log2(2 * quantities / level))


def is_higher(these: Sequence[Rational], those: Sequence[Rational]) -> bool:
    """Whether `these` are higher than `those`, by the rank-sum test of Mann, Whitney and Wilcoxon.

    The statistic is the number of pairs of a value of each in which that of `these` is higher;
    equal values count as not higher. The level is 5 %. The two samples must be independent.
    """
    pairs = sum(low < high for low in those for high in these)
    orders = _orders(len(those), len(these))
    return sum(orders[pairs:]) <= _LEVEL_OF_WINDOWS * sum(orders)


def shifts(before: Floats, after: Floats) -> tuple[Floats | None, Floats | None]:
    """The lower and upper ends of the 90 % intervals of changes; None if there are too few samples.

    Each row is a quantity, each column a sample; three samples on each side are enough. The
    interval holds the changes that `is_higher` rejects in neither direction, so it ends at
    differences of pairs of samples (Hollander and Wolfe, 4.3).
    """
    orders = _orders(before.shape[1], after.shape[1])
    rare = np.cumsum(np.array(orders, object)) <= _LEVEL_OF_WINDOWS * sum(orders)
    left_out = int(rare.sum())
    if not left_out:
        return None, None
    pairs = (after[:, :, None] - before[:, None, :]).reshape(len(before), -1)
    pairs.sort(axis=1)
    return pairs[:, left_out - 1], pairs[:, -left_out]


def _orders(low: int, high: int) -> list[int]:
    """Item k is the number of orders of both samples in which the statistic of `is_higher` is k.

    They are the coefficients of a Gaussian binomial: the product of (1 - q**(low + i)) / (1 - q**i)
    for i from 1 to `high`. Cost: the product of `low` and the square of `high`.
    """
    counts = [1] + [0] * (low * high)
    for i in range(1, high + 1):
        for k in range(low * high, low + i - 1, -1):
            counts[k] -= counts[k - low - i]
        for k in range(i, low * high + 1):
            counts[k] += counts[k - i]
    return counts


def _signs(blocks: int) -> Floats:
    """Make patterns of signs, one in each row; the first row leaves all signs unchanged.

    Of a pattern and its opposite, which give the same statistic, there is only one.
    """
    if blocks <= _MOST_EXACT:
        bits = np.arange(2 ** (blocks - 1))[:, None] >> np.arange(blocks) & 1
    else:
        bits = np.random.default_rng(_SEED).integers(0, 2, (_PATTERNS, blocks), np.int8)
        bits[0] = 0
    return (1 - 2 * bits).astype(np.float64)


def _left_out(blocks: int, largest: Floats, level: float) -> int:
    """How many sorted means of pairs lie below the interval of a change, and as many above it.

    The result is -1 if there are too few blocks for a significant result. `largest` has, sorted,
    the largest statistic of all quantities for each pattern of `_signs`.
    """
    values, first = np.unique(largest, return_index=True)
    is_rare = len(largest) - first <= level * len(largest)
    critical = float(values[is_rare][0]) if is_rare.any() else math.inf
    pairs = blocks * (blocks + 1) // 2
    return -1 if critical > pairs else math.floor((pairs - critical) / 2)


def _change(log_ratios: Floats, left_out: int, p_value: float) -> Change:
    first, second = np.triu_indices(len(log_ratios))
    means = np.sort((log_ratios[first] + log_ratios[second]) / 2)
    low = high = None
    if left_out >= 0:
        low, high = math.expm1(means[left_out]), math.expm1(means[-1 - left_out])
    return Change(math.expm1(float(np.median(means))), low, high, p_value)
