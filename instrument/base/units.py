"""Times, bytes and counts as text with units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

MINUS = "\N{MINUS SIGN}"
# A measured number has so many digits: steps of a window rarely agree in more.
_DIGITS = 4
_Units: TypeAlias = Sequence[tuple[str, float]]
_TIMES: _Units = (("ns", 1), ("µs", 1e3), ("ms", 1e6), ("s", 1e9))


def duration(ns: float) -> str:
    """A time in nanoseconds as text with four digits, such as "1.500 ms", "87.41 ms" or "12 ns"."""
    return durations_like(ns)(ns)


def durations_like(ns: float) -> Callable[[float], str]:
    """Return a function that writes all times in one unit, so that a column is easy to compare.

    The unit and the number of decimals are those of `duration(ns)`. For example, if `ns` is 87.41
    ms, a time of 300 µs is "0.30 ms".
    """
    unit, divisor, decimals = _unit_of(ns, _TIMES)

    def text(value: float) -> str:
        # Adding 0 turns a negative zero into 0.
        return f"{round(value / divisor, decimals) + 0.0:,.{decimals}f} {unit}"

    return text


def last_digit(ns: float) -> int:
    """The value, in nanoseconds, of the last digit that `durations_like(ns)` shows."""
    _, divisor, decimals = _unit_of(ns, _TIMES)
    return int(divisor / 10**decimals)


def percent(share: float) -> str:
    """A share as text with the digits that a few steps allow, such as "52 %" or "0.4 %".

    Only a share near nothing or near all has a decimal, so that 99.6 % is not all.
    """
    is_near_an_end = abs(share) < 0.095 or 0.995 <= share < 1
    return f"{share * 100:.{int(is_near_an_end and share != 0)}f} %"


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
    scales = [(unit, float(base**power)) for power, unit in enumerate(units[1:], 1)]
    unit, divisor, decimals = _unit_of(value, scales)
    return f"{value / divisor:.{min(decimals, 2)}f} {unit}"


def _unit_of(value: float, units: _Units) -> tuple[str, float, int]:
    """Return the unit and divisor for a value, and the decimals with which it has four digits.

    A text that would round up to the next unit, such as "1000 ms", has the next unit.
    """
    at, shown = 0, _rounded(value, units[0][1])
    while at + 1 < len(units) and shown * units[at][1] >= units[at + 1][1]:
        at += 1
        shown = _rounded(value, units[at][1])
    unit, divisor = units[at]
    return unit, divisor, max(_DIGITS - len(str(int(shown))), 0) if divisor > 1 else 0


def _rounded(value: float, divisor: float) -> float:
    return abs(float(f"{value / divisor:.{_DIGITS}g}") if divisor > 1 else round(value))


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
