"""Which steps count, and the kinds of steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from instrument.base.step_times import counting, kinds_in_words, like_for_like, step_kinds

NOISE = random.Random(0)


def of(*times_ms: float, noise: float = 0.0) -> list[float]:
    return [each * 1e6 * (1 + NOISE.uniform(-noise, noise)) for each in times_ms]


@pytest.mark.parametrize(
    ("times_ns", "words"),
    [
        (of(1, 31, 1, 31), "every second step takes 31.00 ms, the others 1.000 ms"),
        (of(1, 1, 1, 31) * 2, "every fourth step takes 31.00 ms, the others 1.000 ms"),
        (of(9, 9, 2) * 2, "every third step takes 2.000 ms, the others 9.000 ms"),
        (of(1, *[5] * 11) * 2, "every 12th step takes 1.000 ms, the others 5.000 ms"),
        (of(1, 1, 9, 9, 9) * 3, "2 of each 5 steps take 1.000 ms, the others 9.000 ms"),
        (of(1, 31, 1, 1, 31, 1, 1, 1), "2 of 8 steps take 31.00 ms, the others 1.000 ms"),
        (of(1, 4, 20) * 3, "of each 3 steps, 1 takes 20.00 ms, 1 takes 4.000 ms, "
         "1 takes 1.000 ms"),
        # the short steps are sometimes disturbed, by up to half of a long one
        (of(31, 1, 35, 14, 33, 2, 36, 15, 32, 1), "every second step takes 33.00 ms, "
         "the others 2.000 ms"),
        (of(1, 1, 1, 1, 9, 1), "the shortest takes 1.000 ms, the longest 9.000 ms"),
    ],
)  # fmt: skip
def test_steps_of_several_kinds_are_described(times_ns: list[float], words: str) -> None:
    assert kinds_in_words(times_ns) == words


@pytest.mark.parametrize(
    "times_ns",
    [
        [],
        of(5),
        of(5, 5),
        of(5, 8, 6),
        of(10, 11, 9, 10),
        of(*[10] * 3, noise=0.3),
        of(*[10] * 30, noise=0.3),
        of(*[10] * 8, 11, noise=0.1),
        of(*(10 + k for k in range(12)), noise=0.02),
        of(*(5 * 1.2**k for k in range(5))),
        of(0, 0, 0),
    ],
)
def test_noise_and_drift_make_no_kinds(times_ns: list[float]) -> None:
    assert len(step_kinds(times_ns).usual_ns) <= 1
    assert step_kinds(times_ns).period == 0


def test_a_single_long_step_is_no_kind() -> None:
    assert len(step_kinds(of(10, 11, 10, 300, 10, 9)).usual_ns) == 1
    assert len(step_kinds(of(10, 11, 10, 300)).usual_ns) == 1


@pytest.mark.parametrize(
    ("times_ns", "counted"),
    [
        ([], slice(0, 0)),
        (of(5), slice(0, 1)),
        (of(500, 5, 6), slice(1, 3)),
        (of(500, 1, 31, 1, 31), slice(1, 5)),
        (of(500, 1, 31, 1, 31, 1), slice(1, 5)),
        (of(500, *of(1, 1, 1, 31) * 3, 1, 1), slice(1, 13)),
    ],
)
def test_whole_periods_count(times_ns: Sequence[float], counted: slice) -> None:
    assert counting(times_ns) == counted


def test_steps_are_compared_with_others_of_the_same_kind() -> None:
    others = of(*[1, 31] * 10)
    assert like_for_like(of(2, 32, 2, 32), others) == (17_000_000, 16_000_000)
    assert like_for_like(of(32, 2, 32, 2, 32), others) == (20_000_000, 19_000_000)
    assert like_for_like(of(2, 2, 2, 2), others) == (2_000_000, None), "all may be of one kind"
    rare = of(*[10] * 48, 900, 900)
    assert like_for_like(of(11, 11, 11, 11), rare) == (11_000_000, 10_000_000)
    assert like_for_like([], rare) == (None, 10_000_000)
    assert like_for_like(of(11), []) == (11_000_000, None)
