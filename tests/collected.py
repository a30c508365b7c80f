"""What a test collected from the log, its own or that of a program it ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loguru import logger

_FAILURES = ("WARNING ", "ERROR ", "CRITICAL ")


class Log(list[str]):
    """The messages logged during a test, each as "LEVEL message"; none may be a warning that nobody expects.

    A test expects the messages that it looks at, with `log.at(level)` or `log == […]`, and those that contain a
    part given to `expect`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[int] = set()
        self._parts: list[str] = []

    def at(self, level: str) -> list[str]:
        """The messages of one level."""
        found = {at: line for at, line in enumerate(self) if line.startswith(level + " ")}
        self._seen.update(found)
        return [line.removeprefix(level + " ") for line in found.values()]

    def __eq__(self, other: object) -> bool:
        self._seen.update(range(len(self)))
        return list.__eq__(self, other)

    def expect(self, *parts: str) -> None:
        """Expect, for each part, at least one message that contains it, now or until the test ends."""
        self._parts.extend(parts)

    def unexpected(self) -> list[str]:
        """The warnings and errors that nobody looked at or expects."""
        return [
            line
            for at, line in enumerate(self)
            if line.startswith(_FAILURES)
            and at not in self._seen
            and not any(part in line for part in self._parts)
        ]

    def missing(self) -> list[str]:
        """The parts expected that no message contains."""
        return [part for part in self._parts if not any(part in line for line in self)]


_collecting: list[Log] = []
_handlers: list[int] = []  # the last one added


def _add_handler() -> None:
    """Let the log reach the tests. The handler stays, because adding one takes loguru 7 ms."""
    core: Any = logger._core  # type: ignore[attr-defined]
    if not {*_handlers} & {*core.handlers}:
        _handlers[:] = [logger.add(_collect, format="{level} {message}", level=0)]


def _collect(message: str) -> None:
    if _collecting:
        _collecting[-1].append(str(message).rstrip("\n"))


@contextmanager
def logged() -> Iterator[Log]:
    """Collect what is logged in the block, and fail if a warning is unexpected or an expected one is missing.

    A fixture for several tests needs it if it logs a warning. Blocks can be nested: the inner one collects.
    """
    lines = Log()
    if not _collecting:
        _add_handler()
    _collecting.append(lines)
    try:
        yield lines
    finally:
        _collecting.pop()
    unexpected, missing = lines.unexpected(), lines.missing()
    assert not unexpected, "\n".join(["Logged, and not expected:", *unexpected])
    assert not missing, "\n".join(["Expected, and not logged:", *missing])


def problems_in(printed: str) -> list[str]:
    """The warnings and errors that a program has printed, as loguru and Hydra write them.

    torch's own library prints "ERROR:" too, where its CUDA build finds no driver.
    """
    level = r"(?:WARNING|ERROR)"
    return re.findall(rf"^.*(?:\| {level} |\[{level}\]).*$", printed, re.MULTILINE)
