"""Find captures: those at or below a path or URL, and of these the captures of the newest run.

Links below a folder are not followed, and hidden folders are left out.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from instrument.base import files, storage
from instrument.base.errors import CaptureError
from instrument.base.files import METADATA_FILE
from instrument.base.units import counted, few
from instrument.read.trace.capture_json import (
    TRACE_FILES,
    Metadata,
    decoded,
    read,
    typed,
    unix_time,
)

#: The path or URL of a capture.
Place: TypeAlias = Path | str
_Capture = TypeVar("_Capture")

#: Captures are searched at most this many levels below a folder. Hydra's folders
#: outputs/<day>/<time>/profile/<capture> need four levels.
DEPTH = 5
#: Captures of the same steps belong to different runs if they began more than this many seconds
#: apart, because the ranks of a job reach a step at about the same time.
TOGETHER_S = 600
#: The names of the files of timings that a run writes, one for each rank.
TIMINGS_FILES = "timings_rank*.jsonl"


def place_of(given: str | PathLike[str]) -> Place:
    """A URL as it is, and everything else as a path."""
    text = fspath(given)
    return text if storage.is_url(text) else Path(text)


def captures_at(place: Place, *, or_traces: bool = False) -> list[Place]:
    """Return the captures at or below a path or URL, the newest last.

    With `or_traces`, a folder without captures stands for the traces in it.

    Raises:
        CaptureError: there is nothing at the place, or no capture.
    """
    if storage.is_url(place):
        return [*storage.captures(place, or_traces=or_traces)]
    path = Path(place)
    own = (METADATA_FILE,) if or_traces else (METADATA_FILE, *TRACE_FILES)
    if kind_of(path) == "file" or any(files.exists(path / name) for name in own):
        return [path]
    found = {folder: folder / METADATA_FILE for folder in captures_below(path)}
    if not found and or_traces:
        found = {file: file for file in _traces_in(path)}
    if not found:
        raise _no_capture_in(path)
    return [*sorted(found, key=lambda each: found[each].stat().st_mtime_ns)]


def captures_below(folder: Path) -> Iterator[Path]:
    """Yield the finished captures at most `DEPTH` levels below a folder, ordered by path."""
    for parent, names in _walk(folder):
        if parent != folder and METADATA_FILE in names and files.is_regular(parent / METADATA_FILE):
            yield parent


def timings_at(place: Place) -> list[Path]:
    """Return the files of timings in a folder, the newest last; a file is returned as it is.

    Raises:
        CaptureError: the folder holds no timings, or the URL cannot be fetched.
    """
    path = storage.fetch(place) if storage.is_url(place) else Path(place)
    if not path.is_dir():
        return [path]
    found = _timings_in(path)
    if not found:
        raise CaptureError(f"{path} holds no timings: record them with profiler=timings.")
    return sorted(found, key=lambda file: (file.stat().st_mtime_ns, file))


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    for parent, inner, names in os.walk(folder):
        path = Path(parent)
        depth = len(path.parts) - len(folder.parts)
        shown = sorted(name for name in inner if not name.startswith("."))
        inner[:] = shown if depth < DEPTH else []
        yield path, names


def _timings_in(folder: Path) -> list[Path]:
    found = [(parent, fnmatch.filter(names, TIMINGS_FILES)) for parent, names in _walk(folder)]
    paths = (parent / name for parent, names in found for name in names)
    return [path for path in paths if files.is_regular(path)]


def kind_of(path: Path) -> Literal["folder", "file"]:
    """Whether a path is a folder or a file; symbolic links are followed.

    Raises:
        CaptureError: the path does not exist or cannot be read.
    """
    try:
        if path.is_dir():
            return "folder"
        if path.exists():
            return "file"
    except OSError as error:  # for example, a name that is too long
        raise CaptureError(f"{path} cannot be read: {error.strerror}.") from None
    raise CaptureError(f"There is no capture at {path}; give a capture folder or a trace file.")


def _traces_in(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.iterdir())
        if file.name.endswith((".json", ".json.gz"))
        and not file.name.startswith(".")
        and files.is_regular(file)
    ]


def _no_capture_in(folder: Path) -> CaptureError:
    if _timings_in(folder):
        return CaptureError(
            f"{folder} holds timings and no capture: "
            f"`instrument show {shlex.quote(str(folder))} --timings` shows them."
        )
    return CaptureError(
        f"{folder} holds no capture: "
        "give the folder of a capture, a folder above it, or a trace file."
    )


class NewestRun(NamedTuple):
    """The captures of the newest run, all others, and a sentence that names the others or is ""."""

    captures: list[Place]
    older: list[Place]
    left_out: str


def of_newest_run(places: Sequence[Place]) -> NewestRun:
    """Choose the captures of the newest run; only the `capture.json` of each is read.

    A capture whose file cannot be read counts as newest, so that the caller can report the error.
    All URLs must be on the same file system.

    Raises:
        CaptureError: the server refuses access.
    """
    if len(places) < 2:
        return NewestRun([*places], [], "")
    newest, older = newest_run(places, _metadata(places).get)
    named = [(Path(place).name, place) for place in older]
    return NewestRun(newest, older, left_out(named, (Path(place).name for place in newest)))


def most_complete_last(places: Sequence[Place]) -> list[Place]:
    """Move the captures of whole windows of training with a trace to the end, in their order."""
    about = _metadata(places) if len(places) > 1 else {}

    def completeness(place: Place) -> tuple[bool, bool, bool]:
        # a rank may have kept no trace, as of profiler.ranks=one_per_role
        has_trace = isinstance(place, str) or place.is_file() or any(place.glob("trace.json*"))
        if place not in about:  # the caller reports why it cannot be read
            return has_trace, True, True
        window = about[place].window
        return has_trace, window.phase in (None, "train"), not window.truncated

    return sorted(places, key=completeness)


class _Process(NamedTuple):
    host: str
    number: str
    world_size: int


def newest_run(
    captures: Iterable[_Capture], about: Callable[[_Capture], Metadata | None]
) -> tuple[list[_Capture], list[_Capture]]:
    """Return the captures of the newest run, and the captures of older runs.

    All captures of a process belong to the same run: a process may train and then validate. The
    process that recorded the latest capture belongs to the newest run. For every other rank, the
    process that recorded the rank's latest capture belongs to the newest run too, if its job has
    as many ranks, and if this capture began after the first capture of the newest process, or at
    most `TOGETHER_S` earlier. A capture without a run id or a start, such as a trace file, counts
    as newest.
    """
    captures = list(captures)
    began = [_began(about(capture)) for capture in captures]
    seconds: dict[_Process, list[float]] = {}
    last_of_rank: dict[int | None, tuple[float, _Process]] = {}
    for second, rank, process in filter(None, began):
        seconds.setdefault(process, []).append(second)
        latest = (second, process)
        last_of_rank[rank] = max(last_of_rank.get(rank, latest), latest)
    if not seconds:
        return captures, []
    run = max(seconds, key=lambda process: (max(seconds[process]), process))

    first = min(seconds[run]) - TOGETHER_S
    newest: list[_Capture] = []
    older: list[_Capture] = []
    for capture, each in zip(captures, began):
        is_newest = each is None or (
            each[2] == last_of_rank[each[1]][1]
            and each[2].world_size == run.world_size
            and max(seconds[each[2]]) >= first
        )
        (newest if is_newest else older).append(capture)
    return newest, older


def left_out(older: Sequence[tuple[str, Place | None]], newest: Iterable[str]) -> str:
    """Return a sentence that names the captures of older runs; "" if there are none.

    A capture is named by its place if another one, also of the newest run, has the same name.
    """
    if not older:
        return ""
    of_name = Counter([*newest, *(name for name, _ in older)])
    names = [name if of_name[name] == 1 or place is None else str(place) for name, place in older]
    are = "is" if len(names) == 1 else "are"
    return (
        f"Only the newest run counts; {counted(len(names), 'capture')} of older runs {are} left "
        f"out: {few(names)}."
    )


def _metadata(places: Sequence[Place]) -> dict[Place, Metadata]:
    urls = {
        f"{place.rstrip('/')}/{METADATA_FILE}": place for place in places if storage.is_url(place)
    }
    found: dict[Place, Metadata] = {}
    for place in places:
        with suppress(CaptureError):
            if not storage.is_url(place):
                found[place] = typed(read(Path(place)))
    for url, about in (storage.contents([*urls], _decoded) if urls else {}).items():
        if about is not None:
            found[urls[url]] = about
    return found


def _decoded(content: bytes) -> Metadata | None:
    try:
        return typed(decoded(content, METADATA_FILE))
    except CaptureError:
        return None


def _began(about: Metadata | None) -> tuple[float, int | None, _Process] | None:
    """When, on which rank and in which process a capture began; None if not known."""
    second = None if about is None else unix_time(about.started_at)
    if about is None or second is None or about.run is None:
        return None
    number = about.run if about.pid is None else str(about.pid)
    return second, about.rank, _Process(about.host or "", number, about.world_size or 1)
