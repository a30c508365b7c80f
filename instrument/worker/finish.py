"""From a queued folder to a finished capture: the trace compressed, a summary written, the sinks run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import format_exception
from typing import Any, Literal

from loguru import logger

from instrument import files
from instrument.capture import Capture
from instrument.config.instantiate import sink_of_class
from instrument.errors import CaptureError, InstrumentError, reason_of
from instrument.runs import rank_summary as of_rank
from instrument.sinks import Sink
from instrument.sinks.scalars import scalars
from instrument.trace.rewrite import rewrite
from instrument.worker.queue import PACKED, RAW, describe, name_of, publish

_LOCK_FILE = ".lock"


def finish(folder: Path, sinks: Mapping[str, Any], *, failed: set[str]) -> Path:
    """Compress a queued folder's trace, write its summary, run the sinks on it, and give it its name.

    `failed` are the sinks that have failed before in this run, which is said once; they are added to it.

    Raises:
        CaptureError: another process is at it, or its trace is no regular file.
        OSError: the trace cannot be compressed, for one because the disk is full; the folder stays queued.
    """
    with _alone(folder):
        began = time.perf_counter_ns()
        for half_written in folder.glob(".*.tmp"):  # by one that was killed at it
            half_written.unlink()
        about = dict(
            Capture.load(folder).metadata
        )  # ours: a sink may do anything to the capture's own
        raw = folder / RAW
        if files.exists(raw):
            if not files.is_regular(raw):
                raise CaptureError(
                    f"{raw} is no regular file, and no link is followed: put the trace itself there."
                )
            # put in here and not by torch, whose export turns backslashes into slashes and the trace into no JSON
            rewrite(raw, folder / PACKED, about.get("user_metadata", {}))
            raw.unlink()
        cost = about["cost"] = {
            **about.get("cost", {}),
            "packed_bytes": (folder / PACKED).stat().st_size,
        }
        capture = Capture.load(folder)
        capture.metadata["cost"] = cost
        _summarize(capture, folder, failed)
        on_final = {
            name: sink for name, sink in sinks.items() if getattr(sink, "needs_final_folder", False)
        }
        on_queued = [(name, sink) for name, sink in sinks.items() if name not in on_final]
        for name, sink in sorted(on_queued, key=lambda item: bool(getattr(item[1], "last", False))):
            cost["export_ns"] = time.perf_counter_ns() - began  # until now
            run_sink(name, sink, capture, folder, failed)
        cost["export_ns"] = time.perf_counter_ns() - began
        with suppress(InstrumentError):
            if about.get(
                "sinks_inline"
            ):  # training would feel it if they read a large trace for these
                about["scalars"] = dict(scalars(capture))
        describe(folder, about)
        (folder / _LOCK_FILE).unlink(missing_ok=True)
        place = publish(folder, about)
    for name, sink in on_final.items():
        run_sink(name, sink, Capture.load(place), place, failed)
    return place


def _summarize(capture: Capture, folder: Path, failed: set[str]) -> None:
    """Write what a table of all ranks needs of this one; that it failed is said once, and it is made when needed."""
    try:
        of_rank.write(capture, folder)
    except Exception as error:  # the trace is there, or the sinks that need it say what is wrong
        if of_rank.SUMMARY_FILE not in failed:
            failed.add(of_rank.SUMMARY_FILE)
            logger.warning(
                "{} gets no {} ({}).", name_of(folder), of_rank.SUMMARY_FILE, reason_of(error)
            )


def run_sink(name: str, sink: Any, capture: Capture, folder: Path, failed: set[str]) -> None:
    """Let one sink write into the capture's folder; what it raises is logged, once for each sink in `failed`.

    That may be anything, KeyboardInterrupt too: where the user can press Ctrl-C, the caller looks for it.
    """
    try:
        sink.write(capture, folder)
    except BaseException as error:  # training and the other sinks go on
        if name in failed:
            return
        failed.add(name)
        # one of our own sentences says it all, anything else needs its traceback; loguru's would show every variable
        where = "" if isinstance(error, InstrumentError) else f"\n{traceback_of(error)}"
        logger.error(
            "The {} sink failed on {}: {}. The trace is kept in {}, and further failures of this sink are not told.{}",
            name,
            name_of(folder),
            reason_of(error),
            folder.with_name(name_of(folder)),
            where,
        )


def tell_sinks(
    sinks: Mapping[str, Any],
    what: Literal["notice", "close"],
    failed: set[str],
    timeout_s: float | None = None,
) -> None:
    """Call one of the methods that sinks have besides `write`; what it raises is logged, once for each in `failed`.

    `timeout_s` is for `close`.
    """
    for name, sink in sinks.items():
        try:
            if not isinstance(sink, Sink):  # another's `close` may mean anything
                continue
            if what == "notice":
                sink.notice()
            else:
                sink.close(timeout_s)
        except BaseException as error:
            if f"{name}.{what}" not in failed:
                failed.add(f"{name}.{what}")
                where = "" if isinstance(error, InstrumentError) else f"\n{traceback_of(error)}"
                logger.error(
                    "The {} sink failed in {}(): {}{}", name, what, reason_of(error), where
                )


def traceback_of(error: BaseException) -> str:
    """An exception with its traceback, as Python prints it."""
    return "".join(format_exception(error)).rstrip()


def built(described: Mapping[str, Mapping[str, Any]], failed: set[str]) -> dict[str, Any]:
    """The sinks of a job; one that cannot be built is logged, and added to `failed`."""
    sinks = {}
    for name, about in described.items():
        try:
            options = {option: value for option, value in about.items() if option != "_target_"}
            sinks[name] = sink_of_class(str(about.get("_target_")), options)
        except Exception as error:
            if name not in failed:
                failed.add(name)
                logger.error(
                    "The {} sink cannot be built where captures are finished: {}",
                    name,
                    reason_of(error),
                )
    return sinks


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from finishing the same folder; the lock goes with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    # a file, as NFS locks no folder
    handle = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0))
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CaptureError(
                f"{folder} is just being finished by another process: wait for that."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


@contextmanager
def ctrl_c_passes() -> Iterator[None]:
    """Raise KeyboardInterrupt behind the block if the user pressed Ctrl-C in it and the block took that for a failure.

    So that a sink which raises KeyboardInterrupt by itself ends no training, and Ctrl-C while a sink runs still does.
    """
    handler, pressed = signal.getsignal(signal.SIGINT), False
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            pressed = True
            raise

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt
