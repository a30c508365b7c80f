"""What `capture.json` says: what was recorded, when, under what config, on what machine, with which versions."""

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

from instrument.annotate import backends
from instrument.config.schema import ProfilerConfig
from instrument.rank_info import RankInfo
from instrument.redact import redact_words
from instrument.trace.capture_json import FORMAT, own_version
from instrument.worker import queue

# How long git is waited for, once, at the start of a run.
_GIT_S = 2.0


def describe_run(
    config: ProfilerConfig, activities: list[str], rank_info: RankInfo
) -> dict[str, Any]:
    """What `capture.json` says of every window of a run; asked once, when the run begins."""
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
        "command": redact_words(sys.argv),
        "overrides": None if hydra is None else redact_words(hydra.overrides.task),
        "git": _git(Path(main).absolute().parent if main else Path.cwd()),
    }


@cache
def _git(folder: Path) -> dict[str, Any] | None:
    try:
        commit = _asked_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
        scopes = _asked_git(folder, "config", "--list", "--show-scope", "--name-only")
        own = [line for line in scopes.splitlines() if line.startswith(("local\t", "worktree\t"))]
        if any(line.partition("\t")[2].startswith("filter.") for line in own):
            return {
                "commit": commit,
                "dirty": None,
            }  # to compare files git would run what the repository names
        changed = _asked_git(
            folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"
        )
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
    """The names of the devices that were recorded; empty on a CPU alone."""
    return [
        str(torch.cuda.get_device_name(index))
        for index in range(torch.cuda.device_count())
        if "cuda" in activities
    ]
