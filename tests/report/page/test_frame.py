"""The frame of the report page writes numbers and names as the terminal does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from page_parts import page_of

from instrument.base.printable import printable
from instrument.base.units import duration, percent, size

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_texts_are_those_of_python(opened: Callable[..., Page], tmp_path: Path) -> None:
    tab = opened(page_of(tmp_path))
    numbers = [1_062_500, 1_187_500, 1152, 2_500, 150_000_000_500, -1152, 0, 0.5, 1.5] + [
        sign * round(10**power * k)
        for sign in (1, -1)
        for power in range(11)
        for k in (1, 1.2345, 9.9994, 9.9999995)
    ]
    for name, function in (("duration", duration), ("bytes", size)):
        given = [number for number in numbers if function is duration or number == int(number)]
        assert tab.evaluate(f"numbers => numbers.map({name})", given) == [*map(function, given)]
    shares = [0, 0.0004, 0.094, 0.0951, 0.5327, 0.994, 0.9961, 1, 1.204]
    assert tab.evaluate("shares => shares.map(percent)", shares) == [*map(percent, shares)]
    names = [
        "plain",
        "a\nb\tc\r",
        "\0",
        "\u2028",
        "\u202e",
        "\xa0",
        "é µ ü",
        "\U0001f600",
        "\u200b",
        "\U000e0001",
        "\x7f",
        "a\u3164b\ufe0f\u2800\U000e0101",
    ]
    assert tab.evaluate("names => names.map(printable)", names) == [*map(printable, names)]
