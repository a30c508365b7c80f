"""From a window that has just ended to its capture: saved in the training loop, finished beside it, kept in bounds."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

import msgspec
from loguru import logger

from instrument.capture import Capture
from instrument.config.schema import ProfilerConfig
from instrument.record.metadata import Place
from instrument.record.overhead import Cost
from instrument.record.recorder import Recorder
from instrument.record.signals import ctrl_c_passes
from instrument.runs import ranks_report
from instrument.sinks import Sink
from instrument.worker import job, queue
from instrument.worker.finish import finish, run_sink, tell_sinks
from instrument.worker.job import Job
from instrument.worker.process import Exporter
from instrument.worker.run_lock import RunLock
from instrument.worker.upload import Uploader

# How long the lowest of several ranks waits at the end for what the others finish themselves as well.
_PATIENT_S = 2.0


class Delivery:
    """Takes a run's finished windows; `captures` gets each once it is whole, and loses those that are not kept.

    With `profiler.export=process` that happens on a thread which waits for the worker and needs next to no time.
    Whoever runs the last sink sends the capture where `profiler.upload_to` says: the worker, or this process on a
    thread. None is removed before it has arrived.

    Attributes:
        run: the run's id, which its captures bear.
        lock: tells others that the run is alive; held from the first window on.
        taken: how many windows were saved.
    """

    def __init__(self, config: ProfilerConfig, output_dir: Path, captures: list[Capture], place: Place) -> None:
        self.output_dir = output_dir
        self.run = uuid4().hex
        self.lock = RunLock(output_dir, self.run)
        self.taken = 0
        self._config = config
        self._captures = captures
        self._sizes: dict[Path, int] = {}
        self._failed: set[str] = set()
        self._dropped: list[str] = []
        self._to_finish: list[Path] = []  # by this process itself
        self._unsent: set[Path] = set()
        self._bounding = Lock()
        self._inline = self._chosen_inline() if config.export == "process" else {}
        self._job = Job(
            run=self.run,
            rank=place.rank,
            world_size=place.world_size,
            ranks=config.ranks,
            folder=str(output_dir),
            sinks={name: about for name, about in config.sinks_for_worker.items() if name not in self._inline},
            upload_to=config.upload_to,
            upload_options=config.upload_options,
            timeout_s=config.export_timeout_s,
        )
        here = config.export == "inline" or bool(self._inline)  # the last sink runs
        self._uploader = (
            Uploader(config.upload_to, config.upload_options, self._sent) if config.upload_to and here else None
        )
        self._exporter = (
            Exporter(self._without_upload(self._job) if here else self._job, self.lock, self._arrived, self._sent)
            if config.export == "process"
            else None
        )
        self._here = config.sinks if self._exporter is None else self._inline
        with ctrl_c_passes():
            tell_sinks(self._here, "notice", self._failed)

    def has_room(self, name: str) -> bool:
        """Whether a window that is about to begin could be taken at its end; says so where not, and notes its name."""
        if self._exporter is None or len(self._exporter.pending) < self._config.export_queue:
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

    def take(
        self, recorder: Recorder, name: str, cost: Cost, describe: Callable[[], dict[str, Any]], in_haste: bool = False
    ) -> None:
        """Save a window's raw trace before anything else, and have the rest done; `in_haste` as for `Recorder.save`.

        Raises:
            CaptureError: the trace cannot be saved.
            OSError: as for `CaptureError`.
        """
        tell_sinks(self._here, "notice", self._failed)
        staging = queue.stage(self.output_dir, name, self.run if self.lock.hold() else "")
        try:
            with cost.standing_still("save"):
                recorder.save(staging / queue.RAW, in_haste=in_haste)
            about = {"name": name, **self._described(describe), "run": self.run, "rank": self._job.rank}
            about["sinks_inline"] = list(self._inline)
            about["cost"] = cost.window() | {"trace_bytes": (staging / queue.RAW).stat().st_size}
            if not self.taken:
                self._job.owner = staging.stat().st_uid if hasattr(os, "getuid") else None
                job.remember(self._job)
            folder = queue.queue(staging, about)
        except Exception:
            shutil.rmtree(staging, ignore_errors=True)  # half a trace, whose space may be what is missing
            raise
        self.taken += 1
        if self._exporter is None:
            self._to_finish.append(folder)
        else:
            self._hand_over(folder)

    def finish_inline(self) -> None:
        """With `profiler.export=inline`: finish what was taken.

        Raises:
            OSError: the trace cannot be compressed; it stays queued.
        """
        with ctrl_c_passes():
            while self._to_finish:
                folder = self._to_finish.pop(0)
                self._arrived(finish(folder, self._config.sinks, failed=self._failed))

    def close(self, cut: str | None) -> None:
        """Finish what is not finished yet; for the worker and for what is sent wait as long as the config allows.

        Where an exception ended the run, other ranks may stand in a collective until this process ends: the worker is
        waited for two seconds at most, and what is to be sent not at all. The worker sends by itself, and for this
        process `instrument export` does.
        """
        self.finish_inline()
        began, raised = time.monotonic(), cut is not None and cut.startswith("exception ")
        try:
            if self._exporter is not None:
                self._exporter.close(failed=raised)
            if self._uploader is not None and cut is None:
                self._uploader.close(max(0.1, began + self._config.export_timeout_s - time.monotonic()))
            with ctrl_c_passes():
                if cut is not None:
                    tell_sinks(self._here, "hurry", self._failed)
                tell_sinks(self._here, "close", self._failed)
            with self._bounding:
                self._keep_in_bounds()
        finally:  # also where Ctrl-C ends the waiting
            self.say_what_is_left()
            self._release()
        if len(self._dropped) > 1:
            logger.warning("The windows dropped in all: {}", ", ".join(self._dropped))
        if self._exporter is None and self._captures and self._captures[-1].folder is not None:
            ranks_report.conclude(self._job, self._captures[-1].folder, 0.0 if cut else _PATIENT_S)

    def _release(self) -> None:
        """Let go of the run; what is left, the worker or `instrument export` does."""
        done = not self._unsent and not (self.taken and queue.queued_of(self._job))
        self.lock.release(done=done)
        if done and self.taken:
            job.forget(self.run)

    def say_what_is_left(self) -> None:
        """Name the windows that the exporter has not finished yet; it goes on when this process has ended."""
        left = self._exporter.pending if self._exporter is not None else []
        if left:
            logger.warning(
                "Left to the exporter, which goes on by itself: {}. Should it not come to an end, "
                "`instrument export {}` finishes what there is.",
                ", ".join(map(queue.name_of, left)),
                self.output_dir,
            )
        if unsent := sorted(folder.name for folder in self._unsent):
            alone = "The exporter goes on by itself; later " if self._exporter and self._exporter.sending else ""
            what = "Not sent to {} yet, and kept: {}. {}`instrument export {}` sends what has not arrived."
            logger.warning(what, self._config.upload_to, ", ".join(unsent), alone, self.output_dir)

    @staticmethod
    def _without_upload(whole: Job) -> Job:
        return msgspec.structs.replace(whole, upload_to=None, upload_options={})

    def _chosen_inline(self) -> dict[str, Any]:
        """The sinks that must run here, and behind them, if there are any, those that must run behind all others."""
        names = self._config.inline_sinks
        if not names:
            return {}
        logger.info("Only this process can run the sink {}: it does, on a thread beside training.", " and ".join(names))
        last = [name for name, sink in self._config.sinks.items() if getattr(sink, "last", False)]
        return {name: self._config.sinks[name] for name in sorted({*names, *last}, key=lambda name: name in last)}

    def _described(self, describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return describe()
        except Exception:  # the trace is there, and is worth more than what is said of it
            logger.exception("What capture.json says of a window is not all that it should.")
            return {"config": self._config.plain()}

    def _hand_over(self, folder: Path) -> None:
        assert self._exporter is not None
        try:
            self._exporter.submit(folder)
        except RuntimeError as error:  # no thread can be started
            if "shutdown" not in str(error) and "thread" not in self._failed:  # else the interpreter just ends
                self._failed.add("thread")
                logger.warning("No thread can be started ({}), so training waits while windows are finished.", error)
            sinks = {name: sink for name, sink in self._config.sinks.items() if name not in self._inline}
            with ctrl_c_passes():
                self._arrived(finish(folder, sinks, failed=self._failed))
        except OSError as error:
            if "exporter" not in self._failed:
                what = "The exporter cannot be started ({}): `instrument export {}` finishes the captures."
                logger.error(what, error, self.output_dir)
            self._failed.add("exporter")

    def _arrived(self, folder: Path) -> None:
        for name, sink in self._inline.items():
            run_sink(name, sink, Capture.load(folder), folder, self._failed)
        self._captures.append(Capture.load(folder))
        logger.info("Recorded {}", folder)
        with self._bounding:
            self._sizes[folder] = _size(folder)
            if self._config.upload_to is not None:
                self._unsent.add(folder)
            self._keep_in_bounds()
        if self._uploader is not None:
            self._uploader.submit(folder)

    def _sent(self, folder: Path, arrived: bool) -> None:
        if arrived:
            with self._bounding:
                self._unsent.discard(folder)
                self._keep_in_bounds()

    def _is_needed(self, folder: Path) -> bool:
        """Whether a capture is still to be sent, to `profiler.upload_to` or by a sink that runs here."""
        sinks = (sink for sink in self._here.values() if isinstance(sink, Sink))
        return folder in self._unsent or any(sink.busy_with(folder) for sink in sinks)

    def _keep_in_bounds(self) -> None:
        """Remove the oldest captures of this run while there are too many, or they are too large; never the last.

        Nor one that is still to be sent, there or by a sink: it goes once it has arrived.
        """
        keep, budget = self._config.keep or sys.maxsize, self._config.disk_budget or sys.maxsize
        removable = [folder for folder in list(self._sizes)[:-1] if not self._is_needed(folder)]
        while removable and (len(self._sizes) > keep or sum(self._sizes.values()) > budget):
            oldest = removable.pop(0)
            del self._sizes[oldest]
            self._captures[:] = [capture for capture in self._captures if capture.folder != oldest]
            queue.remove(oldest)
            logger.info("Removed {}, as profiler.keep and profiler.disk_budget ask", oldest)


def _size(folder: Path) -> int:
    """The bytes of a folder's files."""
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # a reader's temporary file, gone again
            size += file.stat().st_size if file.is_file() else 0
    return size
