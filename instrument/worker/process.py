"""The worker: a process that finishes a run's captures while training goes on, and the trainer's handle on it.

`main` reads one line from its standard input, its job (see `instrument.worker.job`). After that a
line says only that there may be something new: what is to be done are the queued folders of its run and rank in the
folder for captures. It finishes one after the other at low priority, and sends them on a thread. The word `end`, or the
end of the input, says that no more of them come. It answers, a JSON object a line, where each capture came to lie,
whether it has arrived, and with what is logged meanwhile.

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

import msgspec
from loguru import logger

from instrument import files
from instrument.errors import reason_of
from instrument.worker import queue, rank_report, run_lock, waiting
from instrument.worker.finish import built, finish, tell_sinks, traceback_of
from instrument.worker.job import Job, from_line, to_line
from instrument.worker.run_lock import RunLock
from instrument.worker.upload import Uploader

_NICENESS = 10
_END = "end"
_GRACE_S = 1.0
# How long the end of a run waits for the worker where training has failed; for its sinks to close; and for its end.
_HURRIED_S, _CLOSING_S, _ENDING_S = 2.0, 5.0, 1.0
_telling = Lock()


class Exporter:
    """The trainer's side: `submit` tells of a queued folder, `finished` is called with each capture's folder.

    Where the job sends captures, `sent` hears of each whether it arrived there.

    The process starts with the first window. Where it ends before its work is done, that is said once, the window it
    was at is left queued, and the next window, or `close`, starts it again for the others.

    Cost for the training loop: starting the process once, some 2 ms, and a line in a pipe for each window.
    """

    def __init__(
        self,
        job: Job,
        lock: RunLock,
        finished: Callable[[Path], None],
        sent: Callable[[Path, bool], None],
    ) -> None:
        self._job, self._lock = job, lock
        self._finished, self._sent = finished, sent
        self._process: subprocess.Popen[str] | None = None
        self._listener: Thread | None = None
        self._changed = Condition()
        self._pending: dict[
            Path, int
        ] = {}  # submitted and not answered, in order: by which line it was told
        self._told = 0  # lines to the present process
        self._early: set[Path] = (
            set()
        )  # answered before they were submitted: the worker looks for itself
        self._sending: list[Path] = []  # finished, and neither sent nor left
        self._answered = False  # by the present process
        self._closed = False  # whether it has closed its sinks
        self._said_death = False

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
            if folder in self._early:
                return
            self._pending[folder] = self._told + 1
            if self._process is not None:
                self._told += 1
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
        timeout_s = min(_HURRIED_S, self._job.timeout_s) if failed else self._job.timeout_s
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
        self._answered = self._closed = False
        job = msgspec.structs.replace(self._job, unsent=[str(folder) for folder in self._sending])
        _write(process, to_line(job).rstrip())
        _write(process, "")
        self._told = 1
        self._pending = dict.fromkeys(self._pending, 1)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        at: Path | None = None
        with (
            suppress(BrokenPipeError),
            process,
        ):  # closes the pipes, one with words that nobody took, and waits
            for line in process.stdout or ():
                try:
                    at = self._hear(json.loads(line), at)
                except Exception:
                    at = None
                    logger.exception("What the exporter said cannot be taken in: {}", line.strip())
        with self._changed:
            self._process = None
            if at is None and self._pending and not self._answered:
                at = next(
                    iter(self._pending)
                )  # one that cannot even begin is not asked again for the same window
            if at in self._pending:
                del self._pending[at]
                self._job.given_up.append(at.name)
            elif at is None and self._sending:
                at = self._sending.pop(0)
            if at is not None:
                self._report_death(at, process.returncode)
            self._changed.notify_all()

    def _hear(self, answer: dict[str, Any], at: Path | None) -> Path | None:
        """Take one answer in; gives the folder that the process is at."""
        if "text" in answer:
            logger.log(answer["level"], "exporter: {}", answer["text"])
            return at
        if "closed" in answer:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            return None
        if "looked" in answer:
            self._hear_looked(answer["looked"])
            return None
        self._answered, folder = True, Path(answer["folder"])
        if "sent" in answer:
            self._hear_sent(folder, answer["sent"])
            return at
        if "finished" not in answer:
            return folder
        try:
            if answer["finished"] is not None:
                if self._job.upload_to is not None:
                    self._sending.append(Path(answer["finished"]))
                self._finished(Path(answer["finished"]))
        finally:
            with self._changed:
                if self._pending.pop(folder, None) is None:
                    self._early.add(folder)
                self._changed.notify_all()
        return None

    def _hear_looked(self, told: int) -> None:
        """Wait no longer for what the worker has looked for and not found: nobody will finish it."""
        with self._changed:
            missing = [folder for folder, line in self._pending.items() if line <= told]
            for folder in missing:
                del self._pending[folder]
            self._changed.notify_all()
        if missing:
            names = ", ".join(map(queue.name_of, missing))
            logger.error(
                "The exporter cannot find or read {} in {}: somebody removed it.",
                names,
                self._job.folder,
            )

    def _hear_sent(self, folder: Path, arrived: bool) -> None:
        self._sent(folder, arrived)
        with self._changed:
            if folder in self._sending:  # else it was left before
                self._sending.remove(folder)
            self._changed.notify_all()

    def _report_death(self, folder: Path, status: int) -> None:
        if self._said_death:
            return
        self._said_death = True
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
    """Do the job that the first line of standard input tells."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a sink prints is no answer
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logger.remove()
    logger.add(
        lambda message: _tell(answers, level=message.record["level"].name, text=_text(message)),
        level=0,
    )
    job = from_line(sys.stdin.readline())
    uploader = None
    if job.upload_to is not None:
        uploader = Uploader(
            job.upload_to,
            job.upload_options,
            lambda folder, sent: _tell(answers, folder=str(folder), sent=sent),
        )
        for unsent in job.unsent:  # finished by a process that has ended since
            uploader.submit(Path(unsent))
    failed = set[str]()
    sinks = built(job.sinks, failed)
    last: Path | None = None
    for folder in _queue(job, answers):
        _tell(answers, folder=str(folder))
        _allow(job.timeout_s)
        place = _finished(folder, sinks, failed)
        _allow(0)
        _tell(answers, folder=str(folder), finished=str(place) if place else None)
        if place is not None:
            last = place
            if uploader is not None:
                uploader.submit(place)
    _allow(job.timeout_s)  # also for threads that a sink has left
    tell_sinks(sinks, "close", failed)
    _tell(answers, closed=True)
    if uploader is not None:
        uploader.close(None)
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
    """The folders to finish, as they come; each is given once, whatever becomes of it.

    After each line, when all that was there is finished, the answer says how many lines have been heeded.
    """
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
        _tell(answers, looked=lines)


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


def _tell(answers: TextIO, **answer: Any) -> None:
    with _telling, suppress(OSError):  # the trainer has ended, and the work goes on
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
