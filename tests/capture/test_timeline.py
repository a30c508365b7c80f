"""Unions of intervals, against counting every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from instrument.read.facts.intervals import merged


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), min_size=1))
def test_merged_intervals_lie_apart_and_cover_the_same(intervals) -> None:
    start, length = np.array(intervals).T
    end = start + length
    kept_start, kept_end = merged(start, end)
    assert (kept_start[1:] > kept_end[:-1]).all()
    assert _all(zip(kept_start, kept_end)) == _all(zip(start, end))
    assert set(start) >= set(kept_start)


def _all(intervals) -> set[int]:
    return {at for first, last in intervals for at in range(first, last)}


def test_nothing_covers_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert [part.tolist() for part in merged(none, none)] == [[], []]
