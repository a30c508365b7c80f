"""One page as a Python script: its Python blocks at their own lines, and between them its commands.

A traceback so names the line of the page. Commands of ours run in the same process, and scripts in a warm one, as
loading takes longer than most.

What a reader need not see stands in a comment before the block that needs it, and runs as a block does:

    <!-- setup: python
    from instrument import Session
    -->

A comment before a block of text names the command that prints its paragraphs, of traces in the folder INSTRUMENT_TRACES:

    <!-- printed by: instrument show v100_ns_resolution.json.gz --queue -->
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import warm

from instrument.cli.command import main

# The package is built and installed in test_package.py; clusters are not at hand.
_NOT_RUN = ("pip install ", "sbatch ")
# What only a shell understands.
_OF_A_SHELL = {"|", "||", "&", "&&", ";", "<", ">", ">>", "(", ")"}
_BLOCKS = re.compile(
    r"(?:^<!-- printed by: (?P<by>[^\n]+) -->\n\n?)?"
    r"^(?:```|<!-- setup: )(?P<language>\w+)\n(?P<body>.*?)^(?:```|-->)$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code: where it begins in its page, counted from 0, its language, its text, what prints it."""

    line: int
    language: str
    body: str
    printed_by: str | None

    @property
    def file(self) -> str | None:
        """The name in its first line, where the block is a file."""
        named = re.match(r"(?:#!.*\n)?# ([\w/]+\.(?:py|yaml|sh))\n", self.body)
        return named and named[1]


def blocks(text: str) -> list[Block]:
    """The blocks of a page."""
    return [
        Block(text.count("\n", 0, each.start("body")), each["language"], each["body"], each["by"])
        for each in _BLOCKS.finditer(text)
    ]


def unread(text: str) -> list[str]:
    """The lines of a page with a mark of a block or a comment that `blocks` does not understand."""
    rest = _BLOCKS.sub("", text)
    return re.findall(r"^(?:```|<!--(?! Written by)).*$", rest, re.MULTILINE)


def script(page: Sequence[Block], left_out: Callable[[str], bool]) -> str:
    """The script; Python blocks that `left_out` names have no part in it."""
    lines = [
        f"import sys; sys.path.append({str(Path(__file__).parent)!r}); from page_script import command"
    ]
    for block in page:
        body: list[str] = []
        if block.language == "bash" and not block.file:
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
    print(f"\n$ {line}", flush=True)
    words = _words(os.path.expandvars(line))
    if words[:2] == ["instrument", "run"]:
        words = ["python", "-m", *words]
    if words[0] == "python" and not _OF_A_SHELL.intersection(words):
        assert warm.run_into(words[1:], Path.cwd(), os.environ, 1) == 0, line
        return
    with ExitStack() as stack:
        if words[-2:-1] == [">"]:
            file = stack.enter_context(Path(words[-1]).open("w"))
            stack.enter_context(redirect_stdout(file))
            words = words[:-2]
        if words[0] != "instrument" or _OF_A_SHELL.intersection(words):
            subprocess.run(line, shell=True, check=True)
            return
        try:
            status: object = main(words[1:])
        except SystemExit as asked:  # by --help
            status = asked.code
    assert not status, line


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)
