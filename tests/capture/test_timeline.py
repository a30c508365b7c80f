"""Unions of intervals, against counting every nanosecond."""

from __future__ import annotations

import numpy as np
import pytest

from instrument.links.intervals import merged


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    start = random.integers(0, 60, count)
    return start, start + random.integers(0, 12, count)


@pytest.mark.parametrize("seed", range(20))
def test_merged_intervals_lie_apart_and_cover_the_same(seed) -> None:
    start, end = drawn(seed, 6 + seed)
    kept_start, kept_end = merged(start, end)
    assert (kept_start[1:] > kept_end[:-1]).all()
    assert _all(zip(kept_start, kept_end)) == _all(zip(start, end))
    assert set(start) >= set(kept_start)


def _all(intervals) -> set[int]:
    return {at for first, last in intervals for at in range(first, last)}


def test_nothing_covers_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert [part.tolist() for part in merged(none, none)] == [[], []]
