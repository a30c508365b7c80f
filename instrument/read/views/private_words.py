"""The private words of a capture, such as its host and path, which a redacted report hides."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from instrument.base.errors import CaptureError
from instrument.base.storage import is_url
from instrument.read.views.views import Views


def private_words(capture: Views) -> Iterator[str]:
    """Yield a capture's host, command, path, failed guards of torch.compile and odd file names."""
    yield capture.about.host or ""
    yield shlex.join(capture.about.command)
    dynamo = capture.about.dynamo  # its guards may hold values
    for guard in (None if dynamo is None else dynamo.failed_guards) or ():
        yield guard.partition(": ")[2]
    with suppress(CaptureError):  # a file that cannot be read is shown nowhere
        samples = capture.line_samples
        # in a sentence, a name with spaces is not recognised
        yield from {file for _, file, *_ in (samples.frames if samples else ()) if " " in file}
    if capture.folder is None:
        yield capture.name
    if capture.place is not None:
        yield from words_of_path(capture.place)


def words_of_path(path: Path | str) -> Iterator[str]:
    """Yield a path or URL as given, absolute and quoted; nothing for a path of only one name."""
    if is_url(path):
        yield from (path, shlex.quote(path))
    elif len((path := Path(path)).parts) > 1:
        for text in (str(path), str(path.absolute())):
            yield from (text, shlex.quote(text))
