"""Draw text and tables on a terminal: fitted to its width, with tree lines, bars and colours.

Names in a trace may come from anybody, so they must not control the terminal. `printable` escapes
control characters, and `rich.text.Text` does not interpret rich's markup.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from instrument.base.printable import printable, without_commands
from instrument.read.views.layout import Medium, lines
from instrument.read.views.section import Part, Section, lines_of


def draw(parts: Iterable[Part], console: Console | None = None) -> str:
    """Return the parts of a report as text for a terminal, with control sequences.

    Colours depend on NO_COLOR and on the terminal. If `console` is None, the terminal on stdout is
    used.
    """
    console = console or Console()
    medium = Medium(console.width, True, True, ascii_only=console.options.ascii_only)
    with console.capture() as drawn:
        for number, part in enumerate(parts):
            if number:
                console.print()
            if isinstance(part, Section):
                for pieces, is_row in lines(part, medium):
                    console.print(
                        Text.assemble(*pieces),
                        no_wrap=is_row,
                        overflow="ellipsis" if is_row else None,
                    )
            else:
                for line in map(printable, lines_of(part)):
                    _print_words(console, Text(line, "" if number else "bold"))
    return without_commands(drawn.get())


def _print_words(console: Console, line: Text) -> None:
    """Print a line, wrapped between words.

    If a word, such as a path, is wider than the terminal, the line is not wrapped, so that the word
    can be copied.
    """
    too_long = any(cell_len(word) > console.width for word in line.plain.split(" "))
    console.print(line, soft_wrap=too_long)
