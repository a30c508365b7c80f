"""The exporter: `python -m instrument.export FOLDER` finishes the queued windows of a run.

Options call it the export process. The trainer starts it with the first window, and writes to its
standard input: the job (see `instrument.base.export_job`), then a line for each new window. After
each line, the exporter finishes the queued folders of its run and rank in FOLDER. After `end`, or
at the end of the input, it closes the sinks, waits for uploads, and ends.

Its standard output is its log: one JSON object per line, with `text`, `level` and `is_block` (see
`Logger.block`). What sinks print goes to stderr.

It ignores Ctrl-C and SIGTERM, which launchers often send to all processes, and outlives the trainer
until its queue is empty. A timer kills it if a capture, or closing the sinks, takes longer than the
job's time limit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

import loguru

from instrument.base import queue
from instrument.base.errors import reason_of
from instrument.base.export_job import Job, from_line
from instrument.base.file_lock import remove_if_free
from instrument.base.log import logger
from instrument.export.exporter import Exporter

# The exporter runs beside training: polars, which sinks load, gets one thread.
os.environ.setdefault("POLARS_MAX_THREADS", "1")
_NICENESS = 10
_writing = Lock()


def main() -> None:
    """Finish queued windows. The arguments are the folder, and the handle of the run's lock."""
    folder, *lock = sys.argv[1:]
    # never closed: threads of sinks may log until the process ends
    log = os.fdopen(os.dup(1), "w", encoding="utf-8", closefd=False)
    os.dup2(2, 1)
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    loguru.logger.remove()
    loguru.logger.add(lambda message: _write(log, message.record), level=0)
    job = from_line(sys.stdin.readline())
    try:
        _finish_all(Exporter(Path(folder), job), job)
    except MemoryError as error:
        logger.error("The exporter has ended: {}.", reason_of(error))
        sys.exit(1)
    for handle in lock:
        os.close(int(handle))
        remove_if_free(queue.lock_of(Path(folder), job.run))


def _finish_all(exporter: Exporter, job: Job) -> None:
    is_over = False
    while not is_over:
        line = sys.stdin.readline()
        is_over = not line or line.strip() == "end"
        for window in exporter.queued(is_over=is_over):
            _allow(job.timeout_s)
            exporter.finish(window)
            _allow(0)
    _allow(job.timeout_s)  # not cancelled: threads of a sink may delay the end of the process
    exporter.close()


def _allow(seconds: float) -> None:
    """Kill this process after `seconds`; 0 cancels the timer."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _write(log: TextIO, record: Any) -> None:
    text = record["message"]
    is_block = record["extra"].get("is_block", False)
    line = json.dumps({"level": record["level"].name, "text": text, "is_block": is_block})
    with _writing, suppress(OSError):  # no room for it
        log.write(line + "\n")
        log.flush()


if __name__ == "__main__":
    main()
