"""The worker process, which finishes captures during training, and `Exporter`, which starts it.

Options call the worker the export process, and log messages call it the exporter. The trainer is
the training process.

`main` reads its job (see `instrument.worker.job`) from the first line of its standard input. Each
further line is empty and announces a window: the worker then looks for queued folders of its run
and rank in the output folder. `end`, or the end of the input, means that no more windows come. The
worker finishes the folders one after the other, at low priority.

The worker answers with JSON objects, one per line. Their keys are:

- `text`, `level`: a log message;
- `began`: the queued folder that the worker starts to finish. If the worker dies, this key tells
  the trainer which folder is unfinished;
- `done`, `place`: the queued folder that the worker has finished, and the folder of its capture;
  `place` is null if finishing failed;
- `sending`: all captures that are still to be uploaded;
- `looked`: the number of handled lines, without the line of the job. All folders that these lines
  announced are finished, have failed, or could not be found;
- `closed`: true once the sinks are closed.

The worker loads no torch. It ignores Ctrl-C and SIGTERM, because launchers often send these signals
to all processes. If the trainer ends, the worker continues until its queue is empty. A timer kills
the worker if a capture, or closing the sinks, takes longer than the job's time limit.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TextIO

import loguru

from instrument import files
from instrument.errors import reason_of, to_trace
from instrument.file_lock import FileLock, remove_if_free
from instrument.log import lines_logger, logger
from instrument.worker import queue, retention, waiting
from instrument.worker.job import Job, from_line, to_line
from instrument.worker.sink_calls import build_sinks, call_sinks, traceback_of
from instrument.worker.upload import SINK_NAME, Upload, has_arrived

_NICENESS = 10
_END = "end"
_GRACE_S = 1.0
# How long the end of a run waits, in seconds: for the worker's work, if training failed; until the
# worker has closed its sinks; until the worker process has ended.
_AFTER_FAILURE_S, _CLOSING_S, _ENDING_S = 2.0, 5.0, 1.0
_answering = Lock()


class Exporter:
    """Starts the worker, announces windows to it, and handles its answers.

    A thread reads the worker's output and calls `on_finished` with the folder of each capture.

    The first window starts the process. If the process dies before its work is done, the unfinished
    window stays queued, and the next window or `close` starts another process. An error is logged
    for the first process that dies in a run.

    Cost for the training loop: about 2 ms to start the process; for each window, the time to write
    a line to a pipe.
    """

    def __init__(self, job: Job, lock: FileLock, on_finished: Callable[[Path], None]) -> None:
        self._job, self._lock, self._on_finished = job, lock, on_finished
        self._process: subprocess.Popen[str] | None = None
        self._listener: Thread | None = None
        self._changed = Condition()
        # The announced folders that are not finished, in order, with the line number of each.
        self._pending: dict[Path, int] = {}
        # Folders that the worker found by itself and finished before they were announced.
        self._early: set[Path] = set()
        self._sending: list[Path] = []
        # The state of the current worker process.
        self._lines = 0  # how many lines were written to the worker after the job
        self._current: Path | None = None  # the folder that the worker finishes now
        # whether the worker has begun any folder, and whether its sinks are closed
        self._has_begun = self._closed = False
        self._death_reported = False

    @property
    def pending(self) -> list[Path]:
        """The queued folders that are not finished yet, in the order of their announcement."""
        return list(self._pending)

    @property
    def sending(self) -> list[Path]:
        """The finished captures that are not uploaded yet."""
        return list(self._sending)

    def submit(self, folder: Path) -> None:
        """Announce a queued folder to the worker; start the worker if it does not run.

        Raises:
            OSError: the process cannot be started.
            RuntimeError: no thread can be started, for example because the interpreter shuts down.
        """
        with self._changed:
            if folder in self._early:
                self._early.remove(folder)
                return
            self._pending[folder] = self._lines + 1
            if self._process is not None:
                self._lines += 1
                _write(self._process, "")
                return
            try:
                self._start()
            except Exception:
                del self._pending[folder]
                raise

    def close(self, *, failed: bool) -> None:
        """Wait until all windows are finished and uploaded, for at most the job's `timeout_s`.

        The log shows the wait. If training `failed`, other ranks may be waiting
        for this process to end. So this method then waits at most two seconds, and does not wait
        for uploads. The worker continues by itself, and ends when all windows are done.
        """
        timeout_s = min(_AFTER_FAILURE_S, self._job.timeout_s) if failed else self._job.timeout_s
        try:
            with self._changed, suppress(OSError, RuntimeError):  # the worker cannot be restarted
                waiting.wait(
                    self._changed, lambda: self._left(until_sent=not failed), timeout_s, "exporter"
                )
        finally:  # also if Ctrl-C ends the wait
            if self._process is not None:
                # Closing the pipe is not enough: forked data loaders hold it open too.
                _write(self._process, _END)
        with self._changed:
            if self._process is not None and not self._pending and not self._sending:
                self._changed.wait_for(
                    lambda: self._closed or self._process is None, min(_CLOSING_S, timeout_s)
                )
        if self._closed and self._listener is not None:
            # the listener ends at once, unless threads of a sink still run in the worker
            self._listener.join(_ENDING_S)

    def _left(self, *, until_sent: bool) -> list[str]:
        """The names of the unfinished windows; if `until_sent`, of the unfinished uploads too.

        If something is unfinished and the worker has ended, the worker is started again.
        """
        sending = self._sending if until_sent else []
        if (self._pending or sending) and self._process is None:
            self._start()
        return [
            *map(queue.name_of, self._pending),
            *(f"sending {folder.name}" for folder in sending),
        ]

    def _start(self) -> None:
        # the worker inherits the lock, so that the run counts as alive until the worker ends
        handle = self._lock.handle
        files.fill_standard_streams()
        self._process = process = subprocess.Popen(
            files.python_running(
                "instrument.worker.process", *([] if handle is None else [str(handle)])
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # not inheritable: stderr was closed, and the number now belongs to another file
            stderr=None if os.get_inheritable(2) else subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(path) or os.curdir for path in sys.path),
            },
            start_new_session=True,  # against Ctrl-C in the trainer's terminal
            pass_fds=() if handle is None else (handle,),
        )
        try:
            self._listener = Thread(
                target=self._listen, args=(process,), name="instrument exporter", daemon=True
            )
            self._listener.start()
        except RuntimeError:
            self._process = None
            process.kill()
            with suppress(OSError), process:  # closes the pipes and waits
                raise
        self._current, self._has_begun, self._closed = None, False, False
        _write(process, to_line(self._job).rstrip())
        _write(process, "")
        self._lines = 1
        self._pending = dict.fromkeys(self._pending, 1)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Handle the output of a worker until the worker ends.

        If the worker died while it worked on a folder, log an error with the name of the folder.
        """
        # `with process` closes the pipes and waits at the end; if the worker has left lines unread,
        # closing raises BrokenPipeError
        with suppress(BrokenPipeError), process:
            for line in process.stdout or ():
                try:
                    self._take(json.loads(line))
                except Exception as error:
                    logger.error(
                        "A message from the exporter cannot be used ({}): {}",
                        reason_of(error),
                        line.strip(),
                        exception=to_trace(error),
                    )
        with self._changed:
            self._process, failed_at = None, self._current
            if failed_at is None and self._pending and not self._has_begun:
                # given up, because the next process may die on this folder too
                failed_at = next(iter(self._pending))
            if failed_at in self._pending:
                del self._pending[failed_at]
            elif failed_at is None and self._sending:
                failed_at = self._sending.pop(0)
            if failed_at is not None:
                self._job.given_up.append(failed_at.name)
                self._report_death(failed_at, process.returncode)
            self._changed.notify_all()

    def _take(self, answer: dict[str, Any]) -> None:
        """Handle one line of the worker's output."""
        if "text" in answer:
            lines_logger.log(answer["level"], "exporter: {}", answer["text"])
        elif "began" in answer:
            self._current, self._has_begun = Path(answer["began"]), True
        elif "looked" in answer:
            self._drop_lost(answer["looked"])
        else:
            try:
                if answer.get("place") is not None:
                    self._on_finished(Path(answer["place"]))
            finally:
                with self._changed:
                    if "sending" in answer:
                        self._sending = [Path(folder) for folder in answer["sending"]]
                    if "done" in answer:
                        self._current, done = None, Path(answer["done"])
                        if self._pending.pop(done, None) is None:
                            self._early.add(done)
                    self._closed = self._closed or "closed" in answer
                    self._changed.notify_all()

    def _drop_lost(self, lines: int) -> None:
        """Remove the pending folders that the worker could not find.

        The worker has handled `lines` lines. If a folder that these lines announced is still
        pending, the worker could not find it.
        """
        with self._changed:
            lost = [folder for folder, line in self._pending.items() if line <= lines]
            for folder in lost:
                del self._pending[folder]
            self._changed.notify_all()
        if not lost:
            return
        names = ", ".join(map(queue.name_of, lost))
        logger.error(
            "The exporter cannot find or read {} in {}: was it removed?",
            names,
            self._job.folder,
        )

    def _report_death(self, folder: Path, status: int) -> None:
        if self._death_reported:
            return
        self._death_reported = True
        is_saved = folder.name.startswith(".")
        upload = f" --upload-to {self._job.upload_to}" if self._job.upload_to else ""
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        logger.error(
            "The exporter ended while it worked on {} ({}). The {} is kept, and `instrument export "
            "{}{}` finishes the work. Training goes on, and a new exporter process finishes later "
            "windows.",
            queue.name_of(folder),
            f"it took longer than profiler.export_timeout_s={self._job.timeout_s:g}"
            if status == -signal.SIGALRM
            else how,
            "raw trace" if is_saved else "capture",
            folder.parent,
            upload,
        )


