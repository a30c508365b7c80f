"""The exporter: `python -m instrument.export FOLDER` finishes the queued windows of a run.

Options call it the export process. The trainer starts it with the first window, and writes to its
standard input: the job (see `instrument.base.export_job`), then a line for each new window. After
each line, the exporter finishes the queued folders of its run and rank in FOLDER. After `end`, or
at the end of the input, it closes the sinks, waits for uploads, and ends.

After the line `BEGIN_ANSWERS`, its standard output has one JSON object per line: a log message
(`text`, `level`, `is_block`; see `Logger.block`), or a window that the exporter has done with
(`done`, the queued folder, and `place`, the capture; null if it failed).

It ignores Ctrl-C and SIGTERM, which launchers often send to all processes, and outlives the trainer
until its queue is empty. A timer kills it if a capture, or closing the sinks, takes longer than the
job's time limit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

import loguru

from instrument.base import queue
from instrument.base.errors import reason_of
from instrument.base.export_job import BEGIN_ANSWERS, Job, from_line
from instrument.base.file_lock import remove_if_free
from instrument.base.log import logger
from instrument.export.sink_calls import build_sinks, call_sinks, traceback_of
from instrument.export.upload import Uploads, has_arrived
from instrument.export.window import finish

# The exporter runs beside training: polars, which sinks load, gets one thread.
os.environ.setdefault("POLARS_MAX_THREADS", "1")
_NICENESS = 10
_answering = Lock()


def main() -> None:
    """Finish queued windows. The arguments are the folder, and the handle of the run's lock."""
    folder, *lock = sys.argv[1:]
    # never closed: threads of sinks may log until the process ends
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", closefd=False)
    os.dup2(2, 1)  # prints of sinks go to stderr
    with suppress(OSError):  # the trainer may have ended
        answers.write(f"\n{BEGIN_ANSWERS}\n")
        answers.flush()
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    loguru.logger.remove()
    loguru.logger.add(
        lambda message: _answer(
            answers,
            level=message.record["level"].name,
            text=_text(message),
            is_block=message.record["extra"].get("is_block", False),
        ),
        level=0,
    )
    job = from_line(sys.stdin.readline())
    try:
        _finish_all(Path(folder), job, answers)
    except MemoryError as error:
        logger.error("The exporter has ended: {}.", reason_of(error))
        sys.exit(1)
    for handle in lock:
        os.close(int(handle))
        remove_if_free(queue.lock_of(Path(folder), job.run))


def _finish_all(folder: Path, job: Job, answers: TextIO) -> None:
    failed = set[str]()
    sinks = build_sinks(job.sinks, failed)
    uploads = None
    if job.upload_to:
        uploads = Uploads(job.upload_to, job.upload_options, job.recording_ranks)
    for window in _queued(folder, job):
        _allow(job.timeout_s)
        place = _finished(window, sinks, failed, job)
        _allow(0)
        if place is not None and uploads is not None:
            uploads.add(place)
        _answer(answers, done=str(window), place=str(place) if place else None)
    if uploads is not None:  # at the end, since an earlier exporter may have died of one of them
        captures = queue.captures_of(folder, job.rank, {job.run: job.owner})
        unsent = [each for _, each in captures if not has_arrived(each, str(job.upload_to))]
        uploads.add(*unsent)
    _allow(job.timeout_s)  # not cancelled: threads of a sink may delay the end of the process
    call_sinks(sinks, "close", failed)
    if uploads is not None:
        uploads.close()


def _queued(folder: Path, job: Job) -> Iterator[Path]:
    """Yield the folders to finish, each once, until the end of the input."""
    seen, line = set[str](), "\n"
    while line:
        line = sys.stdin.readline()
        if line.strip() == "end":
            line = ""
        for window in queue.queued_of(folder, job.run, job.rank, job.owner):
            if window.name not in seen:
                seen.add(window.name)
                yield window


def _finished(window: Path, sinks: dict[str, Any], failed: set[str], job: Job) -> Path | None:
    """Finish a queued folder; return the folder of the capture, or None if the folder fails."""
    try:
        return finish(window, sinks, failed=failed, one_per_role=job.one_per_role)
    except Exception as error:
        if "exporter" not in failed and not isinstance(error, queue.TakenError):
            failed.add("exporter")
            logger.error(
                "{} cannot be finished ({}); failures of later windows are not logged. The raw "
                "traces are kept: `instrument export {}` tries again.",
                queue.name_of(window),
                reason_of(error),
                window.parent,
            )
        return None


def _allow(seconds: float) -> None:
    """Kill this process after `seconds`; 0 cancels the timer."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _text(message: Any) -> str:
    text, error = message.record["message"], message.record["exception"]
    if error is None or error.value is None:
        return str(text)
    return f"{text}\n{traceback_of(error.value)}"


def _answer(answers: TextIO, **answer: Any) -> None:
    with _answering, suppress(OSError):  # the trainer may have ended; the exporter goes on
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
