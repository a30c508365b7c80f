"""`profiler.keep` and `profiler.disk_budget`: the oldest captures of a run are removed while it goes on.

What there is, the output folder says: no list is kept beside it that could say something else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
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
    folder: Path,
    run: str,
    rank: int,
    keep: int | None,
    budget: int | None,
    needed: Callable[[Path], bool],
) -> list[Path]:
    """Remove the oldest captures of a run while there are too many, or they are too large; never the newest.

    Cost: without limits nothing; else the folder is listed, some 20 µs for each capture, and with a budget each capture
    too, some 75 µs. A `capture.json` is read once, and no other file.

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
    there = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            own = not name.startswith(".") and name.rpartition("_rank")[2].partition("-")[0] == str(
                rank
            )
            if own and entry.is_dir(follow_symlinks=False):
                key = Path(entry.path), entry.inode()
                there[key] = _origins.get(key) or _read_origin(key[0])
    for key in [key for key in _origins if key[0].parent == folder and key not in there]:
        _origins.pop(key, None)
    _origins.update(there)
    return [
        path
        for (path, _), origin in sorted(
            there.items(), key=lambda item: (item[1].started_at, item[0])
        )
        if origin.run == run
    ]


# By the folder and its inode. A folder that is known costs no call of the system: beside a training loop that holds the
# interpreter's lock each call may take 5 ms.
_origins: dict[tuple[Path, int], _Origin] = {}


def _read_origin(folder: Path) -> _Origin:
    """What a folder's `capture.json` says; empty where it has none that can be read."""
    try:
        return msgspec.json.decode(files.read_bytes(folder / METADATA_FILE), type=_Origin)
    except (OSError, *BAD_JSON):
        return _Origin()


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