def _write(process: subprocess.Popen[str], line: str) -> None:
    """Write a line to the worker.

    Do nothing if the worker has ended: `_listen` handles its end.
    """
    with suppress(OSError, ValueError):  # the worker has ended, or the listener closed the pipe
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


def main() -> None:
    """Run the worker with the job on the first line of standard input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of sinks go to stderr
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    loguru.logger.remove()
    loguru.logger.add(
        lambda message: _answer(answers, level=message.record["level"].name, text=_text(message)),
        level=0,
    )
    job = from_line(sys.stdin.readline())
    try:
        _finish_all(job, answers)
    except MemoryError as error:
        logger.error("The exporter has ended: {}.", reason_of(error))
        sys.exit(1)


def _finish_all(job: Job, answers: TextIO) -> None:
    """Finish the folders that the trainer announces, and close the sinks at the end."""
    failed = set[str]()
    sinks = build_sinks(job.sinks, failed)
    if job.upload_to is not None:
        upload = Upload(
            url=job.upload_to,
            options=job.upload_options,
            on_change=lambda pending: _answer(answers, sending=list(map(str, pending))),
        )
        sinks[SINK_NAME] = upload
        captures = retention.captures_of(Path(job.folder), job.run, job.rank)
        # left by an earlier worker that died
        unsent = [folder for folder in captures if not has_arrived(folder, upload.url)]
        upload.submit(*(folder for folder in unsent if folder.name not in job.given_up))
    for folder in _queue(job, answers):
        _answer(answers, began=str(folder))
        _allow(job.timeout_s)
        place = _finished(folder, sinks, failed)
        _allow(0)
        _answer(answers, done=str(folder), place=str(place) if place else None)
    _allow(job.timeout_s)  # not cancelled: threads of a sink may delay the end of the process
    call_sinks(sinks, "close", failed)
    _answer(answers, closed=True)
    if len(sys.argv) > 1:
        os.close(int(sys.argv[1]))
        remove_if_free(queue.lock_of(Path(job.folder), job.run))


def _allow(seconds: float) -> None:
    """Kill this process after `seconds`; 0 cancels the timer."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.cancel_dump_traceback_later()
    if seconds:  # a second timer, in case a sink blocks the signal; it also writes the traceback
        faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True)


