"""Unions of intervals, against counting every nanosecond."""

from __future__ import annotations

import numpy as np
import pytest

from instrument.capture.busy import covered_ns, idle_ns


def drawn(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    start = random.integers(0, 60, count)
    return start, start + random.integers(0, 12, count)


@pytest.mark.parametrize("seed", range(20))
def test_a_groups_union_counts_each_nanosecond_once(seed) -> None:
    start, end = drawn(seed, 12)
    random = np.random.default_rng(seed)
    group, interval = random.integers(0, 4, 30), random.integers(0, 12, 30)
    covered = [set() for _ in range(5)]
    for g, k in zip(group, interval):
        covered[g] |= set(range(start[k], end[k]))
    far = 2**62  # nothing may be added to times that may be this large
    assert covered_ns(group, interval, start + far, end + far, 5).tolist() == [len(each) for each in covered]


@pytest.mark.parametrize("seed", range(20))
def test_idle_is_what_no_interval_covers(seed) -> None:
    busy_start, busy_end = drawn(seed, 6)
    start, end = drawn(seed + 100, 30)
    busy = {at for first, last in zip(busy_start, busy_end) for at in range(first, last)}
    expected = [len(set(range(first, last)) - busy) for first, last in zip(start, end)]
    assert 0 < sum(expected) < sum(end - start)
    assert idle_ns(start, end, busy_start, busy_end).tolist() == expected


def test_nothing_covers_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert covered_ns(none, none, none, none, 2).tolist() == [0, 0]
