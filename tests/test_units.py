"""Numbers as text: a number that would round up to the next unit is shown in that unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from instrument.base.units import count, duration, durations_like, last_digit, percent, rate, size


@pytest.mark.parametrize(
    ("text", "below", "shown", "border", "next_unit"),
    [
        (duration, 999, "999 ns", 999.5, "1.000 µs"),
        (duration, 999_949, "999.9 µs", 999_950, "1.000 ms"),
        (duration, 999_949_999, "999.9 ms", 999_950_000, "1.000 s"),
        (duration, 999_949_999_999, "999.9 s", 10**12, "1,000 s"),
        (size, 1023, "1023 B", 1024, "1.00 KiB"),
        (size, 1023 * 1024, "1023 KiB", 1024 * 1024 - 512, "1.00 MiB"),
        (size, 1023 * 1024**2, "1023 MiB", 1024**3 - 1024**2 // 2, "1.00 GiB"),
        (size, 1023 * 1024**3, "1023 GiB", 1024**4 - 1024**3 // 2, "1.00 TiB"),
        (rate, 999, "999 B/s", 1000, "1.00 kB/s"),
        (rate, 999_940, "999.9 kB/s", 999_960, "1.00 MB/s"),
        (rate, 999_940 * 10**6, "999.9 GB/s", 999_960 * 10**6, "1.00 TB/s"),
        (count, 999, "999", 1000, "1.00 K"),
        (count, 999_940, "999.9 K", 999_960, "1.00 M"),
        (count, 999_940 * 10**9, "999.9 T", 999_960 * 10**9, "1.00 P"),
    ],
)
def test_a_number_that_rounds_up_has_the_next_unit(
    text: Callable[[float], str], below: float, shown: str, border: float, next_unit: str
) -> None:
    assert (text(below), text(border)) == (shown, next_unit)
    assert (text(-below), text(-border)) == (f"-{shown}", f"-{next_unit}")


@pytest.mark.parametrize(
    ("like", "shown", "last"),
    [
        (999_949_999, "999.9 ms", 100_000),
        (999_950_000, "1.000 s", 1_000_000),
        (9_999_499, "9.999 ms", 1_000),
        (9_999_600, "10.00 ms", 10_000),
        (999_949, "999.9 µs", 100),
        (999_960, "1.000 ms", 1_000),
        (412, "412 ns", 1),
    ],
)
def test_a_column_has_four_digits(like: int, shown: str, last: int) -> None:
    assert (durations_like(like)(like), last_digit(like)) == (shown, last)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "0 %"), (0.0004, "0.0 %"), (0.094, "9.4 %"), (0.0951, "10 %"), (0.5327, "53 %"),
     (0.994, "99 %"), (0.9961, "99.6 %"), (1, "100 %"), (1.204, "120 %"), (-0.3, "-30 %")],
)  # fmt: skip
def test_a_share_has_a_decimal_only_near_nothing_and_near_all(share: float, shown: str) -> None:
    assert percent(share) == shown
