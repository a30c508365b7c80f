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
from instrument.read.views.layout import lines
from instrument.read.views.section import Part, Section, lines_of


def draw(parts: Iterable[Part], console: Console | None = None) -> str:
    """Return the parts of a report as text for a terminal, with control sequences.

    Colours depend on NO_COLOR and on the terminal. If `console` is None, the terminal on stdout is
    used. A word that is wider than the terminal, such as a path, is not broken, so that it can be
    copied.
    """
    console = console or Console()
    with console.capture() as drawn:
        for number, part in enumerate(parts):
            if number:
                console.print()
            if isinstance(part, Section):
                draws = not console.options.ascii_only
                for pieces, is_row in lines(part, console.width, draws):
                    drawing = Text.assemble(*pieces)
                    drawing.overflow = "ellipsis" if is_row else None
                    console.print(drawing, no_wrap=is_row)
            else:
                for line in map(printable, lines_of(part)):
                    too_long = any(cell_len(word) > console.width for word in line.split(" "))
                    console.print(Text(line, "" if number else "bold"), soft_wrap=too_long)
    return without_commands(drawn.get())
