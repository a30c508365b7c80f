"""Which of a job's processes this one is."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

# What a launcher calls a process's rank, how many there are, and the rank on its machine. Slurm's tasks are counted by
# step: a batch script outside any step sees those of the whole job.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


class RankInfo(NamedTuple):
    """Which of a job's processes this one is; `local_rank` is its number on its machine."""

    rank: int
    world_size: int
    local_rank: int


def rank_info() -> RankInfo:
    """As torchrun says it, torch's process group, Slurm or Open MPI; rank 0 of 1 where none does.

    Where nobody tells the local rank, it is the rank.
    """
    dist = sys.modules.get("torch.distributed")  # where a process group was made, it is loaded
    if (
        _number("RANK") is None
        and dist is not None
        and dist.is_available()
        and dist.is_initialized()
    ):
        return _placed(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK"))
    for names in _LAUNCHERS:
        rank, world_size, local_rank = map(_number, names)
        if rank is not None:
            return _placed(rank, world_size or 1, local_rank)
    return RankInfo(0, 1, 0)


def _placed(rank: int, world_size: int, local_rank: int | None) -> RankInfo:
    return RankInfo(rank, world_size, rank if local_rank is None else local_rank)


def _number(variable: str) -> int | None:
    """A launcher's variable; None where it is not set, or set to something else."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None
