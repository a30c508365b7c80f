"""A fixture that runs the commands of `instrument` in the test's own process."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import pytest

from instrument.cli.command import main


class Printed(NamedTuple):
    """What a command printed."""

    out: str
    err: str


class Command(Protocol):
    """The type of the fixture `command`."""

    def __call__(self, *words: object, status: int = 0) -> Printed: ...


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command that must end with this status: `command("show", folder, "--json").out`."""

    def run(*words: object, status: int = 0) -> Printed:
        assert main([*map(str, words)]) == status, words
        return Printed(*capsys.readouterr())

    return run
