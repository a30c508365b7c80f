"""The rank of this process in its job."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

# For each launcher, the environment variables with the rank, the number of ranks and the local
# rank. SLURM_NTASKS is not used: a batch script runs once, but outside of `srun`, SLURM_NTASKS is
# the number of tasks of the whole job.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


class RankInfo(NamedTuple):
    """The rank of a process, the number of ranks, and the rank of the process on its machine."""

    rank: int
    world_size: int
    local_rank: int


def rank_info() -> RankInfo:
    """The rank from torchrun, torch's process group, Slurm or Open MPI; otherwise rank 0 of 1.

    If the local rank is not known, the rank is used as the local rank.
    """
    dist = sys.modules.get("torch.distributed")  # loaded if there is a process group
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    if dist is not None and has_group and _number("RANK") is None:
        rank, local_rank = dist.get_rank(), _number("LOCAL_RANK")
        return RankInfo(rank, dist.get_world_size(), rank if local_rank is None else local_rank)
    for names in _LAUNCHERS:
        rank, world_size, local_rank = map(_number, names)
        if rank is not None:
            return RankInfo(rank, world_size or 1, rank if local_rank is None else local_rank)
    return RankInfo(0, 1, 0)


def lowest_rank(ranks: object) -> int:
    """The lowest of the ranks that record; `ranks` is the value of `profiler.ranks`."""
    numbers = [each for each in ranks if isinstance(each, int)] if isinstance(ranks, list) else []
    return min(numbers, default=0)  # also with a name: each selects rank 0


def _number(variable: str) -> int | None:
    """The number in an environment variable; None if it is unset or holds no number."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None
