"""The part of `capture.json` that is the same in all windows of a run, such as the config."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from instrument import __version__
from instrument.annotate import backends
from instrument.config.schema import ProfilerConfig
from instrument.files import FORMAT
from instrument.rank_info import RankInfo
from instrument.record.output_folder import hydra_run
from instrument.redact import redact_words

# How long a run waits for git at its start.
_GIT_S = 2.0


def run_metadata(
    config: ProfilerConfig, activities: list[str], rank_info: RankInfo
) -> dict[str, Any]:
    """The metadata that all windows of a run share, computed once when the run begins."""
    return {
        "format": FORMAT,
        "rank": rank_info.rank,
        "local_rank": rank_info.local_rank,
        "world_size": rank_info.world_size,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "activities": activities,
        "devices": devices(activities),
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "processor": platform.processor(),
        },
        "versions": {
            "instrument": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **provenance(),
        "annotations_disabled": backends.disabled,
        "config": config.plain(),
    }


def provenance() -> dict[str, Any]:
    """Describe the program: its command line, Hydra's overrides, the state of its git repository.

    The keys are:

    - `command`: the command line, without secrets.
    - `overrides`: Hydra's overrides; None if the program does not use Hydra.
    - `git`: None if there is no git, no repository or no commit, or if git does not answer within
      two seconds. Otherwise `git` has two keys. `commit` is the commit of the script's repository.
      `dirty` says whether a tracked file differs from this commit. `dirty` is None if the git
      config of the repository itself sets filters: programs that git would run to compare files.

    The repository is read only once in a process.
    """
    hydra = hydra_run()
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "command": redact_words(sys.argv),
        "overrides": None if hydra is None else redact_words(hydra.overrides.task),
        "git": _git(Path(main).absolute().parent if main else Path.cwd()),
    }


@cache
def _git(folder: Path) -> dict[str, Any] | None:
    try:
        commit = _run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
        scopes = _run_git(folder, "config", "--list", "--show-scope", "--name-only")
        own = [line for line in scopes.splitlines() if line.startswith(("local\t", "worktree\t"))]
        if any(line.partition("\t")[2].startswith("filter.") for line in own):
            # to find changed files, git would run the programs that the repository's config names
            return {"commit": commit, "dirty": None}
        changed = _run_git(
            folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _run_git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return its output.

    The config of a repository may name programs that git runs. Options of our git command prevent
    this.

    Raises:
        OSError, subprocess.SubprocessError, UnicodeError: git or the repository is missing, or git
            does not answer in time.
    """
    safe = ["core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never"]
    command = ["git", *(word for option in safe for word in ("-c", option)), *arguments]
    # write nothing into the user's repository, and fetch nothing for a partial clone
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_GIT_S,
        check=True,
    )
    return done.stdout.strip()


def devices(activities: list[str]) -> list[str]:
    """The names of the CUDA devices; empty if CUDA is not recorded."""
    return [
        str(torch.cuda.get_device_name(index))
        for index in range(torch.cuda.device_count())
        if "cuda" in activities
    ]
