"""The worker: a process that finishes a run's captures while training goes on, and the trainer's handle on it.

`main` reads its job (see `instrument.worker.job`) from the first line of its standard input. Each further line is
empty and only wakes it: what is to be done are the queued folders of its run and rank in the output folder. The word
`end`, or the end of the input, says that no more of them come. It finishes one after the other at low priority.

It answers with JSON objects, one a line:

- `text`, `level`: a log message;
- `began`: the queued folder that it works on from now on, so that the trainer knows it should the process die;
- `done`, `place`: the queued folder that it is through with, and its capture, or null where it could not be finished;
- `sending`: all captures that are still to be sent;
- `looked`: so many lines it has read, and after the last of them finished what was there;
- `closed`: its sinks are closed.

It loads no torch, ignores Ctrl-C and SIGTERM, which reach it with the trainer, and outlives the trainer until its queue
is done. An alarm ends it when one capture, or what is left at the end, takes longer than the job allows.
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

from loguru import logger

from instrument import files
from instrument.errors import reason_of
from instrument.worker import queue, rank_report, retention, run_lock, waiting
from instrument.worker.finish import built, finish, tell_sinks, traceback_of
from instrument.worker.job import Job, from_line, to_line
from instrument.worker.run_lock import RunLock
from instrument.worker.upload import SINK_NAME, Upload, has_arrived

_NICENESS = 10
_END = "end"
_GRACE_S = 1.0
# How long the end of a run waits for the worker where training has failed; for its sinks to close; and for its end.
_AFTER_FAILURE_S, _CLOSING_S, _ENDING_S = 2.0, 5.0, 1.0
_answering = Lock()


class Exporter:
    """The trainer's side: has queued folders finished by the worker.

    `on_finished` is called with the folder of each capture, on the thread that listens to the worker.

    The process starts with the first window. Where it dies before its work is done, one error says so, the window that
    it worked on stays queued, and the next window, or `close`, starts another process for the rest.

    Cost for the training loop: starting the process once, some 2 ms, and a line in a pipe for each window.
    """

    def __init__(self, job: Job, lock: RunLock, on_finished: Callable[[Path], None]) -> None:
        self._job, self._lock, self._on_finished = job, lock, on_finished
        self._process: subprocess.Popen[str] | None = None
        self._listener: Thread | None = None
        self._changed = Condition()
        # in order, each with the number of the line that announced it
        self._pending: dict[Path, int] = {}
        self._sending: list[Path] = []
        # Of the current process: lines written to it after the job, the folder that it works on,
        # whether it has begun any, whether its sinks are closed.
        self._lines = 0
        self._current: Path | None = None
        self._has_begun = self._closed = False
        self._death_reported = False

    @property
    def pending(self) -> list[Path]:
        """The queued folders that it has yet to finish, in order."""
        return list(self._pending)

    @property
    def sending(self) -> list[Path]:
        """The captures that it has finished and has yet to send."""
        return list(self._sending)

    def submit(self, folder: Path) -> None:
        """Have a queued folder finished.

        Raises:
            OSError: the process cannot be started.
            RuntimeError: no thread can be started, as when the interpreter is ending.
        """
        with self._changed:
            capture = folder.with_name(queue.name_of(folder))
            if capture.exists() and not folder.exists():
                return  # the worker, which looks for itself, was faster
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
        """Wait until all is finished and sent, at most the time allowed, and say what for.

        Where training has `failed`, wait two seconds at most, and not for what is to be sent: others may wait for this
        process to end. With what is still to be done then, the worker goes on by itself before it ends.
        """
        timeout_s = min(_AFTER_FAILURE_S, self._job.timeout_s) if failed else self._job.timeout_s
        try:
            with self._changed, suppress(OSError, RuntimeError):  # it cannot be started again
                waiting.wait(
                    self._changed, lambda: self._left(until_sent=not failed), timeout_s, "exporter"
                )
        finally:  # also where Ctrl-C ends the waiting
            if self._process is not None:
                _write(
                    self._process, _END
                )  # closing the pipe is not enough: forked workers hold it too
        with self._changed:
            if self._process is not None and not self._pending and not self._sending:
                self._changed.wait_for(
                    lambda: self._closed or self._process is None, min(_CLOSING_S, timeout_s)
                )
        if self._closed and self._listener is not None:
            self._listener.join(_ENDING_S)  # it ends at once, unless a sink has left threads

    def _left(self, *, until_sent: bool) -> list[str]:
        """What there is to wait for; the process is started again for it where it has ended."""
        sending = self._sending if until_sent else []
        if (self._pending or sending) and self._process is None:
            self._start()
        return [
            *map(queue.name_of, self._pending),
            *(f"sending {folder.name}" for folder in sending),
        ]

    def _start(self) -> None:
        handle = self._lock.handle  # so that the run counts as alive until the worker is through
        self._process = process = subprocess.Popen(
            files.python_running(
                "instrument.worker.process", *([] if handle is None else [str(handle)])
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(path or Path.cwd()) for path in sys.path),
            },
            start_new_session=True,  # Ctrl-C in the trainer's terminal is not meant for it
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
        """Take in what a process answers until it ends, and then see what it has left undone."""
        # leaving `process` closes the pipes, one with words that nobody took, and waits
        with suppress(BrokenPipeError), process:
            for line in process.stdout or ():
                try:
                    self._take(json.loads(line))
                except Exception:
                    logger.exception("What the exporter said cannot be taken in: {}", line.strip())
        with self._changed:
            self._process, failed_at = None, self._current
            if failed_at is None and self._pending and not self._has_begun:
                failed_at = next(iter(self._pending))  # else the next process may die of it too
            if failed_at in self._pending:
                del self._pending[failed_at]
            elif failed_at is None and self._sending:
                failed_at = self._sending.pop(0)
            if failed_at is not None:
                self._job.given_up.append(failed_at.name)
                self._report_death(failed_at, process.returncode)
            self._changed.notify_all()

    def _take(self, answer: dict[str, Any]) -> None:
        """Take in one answer of the worker."""
        if "text" in answer:
            logger.log(answer["level"], "exporter: {}", answer["text"])
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
                        self._current = None
                        self._pending.pop(Path(answer["done"]), None)
                    self._closed = self._closed or "closed" in answer
                    self._changed.notify_all()

    def _drop_lost(self, lines: int) -> None:
        """Wait no longer for folders that the worker has looked for and not found: nobody will finish them.

        The worker has looked after reading `lines` lines, so it has found all folders that they announced.
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
            "The exporter cannot find or read {} in {}: somebody removed it.",
            names,
            self._job.folder,
        )

    def _report_death(self, folder: Path, status: int) -> None:
        if self._death_reported:
            return
        self._death_reported = True
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        logger.error(
            "The exporter ended ({}) while it worked on {}, {} is kept: `instrument export {}` finishes "
            "it. Training goes on, and another exporter takes the windows after it.",
            f"profiler.export_timeout_s={self._job.timeout_s:g} were over"
            if status == -signal.SIGALRM
            else how,
            queue.name_of(folder),
            "whose raw trace" if folder.name.startswith(".") else "which",
            folder.parent,
        )


