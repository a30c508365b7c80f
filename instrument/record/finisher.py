"""`Finisher` queues the saved windows of a run, and makes sure that an exporter finishes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import RLock
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

from instrument.base import files, polars_forks, queue, waiting
from instrument.base.errors import reason_of, to_trace
from instrument.base.export_job import Job, to_line
from instrument.base.file_lock import FileLock
from instrument.base.log import lines_logger, logger
from instrument.base.rank_info import lowest_rank
from instrument.base.signals import raised_by_handler, uninterrupted
from instrument.record.config.schema import ProfilerConfig
from instrument.record.distributed import recording_ranks

if TYPE_CHECKING:
    from instrument.export.exporter import Exporter

# How long the end of a run waits, in seconds: for the exporter, if training failed; once all
# windows are finished, for the sinks in the exporter; for what this process closes, if the run
# ended early.
_AFTER_FAILURE_S, _CLOSING_S, _CLOSING_HERE_S = 2.0, 5.0, 5.0
# How many exporters the end of a run starts, if each dies before it has finished a window.
_STARTS_IN_VAIN = 2
# Exporters that go on after their run: Python warns if the object of a running process is freed.
_left_running: list[subprocess.Popen[bytes]] = []


class Finisher:
    """Queues the saved windows of a run, and makes sure that an exporter finishes them.

    The exporter is a process that the first window starts (see `instrument.export.__main__`). If it
    has died when another window is queued, or when the run ends, another one is started for what is
    left. With `profiler.export=inline`, the thread that steps does its work.

    Cost for the training loop: about 2 ms to start the exporter; for each window, the time to write
    a line to a pipe; while a window is being finished, 0.5 µs for each step.

    Attributes:
        run: the id of the run on this rank, which is in each `capture.json`.
        lock: shows other processes that the run is alive; this process holds the lock from the
            first window on, and the exporter inherits it.
        saved: how many windows have been saved so far.
        pending: queued folders whose captures `deliver` has not seen yet.
        given_up: those of them that no exporter of this run will finish.
    """

    def __init__(
        self, config: ProfilerConfig, output_dir: Path, rank: int, world_size: int
    ) -> None:
        self.output_dir = output_dir
        self.run = uuid4().hex
        self.rank = rank
        self.lock = FileLock(queue.lock_of(output_dir, self.run))
        self.saved = 0
        self.pending: list[Path] = []
        self._config = config
        self._job = Job(
            run=self.run,
            rank=rank,
            recording_ranks=recording_ranks(config.ranks, world_size),
            one_per_role=config.ranks == "one_per_role" and world_size > 1,
            sinks=config.sinks_for_exporter,
            scalars=bool(config.on_capture),
            keep=config.keep,
            disk_budget=config.disk_budget,
            upload_to=config.upload_to,
            upload_options=config.upload_options,
            timeout_s=config.export_timeout_s,
        )
        self._failed: set[str] = set()  # whose first failure is logged
        self._has_captures = False
        # Held while the exporter starts, and while captures are delivered.
        self._changing = RLock()
        # With export=inline; but in a child that was forked after polars was used, it would hang.
        self._inline: Exporter | None = None
        self._finishing = False
        self._is_inline = config.export == "inline" and not polars_forks.is_lost()
        self._process: subprocess.Popen[bytes] | None = None
        # What exporters log, one after the other, and how much of it this process has logged.
        self._log: IO[bytes] | None = None
        self._logged_bytes = 0
        # whether no more windows come, and whether an exporter has tried all of them
        self._over = self._is_done = False
        self._starts_left = _STARTS_IN_VAIN
        self.given_up: list[Path] = []  # windows that no exporter of this run finishes
        missing = self._config.sinks.keys() - self._job.sinks.keys()
        if missing and not self._is_inline:
            logger.warning(
                "This process was forked after it had read captures, so another process exports "
                "its windows, without the sinks {}, which only this process can build.",
                ", ".join(sorted(missing)),
            )

    @property
    def owner(self) -> int | None:
        """The user id that owns the windows of the run; None before the first one is saved."""
        return self._job.owner

    def begin(self) -> None:
        """Load what the first window needs; call this on the training thread."""
        for name, callback in self._config.on_capture.items():
            self._call(name, getattr(callback, "begin", lambda: None))
        if self._is_inline:
            self._exporter()

    def _exporter(self) -> Exporter:
        if self._inline is None:
            from instrument.export.exporter import Exporter

            self._inline = Exporter(self.output_dir, self._job, self._config.sinks)
        return self._inline

    def save(self, staging: Path, metadata: Mapping[str, Any], *, hold: bool = False) -> Path:
        """Queue the partial folder of a window whose trace is complete, and have it finished.

        With `hold`, it is finished after `release`, or by an exporter that outlives the run.
        Returns the queued folder.
        """
        if not self.saved:  # on a network file system, it may differ from the process's user id
            self._job.owner = staging.stat().st_uid
        needs = {"upload": self._config.upload_to, "on_capture": self._config.on_capture}
        for purpose in filter(needs.get, needs):
            queue.need(staging, purpose)
        if hold:
            queue.need(staging, queue.DETAIL)
        with self._changing:
            self.pending.append(queue.queue(staging, metadata))
            self.saved += 1
            if not self._is_inline:
                self._wake()
            return self.pending[-1]

    def release(self, folder: Path) -> None:
        """Have a queued folder finished that `save` holds."""
        queue.let_go(folder, queue.DETAIL)
        if not self._is_inline:
            with self._changing:
                self._wake()

    # Captures.

    @property
    def has_news(self) -> bool:
        """Whether `deliver` has something to do."""
        if self._is_inline or self._log is None:
            return self._is_inline and len(self.pending) > len(self.given_up)
        if os.fstat(self._log.fileno()).st_size > self._logged_bytes:
            return True
        return self._process is not None and self._process.poll() is not None

    def deliver(self) -> None:
        """Log what the exporter has logged, and call `on_capture` for each finished window.

        With `export=inline`, finish the windows first. Call this on the training thread.
        """
        with self._changing:
            if self._is_inline and not self._finishing:  # a sink may stop the session
                self._finish_here()
            self._is_running()  # otherwise, logs why
            self._pass_log_on()
            for folder in list(self.pending):
                if folder in self.pending and not queue.is_waiting(folder):
                    self.pending.remove(folder)
                    self._deliver(folder.with_name(queue.name_of(folder)))

    def _finish_here(self) -> None:
        for folder in self.pending:
            with suppress(OSError):  # a signal's exception came before it was queued again
                queue.put_back(queue.busy_path(folder))
        exporter = self._exporter()
        try:
            self._finishing = True
            for window in exporter.queued():
                exporter.finish(window)
            held = self._waiting()
            self.given_up = [each for each in held if not queue.is_needed(each, queue.DETAIL)]
        finally:
            self._finishing = False  # Python handles no signal between the loop and this line

    def _deliver(self, capture: Path) -> None:
        self._starts_left = _STARTS_IN_VAIN
        if queue.origin(capture).run != self.run:
            # `keep` or `disk_budget` may have removed it
            if self._config.keep is None and self._config.disk_budget is None:
                logger.warning(
                    "{} is neither queued nor complete in {}: was it removed?",
                    capture.name,
                    self.output_dir,
                )
            return
        self._has_captures = True
        logger.info("Recorded {}", capture)
        if not self._config.on_capture:
            return
        with suppress(OSError, ValueError):  # a rank that does not keep its trace has no scalars
            scalars = json.loads(files.read_bytes(capture / queue.SCALARS_FILE))
            for name, callback in self._config.on_capture.items():
                self._call(name, callback, capture, dict(scalars))
        queue.let_go(capture, "on_capture")

    def _call(self, name: str, callback: Any, *args: Any) -> None:
        """Call a function of `profiler.on_capture.NAME`, and log the first error of each name."""
        try:
            callback(*args)
        except (Exception, SystemExit) as error:
            if raised_by_handler(error):
                raise
            if name not in self._failed:
                self._failed.add(name)
                logger.error(
                    "profiler.on_capture.{} failed ({}); further failures of it are not logged.",
                    name,
                    reason_of(error),
                    exception=to_trace(error),
                )

    def _pass_log_on(self) -> None:
        if self._log is None:
            return
        log, end = self._log.fileno(), os.fstat(self._log.fileno()).st_size
        lines = os.pread(log, end - self._logged_bytes, self._logged_bytes)
        lines = lines[: lines.rfind(b"\n") + 1]
        self._logged_bytes += len(lines)
        for line in lines.splitlines():
            # what `sitecustomize` prints is no JSON
            with suppress(ValueError, TypeError, LookupError):
                record = json.loads(line)
                if record["is_block"]:
                    lines_logger.block(record["text"].strip("\n"))
                elif record["level"] != "DEBUG":
                    lines_logger.log(record["level"], "exporter: {}", record["text"])

    # The exporter.

    def _wake(self) -> None:
        """Have the exporter look for queued windows; if none runs, start one."""
        try:
            if not self._is_running():
                self._start()
            self._tell("end" if self._over else "")
        except (OSError, RuntimeError, ValueError) as error:
            if "exporter" not in self._failed:
                self._failed.add("exporter")
                logger.error(
                    "The exporter cannot be started ({}): `instrument export {}` finishes the "
                    "captures.",
                    error,
                    self.output_dir,
                )

    def _start(self) -> None:
        handle = self.lock.handle
        files.fill_standard_streams()
        if self._log is None:
            self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - for all exporters
        self._process = subprocess.Popen(
            files.python_running(
                "instrument.export.__main__",
                str(self.output_dir),
                *([] if handle is None else [str(handle)]),
            ),
            stdin=subprocess.PIPE,
            stdout=self._log,
            # not inheritable: stderr was closed, and the number now belongs to another file
            stderr=None if os.get_inheritable(2) else subprocess.DEVNULL,
            bufsize=0,
            env={name: each for name, each in os.environ.items() if name != "PYTHONPATH"},
            start_new_session=True,  # against Ctrl-C in the trainer's terminal
            # the run counts as alive until the exporter ends
            pass_fds=() if handle is None else (handle,),
        )
        self._tell(to_line(self._job).rstrip())

    def _tell(self, line: str) -> None:
        """Write a line to the exporter; if it has died, the next window or the end notices."""
        with suppress(OSError):
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n".encode())

    def _is_running(self) -> bool:
        """Whether an exporter runs; if it has died, log why and note it in its window."""
        process = self._process
        if process is None or process.poll() is None:
            return process is not None
        self._process = None
        assert process.stdin is not None
        process.stdin.close()
        self._pass_log_on()
        left = [each for each in self._waiting() if each not in self.given_up]
        # a sink may call `os._exit(0)`, or a handler of the program may take the status
        in_vain = any(files.is_folder(queue.busy_path(each)) for each in left)
        if process.returncode == 0 and not in_vain:
            self._is_done, self.given_up = True, self._waiting()  # it has tried all of them
        else:
            self._report_death(process.returncode)
        return False

    def _report_death(self, status: int) -> None:
        """Log the first death of an exporter that still had something to do."""
        signals = {each.value: each.name for each in signal.Signals}
        why = f"exit status {status}" if status >= 0 else signals.get(-status, f"signal {-status}")
        if status == -signal.SIGALRM:
            why = f"it took longer than profiler.export_timeout_s={self._job.timeout_s:g}"
        waiting = [each for each in self._waiting() if each not in self.given_up]
        busy = [each for each in waiting if files.is_folder(queue.busy_path(each))]
        for folder in busy:
            reason = f"The exporter ended while it worked on it ({why})."
            queue.say_why(queue.busy_path(folder), reason)
            self.given_up.append(folder)
            self._starts_left = _STARTS_IN_VAIN
        left = [queue.name_of(each) for each in busy or waiting] or self._unsent()
        if left and "death" not in self._failed:
            self._failed.add("death")
            logger.error(
                "The exporter ended {} {} ({}). Nothing is lost: training goes on, another does "
                "the rest, and `instrument export {}` what is left when the run has ended.",
                "while it worked on" if busy else "before it was done with",
                ", ".join(left),
                why,
                self.output_dir,
            )

    def _waiting(self) -> list[Path]:
        return [each for each in self.pending if queue.is_waiting(each)]

    def _unsent(self) -> list[str]:
        """The names of the captures that are not uploaded to `profiler.upload_to`."""
        if self._config.upload_to is None:
            return []
        return [each.name for each in self._captures() if queue.is_needed(each, "upload")]

    def _captures(self) -> list[Path]:
        found = queue.captures_of(self.output_dir, self.rank, {self.run: self.owner})
        return [folder for _, folder in found]

    # The end of the run.

    def close(self, reason: str | None, timeout_s: float | None = None) -> None:
        """Have all windows finished; wait for that and for uploads at most `timeout_s` seconds.

        None: `profiler.export_timeout_s`. `reason` says why the run ended early; None after a
        normal end. After an exception, other ranks may hang in a collective until this process
        ends. So this method then waits at most two seconds for the exporter, and the exporter
        continues by itself.
        """
        began = time.monotonic()
        timeout_s = self._config.export_timeout_s if timeout_s is None else timeout_s
        longest_s = None if reason is None else _CLOSING_HERE_S
        try:
            with uninterrupted():
                self._over = True
            self.deliver()
            if self._inline is not None:
                uploads_s = 0.0 if reason else max(0.1, began + timeout_s - time.monotonic())
                self._inline.close(longest_s, uploads_s)
            elif self.saved:
                raised = reason is not None and reason.startswith("exception ")
                self._end_exporter(timeout_s, raised=raised)
                self.deliver()
            for name, callback in self._config.on_capture.items():
                if close := getattr(callback, "close", None):
                    self._call(f"{name}.close", close, longest_s)
            if self._config.on_capture:  # they needed what the exporter has kept
                keep, budget = self._config.keep, self._config.disk_budget
                queue.remove_oldest(self._captures(), keep, budget)
        finally:  # even if Ctrl-C or another signal ends the wait
            left = self.warn_of_unfinished()
            if self._process is None or self._process.poll() is not None:
                self.given_up = self._waiting()  # nobody starts another exporter
            if self._process is not None:
                assert self._process.stdin is not None
                self._process.stdin.close()
                _left_running.append(self._process)
            if self._log is not None:
                self._log.close()
                self._log = None
            self.lock.release(done=not left)
        is_lowest = self.rank == lowest_rank(self._config.ranks)
        if self._has_captures and self._job.recording_ranks > 1 and is_lowest:
            logger.info("`instrument ranks {}` compares the ranks.", self.output_dir)

    def _end_exporter(self, timeout_s: float, *, raised: bool) -> None:
        """Wait until the exporter has ended, as `close` says.

        If the exporter dies before its work is done, another one goes on, but no third one if two
        in succession die before they have finished a window.
        """
        began = time.monotonic()
        if raised:
            timeout_s = min(_AFTER_FAILURE_S, timeout_s)

        if self._process is not None:
            # Closing the pipe is not enough: forked data loaders hold it open too.
            self._tell("end")
        while (left_s := timeout_s - (time.monotonic() - began)) > 0:
            with uninterrupted(), self._changing:
                if not self._is_running():
                    if self._is_done or not (self._starts_left and self._left(raised)):
                        return
                    self._starts_left -= 1
                    self._wake()
            if self._process is None:
                continue
            closing_s = 0 if raised and self._unsent() else _CLOSING_S
            left = partial(self._left, raised)
            waiting.wait_for(self._has_ended, left, left_s, closing_s, "exporter")
            if self._process is not None and self._process.poll() is None:
                return  # it goes on by itself

    def _left(self, raised: bool) -> list[str]:
        """What the exporter still has to do; after an exception, uploads are not waited for."""
        names = [queue.name_of(each) for each in self._waiting() if each not in self.given_up]
        unsent = [] if raised else self._unsent()
        return [*names, *(f"sending {name}" for name in unsent)]

    def _has_ended(self, longest_s: float) -> bool:
        """Wait for the end of the exporter, and deliver captures meanwhile."""
        self.deliver()
        process = self._process
        if process is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            process.wait(longest_s)
        return process.returncode is not None

    def leave_to_parent(self) -> None:
        """In a forked child: leave the windows, and the exporter, to the parent."""
        if self._process is not None:
            _left_running.append(self._process)
        if self._log is not None:  # otherwise Python warns of it
            self._log.close()
        self._process = self._log = None
        self.pending, self.given_up, self._changing = [], [], RLock()

    def warn_of_unfinished(self) -> bool:
        """Warn of windows not finished and captures not uploaded; return whether there are any."""
        goes_on = self._process is not None and self._process.poll() is None
        waiting, unsent, url = self._waiting(), self._unsent(), self._config.upload_to
        stuck = [each for each in waiting if not goes_on or each in self.given_up]
        going = [each for each in waiting if each not in stuck]
        command = f"`instrument export {self.output_dir}"
        later = "The exporter continues to send them. After it has ended, " * goes_on
        for names, what, then in (
            (
                map(queue.name_of, stuck),
                "These windows are saved but not finished",
                f"{command}` finishes them.",
            ),
            (
                map(queue.name_of, going),
                "The exporter continues by itself, and these windows are not finished yet",
                f"If the exporter ends before it has finished them, {command}` finishes the rest.",
            ),
            (
                unsent,
                f"These captures are not sent to {url} yet and are kept on disk",
                f"{later}{command} --upload-to {url}` sends captures that have not arrived.",
            ),
        ):
            if listed := ", ".join(names):
                logger.warning("{}: {}. {}", what, listed, then)
        return bool(waiting or unsent)
