"""`CaptureQueue` finishes and uploads the windows of a run, and removes old captures."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from instrument import files
from instrument.config.schema import ProfilerConfig
from instrument.errors import from_signal_handler
from instrument.file_lock import FileLock
from instrument.interrupts import interruptibly
from instrument.log import logger
from instrument.rank_info import lowest_rank
from instrument.sinks import Sink
from instrument.worker import queue, retention, upload
from instrument.worker.job import Job
from instrument.worker.process import Exporter
from instrument.worker.sink_calls import call_sinks, run_sink
from instrument.worker.upload import SINK_NAME, Upload

if TYPE_CHECKING:
    from instrument.capture import Capture

# How long each sink may take to close if training failed, in seconds.
_CLOSING_S = 5.0


class FinishedCapture:
    """The folder of a finished capture, which is read when somebody asks for the capture."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def capture(self) -> Capture:
        """The capture.

        Raises:
            CaptureError: the folder was removed, or cannot be read.
        """
        from instrument.capture import Capture

        return Capture.load(self.folder)


class CaptureQueue:
    """Finishes the saved windows of a run, uploads their captures, and removes old captures.

    To finish a window means to compress its trace and to run the sinks. With
    `profiler.export=process`, the worker process finishes the windows, and a thread of this process
    adds each capture to the session's `captures`. A capture that is removed from disk is also
    removed from `captures`. The upload is the last sink. If this process runs sinks itself, the
    upload runs in this process, after these sinks; otherwise it runs in the worker.

    Attributes:
        output_dir: the folder for captures.
        run: the id of the run on this rank, which is in each `capture.json`.
        rank: the rank of this process.
        lock: shows other processes that the run is alive; this process holds the lock from the
            first window on.
        taken: how many windows have been saved so far.
        exporter: starts and feeds the worker; None with `profiler.export=inline`.
        to_finish: queued folders that this process must finish itself.
        inline: the user's sinks that run in this process although there is a worker, by name.
        sinks_here: all sinks that run in this process, by name, in the order in which they run.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        output_dir: Path,
        finished: list[FinishedCapture],
        rank: int,
        world_size: int,
    ) -> None:
        self.output_dir = output_dir
        self.run = uuid4().hex
        self.rank = rank
        self._world_size = world_size
        self.lock = FileLock(queue.lock_of(output_dir, self.run))
        self.taken = 0
        self._config = config
        self._finished = finished
        self._failed: set[str] = set()
        self._dropped: list[str] = []
        self.to_finish: list[Path] = []
        self._finishing = False
        self._enforcing = Lock()
        by_worker = config.export == "process"
        self.inline = self._choose_inline_sinks() if by_worker else {}
        self.sinks_here = dict(self.inline if by_worker else config.sinks)
        uploads_here = not by_worker or bool(self.inline)
        self._upload: Upload | None = None
        if config.upload_to and uploads_here:
            self._upload = Upload(url=config.upload_to, options=config.upload_options)
            self.sinks_here[SINK_NAME] = self._upload
        self._job = Job(
            run=self.run,
            rank=rank,
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
        interruptibly(self.notice)

    def notice(self) -> None:
        """Let each sink that runs in this process read state of the training thread.

        Call this on the training thread; see `Sink.notice`.
        """
        call_sinks(self.sinks_here, "notice", self._failed)

    def note_owner(self, staging: Path) -> None:
        """Note the user id that owns the folder of a window: the worker takes no other folders.

        On a network file system, it may differ from the user id of this process.
        """
        self._job.owner = staging.stat().st_uid

    def has_room(self, name: str) -> bool:
        """Whether the exporter's queue has room for the next window, which is named `name`.

        If there is no room, the window is dropped. A warning is logged for the first such window.
        """
        if self.exporter is None or len(self.exporter.pending) < self._config.export_queue:
            return True
        if not self._dropped:
            logger.warning(
                "The exporter is {} windows behind (profiler.export_queue): {} is dropped, and so "
                "are later windows until the exporter has finished a window. Record less often, or "
                "give the exporter a CPU core of its own.",
                self._config.export_queue,
                name,
            )
        self._dropped.append(name)
        return False

    def finish_inline(self) -> None:
        """Finish the windows in `to_finish` on this thread.

        Raises:
            OSError: a trace cannot be compressed; the window stays queued.
        """
        if self._finishing:  # a sink or a signal handler stops the session, or another thread
            return
        try:
            self._finishing = True
            while self.to_finish:
                self._finish_first()
        finally:
            self._finishing = False

    def _finish_first(self) -> None:
        folder = self.to_finish[0]
        finished = folder.with_name(queue.name_of(folder))
        if queue.is_queued(folder):
            try:
                interruptibly(self._finish, folder, self.sinks_here)
            except BaseException as error:
                if not from_signal_handler(error):  # otherwise the next call goes on
                    self.to_finish.remove(folder)
                raise
        elif files.exists(finished) and finished not in [each.folder for each in self._finished]:
            self._take_capture(finished)  # a signal's exception came right after renaming
        self.to_finish.remove(folder)

    def _finish(self, folder: Path, sinks: dict[str, Any]) -> None:
        from instrument.worker.finish import finish

        self._take_capture(finish(folder, sinks, failed=self._failed))

    def close(self, reason: str | None) -> None:
        """Finish all windows; wait for the worker and for uploads as long as the config allows.

        If the run ended early, this method does not wait for uploads by this process; `instrument
        export` can upload the captures later. After an exception, other ranks may hang in a
        collective until this process ends. So this method then waits at most two seconds for the
        worker, and the worker continues by itself.

        Args:
            reason: why the run ended early; None after a normal end.
        """
        began, raised = time.monotonic(), reason is not None and reason.startswith("exception ")
        try:
            self.finish_inline()
            if self.exporter is not None:
                self.exporter.close(failed=raised)
            if self._upload is not None and reason is None:
                self._upload.close(
                    max(0.1, began + self._config.export_timeout_s - time.monotonic())
                )
            others = {
                name: sink for name, sink in self.sinks_here.items() if sink is not self._upload
            }
            longest_s = None if reason is None else _CLOSING_S
            interruptibly(call_sinks, others, "close", self._failed, longest_s)
            self._remove_oldest()
        finally:  # also if Ctrl-C or another signal ends the wait
            self._release(unsent=self.warn_of_unfinished())
        if len(self._dropped) > 1:
            logger.warning("All windows that were dropped: {}", ", ".join(self._dropped))
        if len(self._job.given_up) > 1:
            names = (queue.name_of(Path(name)) for name in self._job.given_up)
            logger.warning("All windows on which an exporter ended: {}", ", ".join(names))
        if self._finished and self._world_size > 1 and self.rank == lowest_rank(self._config.ranks):
            logger.info("`instrument ranks {}` compares the ranks.", self.output_dir)

    def _release(self, unsent: list[str]) -> None:
        """Release the run's lock; its file goes if no window is left to finish or upload."""
        done = not unsent and not (self.taken and queue.queued_of(self._job))
        self.lock.release(done=done)

    def warn_of_unfinished(self) -> list[str]:
        """Warn about windows that are not finished, and about captures that are not uploaded.

        Returns the names of the captures that are not uploaded.
        """
        if self.to_finish:
            logger.warning(
                "These windows are saved but not finished: {}. `instrument export {}` finishes "
                "them.",
                ", ".join(map(queue.name_of, self.to_finish)),
                self.output_dir,
            )
        left = self.exporter.pending if self.exporter is not None else []
        if left:
            logger.warning(
                "The exporter continues by itself, and these windows are not finished yet: {}. If "
                "the exporter ends before it has finished them, `instrument export {}` finishes "
                "the rest.",
                ", ".join(map(queue.name_of, left)),
                self.output_dir,
            )
        unsent = self._unsent()
        if unsent:
            is_sending = self.exporter is not None and self.exporter.sending
            logger.warning(
                "These captures are not sent to {} yet and are kept on disk: {}. {}`instrument "
                "export {} --upload-to {}` sends captures that have not arrived.",
                self._config.upload_to,
                ", ".join(unsent),
                "The exporter continues to send them. After it has ended, " if is_sending else "",
                self.output_dir,
                self._config.upload_to,
            )
        return unsent

    def _choose_inline_sinks(self) -> dict[str, Any]:
        """The sinks that this process must run itself.

        This process must run the sinks that no other process can build. If there are such sinks,
        the sinks that set `last` run here too, because they must run after all other sinks.
        """
        names = self._config.inline_sinks
        if not names:
            return {}
        logger.info(
            "Only the training process can run these sinks: {}. They run on a separate thread.",
            ", ".join(names),
        )
        last = [name for name, sink in self._config.sinks.items() if getattr(sink, "last", False)]
        return {
            name: self._config.sinks[name]
            for name in sorted({*names, *last}, key=lambda name: name in last)
        }

    def finish_without_exporter(self, folder: Path, error: Exception) -> None:
        """Handle an error of `Exporter.submit`: finish the window on this thread, or log the error.

        A RuntimeError means that no thread can be started; then the window is finished on this
        thread. After any other error, `instrument export` must finish the window.
        """
        if isinstance(error, RuntimeError):  # no thread can be started
            is_shutdown = "shutdown" in str(error)
            if not is_shutdown and "thread" not in self._failed:
                self._failed.add("thread")
                logger.warning(
                    "No thread can be started ({}), so training waits while windows are finished.",
                    error,
                )
            sinks = {
                name: sink for name, sink in self._config.sinks.items() if name not in self.inline
            }
            interruptibly(self._finish, folder, sinks)
        elif "exporter" not in self._failed:
            self._failed.add("exporter")
            what = (
                "The exporter cannot be started ({}): `instrument export {}` finishes the captures."
            )
            logger.error(what, error, self.output_dir)

    def _take_capture(self, folder: Path) -> None:
        """Run this process's sinks on a finished capture; then add it to the session's captures."""
        if self.exporter is not None and self.sinks_here:
            from instrument.capture import Capture

            capture = Capture.load(folder)  # not the one that is kept, which would keep its events
            for name, sink in self.sinks_here.items():
                run_sink(name, sink, capture, folder, self._failed)
        self._finished.append(FinishedCapture(folder))
        logger.info("Recorded {}", folder)
        self._remove_oldest()

    def _unsent(self) -> list[str]:
        """The names of the captures that are not uploaded to `profiler.upload_to`."""
        folders = (each.folder for each in self._finished)
        return sorted(
            folder.name for folder in folders if self._is_unsent(folder) and folder.exists()
        )

    def _is_unsent(self, folder: Path) -> bool:
        url = self._config.upload_to
        return url is not None and not upload.has_arrived(folder, url)

    def _remove_oldest(self) -> None:
        """Remove the oldest captures if the captures exceed the config's limits."""
        keep, budget = self._config.keep, self._config.disk_budget
        with self._enforcing:
            removed = retention.enforce(
                self.output_dir, self.run, self.rank, keep, budget, self._is_needed
            )
            if removed:
                self._finished[:] = [each for each in self._finished if each.folder not in removed]

    def _is_needed(self, folder: Path) -> bool:
        """Whether a capture must stay on disk for now.

        A capture must stay until it is finished and uploaded, and while a sink is busy with it.
        """
        if self.exporter is not None and folder.name in map(queue.name_of, self.exporter.pending):
            return True
        sinks = (sink for sink in self.sinks_here.values() if isinstance(sink, Sink))
        return self._is_unsent(folder) or any(sink.busy_with(folder) for sink in sinks)
