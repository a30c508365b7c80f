"""`Exporter` finishes the queued windows of one rank of a run, uploads them, and removes old ones.

It runs in a process of its own (`python -m instrument.export`), and with `profiler.export=inline`
in the training process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instrument.base import queue
from instrument.base.errors import reason_of
from instrument.base.export_job import Job
from instrument.base.log import logger
from instrument.base.signals import raised_by_handler
from instrument.export.sink_calls import build_sinks, close_sinks
from instrument.export.upload import Uploads
from instrument.export.window import finish


class Exporter:
    """Finishes the windows of `job` in `folder`; without `sinks`, builds the sinks of the job."""

    def __init__(self, folder: Path, job: Job, sinks: Mapping[str, Any] | None = None) -> None:
        self._folder, self._job = folder, job
        self._failed = set[str]()  # whose first failure is logged
        self._given_up = set[str]()
        self._sinks = build_sinks(job.sinks, self._failed) if sinks is None else sinks
        self._uploads = (
            Uploads(job.upload_to, job.upload_options, job.recording_ranks)
            if job.upload_to
            else None
        )

    def queued(self, *, is_over: bool = False) -> list[Path]:
        """The queued windows, oldest first, without those that could not be finished.

        Unless the run is over, those that wait for their detail window are left out.
        """
        job = self._job
        found = queue.queued_of(self._folder, job.run, job.rank, job.owner, is_over=is_over)
        return [each for each in found if each.name not in self._given_up]

    def finish(self, window: Path) -> None:
        """Turn a queued window into a capture; log an error if that fails: it then stays queued."""
        job = self._job
        try:
            place = finish(
                window,
                self._sinks,
                failed=self._failed,
                one_per_role=job.one_per_role,
                with_scalars=job.scalars,
            )
        except Exception as error:
            if raised_by_handler(error):
                raise
            self._given_up.add(window.name)
            if isinstance(error, queue.TakenError):
                return
            queue.say_why(window, f"It cannot be finished: {reason_of(error)}.")
            if "exporter" not in self._failed:
                self._failed.add("exporter")
                logger.error(
                    "{} cannot be finished ({}); failures of later windows are not logged. The raw "
                    "traces are kept: `instrument export {}` tries again.",
                    queue.name_of(window),
                    reason_of(error),
                    window.parent,
                )
            return
        logger.debug("Exported {}", place)  # a line of the log is how the trainer learns of it
        if self._uploads is not None:
            self._uploads.add(place)
        self._remove_oldest()

    def close(self, sinks_s: float | None = None, uploads_s: float | None = None) -> None:
        """Close the sinks, and wait for uploads; each at most so long, None without limit."""
        if self._uploads is not None:  # an earlier exporter may have died of one of them
            captures = self._captures()
            self._uploads.add(*(each for each in captures if queue.is_needed(each, "upload")))
        close_sinks(self._sinks, self._failed, sinks_s)
        if self._uploads is not None:
            self._uploads.close(uploads_s)
        self._remove_oldest()

    def _captures(self) -> list[Path]:
        job = self._job
        found = queue.captures_of(self._folder, job.rank, {job.run: job.owner})
        return [folder for _, folder in found]

    def _remove_oldest(self) -> None:
        if self._job.keep is not None or self._job.disk_budget is not None:
            queue.remove_oldest(self._captures(), self._job.keep, self._job.disk_budget)
