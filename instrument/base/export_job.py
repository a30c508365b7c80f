"""`Job`: what the exporter of a run has to know besides the folder.

The trainer sends the job through the exporter's standard input, because it may hold credentials. No
file in a folder of captures can change the job: `capture.json` is never read as an instruction.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


class Job(msgspec.Struct, kw_only=True):
    """The job of the exporter of one rank of a run.

    Attributes:
        run: the id of the run, 32 hexadecimal digits; each capture.json holds this id.
        recording_ranks: the number of ranks that record.
        one_per_role: whether only one rank of each parallel role keeps its trace.
        owner: the user id that owns the run's files; folders of others are left alone.
        sinks: the config (`_target_` and options) of each sink, in the order of the run's config.
        scalars: whether to write `scalars.json`, for callbacks of the training process.
        keep: how many captures may stay; None means no limit.
        disk_budget: how many bytes they may take.
        upload_to: the URL to upload captures to; None means that nothing is uploaded.
        upload_options: fsspec's options for the URL.
        timeout_s: the longest time for one capture.
    """

    run: str
    rank: int
    recording_ranks: int = 1
    one_per_role: bool = False
    owner: int | None = None
    sinks: dict[str, dict[str, Any]] = {}
    scalars: bool = False
    keep: int | None = None
    disk_budget: int | None = None
    upload_to: str | None = None
    upload_options: dict[str, Any] = {}
    timeout_s: float = 600.0


def to_line(job: Job) -> str:
    """Write a job as one line of text."""
    return json.dumps(msgspec.to_builtins(job)) + "\n"


def from_line(line: str) -> Job:
    """Read the job that `to_line` wrote."""
    return msgspec.convert(json.loads(line), Job)
