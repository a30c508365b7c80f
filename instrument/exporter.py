"""The process that finishes a run's windows while training goes on, and the trainer's handle on it.

`python -m instrument.exporter SECONDS` reads from its standard input a line that says where captures are sent, and then
paths of queued folders, a JSON string a line, until a null or its end. It finishes one after the other at low priority
and sends them on a thread. It answers, a JSON object a line, where each came to lie, whether it has arrived, and with
what is logged meanwhile. It loads no torch, ignores Ctrl-C and SIGTERM, which reach it with the trainer, outlives the
trainer until its queue is done, and is ended by an alarm when a window takes longer than SECONDS, or when at the end
sending what is left does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TextIO

from loguru import logger

from instrument import export, waiting
from instrument.capture import Capture
from instrument.upload import Uploader

_NICENESS = 10
_telling = Lock()


class Exporter:
    """The trainer's side: `submit` hands a queued folder over, `finished` is called with each capture's folder.

    With `upload`, a URL and the options for it, `sent` hears of each whether it arrived there.

    The process starts with the first window. Where it ends before its work is done, that is said once, the window it
    was at is left queued, and the next window, or `close`, starts it again for the others.

    Cost for the training loop: starting the process once, some 2 ms, and a line in a pipe for each window.
    """

    def __init__(
        self,
        timeout_s: float,
        finished: Callable[[Path], None],
        upload: tuple[str, dict[str, Any]] | None = None,
        sent: Callable[[Path, bool], None] = lambda *_: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._finished, self._upload, self._sent = finished, upload, sent
        self._process: subprocess.Popen[str] | None = None
        self._listener: Thread | None = None
        self._changed = Condition()
        self._pending: list[Path] = []  # submitted and not answered, in order
        self._sending: list[Path] = []  # finished, and neither sent nor left
        self._answered = False  # by the present process
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
            RuntimeError: the interpreter is ending, which starts no threads.
        """
        with self._changed:
            self._pending.append(folder)
            if self._process is not None:
                _write(self._process, str(folder))
                return
            try:
                self._start()
            except Exception:
                self._pending.remove(folder)
                raise

    def close(self, until_sent: bool = True) -> None:
        """Wait until all is finished, and sent where that is asked for, at most the time allowed, and say what for.

        With what is still to be done then, the process goes on by itself before it ends.
        """
        began = time.monotonic()
        try:
            with self._changed, suppress(OSError, RuntimeError):  # it cannot be started again
                waiting.wait(self._changed, lambda: self._left(until_sent), self._timeout_s, "exporter")
        finally:  # also where Ctrl-C ends the waiting
            if self._process is not None:
                _write(self._process, None)  # closing the pipe is not enough: forked workers hold it too
        if self._listener is not None and not self._pending and not self._sending:
            self._listener.join(max(0.1, began + self._timeout_s - time.monotonic()))  # a sink's threads may linger

    def _left(self, until_sent: bool) -> list[str]:
        """What there is to wait for; the process is started again for it where it has ended."""
        if (self._pending or self._sending) and self._process is None:
            self._start()
        sending = [f"sending {folder.name}" for folder in self._sending if until_sent]
        return [*map(export.name_of, self._pending), *sending]

    def _start(self) -> None:
        command = [sys.executable, "-m", "instrument.exporter", str(self._timeout_s)]
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(path or Path.cwd()) for path in sys.path)},
            start_new_session=True,  # Ctrl-C in the trainer's terminal is not meant for it
        )
        try:
            self._listener = Thread(target=self._listen, args=(process,), name="instrument exporter", daemon=True)
            self._listener.start()
        except RuntimeError:
            process.kill()
            self._process = None
            raise
        self._answered = False
        _write(process, self._upload)
        for folder in (*self._sending, *self._pending):
            _write(process, str(folder))

    def _listen(self, process: subprocess.Popen[str]) -> None:
        at: Path | None = None
        with suppress(BrokenPipeError), process:  # closes the pipes, one with words that nobody took, and waits
            for line in process.stdout or ():
                try:
                    at = self._hear(json.loads(line), at)
                except Exception:
                    at = None
                    logger.exception("What the exporter said cannot be taken in: {}", line.strip())
        with self._changed:
            self._process = None
            if at is None and self._pending and not self._answered:
                at = self._pending[0]  # one that cannot even begin is not asked again for the same window
            if at in self._pending:
                self._pending.remove(at)
            elif at is None and self._sending:
                at = self._sending.pop(0)
            if at is not None:
                self._mourn(at, process.returncode)
            self._changed.notify_all()

    def _hear(self, answer: dict[str, Any], at: Path | None) -> Path | None:
        """Take one answer in; gives the folder that the process is at."""
        if "text" in answer:
            logger.log(answer["level"], "exporter: {}", answer["text"])
            return at
        self._answered, folder = True, Path(answer["folder"])
        if "sent" in answer:
            self._hear_sent(folder, answer["sent"])
            return at
        if "finished" not in answer:
            return folder
        try:
            if answer["finished"] is not None:
                if self._upload is not None:
                    self._sending.append(Path(answer["finished"]))
                self._finished(Path(answer["finished"]))
        finally:
            with self._changed:
                self._pending.remove(folder)
                self._changed.notify_all()
        return None

    def _hear_sent(self, folder: Path, arrived: bool) -> None:
        self._sent(folder, arrived)
        with self._changed:
            if folder in self._sending:  # else it was left before
                self._sending.remove(folder)
            self._changed.notify_all()

    def _mourn(self, folder: Path, status: int) -> None:
        if self._said_death:
            return
        self._said_death = True
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        logger.error(
            "The exporter ended ({}) while it worked on {}, {} is kept: `instrument export {}` finishes "
            "it. Training goes on, and another exporter takes the windows after it.",
            f"profiler.export_timeout_s={self._timeout_s:g} were over" if status == -signal.SIGALRM else how,
            export.name_of(folder),
            "whose raw trace" if folder.name.startswith(".") else "which",
            folder.parent,
        )


