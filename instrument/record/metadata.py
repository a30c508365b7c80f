"""What `capture.json` says: what was recorded, when, under what config, on what machine, with which versions."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from instrument.annotate import backends
from instrument.config.schema import ProfilerConfig
from instrument.redact import blanked_words
from instrument.trace.capture_json import own_version
from instrument.worker import queue

FORMAT = 1

# How long git is waited for, once, at the start of a run.
_GIT_S = 2.0

# What a launcher calls a process's rank, how many there are, and the rank on its machine. Slurm's tasks are counted by
# step: a batch script outside any step sees those of the whole job.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def describe_run(config: ProfilerConfig, activities: list[str], place: Place) -> dict[str, Any]:
    """What `capture.json` says of every window of a run; asked once, when the run begins."""
    return {
        "format": FORMAT,
        "rank": place.rank,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "activities": activities,
        "devices": devices(activities),
        "machine": {"cpus": os.cpu_count(), "system": platform.platform(), "processor": platform.processor()},
        "versions": {
            "instrument": own_version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **origin(),
        "annotations_disabled": backends.disabled,
        "config": config.plain(),
    }


def origin() -> dict[str, Any]:
    """What was run: the command line, Hydra's overrides (None where Hydra runs nothing), and `git`'s state.

    Of the working tree that the script lies in, git's commit, and whether a tracked file differs from it; None where
    there is no repository, no git, or no answer within two seconds. Asked once in a process. `dirty` is None where the
    repository's own config names programs to compare files with.
    """
    hydra = queue.hydra_run()
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "command": blanked_words(sys.argv),
        "overrides": None if hydra is None else blanked_words(hydra.overrides.task),
        "git": _git(Path(main).absolute().parent if main else Path.cwd()),
    }


@cache
def _git(folder: Path) -> dict[str, Any] | None:
    try:
        commit = _asked_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
        scopes = _asked_git(folder, "config", "--list", "--show-scope", "--name-only")
        own = [line for line in scopes.splitlines() if line.startswith(("local\t", "worktree\t"))]
        if any(line.partition("\t")[2].startswith("filter.") for line in own):
            return {"commit": commit, "dirty": None}  # to compare files git would run what the repository names
        changed = _asked_git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _asked_git(folder: Path, *arguments: str) -> str:
    """What git says of the repository that a folder lies in, with nothing run that the repository's config names.

    Raises:
        OSError, subprocess.SubprocessError, UnicodeError: there is no git or no repository, or no answer in time.
    """
    safe = ["core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never"]
    command = ["git", *(word for option in safe for word in ("-c", option)), *arguments]
    # nothing is written into the user's repository, and nothing fetched for one that is a part of another
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_GIT_S, check=True
    )
    return done.stdout.strip()


class Place(NamedTuple):
    """Which of a job's processes this one is; `local_rank` is its number on its machine."""

    rank: int
    world_size: int
    local_rank: int


def place() -> Place:
    """As torchrun says it, torch's process group, Slurm or Open MPI; rank 0 of 1 where none does.

    Where nobody tells the local rank, it is the rank.
    """
    if _number("RANK") is None and dist.is_available() and dist.is_initialized():
        return _placed(dist.get_rank(), dist.get_world_size(), _number("LOCAL_RANK"))
    for names in _LAUNCHERS:
        rank, world_size, local_rank = map(_number, names)
        if rank is not None:
            return _placed(rank, world_size or 1, local_rank)
    return Place(0, 1, 0)


def _placed(rank: int, world_size: int, local_rank: int | None) -> Place:
    return Place(rank, world_size, rank if local_rank is None else local_rank)


def _number(variable: str) -> int | None:
    """A launcher's variable; None where it is not set, or set to something else."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None


def devices(activities: list[str]) -> list[str]:
    """The names of the devices that were recorded; empty on a CPU alone."""
    return [
        str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count()) if "cuda" in activities
    ]
