"""Find captures: those at or below a path or URL, and of these the captures of the newest run.

Links below a folder are not followed, and hidden folders are left out.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
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
    RecordedSteps,
    decode_metadata,
    read_metadata,
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
        traces = sorted(path.glob("[!.]*.json")) + sorted(path.glob("[!.]*.json.gz"))
        found = {file: file for file in traces if files.is_regular(file)}
    if found:
        return [*sorted(found, key=lambda each: (found[each].stat().st_mtime_ns, each.name))]
    if any(_files_below(path, TIMINGS_FILES)):
        raise CaptureError(
            f"{path} holds timings and no capture: "
            f"`instrument show {shlex.quote(str(path))} --timings` shows them."
        )
    raise CaptureError(
        f"{path} holds no capture: "
        "give the folder of a capture, a folder above it, or a trace file."
    )


def captures_below(folder: Path) -> Iterator[Path]:
    """Yield the finished captures at most `DEPTH` levels below a folder, ordered by path."""
    found = (file.parent for file in _files_below(folder, METADATA_FILE))
    return (capture for capture in found if capture != folder)


def timings_at(place: Place) -> list[Path]:
    """Return the files of timings in a folder, the newest last; a file is returned as it is.

    Raises:
        CaptureError: the folder holds no timings, or the URL cannot be fetched.
    """
    path = storage.fetch(place) if storage.is_url(place) else Path(place)
    if not path.is_dir():
        return [path]
    found = [*_files_below(path, TIMINGS_FILES)]
    if not found:
        raise CaptureError(f"{path} holds no timings: record them with profiler=timings.")
    return sorted(found, key=lambda file: (file.stat().st_mtime_ns, file))


def _files_below(folder: Path, pattern: str) -> Iterator[Path]:
    for parent, inner, names in os.walk(folder):
        depth = len(Path(parent).parts) - len(folder.parts)
        shown = sorted(name for name in inner if not name.startswith("."))
        inner[:] = shown if depth < DEPTH else []
        files_of_folder = (Path(parent, name) for name in fnmatch.filter(names, pattern))
        yield from filter(files.is_regular, files_of_folder)


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


class NewestRun(NamedTuple):
    """The captures of the newest run, all others, and a sentence that names the others or is ""."""

    captures: list[Place]
    older: list[Place]
    left_out: str


def of_newest_run(places: Sequence[Place]) -> NewestRun:
    """Choose the captures of the newest run; only the `capture.json` of each is read.

    The captures of whole windows of training with a trace come last, else in the given order. A
    capture whose file cannot be read counts as newest and whole, so that the caller can report the
    error. If the last window is in parts, its part with the most steps comes last. All URLs must be
    on the same file system.

    Raises:
        CaptureError: the server refuses access.
    """
    if len(places) < 2:
        return NewestRun([*places], [], "")
    about = _metadata(places)
    newest, older = newest_run(places, about.get)

    def completeness(place: Place) -> tuple[bool, bool, bool]:
        # a rank may have kept no trace, as of profiler.ranks=one_per_role
        has_trace = isinstance(place, str) or place.is_file() or any(place.glob("trace.json*"))
        window = about[place].window if place in about else RecordedSteps()
        return has_trace, window.phase in (None, "train"), not window.truncated

    newest.sort(key=completeness)
    *_, last = (parts for parts in _windows(newest, about) if newest[-1] in parts)
    if len(last) > 1:
        longest = max(last, key=lambda place: about[place].window.steps or 0)
        newest.append(newest.pop(newest.index(longest)))
    named = [(Path(place).name, place) for place in older]
    return NewestRun(newest, older, left_out(named, (Path(place).name for place in newest)))


def windows(places: Sequence[Place]) -> list[list[Place]]:
    """Group captures by window: with `profiler.max_stall_ms`, its parts are captures, in order."""
    return _windows(places, _metadata(places))


def _windows(places: Iterable[Place], about: Mapping[Place, Metadata]) -> list[list[Place]]:
    found: dict[object, list[tuple[int, Place]]] = {}
    for place in places:
        known = about.get(place, Metadata())
        first, part, phase = known.window.part_of_step, known.window.part or 0, known.window.phase
        window = place if first is None else (known.run, known.rank, phase, first)
        found.setdefault(window, []).append((part, place))
    return [[place for _, place in sorted(each, key=itemgetter(0))] for each in found.values()]


def with_parts(place: Path) -> list[Place]:
    """Return a capture; if it is the first part of a window, with the other parts."""
    about = _metadata([place])
    if place not in about or about[place].window.part != 0:
        return [place]
    beside = [file.parent for file in place.parent.glob(f"[!.]*/{METADATA_FILE}")]
    return next((each for each in windows(beside) if place in each), [place])


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
    last: dict[_Process, float] = {}
    first: dict[_Process, float] = {}
    last_of_rank: dict[int | None, tuple[float, _Process]] = {}
    for second, rank, process in filter(None, began):
        last[process] = max(last.get(process, second), second)
        first[process] = min(first.get(process, second), second)
        latest = (second, process)
        last_of_rank[rank] = max(last_of_rank.get(rank, latest), latest)
    run = max(last, key=lambda process: (last[process], process), default=None)

    def is_newest(began: tuple[float, int | None, _Process] | None) -> bool:
        if began is None or run is None:
            return True
        _, rank, process = began
        is_last = process == last_of_rank[rank][1] and process.world_size == run.world_size
        return is_last and last[process] >= first[run] - TOGETHER_S

    newest = [*map(is_newest, began)]
    older = [capture for capture, is_new in zip(captures, newest) if not is_new]
    return [capture for capture, is_new in zip(captures, newest) if is_new], older


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
        if not storage.is_url(place):
            with suppress(CaptureError):
                found[place] = typed(read_metadata(Path(place)))
    for url, content in (storage.contents([*urls], bytes) if urls else {}).items():
        with suppress(CaptureError):
            found[urls[url]] = typed(decode_metadata(content, METADATA_FILE))
    return found


def _began(about: Metadata | None) -> tuple[float, int | None, _Process] | None:
    """When, on which rank and in which process a capture began; None if not known."""
    second = None if about is None else unix_time(about.started_at)
    if about is None or second is None or about.run is None:
        return None
    number = about.run if about.pid is None else str(about.pid)
    return second, about.rank, _Process(about.host or "", number, about.world_size or 1)
