"""Times, bytes and counts as text with units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

MINUS = "\N{MINUS SIGN}"
_TIMES = ((1_000, 1, "ns"), (1_000_000, 1e3, "µs"), (1_000_000_000, 1e6, "ms"))


def duration(ns: float) -> str:
    """A time in nanoseconds as text, such as "1.500 ms" or "12 ns"."""
    for limit, divisor, unit in _TIMES:
        if abs(ns) < limit:
            return f"{ns / divisor:.3f} {unit}" if divisor > 1 else f"{ns:.0f} ns"
    return f"{ns / 1e9:.3f} s"


def durations_like(ns: float) -> Callable[[float], str]:
    """Return a function that writes all times in one unit, so that a column is easy to compare.

    The unit and the number of decimals are chosen such that the time `ns` has four digits. For
    example, if `ns` is 87.41 ms, a time of 300 µs is "0.30 ms".
    """
    _, divisor, unit = next(
        (time for time in _TIMES if abs(ns) < time[0]), (float("inf"), 1e9, "s")
    )
    whole = len(str(int(abs(ns) / divisor)))
    decimals = max(4 - whole, 0) if divisor > 1 else 0

    def text(value: float) -> str:
        # Adding 0 turns a negative zero into 0.
        return f"{round(value / divisor, decimals) + 0.0:,.{decimals}f} {unit}"

    return text


def percent(share: float) -> str:
    """A share as text for a title, such as "52 %" or "0.4 %"."""
    return f"{share * 100:.0f} %" if share >= 0.095 else f"{share * 100:.1f} %"


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
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    return f"{value:.2f} {units[power]}" if power else f"{value} {units[0]}".rstrip()


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
