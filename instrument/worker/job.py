"""The job of a run: the folder, sinks, upload URL and time limit for the worker process.

The trainer (the training process) sends the job once, with credentials, through the worker's
standard input. No file in a folder of captures can change the job: `capture.json` is never read as
an instruction. A copy of the job, with its secrets removed, is saved in the user's state folder, so
that `instrument export` can finish the windows of a killed run. The copy is valid only for the
folder that the run recorded into. This folder is identified by path, device and inode, so a
downloaded folder cannot match.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from instrument import files
from instrument.redact import public, redact

# How long the copy of a job is kept if the captures of the run are never finished, in seconds.
_KEPT_S = 90 * 86_400
_RUN = re.compile(r"[0-9a-f]{32}")


class Job(msgspec.Struct, kw_only=True):
    """The job of one rank of one run: the settings of its worker process.

    Attributes:
        run: the id of the run, 32 hexadecimal digits; each capture.json holds this id.
        rank: the rank that recorded the captures.
        folder: the folder for captures.
        owner: the user id that owns the run's files; None on systems without user ids.
        sinks: the config (`_target_` and options) of each sink that the worker runs, in the order
            of the run's config. The keys are the names of the sinks.
        upload_to: the URL to upload captures to; None means that nothing is uploaded.
        upload_options: fsspec's options for the URL.
        timeout_s: the longest time for one capture, in seconds.
        given_up: the names of folders that the worker skips. An earlier worker died while it
            finished or uploaded these folders.
        world_size: the number of ranks. If there are several ranks, the lowest recording rank
            writes the comparison of all ranks at the end of the run.
        ranks: the ranks that record, in the form of the option `profiler.ranks`.
    """

    run: str
    rank: int
    folder: str
    owner: int | None = None
    sinks: dict[str, dict[str, Any]] = {}
    upload_to: str | None = None
    upload_options: dict[str, Any] = {}
    timeout_s: float = 600.0
    given_up: list[str] = []
    world_size: int = 1
    ranks: str | list[int] = "all"


def to_line(job: Job) -> str:
    """Write a job (the settings of a worker process) as one line of text."""
    return json.dumps(msgspec.to_builtins(job)) + "\n"


def from_line(line: str) -> Job:
    """Read the job that `to_line` wrote."""
    return msgspec.convert(json.loads(line), Job)


def remember(job: Job) -> None:
    """Save a copy of a job, with its secrets removed, for `instrument export`.

    A job is the settings of a run's worker process. If the copy cannot be saved, no error is
    raised, and `instrument export` runs only its default sinks.
    """
    with suppress(OSError, RuntimeError):  # no home, a full disk, no permission
        folder = files.state_folder() / "jobs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(folder)
        captures = Path(job.folder).resolve()
        found = captures.stat()
        sinks = {name: options for name, options in job.sinks.items() if redact(options) == options}
        kept = msgspec.structs.replace(
            job,
            folder=str(captures),
            sinks=sinks,
            upload_options=public(job.upload_options),
            given_up=[],
        )
        about = {"device": found.st_dev, "inode": found.st_ino, "job": msgspec.to_builtins(kept)}
        with files.replacing(folder / f"{job.run}.json", mode=0o600) as file:
            file.write(json.dumps(about).encode())


def recall(folder: Path, run: object) -> Job | None:
    """The saved job (the settings of the worker process) of a run.

    None if no job is saved, or if this user did not record the run into `folder`.
    """
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        return None
    try:
        path = files.state_folder() / "jobs" / f"{run}.json"
        about = json.loads(files.read_bytes(path))
        job = msgspec.convert(about["job"], Job)
        captures, kept = folder.resolve(), path.lstat()
        found = captures.stat()
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    is_own = not hasattr(os, "getuid") or (
        kept.st_uid == os.getuid() and not kept.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
    recorded = job.folder, about.get("device"), about.get("inode")
    is_same_folder = (str(captures), found.st_dev, found.st_ino) == recorded
    return job if is_own and is_same_folder and job.run == run else None


def forget(run: str) -> None:
    """Remove the copy of a run's job (the settings of its worker process) that `remember` saved."""
    with suppress(OSError, RuntimeError):
        (files.state_folder() / "jobs" / f"{run}.json").unlink()


def _remove_old(folder: Path) -> None:
    for path in folder.glob("*.json"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _KEPT_S:
                path.unlink()
