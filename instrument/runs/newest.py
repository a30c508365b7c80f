"""Find the captures of the newest run among the captures of several runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from instrument.errors import CaptureError
from instrument.files import METADATA_FILE
from instrument.runs.run import TOGETHER_S
from instrument.storage import contents, is_url
from instrument.trace.capture_json import (
    Metadata,
    decoded,
    read,
    typed,
    unix_time,
)
from instrument.units import counted, few

_Capture = TypeVar("_Capture")


class _Process(NamedTuple):
    """A process that recorded captures.

    Attributes:
        host: the host of the process.
        number: the process id; the id of the run if the process id is not known.
        world_size: the number of ranks of the process's job.
    """

    host: str
    number: str
    world_size: int


class _Began(NamedTuple):
    """The start of a recording in seconds since 1970, with the rank and process that recorded."""

    second: float
    rank: int | None
    process: _Process


def of_newest_run(
    places: Sequence[Path | str],
) -> tuple[list[Path | str], list[Path | str], str]:
    """Return the captures of the newest run, all other captures, and a sentence that names these.

    The sentence is "" if there are no other captures. Only the `capture.json` of each capture is
    read or downloaded. If it cannot be read, the capture is returned, and the caller can report the
    error.

    Args:
        places: the paths or URLs of the captures. All URLs must be on the same file system.

    Raises:
        CaptureError: the server refuses access.
    """
    if len(places) < 2:
        return [*places], [], ""
    newest, older = newest_run(places, _metadata(places).get)
    if not older:
        return newest, [], ""
    named = [(Path(place).name, place) for place in older]
    return newest, older, left_out(named, (Path(place).name for place in newest))


def newest_run(
    captures: Iterable[_Capture], about: Callable[[_Capture], Metadata | None]
) -> tuple[list[_Capture], list[_Capture]]:
    """Return the captures of the newest run, and the captures of older runs.

    The newest process is the process that recorded the latest capture of all. It belongs to the
    newest run. For every other rank, the process that recorded the latest capture of this rank
    belongs to the newest run too, if both conditions hold:

    - Its job has as many ranks as the job of the newest process.
    - Its last capture began after the first capture of the newest process, or at most `TOGETHER_S`
      earlier.

    All captures of a process belong to the same run: a process may train and then validate. A
    capture without a run id or without a start, such as a trace file, counts as newest.

    Args:
        captures: the captures.
        about: returns the metadata of a capture; None if they are not known.
    """
    captures = list(captures)
    began = [_began(about(capture)) for capture in captures]
    bounds: dict[_Process, tuple[float, float]] = {}
    last_of_rank: dict[int | None, tuple[float, _Process]] = {}
    for known in filter(None, began):
        first, last = bounds.get(known.process, (known.second, known.second))
        bounds[known.process] = min(first, known.second), max(last, known.second)
        latest = (known.second, known.process)
        last_of_rank[known.rank] = max(last_of_rank.get(known.rank, latest), latest)
    newest: list[_Capture] = []
    older: list[_Capture] = []
    if bounds:
        run = max(bounds, key=lambda process: (bounds[process][1], process))
        run_began = bounds[run][0]
    for capture, each in zip(captures, began):
        is_newest = each is None or (
            each.process == last_of_rank[each.rank][1]
            and each.process.world_size == run.world_size
            and bounds[each.process][1] >= run_began - TOGETHER_S
        )
        (newest if is_newest else older).append(capture)
    return newest, older


def left_out(older: Sequence[tuple[str, Path | str | None]], newest: Iterable[str]) -> str:
    """Return a sentence on the left-out captures of older runs.

    Args:
        older: the name and the path of each left-out capture. The sentence has the path if another
            capture has the same name, and otherwise the name.
        newest: the names of the captures that are not left out.
    """
    of_name = Counter([*newest, *(name for name, _ in older)])
    names = [name if of_name[name] == 1 or place is None else str(place) for name, place in older]
    are = "is" if len(names) == 1 else "are"
    return (
        f"Only the newest run counts; {counted(len(names), 'capture')} of older runs {are} left "
        f"out: {few(names)}."
    )


def _metadata(places: Sequence[Path | str]) -> dict[Path | str, Metadata]:
    """The metadata of each capture whose `capture.json` can be read."""
    urls = {f"{place.rstrip('/')}/{METADATA_FILE}": place for place in places if is_url(place)}
    found: dict[Path | str, Metadata] = {}
    for place in places:
        with suppress(CaptureError):
            if not is_url(place):
                found[place] = typed(read(Path(place)))
    for url, about in (contents([*urls], _decoded) if urls else {}).items():
        if about is not None:
            found[urls[url]] = about
    return found


def _decoded(content: bytes) -> Metadata | None:
    try:
        return typed(decoded(content, METADATA_FILE))
    except CaptureError:
        return None


def _began(about: Metadata | None) -> _Began | None:
    """The start, rank and process of a capture; None if its start or its run id is not known."""
    second = None if about is None else unix_time(about.started_at)
    if about is None or second is None or about.run is None:
        return None
    number = about.run if about.pid is None else str(about.pid)
    process = _Process(about.host or "", number, about.world_size or 1)
    return _Began(second, about.rank, process)
