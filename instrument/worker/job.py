"""A run's job: what the worker beside training does with the run's captures.

The trainer sends it once through the worker's standard input, credentials and all. Nothing that lies in a folder of
captures adds to it: a capture describes itself and gives no orders. A copy without secrets is kept in the user's state
folder, so that `instrument export` can finish what a killed run has left. It counts for the very folder that the run
recorded into, known by its path, device and inode, which no download can match.
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
from instrument.redact import blanked, public

# Copies of jobs whose captures were never finished are kept so long.
_KEPT_S = 90 * 86_400
_RUN = re.compile(r"[0-9a-f]{32}")


class Job(msgspec.Struct, kw_only=True):
    """The job of one rank of one run.

    Attributes:
        run: the run's id, 32 hexadecimal digits, which stands in the capture.json of each capture.
        rank: whose captures they are.
        folder: the folder for captures.
        owner: the user id that the run's files have there; None where the system has none.
        sinks: name -> `_target_` mapping of the sinks that the worker runs, in order.
        upload_to: the URL below which finished captures are sent; None: they are not.
        upload_options: fsspec's options for it.
        timeout_s: seconds that one capture may take.
        given_up: names of the queued folders and captures that a worker before this one has died at.
        world_size: how many ranks the run has; with more than one, the lowest that records writes their common table.
        ranks: which of them record, as `profiler.ranks` says it.
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
    """The job as one line of text."""
    return json.dumps(msgspec.to_builtins(job)) + "\n"


def from_line(line: str) -> Job:
    """The job that `to_line` wrote."""
    return msgspec.convert(json.loads(line), Job)


def remember(job: Job) -> None:
    """Keep a copy without secrets; what fails in it costs `instrument export` alone, which then asks for the sinks."""
    with suppress(OSError, RuntimeError):  # no home, no room, no right to write
        folder = files.state_folder() / "jobs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(folder)
        place = Path(job.folder).resolve()
        found = place.stat()
        sinks = {name: about for name, about in job.sinks.items() if blanked(about) == about}
        kept = msgspec.structs.replace(
            job,
            folder=str(place),
            sinks=sinks,
            upload_options=public(job.upload_options),
            given_up=[],
        )
        about = {"device": found.st_dev, "inode": found.st_ino, "job": msgspec.to_builtins(kept)}
        with files.replacing(folder / f"{job.run}.json", mode=0o600) as file:
            file.write(json.dumps(about).encode())


def recall(folder: Path, run: object) -> Job | None:
    """The job of the run with this id, if it recorded into that folder on this machine as this user; else None."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        return None
    try:
        path = files.state_folder() / "jobs" / f"{run}.json"
        about = json.loads(files.read_bytes(path))
        job = msgspec.convert(about["job"], Job)
        place, kept = folder.resolve(), path.lstat()
        found = place.stat()
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    is_own = not hasattr(os, "getuid") or (
        kept.st_uid == os.getuid() and not kept.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
    is_there = (str(place), found.st_dev, found.st_ino) == (
        job.folder,
        about.get("device"),
        about.get("inode"),
    )
    return job if is_own and is_there and job.run == run else None


def forget(run: str) -> None:
    """Remove the copy of a run whose captures are all finished and sent."""
    with suppress(OSError, RuntimeError):
        (files.state_folder() / "jobs" / f"{run}.json").unlink()


def _remove_old(folder: Path) -> None:
    for path in folder.glob("*.json"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _KEPT_S:
                path.unlink()
