"""A fixture that runs the commands of `instrument` in the test's own process."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
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


@pytest.fixture
def transcript(capsys: pytest.CaptureFixture[str]) -> Callable[[Iterable[str]], str]:
    """Run command lines, whatever they end with, and give what each printed, with paths from the current folder."""

    def run(lines: Iterable[str]) -> str:
        shown = []
        for line in lines:
            try:
                status: object = main(shlex.split(line))
            except SystemExit as stopped:
                status = stopped.code
            printed = capsys.readouterr()
            ended = f"(exit status {status})\n" if status else ""
            shown.append(f"$ instrument {line}\n{printed.out}{printed.err}{ended}")
        return "\n".join(shown).replace(f"{Path.cwd()}/", "")

    return run
