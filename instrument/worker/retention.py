"""`profiler.keep` and `profiler.disk_budget`: the oldest captures of a run are removed while it goes on.

What there is, the output folder says: no list is kept beside it that could say something else.
"""

from __future__ import annotations

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
    output_dir: Path,
    run: str,
    rank: int,
    keep: int | None,
    budget: int | None,
    needed: Callable[[Path], bool],
) -> list[Path]:
    """Remove the oldest captures of a run while there are too many, or they are too large; never the newest.

    Cost: nothing without limits. With them, the `capture.json` of each capture of this rank is read, some 0.1 ms each,
    and with a budget the files of each are listed, some 0.04 ms each.

    Args:
        output_dir: the folder for captures.
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
            logger.info("Removed {}, as profiler.keep and profiler.disk_budget ask", folder)
    return removed


def captures_of(output_dir: Path, run: str, rank: int) -> list[Path]:
    """The finished captures of one rank of a run in its output folder, oldest first; links are skipped."""
    found = list[tuple[str, Path]]()
    # behind the rank stands nothing, or the number that a taken name was given
    for pattern in (f"[!.]*_rank{rank}", f"[!.]*_rank{rank}-*"):
        for folder in output_dir.glob(pattern):
            with suppress(OSError, *BAD_JSON):
                if files.is_folder(folder):
                    about = files.read_bytes(folder / METADATA_FILE)
                    origin = msgspec.json.decode(about, type=_Origin)
                    if origin.run == run:
                        found.append((origin.started_at, folder))
    return [folder for _, folder in sorted(found)]
