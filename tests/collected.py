"""What a test collected from the log."""

from __future__ import annotations


class Log(list[str]):
    """The messages logged during a test, each as "LEVEL message"; a test that expects errors says so."""

    errors_expected = False

    def at(self, level: str) -> list[str]:
        """The messages of one level."""
        return [line.removeprefix(level + " ") for line in self if line.startswith(level + " ")]
