"""Check the option `peak_flops`, and list the precisions that it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from instrument.base.errors import ConfigError, did_you_mean

#: Names of torch's types, and two more: `tf32` for float32 that tensor cores multiply with fewer
#: bits, and `float8` for all float8 types.
PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8")
#: Text that describes a value of `profiler.peak_flops`.
EXAMPLE = "a number of FLOP/s such as 989e12, or a mapping such as {bfloat16: 989e12}"
_MOST = 1e24


def check_peak_flops(given: Any, option: str) -> float | dict[str, float] | None:
    """Return the peak FLOP/s as a number, or as a mapping from precisions to numbers.

    None stays None. `option` is the name of the option in error messages.

    Raises:
        ConfigError: the value has another type, a number is 0, negative, above 1e24 or NaN, or a
            precision is unknown.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return _rate(given, f"{option} is {given!r}")
    for name in given:
        if name not in PRECISIONS:
            hint = did_you_mean(str(name), PRECISIONS)
            raise ConfigError(f"{option} names the unknown precision {name!r}{hint}")
    if not given:
        raise ConfigError(f"{option} is {given!r}, but it must be {EXAMPLE}.")
    return {name: _rate(rate, f"{option}.{name} is {rate!r}") for name, rate in given.items()}


def _rate(given: Any, what: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ConfigError(f"{what}, but it must be {EXAMPLE}.")
    if not 0 < given <= _MOST:  # also false for NaN
        raise ConfigError(f"{what}, but it must be above 0 and at most {_MOST:g}: give {EXAMPLE}.")
    return float(given)
