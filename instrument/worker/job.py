"""The job of a run: the folder, sinks, upload URL and time limit for the worker process.

The trainer (the training process) sends the job once, with credentials, through the worker's
standard input, and the job is on no disk. No file in a folder of captures can change the job:
`capture.json` is never read as an instruction.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


class Job(msgspec.Struct, kw_only=True):
    """The job of one rank of one run: the settings of its worker process.

    Attributes:
        run: the id of the run, 32 hexadecimal digits; each capture.json holds this id.
        rank: the rank that recorded the captures.
        folder: the folder for captures.
        owner: the user id that owns the run's files; None until a window was
            saved.
        sinks: the config (`_target_` and options) of each sink that the worker runs, in the order
            of the run's config. The keys are the names of the sinks.
        upload_to: the URL to upload captures to; None means that nothing is uploaded.
        upload_options: fsspec's options for the URL.
        timeout_s: the longest time for one capture, in seconds.
        given_up: the names of folders that the worker skips. An earlier worker died while it
            finished or uploaded these folders.
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


def to_line(job: Job) -> str:
    """Write a job (the settings of a worker process) as one line of text."""
    return json.dumps(msgspec.to_builtins(job)) + "\n"


def from_line(line: str) -> Job:
    """Read the job that `to_line` wrote."""
    return msgspec.convert(json.loads(line), Job)