def _write(process: subprocess.Popen[str], line: str) -> None:
    """Write one line; where the process has just ended, its listener sees to that."""
    with suppress(OSError, ValueError):  # broken, or closed by the listener
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()


def main() -> None:
    """Do the job that is the first line of standard input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a sink prints is no answer
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logger.remove()
    logger.add(
        lambda message: _answer(answers, level=message.record["level"].name, text=_text(message)),
        level=0,
    )
    job = from_line(sys.stdin.readline())
    failed = set[str]()
    sinks = built(job.sinks, failed)
    if job.upload_to is not None:
        upload = Upload(
            url=job.upload_to,
            options=job.upload_options,
            on_change=lambda pending: _answer(answers, sending=list(map(str, pending))),
        )
        sinks[SINK_NAME] = upload
        captures = retention.captures_of(Path(job.folder), job.run, job.rank)
        left = [folder for folder in captures if not has_arrived(folder, upload.url)]
        # finished by a process that has died since
        upload.submit(*(folder for folder in left if folder.name not in job.given_up))
    last: Path | None = None
    for folder in _queue(job, answers):
        _answer(answers, began=str(folder))
        _allow(job.timeout_s)
        place = _finished(folder, sinks, failed)
        _allow(0)
        last = place or last
        _answer(answers, done=str(folder), place=str(place) if place else None)
    _allow(job.timeout_s)  # also for threads that a sink has left
    tell_sinks(sinks, "close", failed)
    _answer(answers, closed=True)
    if last is not None:
        rank_report.write_rank_report(job, last, rank_report.PATIENT_S)
    if len(sys.argv) > 1:
        os.close(int(sys.argv[1]))
        run_lock.remove_if_free(run_lock.path_of(Path(job.folder), job.run))


def _allow(seconds: float) -> None:
    """Have the process ended in so many seconds; 0: not any more."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.cancel_dump_traceback_later()
    if seconds:  # a sink may ignore the signal, and then stderr tells where it was
        faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True)


def _queue(job: Job, answers: TextIO) -> Iterator[Path]:
    """The folders to finish, as they come; each is given once, whatever becomes of it."""
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
    """Finish one folder; None where that is not possible."""
    try:
        return finish(folder, sinks, failed=failed)
    except Exception as error:
        if "exporter" in failed:
            return None
        failed.add("exporter")
        logger.error(
            "{} cannot be finished ({}), and further ones may not either, untold; their raw traces are kept: "
            "`instrument export {}` tries again.",
            queue.name_of(folder),
            reason_of(error),
            folder.parent,
        )
        return None


def _text(message: Any) -> str:
    """A log message with the traceback that belongs to it."""
    text, error = message.record["message"], message.record["exception"]
    return (
        str(text)
        if error is None or error.value is None
        else f"{text}\n{traceback_of(error.value)}"
    )


def _answer(answers: TextIO, **answer: Any) -> None:
    with _answering, suppress(OSError):  # the trainer has ended, and the work goes on
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
