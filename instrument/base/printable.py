"""Make text from traces and captures safe to show in a terminal, a log or a text file.

Names in a trace, and everything else in a capture, may come from a stranger. A control character in
a name could clear the screen, change the title of the terminal or write to the clipboard. A line
break could fake a line of a table. A bidirectional override makes a name look like another name.
Text for people therefore shows such characters as escapes, like Python's `repr`. In data (columns,
JSON, Parquet), every name stays unchanged.

All text leaves through `printable_lines` or, in the log, through `log.py`. So a line break within a
line is escaped there, even if nothing else has escaped it.
"""

from __future__ import annotations

import re
from typing import Any

# Characters that are invisible, although `str.isprintable` takes them for printable: fillers and
# variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
# CI systems obey commands in the output of a program: GitHub a line that begins with `::`, and
# GitHub, Azure and TeamCity any line with `##[`, `##vso[` or `##teamcity[`.
_COMMAND = re.compile(r"^( *):(?=:)|#(?=#\w*\[)", re.MULTILINE)


def printable(text: str) -> str:
    """Escape line breaks and all other characters that do not print, as `repr` does."""
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in _INVISIBLE.sub(_escape, text)
    )


def printable_lines(*lines: str) -> str:
    """Join lines that are escaped by `printable` and that no CI system takes for commands."""
    return without_commands("\n".join(map(printable, lines)))


def without_commands(text: str) -> str:
    """Escape the signs by which a CI system recognises commands; JSON keeps its meaning."""
    return _COMMAND.sub(
        lambda found: found[1] + r"\u003a" if found[1] is not None else r"\u0023", text
    )


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def is_terminal(stream: Any) -> bool:
    """Whether a standard stream is a terminal; False if it is closed or replaced."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
