"""Finishes the folder of a saved window: compresses the trace, writes a summary, runs the sinks."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from traceback import format_exception, print_exception
from typing import Any, Literal

from instrument import files
from instrument.capture import Capture
from instrument.config.instantiate import sink_of_class
from instrument.errors import (
    CaptureError,
    InstrumentError,
    from_signal_handler,
    reason_of,
)
from instrument.log import lines_logger, logger
from instrument.printable import printable
from instrument.runs import rank_summary as of_rank
from instrument.sinks import Sink
from instrument.sinks.scalars import scalars
from instrument.trace.rewrite import rewrite
from instrument.worker.queue import PACKED, RAW, describe, name_of, publish

_LOCK_FILE = ".lock"


def finish(folder: Path, sinks: Mapping[str, Any], *, failed: set[str]) -> Path:
    """Compress a queued folder's trace, write a summary, run the sinks, and rename the folder.

    Sinks with `needs_final_folder` run after the folder has its final name.

    Args:
        folder: the queued folder.
        sinks: the sinks, by name.
        failed: the names of the sinks that have already failed in this run; this function adds the
            sinks that fail now. Only the first error of a sink is logged.

    Returns:
        The folder of the finished capture.

    Raises:
        CaptureError: another process is finishing the folder, or the trace is not a regular file.
        OSError: the trace cannot be compressed, for example because the disk is full. The folder
            stays queued.
    """
    with _locked(folder):
        began = time.perf_counter_ns()
        for half_written in folder.glob(".*.tmp"):  # by a process that was killed
            half_written.unlink()
        about = dict(Capture.load(folder).metadata)  # a copy: sinks may change it
        raw = folder / RAW
        if files.exists(raw):
            if not files.is_regular(raw):
                raise CaptureError(
                    f"{raw} is not a regular file (links are not followed): replace it with the "
                    "trace file."
                )
            # torch's own export of metadata turns backslashes into slashes and writes invalid JSON
            rewrite(raw, folder / PACKED, about.get("user_metadata", {}))
            raw.unlink()
        cost = about["cost"] = {
            **about.get("cost", {}),
            "packed_bytes": (folder / PACKED).stat().st_size,
        }
        capture = Capture.load(folder)
        capture.metadata["cost"] = cost
        _summarize(capture, folder, failed)
        # a stable sort: sinks without `last` come first, otherwise the config's order stays
        names = sorted(sinks, key=lambda name: bool(getattr(sinks[name], "last", False)))
        after_renaming = {
            name for name in names if getattr(sinks[name], "needs_final_folder", False)
        }
        for name in names:
            if name in after_renaming:
                continue
            cost["export_ns"] = time.perf_counter_ns() - began  # the time so far: sinks report it
            run_sink(name, sinks[name], capture, folder, failed)
        cost["export_ns"] = time.perf_counter_ns() - began
        with suppress(InstrumentError):
            if about.get("sinks_inline"):  # so that inline sinks need not read the trace
                about["scalars"] = dict(scalars(capture))
        describe(folder, about)
        (folder / _LOCK_FILE).unlink(missing_ok=True)
        finished = publish(folder, about)
    if after_renaming:
        capture = Capture.load(finished)
        for name in names:
            if name in after_renaming:
                run_sink(name, sinks[name], capture, finished, failed)
    return finished


def _summarize(capture: Capture, folder: Path, failed: set[str]) -> None:
    """Write the summary of a capture, for comparisons of ranks.

    Only the first failure in a run is logged.
    """
    try:
        of_rank.write(capture, folder)
    except Exception as error:
        if of_rank.SUMMARY_FILE not in failed:
            failed.add(of_rank.SUMMARY_FILE)
            logger.warning(
                "{}: the file {}, which is needed to compare ranks, cannot be written ({}).",
                name_of(folder),
                of_rank.SUMMARY_FILE,
                reason_of(error),
            )


def run_sink(name: str, sink: Any, capture: Capture, folder: Path, failed: set[str]) -> None:
    """Run a sink on a capture. If the sink raises, log the exception and add the sink to `failed`.

    The exception of a sink that is already in `failed` is not logged. KeyboardInterrupt is caught
    too, so a caller that must react to Ctrl-C uses `interruptibly`. Only what a signal handler of
    the program raises goes through.
    """
    try:
        with ending_children():
            sink.write(capture, folder)
    except BaseException as error:  # training and the other sinks go on
        if not isinstance(error, KeyboardInterrupt) and from_signal_handler(error):
            raise
        if name in failed:
            return
        failed.add(name)
        _log_error(
            f"The {name} sink failed on {name_of(folder)}: {reason_of(error)}. The trace is kept "
            f"in {folder.with_name(name_of(folder))}, and further failures of this sink are not "
            "logged.",
            error,
        )


def call_sinks(
    sinks: Mapping[str, Any],
    what: Literal["notice", "close"],
    failed: set[str],
    timeout_s: float | None = None,
) -> None:
    """Call `notice` or `close` of all sinks; log the exceptions that the sinks raise.

    For each sink and method, only the first exception is logged.

    Args:
        sinks: the sinks, by name.
        what: the name of the method.
        failed: the failures that are already logged, each as SINK.METHOD; new failures are added.
        timeout_s: the argument for `close`, in seconds.
    """
    for name, sink in sinks.items():
        try:
            if not isinstance(sink, Sink):  # `close` of a user's own class may mean anything
                continue
            with ending_children():
                if what == "notice":
                    sink.notice()
                else:
                    sink.close(timeout_s)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt) and from_signal_handler(error):
                raise
            if f"{name}.{what}" not in failed:
                failed.add(f"{name}.{what}")
                _log_error(f"The {name} sink failed in {what}(): {reason_of(error)}", error)


def _log_error(sentence: str, error: BaseException) -> None:
    """Log a sentence, with a traceback if the error is none of this package.

    loguru's own traceback would show the values of variables.
    """
    where = [] if isinstance(error, InstrumentError) else [traceback_of(error)]
    lines_logger.error("{}", "\n".join([printable(sentence), *where]))


@contextmanager
def ending_children() -> Iterator[None]:
    """End a process that the block forks, once the block ends in it; use this around a sink's code.

    Otherwise the child would continue the work of its parent.
    """
    process, status = os.getpid(), 1
    try:
        yield
        status = 0
    except SystemExit as error:
        if isinstance(error.code, int | None):
            status = error.code or 0
        raise
    except BaseException as error:
        if os.getpid() != process:
            print_exception(error)
        raise
    finally:
        if os.getpid() != process:
            os._exit(status)


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception, indented, so that its message cannot forge a log line."""
    return indent("".join(format_exception(error)).rstrip(), "  ")


def build_sinks(mappings: Mapping[str, Mapping[str, Any]], failed: set[str]) -> dict[str, Any]:
    """Build the sinks of a job (the settings of a worker process).

    If a sink cannot be built, the error is logged, and the name of the sink is added to `failed`.
    """
    sinks = {}
    for name, mapping in mappings.items():
        try:
            options = {option: value for option, value in mapping.items() if option != "_target_"}
            with ending_children():
                sinks[name] = sink_of_class(str(mapping.get("_target_")), options)
        except Exception as error:
            if name not in failed:
                failed.add(name)
                logger.error(
                    "The {} sink cannot be built in the process that finishes captures: {}",
                    name,
                    reason_of(error),
                )
    return sinks


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder during the block, so that no other process finishes this folder meanwhile."""
    # a file, since NFS cannot lock folders
    handle = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CaptureError(
                f"Another process is finishing {folder}: wait until it is done."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
