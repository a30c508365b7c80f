"""What a test collected from the log, its own or that of a program it ran."""

from __future__ import annotations

import re


class Log(list[str]):
    """The messages logged during a test, each as "LEVEL message"; a test that expects errors says so."""

    errors_expected = False

    def at(self, level: str) -> list[str]:
        """The messages of one level."""
        return [line.removeprefix(level + " ") for line in self if line.startswith(level + " ")]


def problems_in(printed: str) -> list[str]:
    """The warnings and errors that a program has printed, as loguru and Hydra write them.

    torch's own library prints "ERROR:" too, where its CUDA build finds no driver.
    """
    level = r"(?:WARNING|ERROR)"
    return re.findall(rf"^.*(?:\| {level} |\[{level}\]).*$", printed, re.MULTILINE)
