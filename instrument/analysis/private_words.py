"""The private words of a capture, which a redacted report hides."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from instrument.analysis.views import Views


def private_words(capture: Views) -> Iterator[str]:
    """Yield the host of a capture, its path, and the name of a single trace file."""
    yield capture.about.host or ""
    if capture.folder is None:
        yield capture.name
    if capture.place is not None:
        yield from words_of_path(capture.place)


def words_of_path(path: Path) -> Iterator[str]:
    """Yield a path as text, also absolute and quoted for a shell.

    A path that is one name yields nothing, because the same word may have other meanings.
    """
    if len(path.parts) > 1:
        for text in (str(path), str(path.absolute())):
            yield from (text, shlex.quote(text))
