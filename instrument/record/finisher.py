"""`Finisher` has the saved windows of a run finished, and uploads and removes their captures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import RLock, Thread
from typing import Any
from uuid import uuid4

from instrument.base import files, polars_forks, queue
from instrument.base.errors import reason_of, to_trace
from instrument.base.export_job import BEGIN_ANSWERS, Job, to_line
from instrument.base.file_lock import FileLock
from instrument.base.log import lines_logger, logger
from instrument.base.rank_info import lowest_rank
from instrument.base.signals import interruptibly, raised_by_handler, uninterrupted
from instrument.export import retention, waiting
from instrument.export.sink_calls import call_sinks, is_sink, run_sink
from instrument.export.upload import Uploads, has_arrived
from instrument.record.config.schema import ProfilerConfig
from instrument.record.distributed import recording_ranks

# How long the end of a run waits, in seconds: for the exporter, if training failed; once all
# windows are finished, for the sinks in the exporter; for each sink in this process, if the run
# ended early.
_AFTER_FAILURE_S, _CLOSING_S, _CLOSING_HERE_S = 2.0, 5.0, 5.0
# How many exporters the end of a run starts, if each dies before it has done anything.
_STARTS_IN_VAIN = 2


class Finisher:
    """Has the saved windows of a run finished, uploads their captures, and removes old captures.

    With `profiler.export=process`, the exporter finishes windows (see
    `instrument.export.__main__`), and a thread of this process then runs the sinks that only this
    process can run. With `profiler.export=inline`, or if no thread can be started, the thread that
    steps does it.

    The first window starts the exporter. If the exporter dies, it leaves the window that it was
    working on busy (see `queue`); the next window, or the end of the run, starts another exporter
    for the rest. An error is logged for the first exporter that dies.

    Cost for the training loop: about 2 ms to start the exporter; for each window, the time to write
    a line to a pipe.

    Attributes:
        run: the id of the run on this rank, which is in each `capture.json`.
        lock: shows other processes that the run is alive; this process holds the lock from the
            first window on, and the exporter inherits it.
        saved: how many windows have been saved so far.
        to_finish: queued folders that this process must finish itself.
        inline: the sinks that run in this process although there is an exporter, by name.
        pending: queued folders that the exporter has not finished yet.
    """

    def __init__(
        self, config: ProfilerConfig, output_dir: Path, rank: int, world_size: int
    ) -> None:
        self.output_dir = output_dir
        self.run = uuid4().hex
        self.rank = rank
        self.lock = FileLock(queue.lock_of(output_dir, self.run))
        self.saved = 0
        self.to_finish: list[Path] = []
        self._config = config
        self._recording_ranks = recording_ranks(config.ranks, world_size)
        # In a child that was forked after an inline export, polars would hang.
        self._by_exporter = config.export == "process" or polars_forks.is_lost()
        self.inline = _sinks_after_the_exporter(config) if self._by_exporter else {}
        uploads_here = not self._by_exporter or bool(self.inline)
        self._uploads = (
            Uploads(config.upload_to, config.upload_options, self._recording_ranks)
            if config.upload_to and uploads_here
            else None
        )
        self._job = Job(
            run=self.run,
            rank=rank,
            recording_ranks=self._recording_ranks,
            one_per_role=config.ranks == "one_per_role" and world_size > 1,
            sinks={
                name: about
                for name, about in config.sinks_for_exporter.items()
                if name not in self.inline
            },
            upload_to=None if uploads_here else config.upload_to,
            upload_options={} if uploads_here else config.upload_options,
            timeout_s=config.export_timeout_s,
        )
        self.pending: list[Path] = []
        self._newest: Path | None = None  # the last capture that was finished
        self._given_up: list[Path] = []  # on which an exporter died
        self._dropped: list[str] = []
        self._failed: set[str] = set()  # whose first failure is logged
        self._finishing = False
        # Held while a window is queued, and while the exporter starts, answers or ends.
        self._changing = RLock()
        self._process: subprocess.Popen[str] | None = None
        self._listener: Thread | None = None
        self._over = False  # whether no more windows come
        # how often the end of the run may start another exporter
        self._starts_left = _STARTS_IN_VAIN
        interruptibly(self.notice)

    @property
    def owner(self) -> int | None:
        """The user id that owns the windows of the run; None before the first one is saved."""
        return self._job.owner

    @property
    def sinks_here(self) -> Mapping[str, Any]:
        """The sinks that this process runs."""
        return self.inline if self._by_exporter else self._config.sinks

    def notice(self) -> None:
        """Call `Sink.notice` of this process's sinks; call this on the training thread."""
        call_sinks(self.sinks_here, "notice", self._failed)

    def has_room(self, name: str) -> bool:
        """Whether the exporter's queue has room for the window `name`; if not, it is dropped.

        A warning is logged for the first such window.
        """
        if self._process is None:  # the window starts one
            return True
        if sum(map(queue.is_waiting, self.pending)) < self._config.export_queue:
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

    def save(self, staging: Path, metadata: Mapping[str, Any]) -> None:
        """Queue the partial folder of a window whose trace is complete, and have it finished."""
        if not self.saved:  # on a network file system, it may differ from the process's user id
            self._job.owner = staging.stat().st_uid
        with self._changing:
            folder = queue.queue(staging, metadata)
            self.saved += 1
            if self._by_exporter and self._tell_exporter(folder):
                return
        self.to_finish.append(folder)

    # In this process.

    def finish_here(self) -> None:
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
            self._finishing = False  # Python handles no signal between the loop and this line

    def _finish_first(self) -> None:
        folder = self.to_finish[0]
        finished = folder.with_name(queue.name_of(folder))
        with suppress(OSError):  # a second signal's exception came before it was put back
            queue.put_back(queue.busy_path(folder))
        if queue.is_queued(folder):
            try:
                self._finish(folder)
            except BaseException as error:
                if not raised_by_handler(error):  # otherwise the next call goes on
                    self.to_finish.remove(folder)
                raise
        elif files.exists(finished) and finished != self._newest:
            self._take(finished)  # a signal's exception came right after renaming
        elif finished != self._newest:
            self._report_lost([queue.name_of(folder)])
        self.to_finish.remove(folder)

    def _finish(self, folder: Path) -> None:
        from instrument.export.window import finish

        sinks = {n: sink for n, sink in self._config.sinks.items() if n not in self.inline}
        one_per_role = self._job.one_per_role
        self._take(finish(folder, sinks, failed=self._failed, one_per_role=one_per_role))

    def _take(self, folder: Path) -> None:
        """Run this process's sinks on a finished capture, and upload it."""
        if self.inline:
            from instrument.read.capture import Capture

            capture = Capture.load(folder)
            is_reduced = self._job.one_per_role and capture.trace_path is None
            for name, sink in () if is_reduced else self.inline.items():
                run_sink(name, sink, capture, folder, self._failed)
        if self._uploads is not None:
            self._uploads.add(folder)
        self._newest = folder
        logger.info("Recorded {}", folder)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        keep, budget = self._config.keep, self._config.disk_budget
        if keep is not None or budget is not None:
            retention.enforce(self._captures(), keep, budget, self._is_needed)

    def _captures(self) -> list[Path]:
        found = queue.captures_of(self.output_dir, self.rank, {self.run: self.owner})
        return [folder for _, folder in found]

    def _is_needed(self, folder: Path) -> bool:
        """Whether a capture must stay: it is not taken or uploaded yet, or a sink needs it."""
        if folder.name in map(queue.name_of, self.pending) or self._is_unsent(folder):
            return True
        return any(sink.busy_with(folder) for sink in filter(is_sink, self.sinks_here.values()))

    def _is_unsent(self, folder: Path) -> bool:
        url = self._config.upload_to
        return url is not None and not has_arrived(folder, url)

    def _unsent(self) -> list[str]:
        """The names of the captures that are not uploaded to `profiler.upload_to`."""
        if self._config.upload_to is None:
            return []
        return [folder.name for folder in self._captures() if self._is_unsent(folder)]

    # The exporter.

    def _tell_exporter(self, folder: Path) -> bool:
        """Tell the exporter of a queued folder; return False if no thread can hear its answers."""
        self.pending.append(folder)
        try:
            if self._process is None:
                self._start()
            else:
                _write(self._process, "")
        except RuntimeError as error:
            self.pending.remove(folder)
            if "shutdown" not in str(error) and "thread" not in self._failed:
                self._failed.add("thread")
                logger.warning(
                    "No thread can be started ({}), so training waits while windows are finished.",
                    error,
                )
            return False
        except Exception as error:
            self.pending.remove(folder)
            if "exporter" not in self._failed:
                self._failed.add("exporter")
                logger.error(
                    "The exporter cannot be started ({}): `instrument export {}` finishes the "
                    "captures.",
                    error,
                    self.output_dir,
                )
        return True

    def _start(self) -> None:
        handle, job = self.lock.handle, to_line(self._job)
        files.fill_standard_streams()
        self._process = process = subprocess.Popen(
            files.python_running(
                "instrument.export.__main__",
                str(self.output_dir),
                *([] if handle is None else [str(handle)]),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # not inheritable: stderr was closed, and the number now belongs to another file
            stderr=None if os.get_inheritable(2) else subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={name: each for name, each in os.environ.items() if name != "PYTHONPATH"},
            start_new_session=True,  # against Ctrl-C in the trainer's terminal
            # the run counts as alive until the exporter ends
            pass_fds=() if handle is None else (handle,),
        )
        try:
            self._listener = Thread(
                target=self._listen, args=(process,), name="instrument exporter", daemon=True
            )
            self._listener.start()
        except RuntimeError:
            self._process = self._listener = None
            process.kill()
            with suppress(OSError), process:  # closes the pipes and waits
                raise
        _write(process, job.rstrip())
        _write(process, "end" if self._over else "")

    def _listen(self, process: subprocess.Popen[str]) -> None:
        # `with process` closes the pipes and waits at the end; if the exporter has left lines
        # unread, closing raises BrokenPipeError
        with suppress(BrokenPipeError), process:
            lines = iter(process.stdout or ())
            for line in lines:  # what `sitecustomize` prints comes first
                if line.rstrip() == BEGIN_ANSWERS:
                    break
            for line in lines:
                self._hear(line)
        with self._changing:
            self._process = None
            finished = self._note_end(process.returncode)
        for folder in finished:
            self._hear(json.dumps({"done": "", "place": str(folder)}))

    def _hear(self, line: str) -> None:
        try:
            answer = json.loads(line)
            if "text" in answer:
                if answer["is_block"]:
                    lines_logger.block(answer["text"].strip("\n"))
                else:
                    lines_logger.log(answer["level"], "exporter: {}", answer["text"])
                return
            try:
                if answer["place"] is not None:
                    self._take(Path(answer["place"]))
            finally:
                # not pending if the exporter has found it by itself, after an earlier failure
                with self._changing, suppress(ValueError):
                    self.pending.remove(Path(answer["done"]))
                    self._starts_left = _STARTS_IN_VAIN
        except Exception as error:
            logger.error(
                "A message from the exporter cannot be used ({}): {}",
                reason_of(error),
                line.strip(),
                exception=to_trace(error),
            )

    def _note_end(self, status: int) -> list[Path]:
        """Keep only queued windows pending after an exporter's end.

        Returns the captures that the exporter finished without an answer, because it was killed.
        """
        finished, busy, lost = list[Path](), list[Path](), list[str]()
        for folder in list(self.pending):
            name = queue.name_of(folder)
            capture = folder.with_name(name)
            if queue.is_queued(folder):
                continue
            self.pending.remove(folder)
            if files.is_folder(queue.busy_path(folder)):
                busy.append(folder)
            elif queue.origin(capture).run == self.run:
                finished.append(capture)
            else:
                lost.append(name)
        if lost:
            self._report_lost(lost)
        if busy or finished or status == 0:
            self._starts_left = _STARTS_IN_VAIN if status else 0
        self._given_up += busy
        if status != 0 and "death" not in self._failed:
            self._report_death(status, busy)
        return finished

    def _report_lost(self, names: list[str]) -> None:
        logger.error(
            "The exporter cannot find or read {} in {}: was it removed?",
            ", ".join(names),
            self.output_dir,
        )

    def _report_death(self, status: int, busy: list[Path]) -> None:
        """Log the death of an exporter, unless it had nothing left to do."""
        saved = [queue.name_of(folder) for folder in busy or self.pending]
        names = saved or self._unsent()
        if not names:
            return
        self._failed.add("death")
        what = "before it had sent" if not saved else "before it had finished"
        signals = {each.value: each.name for each in signal.Signals}
        why = f"exit status {status}" if status >= 0 else signals.get(-status, f"signal {-status}")
        if status == -signal.SIGALRM:
            why = f"it took longer than profiler.export_timeout_s={self._job.timeout_s:g}"
        logger.error(
            "The exporter ended {} {} ({}). {} kept, and `instrument export {}{}` finishes the "
            "work when the run has ended. Training goes on, and a new exporter process finishes "
            "later windows.",
            "while it worked on" if busy else what,
            ", ".join(names),
            why,
            "The raw trace is" if saved else "The captures are",
            self.output_dir,
            f" --upload-to {self._job.upload_to}" if self._job.upload_to else "",
        )

    # The end of the run.

    def close(self, reason: str | None) -> None:
        """Finish all windows; wait for the exporter and for uploads as long as the config allows.

        `reason` says why the run ended early; None after a normal end. After an early end, this
        method does not wait for uploads by this process; `instrument export` can upload the
        captures later. After an exception, other ranks may hang in a collective until this process
        ends. So this method then waits at most two seconds for the exporter, and the exporter
        continues by itself.
        """
        began, timeout_s = time.monotonic(), self._config.export_timeout_s
        try:
            self.finish_here()
            self._end_exporter(raised=reason is not None and reason.startswith("exception "))
            if self._uploads is not None and reason is None:
                self._uploads.close(max(0.1, began + timeout_s - time.monotonic()))
            longest_s = None if reason is None else _CLOSING_HERE_S
            interruptibly(call_sinks, self.sinks_here, "close", self._failed, longest_s)
            if self._process is None:  # otherwise its thread does so
                self._remove_oldest()
        finally:  # even if Ctrl-C or another signal ends the wait
            left = self.warn_of_unfinished()
            self.lock.release(done=not left)
        if len(self._dropped) > 1:
            logger.warning("All windows that were dropped: {}", ", ".join(self._dropped))
        if (
            self._newest is not None
            and self._recording_ranks > 1
            and self.rank == lowest_rank(self._config.ranks)
        ):
            logger.info("`instrument ranks {}` compares the ranks.", self.output_dir)

    def _end_exporter(self, *, raised: bool) -> None:
        """Wait until the exporter has ended, as `close` says.

        If the exporter dies before its work is done, another one goes on, but no third one if two
        in succession die before they have done with a window.
        """
        began, timeout_s = time.monotonic(), self._config.export_timeout_s
        if raised:
            timeout_s = min(_AFTER_FAILURE_S, timeout_s)

        def left() -> list[str]:
            unsent = [] if raised or self._job.upload_to is None else self._unsent()
            return [*map(queue.name_of, self.pending), *(f"sending {name}" for name in unsent)]

        with uninterrupted(), self._changing:
            self._over = True
            if self._process is not None:
                # Closing the pipe is not enough: forked data loaders hold it open too.
                _write(self._process, "end")
        while (left_s := timeout_s - (time.monotonic() - began)) > 0:
            with uninterrupted(), self._changing, suppress(OSError, RuntimeError):
                if self._process is None and self._starts_left and left():
                    self._starts_left -= 1
                    self._start()
            if self._listener is None or not self._listener.is_alive():
                return
            closing_s = 0 if raised and self._unsent() else _CLOSING_S
            waiting.wait_for(self._listener, left, left_s, closing_s, "exporter")
            if self._listener.is_alive():  # it goes on by itself
                return

    def warn_of_unfinished(self) -> bool:
        """Warn of windows not finished and captures not uploaded; return whether there are any."""
        waits = self._process is not None
        stuck = [*self._given_up, *self.to_finish, *([] if waits else self.pending)]
        if stuck:
            logger.warning(
                "These windows are saved but not finished: {}. `instrument export {}` finishes "
                "them.",
                ", ".join(map(queue.name_of, stuck)),
                self.output_dir,
            )
        if waits and self.pending:
            logger.warning(
                "The exporter continues by itself, and these windows are not finished yet: {}. If "
                "the exporter ends before it has finished them, `instrument export {}` finishes "
                "the rest.",
                ", ".join(map(queue.name_of, self.pending)),
                self.output_dir,
            )
        unsent = self._unsent()
        if unsent:
            logger.warning(
                "These captures are not sent to {} yet and are kept on disk: {}. {}`instrument "
                "export {} --upload-to {}` sends captures that have not arrived.",
                self._config.upload_to,
                ", ".join(unsent),
                "The exporter continues to send them. After it has ended, "
                if waits and self._job.upload_to
                else "",
                self.output_dir,
                self._config.upload_to,
            )
        return bool(stuck or self.pending or unsent)


def _sinks_after_the_exporter(config: ProfilerConfig) -> dict[str, Any]:
    """The sinks that no other process can build, and with them those that set `last`."""
    names = config.inline_sinks
    if not names:
        return {}
    logger.info(
        "Only the training process can run these sinks: {}. They run on a separate thread.",
        ", ".join(names),
    )
    last = [name for name, sink in config.sinks.items() if getattr(sink, "last", False)]
    return {
        name: config.sinks[name] for name in sorted({*names, *last}, key=lambda name: name in last)
    }


def _write(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to the exporter, unless it has ended: `_listen` handles its end."""
    with suppress(OSError, ValueError):  # ValueError: the listener has closed the pipe
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
