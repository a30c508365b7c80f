"""What a command prints beside its result."""

from __future__ import annotations

import sys

from instrument.printable import printable_lines


def say(text: str) -> None:
    """Print on stderr, with every control character as an escape."""
    print(printable_lines(text), file=sys.stderr)
