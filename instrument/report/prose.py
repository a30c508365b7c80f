"""Sentences in lines of 80 columns, and sentences and names in Markdown.

Names come from a trace, and so from a stranger. Text shows them with unprintable characters
escaped. In Markdown they can be no markup either: no links, no mentions of people, no HTML.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from instrument.printable import printable

#: The width of sentences in plain text, in characters.
PROSE_WIDTH = 80
_LONGEST_NAME = 80


def wrapped(text: str, prefix: str = "", indent: str | None = None) -> list[str]:
    """The lines of a text: the first begins with the prefix, the others with the indent.

    Without an indent, they begin with as many blanks as the prefix has characters.
    """
    return textwrap.wrap(
        printable(text),
        PROSE_WIDTH,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix) if indent is None else indent,
        break_on_hyphens=False,
    ) or [prefix.rstrip()]


def shortened(text: str, width: int) -> str:
    """A text of at most `width` characters: the middle of a longer one is left out."""
    return text if len(text) <= width else f"{text[: width - 12]}…{text[-11:]}"


def byte_count(parts: Sequence[str]) -> int:
    """The size of paragraphs in bytes, with the empty lines between them."""
    return sum(len(part.encode("utf-8", "replace")) + 2 for part in parts)


def code(text: str, width: int = _LONGEST_NAME) -> str:
    """A text as code: inside its marks, Markdown knows no links, mentions or HTML."""
    plain = shortened(printable(text), width)
    longest = max(map(len, re.findall(r"`+", plain)), default=0)
    marks = "`" * (longest + 1)
    blank = " " if longest or not plain.strip() else ""
    return f"{marks}{blank}{plain}{blank}{marks}"


def escaped(text: str) -> str:
    """A sentence with its markup escaped; links, mentions and issue numbers become plain text."""
    marked = re.sub(r"([\\`*_\[\]<>|~&])", r"\\\1", printable(text))
    marked = re.sub(r"://", r":\\//", marked)
    marked = re.sub(r"(?i)\bwww\.", r"www\\.", marked)
    # A backslash does not stop GitHub from reading a mention or an issue number.
    return re.sub(r"([@#])(?=\w)", "\\1\u200b", marked)
