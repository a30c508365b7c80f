"""`profiler.keep` and `profiler.disk_budget`: the oldest captures of a run are removed while it goes on.

What there is, the output folder says: no list is kept beside it that could say something else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec
from loguru import logger

from instrument import files
from instrument.analysis.views import METADATA_FILE
from instrument.trace.capture_json import BAD_JSON
from instrument.worker import queue


class _Origin(msgspec.Struct, frozen=True):
    """What `capture.json` says of where a capture comes from."""

    run: str = ""
    started_at: str = ""


def enforce(
    folder: Path, run: str, rank: int, keep: int | None, budget: int | None, needed: Callable[[Path], bool]
) -> list[Path]:
    """Remove the oldest captures of a run while there are too many, or they are too large; never the newest.

    Cost: without limits nothing; else a look at each capture of the rank in the folder, some 25 µs, and with a budget
    at its files, some 75 µs more. A `capture.json` is read once, and no other file.

    Args:
        folder: the output folder.
        run: the id of the run; a resumed run has another one, and removes nothing of the first.
        rank: whose captures they are.
        keep: how many captures may stay.
        budget: how many bytes they may take together.
        needed: says of a capture whether it must stay for now, as one that is still to be sent.

    Returns:
        The captures that were removed.
    """
    if keep is None and budget is None:
        return []
    captures, removed = captures_of(folder, run, rank), list[Path]()
    sizes = {place: _size(place) for place in captures} if budget is not None else {}
    left_bytes = sum(sizes.values())
    for place in captures[:-1]:
        too_many = keep is not None and len(captures) - len(removed) > keep
        if not too_many and (budget is None or left_bytes <= budget):
            break
        if not needed(place):
            queue.remove(place)
            removed.append(place)
            left_bytes -= sizes.get(place, 0)
            logger.info("Removed {}, as profiler.keep and profiler.disk_budget ask", place)
    return removed


def captures_of(folder: Path, run: str, rank: int) -> list[Path]:
    """The finished captures of one rank of a run in its output folder, oldest first; none behind links."""
    found = []
    for place in folder.glob(f"[!.]*_rank{rank}*"):
        if place.name.rpartition("_rank")[2].partition("-")[0] != str(rank):  # rank 10 where rank 1 is asked for
            continue
        with suppress(OSError):  # somebody removes it just now, or it is no capture
            path = place / METADATA_FILE
            origin = _origin(path, path.lstat().st_mtime_ns) if files.is_folder(place) else None
            if origin is not None and origin.run == run:
                found.append((origin.started_at, place.name, place))
    return [place for *_, place in sorted(found)]


@lru_cache(maxsize=2_048)
def _origin(path: Path, modified_ns: int) -> _Origin | None:  # noqa: ARG001 # with another time it is another file
    """What a `capture.json` says; None: it cannot be read.

    Raises:
        OSError: the file is gone.
    """
    try:
        return msgspec.json.decode(files.read_bytes(path), type=_Origin)
    except BAD_JSON:
        return None


def _size(folder: Path | str) -> int:
    """The bytes of a folder's files; links count for nothing."""
    size = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # a reader's temporary file, gone again
                if entry.is_dir(follow_symlinks=False):
                    size += _size(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    size += entry.stat().st_size
    return size
