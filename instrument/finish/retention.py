"""Removes the oldest captures of a run, as `profiler.keep` and `profiler.disk_budget` say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from instrument import files
from instrument.finish import queue
from instrument.log import logger


def enforce(
    output_dir: Path,
    run: str,
    rank: int,
    keep: int | None,
    budget: int | None,
    needed: Callable[[Path], bool],
) -> list[Path]:
    """Remove the oldest captures of a run beyond `keep` captures or `budget` bytes; return them.

    None means no limit. The newest capture always stays, and so do captures for which `needed`
    returns True. A resumed run has another id, so captures of the first run stay.

    Cost: none without limits. With a limit, about 0.1 ms for each capture of this rank, to read its
    `capture.json`. With a budget, about 0.04 ms more for each capture, to list its files.
    """
    if keep is None and budget is None:
        return []
    captures, removed = queue.captures_of(output_dir, run, rank), list[Path]()
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
