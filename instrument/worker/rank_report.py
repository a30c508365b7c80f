"""Writes the comparison of all ranks in a run's last window, at the end of the run."""

from __future__ import annotations

import time
from pathlib import Path

from instrument import files
from instrument.log import logger
from instrument.rank_info import lowest_rank
from instrument.report.ranks import as_text
from instrument.runs.rank_summary import SUMMARY_FILE
from instrument.runs.run import Ranks, Run
from instrument.units import few
from instrument.worker.job import Job

FILE = "ranks.txt"
# At the end of a run, the workers of other ranks may still be busy. In seconds: the longest wait
# for these workers; the longest wait without a sign of these workers, for example if the disk is
# not shared; the pause between two checks.
LONGEST_WAIT_S, _WITHOUT_SIGN_S, _LOOK_EVERY_S = 20.0, 3.0, 0.2


def write_rank_report(job: Job, last: Path, longest_wait_s: float) -> None:
    """On the lowest recording rank, write the comparison of all ranks in the last window.

    The path is logged. On other ranks, this function does nothing. The lowest recording rank first
    waits until the summaries of all ranks are in the folder. Two limits end the wait earlier:

    - `longest_wait_s`;
    - 3 s without a sign of other ranks. A sign is a new summary, or an unfinished folder of the
      last window.

    If `profiler.ranks` is `first_per_node`, the number of summaries is unknown, so only the two
    limits end the wait. No message is sent to other ranks, so the wait cannot hang.

    Args:
        job: the job of this rank.
        last: the capture of the last window.
        longest_wait_s: the longest wait for summaries, in seconds.
    """
    if job.rank != lowest_rank(job.ranks) or job.world_size < 2:
        return
    folder, name = Path(job.folder), last.name.rpartition("_rank")[0]
    ranks = _wait_for_ranks(folder, name, longest_wait_s, planned=job.ranks != "first_per_node")
    if ranks is None or len(ranks.summaries) < 2:
        return
    files.write(folder / FILE, f"{as_text(ranks)}\n")
    missing = (
        f"; rank {few(ranks.missing)} is not in it yet. `instrument ranks {folder}` shows all "
        "ranks later"
    )
    note = missing if ranks.missing else ""
    logger.info("The table of {} ranks is in {}{}", len(ranks.summaries), folder / FILE, note)


def _wait_for_ranks(
    output_dir: Path, name: str, longest_wait_s: float, *, planned: bool
) -> Ranks | None:
    """Wait for the summaries of the window `name`; return the ranks whose summaries exist.

    Returns None if there is no summary.
    """
    began = last_sign = time.monotonic()
    seen: set[Path] = set()
    while True:
        found = {
            path.parent
            for path in output_dir.glob(f"[!.]*/{SUMMARY_FILE}")
            if path.parent.name.startswith(f"{name}_rank")
        }
        is_one_unfinished = next(output_dir.glob(f".{name}_rank*"), None) is not None
        now = time.monotonic()
        if found - seen or is_one_unfinished:
            last_sign = now
        ranks = Run.load(*sorted(found)).windows[-1] if found - seen else None
        seen = found
        over = now - began >= longest_wait_s or now - last_sign > _WITHOUT_SIGN_S
        if seen and (over or (planned and ranks is not None and not ranks.missing)):
            return ranks or Run.load(*sorted(seen)).windows[-1]
        if over:
            return None
        time.sleep(_LOOK_EVERY_S)
