"""Removes the oldest captures of a run, as `profiler.keep` and `profiler.disk_budget` say.

There is no separate list of captures: the output folder is listed each time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from instrument import files
from instrument.log import logger
from instrument.trace.capture_json import BAD_JSON, METADATA_FILE
from instrument.worker import queue


class _Origin(msgspec.Struct, frozen=True):
    """The fields of `capture.json` that say to which run a capture belongs, and when it began."""

    run: str = ""
    started_at: str = ""


def enforce(
    output_dir: Path,
    run: str,
    rank: int,
    keep: int | None,
    budget: int | None,
    needed: Callable[[Path], bool],
) -> list[Path]:
    """Remove the oldest captures of a run until the remaining captures are within the limits.

    The newest capture always stays, and so do captures for which `needed` returns True.

    Cost: none without limits. With a limit, about 0.1 ms for each capture of this rank, to read its
    `capture.json`. With a budget, about 0.04 ms more for each capture, to list its files.

    Args:
        output_dir: the folder for captures.
        run: the id of the run; a resumed run has another id, so captures of the first run stay.
        rank: the rank of the captures.
        keep: the maximum number of captures; None means no limit.
        budget: the maximum size of all captures together, in bytes; None means no limit.
        needed: returns whether a capture must stay for now, for example until it is uploaded.

    Returns:
        The captures that were removed.
    """
    if keep is None and budget is None:
        return []
    captures, removed = captures_of(output_dir, run, rank), list[Path]()
    sizes = {folder: files.folder_bytes(folder) for folder in captures if budget is not None}
    total_bytes = sum(sizes.values())
    for folder in captures[:-1]:
        too_many = keep is not None and len(captures) - len(removed) > keep
        if not too_many and (budget is None or total_bytes <= budget):
            break
        if not needed(folder):
            queue.remove(folder)
            removed.append(folder)
            total_bytes -= sizes.get(folder, 0)
            logger.info("Removed {}, because of profiler.keep or profiler.disk_budget", folder)
    return removed


def captures_of(output_dir: Path, run: str, rank: int) -> list[Path]:
    """The finished captures of a run on one rank, oldest first; links are skipped."""
    found = list[tuple[str, Path]]()
    # the second pattern finds captures whose names end with a number that `queue` added
    for pattern in (f"[!.]*_rank{rank}", f"[!.]*_rank{rank}-*"):
        for folder in output_dir.glob(pattern):
            with suppress(OSError, *BAD_JSON):
                if files.is_folder(folder):
                    about = files.read_bytes(folder / METADATA_FILE)
                    origin = msgspec.json.decode(about, type=_Origin)
                    if origin.run == run:
                        found.append((origin.started_at, folder))
    return [folder for _, folder in sorted(found)]
