"""Make text from traces and captures safe to show in a terminal, a log or a text file.

Names in a trace, and everything else in a capture, may come from a stranger. A control character in
a name could clear the screen, change the title of the terminal or write to the clipboard. A line
break could fake a line of a table. A bidirectional override makes a name look like another name.
Text for people therefore shows such characters as escapes, like Python's `repr`. In data (columns,
JSON, Parquet), every name stays unchanged.
"""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    """Escape line breaks and all other characters that do not print, as `repr` does."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(text: str) -> str:
    """Escape like `printable`, but keep the line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def is_terminal(stream: Any) -> bool:
    """Whether a standard stream is a terminal; False if it is closed or replaced."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False
