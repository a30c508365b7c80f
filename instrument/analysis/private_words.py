"""The private words of a capture, such as its host and path, which a redacted report hides."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from instrument.analysis.views import Views
from instrument.storage import is_url


def private_words(capture: Views) -> Iterator[str]:
    """Yield the host of a capture, its path, and its failed guards of torch.compile.

    The text of a guard can hold a value of the program. If the capture is a trace file without a
    capture folder, also yield the file's name.
    """
    yield capture.about.host or ""
    dynamo = capture.about.dynamo
    for guard in (None if dynamo is None else dynamo.failed_guards) or ():
        yield guard.partition(": ")[2]
    if capture.folder is None:
        yield capture.name
    if capture.place is not None:
        yield from words_of_path(capture.place)


def words_of_path(path: Path | str) -> Iterator[str]:
    """Yield the texts that a page may show for a path or URL: as given, absolute, and quoted.

    For a path of only one name, yield nothing, because the same word may have other meanings.
    """
    if is_url(path):
        yield from (path, shlex.quote(path))
    elif len((path := Path(path)).parts) > 1:
        for text in (str(path), str(path.absolute())):
            yield from (text, shlex.quote(text))
