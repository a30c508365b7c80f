"""`CaptureQueue`: from the raw traces that a run saves to its finished captures."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

import msgspec
from loguru import logger

from instrument.capture import Capture
from instrument.config.schema import ProfilerConfig
from instrument.sinks import Sink
from instrument.worker import job, queue, rank_report, retention, upload
from instrument.worker.finish import ctrl_c_passes, finish, run_sink, tell_sinks
from instrument.worker.job import Job
from instrument.worker.process import Exporter
from instrument.worker.run_lock import RunLock
from instrument.worker.upload import SINK_NAME, Upload

# How long the lowest of several ranks waits at the end for what the others finish themselves as well.
_PATIENT_S = 2.0
# How long each sink may take to close where training has failed.
_CLOSING_S = 5.0


class CaptureQueue:
    """Takes a run's windows once their raw traces are saved, and has each finished, uploaded and kept or removed.

    The session's `captures` gets each capture once all sinks have run on it, and loses those that retention removes.
    With `profiler.export=process` the worker finishes them, and a thread here, which needs next to no time, takes them
    in. Uploading is the last sink: where this process runs sinks behind the worker's, it uploads too.

    Attributes:
        output_dir: the folder for captures.
        run: the run's id, which stands in each `capture.json`; it is of this rank alone.
        rank: of this process.
        lock: tells others that the run is alive; held from the first window on.
        taken: how many windows were saved.
        exporter: the trainer's handle on the worker; None with `profiler.export=inline`.
        to_finish: queued folders that this process has to finish itself.
        inline: the user's sinks that only this process can run, while the worker runs the others.
        sinks_here: all sinks that run in this process, in order.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        output_dir: Path,
        captures: list[Capture],
        rank: int,
        world_size: int,
    ) -> None:
        self.output_dir = output_dir
        self.run = uuid4().hex
        self.rank = rank
        self.lock = RunLock(output_dir, self.run)
        self.taken = 0
        self._config = config
        self._captures = captures
        self._failed: set[str] = set()
        self._dropped: list[str] = []
        self.to_finish: list[Path] = []
        self._enforcing = Lock()
        by_worker = config.export == "process"
        self.inline = self._chosen_inline() if by_worker else {}
        self.sinks_here = dict(self.inline if by_worker else config.sinks)
        uploads_here = not by_worker or bool(self.inline)  # where the last sink runs
        self._upload: Upload | None = None
        if config.upload_to and uploads_here:
            self._upload = Upload(url=config.upload_to, options=config.upload_options)
            self.sinks_here[SINK_NAME] = self._upload
        self._job = Job(
            run=self.run,
            rank=rank,
            world_size=world_size,
            ranks=config.ranks,
            folder=str(output_dir),
            sinks={
                name: about
                for name, about in config.sinks_for_worker.items()
                if name not in self.inline
            },
            upload_to=None if uploads_here else config.upload_to,
            upload_options={} if uploads_here else config.upload_options,
            timeout_s=config.export_timeout_s,
        )
        self.exporter = Exporter(self._job, self.lock, self._take_capture) if by_worker else None
        with ctrl_c_passes():
            self.notice()

    def notice(self) -> None:
        """Call `notice` of the sinks that run here, on the training thread: a window has ended, or the run begins."""
        tell_sinks(self.sinks_here, "notice", self._failed)

    def remember(self, staging: Path) -> None:
        """Keep a copy of the job for `instrument export`; called before the first window is queued.

        The job's owner is that of the window's folder, which a network's file system may have changed.
        """
        self._job.owner = staging.stat().st_uid if hasattr(os, "getuid") else None
        url, options = self._config.upload_to, self._config.upload_options
        job.remember(msgspec.structs.replace(self._job, upload_to=url, upload_options=options))

    def has_room(self, name: str) -> bool:
        """Whether the queue has room for a window that is about to begin; if not, warn once and count it as dropped."""
        if self.exporter is None or len(self.exporter.pending) < self._config.export_queue:
            return True
        if not self._dropped:
            logger.warning(
                "The exporter is {} windows behind (profiler.export_queue): {} is dropped, and so are further ones "
                "until it has caught up. Record less often, or give it a core.",
                self._config.export_queue,
                name,
            )
        self._dropped.append(name)
        return False

    def finish_inline(self) -> None:
        """Finish all windows in `to_finish`, as `profiler.export=inline` asks.

        Raises:
            OSError: the trace cannot be compressed; it stays queued.
        """
        with ctrl_c_passes():
            while self.to_finish:
                folder = self.to_finish.pop(0)
                self._take_capture(finish(folder, self.sinks_here, failed=self._failed))

    def close(self, reason: str | None) -> None:
        """Finish what is not finished yet, and wait for the worker and for uploads as long as the config allows.

        Where an exception ended the run, other ranks may hang in a collective until this process ends. It then waits
        two seconds at most for the worker, which goes on by itself, and not at all for its own uploads, which
        `instrument export` does later.

        Args:
            reason: why the run ended before its time; None: it did not.
        """
        self.finish_inline()
        began, raised = time.monotonic(), reason is not None and reason.startswith("exception ")
        try:
            if self.exporter is not None:
                self.exporter.close(failed=raised)
            if self._upload is not None and reason is None:
                self._upload.close(
                    max(0.1, began + self._config.export_timeout_s - time.monotonic())
                )
            others = {
                name: sink for name, sink in self.sinks_here.items() if sink is not self._upload
            }
            with ctrl_c_passes():
                tell_sinks(others, "close", self._failed, None if reason is None else _CLOSING_S)
            self._remove_oldest()
        finally:  # also where Ctrl-C ends the waiting
            self.say_what_is_left()
            self._release()
        if len(self._dropped) > 1:
            logger.warning("The windows dropped in all: {}", ", ".join(self._dropped))
        if self.exporter is None and self._captures and self._captures[-1].folder is not None:
            rank_report.write_rank_report(
                self._job, self._captures[-1].folder, 0.0 if reason else _PATIENT_S
            )

    def _release(self) -> None:
        """Release the run's lock, and forget its job if nothing is left for the worker or `instrument export`."""
        done = not self._unsent() and not (self.taken and queue.queued_of(self._job))
        self.lock.release(done=done)
        if done and self.taken:
            job.forget(self.run)

    def say_what_is_left(self) -> None:
        """Warn of windows that the exporter has not finished, and of captures that were not uploaded."""
        left = self.exporter.pending if self.exporter is not None else []
        if left:
            logger.warning(
                "Left to the exporter, which goes on by itself: {}. Should it not come to an end, "
                "`instrument export {}` finishes what there is.",
                ", ".join(map(queue.name_of, left)),
                self.output_dir,
            )
        if unsent := self._unsent():
            alone = (
                "The exporter goes on by itself; later "
                if self.exporter and self.exporter.sending
                else ""
            )
            what = "Not sent to {} yet, and kept: {}. {}`instrument export {}` sends what has not arrived."
            logger.warning(what, self._config.upload_to, ", ".join(unsent), alone, self.output_dir)

    def _chosen_inline(self) -> dict[str, Any]:
        """The sinks that only this process can run; if there are any, those with `last` run here too, behind them."""
        names = self._config.inline_sinks
        if not names:
            return {}
        logger.info(
            "Only this process can run the sink {}: it does, on a thread beside training.",
            " and ".join(names),
        )
        last = [name for name, sink in self._config.sinks.items() if getattr(sink, "last", False)]
        return {
            name: self._config.sinks[name]
            for name in sorted({*names, *last}, key=lambda name: name in last)
        }

    def finish_without_exporter(self, folder: Path, error: Exception) -> None:
        """Finish a window here because no thread could be started; where the worker cannot start, only say so."""
        if isinstance(error, RuntimeError):  # no thread can be started
            if (
                "shutdown" not in str(error) and "thread" not in self._failed
            ):  # else the interpreter just ends
                self._failed.add("thread")
                logger.warning(
                    "No thread can be started ({}), so training waits while windows are finished.",
                    error,
                )
            sinks = {
                name: sink for name, sink in self._config.sinks.items() if name not in self.inline
            }
            with ctrl_c_passes():
                self._take_capture(finish(folder, sinks, failed=self._failed))
        elif "exporter" not in self._failed:
            self._failed.add("exporter")
            what = (
                "The exporter cannot be started ({}): `instrument export {}` finishes the captures."
            )
            logger.error(what, error, self.output_dir)

    def _take_capture(self, folder: Path) -> None:
        """Run the sinks that only this process can run on a finished capture, and keep it in `captures`."""
        if self.exporter is not None:
            for name, sink in self.sinks_here.items():
                run_sink(name, sink, Capture.load(folder), folder, self._failed)
        self._captures.append(Capture.load(folder))
        logger.info("Recorded {}", folder)
        self._remove_oldest()

    def _unsent(self) -> list[str]:
        """The names of the captures that have not arrived at `profiler.upload_to`, as each says itself."""
        folders = [
            capture.folder
            for capture in self._captures
            if capture.folder and capture.folder.exists()
        ]
        return sorted(folder.name for folder in folders if self._is_unsent(folder))

    def _is_unsent(self, folder: Path) -> bool:
        return self._config.upload_to is not None and not upload.has_arrived(
            folder, self._config.upload_to
        )

    def _remove_oldest(self) -> None:
        """Enforce `profiler.keep` and `profiler.disk_budget`, also on `captures`; also on `captures`."""
        keep, budget = self._config.keep, self._config.disk_budget
        with self._enforcing:
            removed = retention.enforce(
                self.output_dir, self.run, self.rank, keep, budget, self._is_needed
            )
            if removed:
                self._captures[:] = [
                    capture for capture in self._captures if capture.folder not in removed
                ]

    def _is_needed(self, folder: Path) -> bool:
        """Whether a capture is still on its way into `captures`, or to be sent."""
        if self.exporter is not None and folder.name in map(queue.name_of, self.exporter.pending):
            return True
        sinks = (sink for sink in self.sinks_here.values() if isinstance(sink, Sink))
        return self._is_unsent(folder) or any(sink.busy_with(folder) for sink in sinks)