def _write(process: subprocess.Popen[str], word: Any) -> None:
    """Name the next folder, or with None the end; where the process has just ended, its listener sees to that."""
    with suppress(OSError, ValueError):  # broken, or closed by the listener
        assert process.stdin is not None
        process.stdin.write(json.dumps(word) + "\n")
        process.stdin.flush()


def main() -> None:
    """Finish the folders that standard input names, until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a sink prints is no answer
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logger.remove()
    logger.add(lambda message: _tell(answers, level=message.record["level"].name, text=_text(message)), level=0)
    timeout_s, sinks, failed = float(sys.argv[1]), dict[str, Any](), set[str]()
    upload, uploader = _next_word(), None
    if upload is not None:
        url, options = upload
        uploader = Uploader(url, options, lambda folder, sent: _tell(answers, folder=str(folder), sent=sent))
    for path in iter(_next_word, None):
        folder = Path(path)
        if uploader is not None and not export.is_queued(folder):
            uploader.submit(folder)  # finished by a process that has ended since
            continue
        _tell(answers, folder=str(folder))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # its signal ends the process
        place = _finish(folder, sinks, failed)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _tell(answers, folder=str(folder), finished=str(place) if place else None)
        if uploader is not None and place is not None:
            uploader.submit(place)
    export.tell_sinks(sinks, "close", failed)
    if uploader is not None:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        uploader.close(None)


def _next_word() -> Any:
    return json.loads(sys.stdin.readline() or "null")


def _finish(folder: Path, sinks: dict[str, Any], failed: set[str]) -> Path | None:
    """Finish one folder; None where that is not possible. `sinks` are the run's, built for its first window."""
    try:
        if not sinks:
            sinks.update(export.sinks_of(Capture.load(folder).metadata, failed))
        return export.finish(folder, sinks, failed=failed)
    except Exception as error:
        if "exporter" in failed:
            return None
        failed.add("exporter")
        logger.error(
            "{} cannot be finished ({}), and further ones may not either, untold; their raw traces are kept: "
            "`instrument export {}` tries again.",
            export.name_of(folder),
            error,
            folder.parent,
        )
        return None


def _text(message: Any) -> str:
    """A log message with the traceback that belongs to it."""
    text, error = message.record["message"], message.record["exception"]
    return str(text) if error is None or error.value is None else f"{text}\n{export.traceback_of(error.value)}"


def _tell(answers: TextIO, **answer: Any) -> None:
    with _telling, suppress(OSError):  # the trainer has ended, and the work goes on
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
