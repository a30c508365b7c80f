"""The statistics of A/B comparisons: against scipy, against brute force, and on random blocks."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy  # loads scipy.stats when it is used

from instrument.read.compare.statistics import (
    LEVEL,
    Change,
    blocks_missing,
    changes,
    is_higher,
    least_blocks,
    level_of,
    shifts,
)


def blocks_of(seed: int, blocks: int, quantities: int = 1, change: float = 0.0) -> np.ndarray:
    """Log-ratios with heavy tails, as on a disturbed machine."""
    noise = np.random.default_rng(seed).standard_t(2, (blocks, quantities)) * 0.03
    return noise + math.log1p(change)


def excludes_zero(change: Change) -> bool:
    return change.low is not None and change.high is not None and not change.low <= 0 <= change.high


@pytest.mark.parametrize("blocks", [5, 6, 9, 12, 17])
def test_one_quantity_has_the_p_value_of_the_exact_signed_rank_test(blocks: int) -> None:
    values = blocks_of(blocks, blocks, change=0.03)
    expected = scipy.stats.wilcoxon(values[:, 0], method="exact").pvalue
    assert changes(values)[0].p_value == pytest.approx(expected)


def test_many_blocks_have_about_the_p_value_of_the_exact_test() -> None:
    values = blocks_of(3, 40, change=0.01)
    expected = scipy.stats.wilcoxon(values[:, 0], method="exact").pvalue
    assert 0.01 < expected < 0.99
    assert changes(values)[0].p_value == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_several_quantities_are_judged_by_the_largest_statistic(seed: int) -> None:
    values = blocks_of(seed, 8, quantities=3)
    ranks = scipy.stats.rankdata(np.abs(values), axis=0) * np.sign(values)
    largest = [
        np.abs(np.array(signs) @ ranks).max() for signs in itertools.product((1, -1), repeat=8)
    ]
    expected = [np.mean([each >= abs(column.sum()) for each in largest]) for column in ranks.T]
    assert [each.p_value for each in changes(values)] == pytest.approx(expected)


def test_the_estimate_is_the_median_of_the_means_of_pairs_and_the_interval_inverts_the_test() -> (
    None
):
    values = blocks_of(1, 10, change=0.04)
    found = changes(values)[0]
    pairs = [*itertools.combinations_with_replacement(values[:, 0], 2)]
    assert found.share == pytest.approx(math.expm1(np.median([sum(pair) / 2 for pair in pairs])))
    assert found.low is not None
    assert found.high is not None
    for bound, outwards in ((found.low, -1e-6), (found.high, 1e-6)):
        inside, outside = (math.log1p(bound) - sign * outwards for sign in (1, -1))
        assert scipy.stats.wilcoxon(values[:, 0] - inside, method="exact").pvalue > LEVEL
        assert scipy.stats.wilcoxon(values[:, 0] - outside, method="exact").pvalue <= LEVEL


@pytest.mark.parametrize("level", [LEVEL, LEVEL / 4])
@pytest.mark.parametrize(("blocks", "quantities"), [(9, 1), (10, 6), (20, 3)])
def test_p_value_and_interval_agree(blocks: int, quantities: int, level: float) -> None:
    for seed in range(20):
        for change in changes(blocks_of(seed, blocks, quantities, change=0.02), level):
            assert (change.p_value <= level) == excludes_zero(change)


@pytest.mark.parametrize(
    ("comparisons", "most"), [(300, 23), pytest.param(1000, 64, marks=pytest.mark.nightly)]
)
def test_at_most_one_in_twenty_comparisons_without_a_change_reports_any(comparisons, most) -> None:
    """15 or 50 are expected at most; more than `most` have a chance of 2 %."""
    alarms = [
        any(map(excludes_zero, changes(blocks_of(seed, 10, quantities=5))))
        for seed in range(comparisons)
    ]
    assert sum(alarms) <= most


@pytest.mark.parametrize(
    ("comparisons", "least"), [(150, 136), pytest.param(500, 460, marks=pytest.mark.nightly)]
)
def test_all_intervals_hold_the_true_changes_in_95_of_100_comparisons(comparisons, least) -> None:
    """143 or 475 are expected; fewer than `least` have a chance of 1 % at most."""
    held = 0
    for seed in range(comparisons):
        found = changes(blocks_of(seed, 12, quantities=5, change=0.05))
        held += all(each.low is not None and each.low <= 0.05 <= each.high for each in found)
    assert held >= least


def test_one_disturbed_block_does_not_hide_a_change() -> None:
    values = 0.05 + np.random.default_rng(0).normal(0, 0.01, (16, 1))
    values[4] = -3.0
    assert changes(values)[0].verdict(0.02) == "slower"


def test_equal_times_are_the_same() -> None:
    change = changes(np.zeros((8, 2)))[1]
    assert change == Change(0.0, 0.0, 0.0, 1.0)
    assert change.verdict(0.001) == "same"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.03, 0.05, "slower"),
        (-0.05, -0.03, "faster"),
        (0.005, 0.015, "same"),
        (-0.02, 0.02, "same"),
        (0.01, 0.03, "slower"),
        (-0.01, 0.03, "undecided"),
        (None, None, "undecided"),
    ],
)
def test_verdicts(low: float | None, high: float | None, verdict: str) -> None:
    assert Change(0.0, low, high, 0.5).verdict(0.02) == verdict


@pytest.mark.parametrize("quantities", [1, 5, 20])
def test_the_fewest_blocks_are_the_fewest_that_can_show_a_change(quantities: int) -> None:
    least = least_blocks(quantities)
    clear = np.random.default_rng(0).uniform(0.1, 0.2, (least, 1))
    noise = np.random.default_rng(1).normal(0, 1, (least, quantities - 1))
    together = np.concatenate([clear, noise], axis=1)
    assert excludes_zero(changes(together)[0])
    assert changes(together[: least_blocks(1) - 1])[0].low is None


def test_missing_blocks_shrink_the_interval_until_it_decides() -> None:
    # The interval is ±4 % at 10 blocks; ±1 % within the margin of 2 % needs 16 times as many, and
    # at half of the level 1.31 times as many again: (2.24 / 1.96)².
    assert blocks_missing(Change(0.01, -0.03, 0.05, 0.5), 10, 1, margin=0.02) in range(185, 220)
    # A change of 4 % needs an interval below ±4 %.
    assert blocks_missing(Change(0.04, -0.01, 0.09, 0.1), 10, 1, margin=0.02) in range(8, 13)
    assert blocks_missing(Change(0.04, None, None, 1.0), 3, 1, margin=0.02) == 4
    many = blocks_missing(Change(0.2, -0.01, 0.4, 0.1), 6, 1, 0.02, level_of(10))
    assert many + 6 >= least_blocks(1, level_of(11))


def test_however_often_it_goes_on_a_comparison_rarely_reports_a_change_by_chance() -> None:
    levels = [level_of(continued) for continued in range(50)]
    assert levels[0] == LEVEL
    assert sum(levels) <= 0.1


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (5, 5)])
def test_an_interval_of_captures_ends_where_the_test_of_windows_begins_to_reject(low, high) -> None:
    random = np.random.default_rng(low)
    before, after = random.normal(0, 1, (1, low)), random.normal(1, 1, (1, high))
    least, most = shifts(before, after)
    assert least is not None
    assert most is not None
    was, now = ([Fraction(each) for each in side[0].tolist()] for side in (before, after))
    for end, outside in ((least[0], -1), (most[0], 1)):
        for sign, is_rejected in ((outside, True), (-outside, False)):
            moved = [each + Fraction(end) + Fraction(sign, 10**6) for each in was]
            assert (is_higher(now, moved) or is_higher(moved, now)) == is_rejected


def test_two_captures_on_a_side_have_no_interval() -> None:
    assert shifts(np.zeros((4, 2)), np.ones((4, 4))) == (None, None)


def test_the_interval_of_captures_holds_the_true_change_in_90_of_100_comparisons() -> None:
    random = np.random.default_rng(1)
    low, high = shifts(random.normal(0, 1, (4_000, 5)), random.normal(2, 1, (4_000, 5)))
    assert low is not None
    assert high is not None
    assert 0.9 <= ((low <= 2) & (high >= 2)).mean() <= 0.97
