"""Times, bytes and counts as text with units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

MINUS = "\N{MINUS SIGN}"
_TIMES = (("ns", 1, 0), ("µs", 1e3, 3), ("ms", 1e6, 3), ("s", 1e9, 3))


def duration(ns: float) -> str:
    """A time in nanoseconds as text, such as "1.500 ms" or "12 ns"."""
    unit, divisor, decimals = _unit_of(ns, _TIMES)
    return f"{ns / divisor:.{decimals}f} {unit}"


def durations_like(ns: float) -> Callable[[float], str]:
    """Return a function that writes all times in one unit, so that a column is easy to compare.

    The unit and the number of decimals are chosen such that the time `ns` has four digits. For
    example, if `ns` is 87.41 ms, a time of 300 µs is "0.30 ms".
    """
    like = _four_digits(ns)
    unit, divisor, _ = _unit_of(like, _TIMES)
    decimals = max(4 - len(str(int(like / divisor))), 0) if divisor > 1 else 0

    def text(value: float) -> str:
        # Adding 0 turns a negative zero into 0.
        return f"{round(value / divisor, decimals) + 0.0:,.{decimals}f} {unit}"

    return text


def last_digit(ns: float) -> int:
    """The value, in nanoseconds, of the last digit that `durations_like(ns)` shows."""
    return int(10 ** max(len(str(int(_four_digits(ns)))) - 4, 0))


def _four_digits(ns: float) -> float:
    return float(f"{abs(ns):.4g}")


def percent(share: float) -> str:
    """A share as text for a title, such as "52 %" or "0.4 %"."""
    return f"{share * 100:.0f} %" if share >= 0.095 or share == 0 else f"{share * 100:.1f} %"


def percent_change(share: float) -> str:
    """A change as text, such as "+5.3 %" or "−0.4 %". A change of 0.0 % has no sign."""
    text = f"{abs(share):,.1%}".replace("%", " %")
    return text if text == "0.0 %" else f"{MINUS if share < 0 else '+'}{text}"


def size(value: float) -> str:
    """A number of bytes as text, such as "2.00 KiB" or "-3 B"."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def rate(value: float) -> str:
    """Bytes per second as text, such as "3.45 GB/s"; a GB has 10**9 bytes here."""
    return f"{_scaled(value, 1000, ('B', 'kB', 'MB', 'GB', 'TB'))}/s"


def count(value: float) -> str:
    """A number of operations as text, such as "1.50 K"."""
    return _scaled(value, 1000, ("", "K", "M", "G", "T", "P"))


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as "1 finding" or "2 findings"."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def few(values: Iterable[object], most: int = 8) -> str:
    """The first `most` values as text, and the number of values that are left out."""
    texts = [*map(str, values)]
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    if abs(value) < base:
        return f"{value} {units[0]}".rstrip()
    unit, divisor, _ = _unit_of(
        value, [(unit, base**power, 2) for power, unit in enumerate(units[1:], 1)]
    )
    return f"{value / divisor:.2f} {unit}"


def _unit_of(value: float, units: Sequence[tuple[str, float, int]]) -> tuple[str, float, int]:
    """Return the unit, divisor and decimals of a value: the first unit whose text is short enough.

    A text that would round up to the next unit, such as "1000.000 ms", has the next unit.
    """
    for unit, following in pairwise(units):
        if round(abs(value) / unit[1], unit[2]) < following[1] / unit[1]:
            return unit
    return units[-1]


#: The units that `quantity` can read, with their factors: units of bytes, and units of counts.
BYTES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
COUNTS = {prefix: 1000**power for power, prefix in enumerate("KMGTP", 1)}


def quantity(text: str, units: Mapping[str, int]) -> int:
    """The number in a text such as "2GB" or "412", rounded to a whole number.

    Raises:
        ValueError: the text is no number with one of the units.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if found is None or found[2] not in {"", *units}:
        raise ValueError(text)
    return round(Fraction(found[1]) * units.get(found[2], 1))
