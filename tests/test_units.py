"""Numbers as text: a number that would round up to the next unit is shown in that unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from instrument.base.units import count, duration, durations_like, last_digit, rate, size


@pytest.mark.parametrize(
    ("text", "below", "shown", "border", "next_unit"),
    [
        (duration, 999, "999 ns", 999.5, "1.000 µs"),
        (duration, 999_999.4, "999.999 µs", 999_999.5, "1.000 ms"),
        (duration, 999_999_499, "999.999 ms", 999_999_500, "1.000 s"),
        (duration, 999_999_499_999, "999.999 s", 10**12, "1000.000 s"),
        (size, 1023, "1023 B", 1024, "1.00 KiB"),
        (size, 1024 * 1024 - 6, "1023.99 KiB", 1024 * 1024 - 5, "1.00 MiB"),
        (size, 1024**3 - 5243, "1023.99 MiB", 1024**3 - 5242, "1.00 GiB"),
        (size, 1024**4 - 5368710, "1023.99 GiB", 1024**4 - 5368709, "1.00 TiB"),
        (rate, 999, "999 B/s", 1000, "1.00 kB/s"),
        (rate, 999_994, "999.99 kB/s", 999_996, "1.00 MB/s"),
        (rate, 999_994 * 10**6, "999.99 GB/s", 999_996 * 10**6, "1.00 TB/s"),
        (count, 999, "999", 1000, "1.00 K"),
        (count, 999_994, "999.99 K", 999_996, "1.00 M"),
        (count, 999_994 * 10**9, "999.99 T", 999_996 * 10**9, "1.00 P"),
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
