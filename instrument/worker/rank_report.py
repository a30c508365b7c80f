"""The table over all ranks of a run's last window, left beside the captures where the run ends."""

from __future__ import annotations

import time
from pathlib import Path

from loguru import logger

from instrument import files
from instrument.report.ranks import as_text
from instrument.runs.rank_summary import SUMMARY_FILE
from instrument.runs.run import Ranks, Run, few
from instrument.worker.job import Job

FILE = "ranks.txt"
# Where a run ends, the other ranks' workers are still busy: so long the worker of the lowest rank waits for them, and
# so long without any news of them, as on a node whose disk the others do not share.
PATIENT_S, _QUIET_S, _LOOK_EVERY_S = 20.0, 3.0, 0.2


def write_rank_report(job: Job, last: Path, patient_s: float) -> None:
    """Where the lowest of several ranks ends its run: leave the table of its last window over all, and say where it is.

    Waits for the others' summaries at most so long, by looking at the folder. With `first_per_node`, where nobody knows
    how many come, until none has come for 3 s. No rank is asked for anything, so none can hang here.
    """
    lowest = min(job.ranks) if isinstance(job.ranks, list) else 0
    if job.rank != lowest or job.world_size < 2:
        return
    folder, name = Path(job.folder), last.name.rpartition("_rank")[0]
    ranks = _gathered(folder, name, patient_s, planned=job.ranks != "first_per_node")
    if ranks is None or len(ranks.summaries) < 2:
        return
    files.write(folder / FILE, f"{as_text(ranks)}\n")
    later = (
        f"; missing yet: rank {few(ranks.missing)}. Later `instrument ranks {folder}` tells of all"
    )
    said = later if ranks.missing else ""
    logger.info("The table of {} ranks is in {}{}", len(ranks.summaries), folder / FILE, said)


def _gathered(output_dir: Path, name: str, patient_s: float, *, planned: bool) -> Ranks | None:
    """The window of that name, once all ranks' summaries are there or nothing more is to be waited for."""
    began = heard = time.monotonic()
    seen: set[Path] = set()
    while True:
        there = {
            path.parent
            for path in output_dir.glob(f"[!.]*/{SUMMARY_FILE}")
            if path.parent.name.startswith(f"{name}_rank")
        }
        on_its_way = next(output_dir.glob(f".{name}_rank*"), None) is not None
        now = time.monotonic()
        if there - seen or on_its_way:
            heard = now
        ranks = Run.load(*sorted(there)).windows[-1] if there - seen else None
        seen = there
        over = now - began >= patient_s or now - heard > _QUIET_S
        if seen and (over or (planned and ranks is not None and not ranks.missing)):
            return ranks or Run.load(*sorted(seen)).windows[-1]
        if over:
            return None
        time.sleep(_LOOK_EVERY_S)