def _queue(job: Job, answers: TextIO) -> Iterator[Path]:
    """Yield the folders to finish, each once, until the end of the input."""
    seen, line, lines = set(job.given_up), "\n", 0
    while line:
        line = sys.stdin.readline()
        if line.strip() == _END:
            line = ""
        for folder in queue.queued_of(job):
            if folder.name not in seen:
                seen.add(folder.name)
                yield folder
        lines += 1
        _answer(answers, looked=lines)


def _finished(folder: Path, sinks: dict[str, Any], failed: set[str]) -> Path | None:
    """Finish a queued folder, and return the folder of the capture; None if the folder fails.

    The worker logs an error only for the first folder that fails. Then it adds "exporter" to
    `failed`, and folders that fail later are not logged.
    """
    from instrument.worker.finish import finish  # not in the trainer, which imports this module

    try:
        return finish(folder, sinks, failed=failed)
    except Exception as error:
        if "exporter" in failed:
            return None
        failed.add("exporter")
        logger.error(
            "{} cannot be finished ({}); failures of later windows are not logged. The raw traces "
            "are kept: `instrument export {}` tries again.",
            queue.name_of(folder),
            reason_of(error),
            folder.parent,
        )
        return None


def _text(message: Any) -> str:
    """The text of a log message, followed by the traceback of its exception if it has one."""
    text, error = message.record["message"], message.record["exception"]
    return (
        str(text)
        if error is None or error.value is None
        else f"{text}\n{traceback_of(error.value)}"
    )


def _answer(answers: TextIO, **answer: Any) -> None:
    with _answering, suppress(OSError):  # the trainer may have ended; the worker goes on
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
