"""One page as a Python script: its Python blocks at their own lines, and between them its commands.

A traceback so names the line of the page. Commands of ours run in the same process, and scripts in a warm one, as
loading takes longer than most.

What a reader need not see stands in a comment before the block that needs it, and runs as a block does:

    <!-- setup: python
    from instrument import Session
    -->

A comment before a block of text names the command that prints its paragraphs, of traces in the folder INSTRUMENT_TRACES:

    <!-- printed by: instrument show v100_ns_resolution.json.gz --queue -->

Or it says that the block of code above prints the text: all of it but its numbers is compared, and a line `…` stands
for what is left out. A command may name its exit status: `pytest test_step.py   # exit status 1`. What takes minutes
runs in `make nightly` only:

    <!-- printed above -->
    <!-- nightly -->
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
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
    r"(?:^<!-- (?:printed by: (?P<by>[^\n]+)|(?P<note>printed above|nightly)) -->\n\n?)?"
    r"^(?:```|<!-- setup: )(?P<language>\w+)\n(?P<body>.*?)^(?:```|-->)$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code: its first line in the page, counted from 0, its language, its text, the comment above it."""

    line: int
    language: str
    body: str
    printed_by: str | None
    note: str | None

    @property
    def file(self) -> str | None:
        """The name in its first line, where the block is a file."""
        named = re.match(r"(?:#!.*\n)?# ([\w/]+\.(?:py|yaml|sh))\n", self.body)
        return named and named[1]


def blocks(text: str) -> list[Block]:
    """The blocks of a page."""
    return [
        Block(
            text.count("\n", 0, each.start("body")),
            each["language"],
            each["body"],
            each["by"],
            each["note"],
        )
        for each in _BLOCKS.finditer(text)
    ]


def unread(text: str) -> list[str]:
    """The lines of a page with a mark of a block or a comment that `blocks` does not understand."""
    rest = _BLOCKS.sub("", text)
    return re.findall(r"^(?:```|<!--(?! Written by)).*$", rest, re.MULTILINE)


def script(
    page: Sequence[Block], left_out: Callable[[str], bool], *, at_night: bool = False
) -> str:
    """The script; Python blocks that `left_out` names have no part in it, those for the night only then."""
    lines = [
        f"import sys; sys.path.append({str(Path(__file__).parent)!r}); from page_script import command, prints"
    ]
    above_runs = False
    for block in page:
        body: list[str] = []
        if block.note == "printed above":
            if above_runs:
                body = [f"prints({block.body!r})"]
            lines += [""] * (block.line - len(lines)) + body
            continue
        above_runs = at_night or block.note != "nightly"
        if not above_runs:
            continue
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


_seen = 0  # how much of the output texts of the page have shown


def prints(shown: str) -> None:
    """Compare what has been printed since the last such text with a text of the page."""
    global _seen
    sys.stdout.flush()
    end = os.lseek(1, 0, os.SEEK_CUR)
    printed, _seen = os.pread(1, end - _seen, _seen).decode(), end
    for paragraph in re.split(r"\n\n|^ *…$", shown, flags=re.MULTILINE):
        if _without_numbers(paragraph) not in _without_numbers(printed):
            raise AssertionError(f"not printed above:\n{paragraph}")


def _without_numbers(text: str) -> str:
    """A text in which numbers, with their units, and widths of columns are all alike."""
    text = text.replace(f"{Path.cwd()}/", "")
    text = re.sub(r"\d[\d.,–]*(?: (?:[nµm]s|s|min|[kKMG]i?B|bytes|[kMG])\b)?", "#", text)
    return " ".join(re.sub(r"-{3,}", "---", text).split())


def command(line: str) -> None:
    """Print a command and run it; its exit status must be 0, or the one that its comment names."""
    print(f"\n$ {line}", flush=True)
    wanted = int(named[1]) if (named := re.search(r"# exit status (\d+)$", line)) else 0
    words = _words(os.path.expandvars(line))
    # `instrument run` replaces its process, here that of the server
    starts_again = "--with" in words
    if words[:2] == ["instrument", "run"] and not starts_again:
        words = ["python", "-m", *words]
    if words[0] == "python" and not _OF_A_SHELL.intersection(words):
        assert warm.run_into(words[1:], Path.cwd(), os.environ, 1) == wanted, line
        return
    with ExitStack() as stack:
        if words[-2:-1] == [">"]:
            file = stack.enter_context(Path(words[-1]).open("w"))
            stack.enter_context(redirect_stdout(file))
            words = words[:-2]
        if words[0] != "instrument" or starts_again or _OF_A_SHELL.intersection(words):
            assert subprocess.run(line, shell=True).returncode == wanted, line
            return
        try:
            status: object = main(words[1:])
        except SystemExit as asked:  # by --help
            status = asked.code
    assert (status or 0) == wanted, line


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)
