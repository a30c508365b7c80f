"""Finishes the folder of a saved window: compresses the trace, writes a summary, runs the sinks."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from instrument import files
from instrument.capture import Capture
from instrument.errors import CaptureError, InstrumentError, reason_of
from instrument.log import logger
from instrument.runs import rank_summary as of_rank
from instrument.sinks.scalars import scalars
from instrument.trace.rewrite import rewrite
from instrument.worker.queue import PACKED, RAW, describe, name_of, publish
from instrument.worker.sink_calls import run_sink

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
