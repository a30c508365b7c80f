"""One page as a Python script: its Python blocks at their own lines, and between them its commands.

A traceback so names the line of the page. Commands of ours run in the same process, and scripts in a warm one, as
loading takes longer than most.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import warm

from instrument.cli.command import main

# Tested elsewhere: the package is built and installed in test_package.py.
_NOT_RUN = ("pip install ",)
# What only a shell understands.
_OF_A_SHELL = re.compile(r"[|&;<>`]|\$\(")
_SAYS = "$ "


class Block(NamedTuple):
    """A block of code: where it begins in its page, counted from 0, its language, its text."""

    line: int
    language: str
    body: str

    @property
    def file(self) -> str | None:
        """The name in its first line, where the block is a file."""
        named = re.match(r"# ([\w/]+\.(?:py|yaml))\n", self.body)
        return named and named[1]


def blocks(text: str) -> list[Block]:
    """The blocks of a page."""
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, each.start(2)), each[1], each[2]) for each in found]


def script(page: Sequence[Block], left_out: Callable[[str], bool]) -> str:
    """The script; Python blocks that `left_out` names have no part in it."""
    lines = [
        f"import sys; sys.path.append({str(Path(__file__).parent)!r}); from page_script import command"
    ]
    for block in page:
        body: list[str] = []
        if block.language == "bash":
            body = [
                f"command({line!r})"
                for line in block.body.splitlines()
                if not line.startswith(_NOT_RUN)
            ]
        elif block.language == "python" and not block.file and not left_out(block.body):
            body = block.body.splitlines()
        lines += [""] * (block.line - len(lines)) + body
    return "\n".join(lines) + "\n"


def command(line: str) -> None:
    """Print a command and run it; it must end well."""
    print(f"\n{_SAYS}{line.partition('  #')[0].rstrip()}", flush=True)
    words = shlex.split(os.path.expandvars(line), comments=True)
    if words[0] == "python" and not _OF_A_SHELL.search(line):
        assert warm.run_into(words[1:], Path.cwd(), os.environ, 1) == 0, line
        return
    if words[0] != "instrument" or _OF_A_SHELL.search(line):
        subprocess.run(line, shell=True, check=True)
        return
    try:
        status: object = main(words[1:])
    except SystemExit as asked:  # by --help
        status = asked.code
    assert not status, line


def printed_by(line: str, printed: str) -> str:
    """What a page's script has printed for one of its commands."""
    _, found, rest = printed.partition(f"\n{_SAYS}{line}\n")
    assert found, f"{line} did not run"
    return rest.partition(f"\n{_SAYS}")[0]
