"""Summarizes captures in tasks of Ray, on a cluster or on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from instrument.base import storage
from instrument.base.errors import need_package
from instrument.read.ranks.rank_summary import RankSummary, summarize_at, written
from instrument.read.views.find_captures import Place

_MEMORY_BYTES = 1 << 30


def read_all(paths: Sequence[Place]) -> dict[Place, RankSummary | str]:
    """Do the same as `rank_summary.read_all`; each trace without a summary is one task of Ray.

    The tasks run on the cluster of this machine, or else on this machine. Its machines need this
    package, and the same path or the URL. A task is repeated if its process is killed. If it fails,
    its result is a sentence.

    Raises:
        MissingPackage: the package ray is not installed.
    """
    need_package("--on ray", "ray", "ray")
    import ray

    stored = written(paths)
    found: dict[Place, RankSummary | str] = {}
    is_own = not ray.is_initialized()
    if is_own:
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            ray.init(log_to_driver=False, include_dashboard=False)
    try:
        task = ray.remote(num_cpus=1, memory=_MEMORY_BYTES, max_retries=3)(summarize_at)
        started = {
            path: task.remote(path if storage.is_url(path) else Path(path).absolute())
            for path, summary in stored.items()
            if summary is None
        }
        for path, summary in stored.items():
            try:
                found[path] = summary or ray.get(started[path])
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                found[path] = f"{path} cannot be summarized on Ray ({reason})."
    finally:
        if is_own:
            ray.shutdown()
    return found
