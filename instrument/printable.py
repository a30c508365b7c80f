"""Text that a terminal, a log or a text file can show as it stands.

Names in a trace, and all of a capture, may come from anybody. A control character in them could clear the screen,
retitle the window or write to the clipboard; a line break could forge a line of a table; a bidirectional override shows
another name than the one there is. In text for a person they stand as escapes, by the rule of Python's `repr`. Data
(columns, JSON, Parquet) keeps every name as it is.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text in one line, with an escape as in `repr` for each character that does not print."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def printable_lines(text: str) -> str:
    """The same for text of several lines, whose line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))
