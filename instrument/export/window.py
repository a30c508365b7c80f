"""Finishes one saved window: compresses the trace, runs the sinks, completes capture.json."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instrument.base import files, queue
from instrument.base.errors import CaptureError, reason_of
from instrument.base.files import DETAIL_FILE
from instrument.base.log import logger
from instrument.base.queue import PACKED, RAW, RAW_DETAIL, SCALARS_FILE
from instrument.export.sink_calls import is_last, run_sink
from instrument.export.sinks.window_scalars import numbers
from instrument.read.capture import Capture
from instrument.read.ranks import rank_summary as of_rank
from instrument.read.trace.rewrite import rewrite

# The words for data-parallel dimensions in torch, torchtitan, Lightning and Megatron.
_DATA_PARALLEL = {"dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard"}
_IN_ANY_NAME = {"mesh", "parallel", "group", "gloo"}


def finish(
    folder: Path,
    sinks: Mapping[str, Any],
    *,
    failed: set[str],
    one_per_role: bool = False,
    with_scalars: bool = False,
) -> Path:
    """Turn a queued folder into a finished capture, and return the capture's folder.

    While this function runs, the folder is busy. After an exception, it is queued again. `failed`
    holds the names of the sinks whose first error in this run is logged; new ones are added. With
    `one_per_role`, only one rank of each parallel role keeps its trace and runs the sinks. With
    `with_scalars`, `scalars.json` is written too.

    Sinks that a process that was killed had already run are not run again, except those with
    `last`, which change files that other sinks read.

    Raises:
        TakenError: another process is finishing the folder.
        CaptureError: the trace is not a regular file.
        OSError: the trace cannot be compressed, for example because the disk is full.
    """
    try:
        busy = queue.take(folder)
        about = _work_on(busy, sinks, failed, one_per_role, with_scalars)
        return queue.publish(busy, about)
    except queue.TakenError:
        raise
    except BaseException:  # also what a signal's handler raises before or after the two renames
        if not queue.is_queued(folder):
            with suppress(OSError):
                queue.put_back(queue.busy_path(folder))
        raise


def _work_on(
    folder: Path,
    sinks: Mapping[str, Any],
    failed: set[str],
    one_per_role: bool,
    with_scalars: bool,
) -> dict[str, Any]:
    """Do all the work on a busy folder; return the new content of its capture.json."""
    began = time.perf_counter_ns()
    for half_written in folder.glob(".*.tmp"):  # by a process that was killed
        half_written.unlink()
    about = dict(Capture.load(folder).metadata)  # a copy: sinks may change it
    present = {each.name for each in folder.iterdir()}
    if of_rank.SUMMARY_FILE in present and present.isdisjoint({RAW, PACKED}):
        return about  # only the new name was left to do
    for raw, packed in ((RAW, PACKED), (RAW_DETAIL, DETAIL_FILE)):
        _compress(folder, raw, packed, about.get("user_metadata", {}))
    queue.let_go(folder, queue.DETAIL)  # its run may have been killed
    # a process that was killed may have written the size already, before a sink changed the trace
    packed_bytes = (folder / PACKED).stat().st_size
    cost = about["cost"] = {"packed_bytes": packed_bytes, **about.get("cost", {})}
    capture = Capture.load(folder)
    capture.metadata["cost"] = cost
    _summarize(capture, folder, failed)
    keeps = True
    if one_per_role and files.exists(folder / of_rank.SUMMARY_FILE) and not _keeps(capture, failed):
        keeps, sinks = False, {}
    for is_after in (False, True):
        for name in (each for each in sinks if is_last(sinks[each]) is is_after):
            cost["export_ns"] = time.perf_counter_ns() - began  # the time so far: sinks report it
            if is_after or name not in queue.sinks_run(folder):
                run_sink(name, sinks[name], capture, folder, failed)
                queue.note_sink(folder, name)
        if with_scalars and keeps and not is_after:
            cost["export_ns"] = time.perf_counter_ns() - began
            files.write(folder / SCALARS_FILE, json.dumps(numbers(capture)))
    about["sinks_run"] = list(dict.fromkeys(queue.sinks_run(folder)))
    cost["export_ns"] = time.perf_counter_ns() - began
    queue.describe(folder, about)
    if not keeps:  # last: without its trace, the work cannot be done again
        (folder / PACKED).unlink()
        (folder / DETAIL_FILE).unlink(missing_ok=True)
    return about


def _keeps(capture: Capture, failed: set[str]) -> bool:
    """Whether this rank is the first one in each of its data-parallel groups."""
    events = capture.events
    groups = [each for each in events.process_groups if _is_data_parallel(each.pg_desc)]
    if not groups and capture.rank == 0 and "roles" not in failed:
        failed.add("roles")
        logger.warning(
            "profiler.ranks is one_per_role, but no process group is named after data parallelism, "
            "so every rank keeps its trace: name the dimensions, as in init_device_mesh(…, "
            'mesh_dim_names=("dp", "tp")), or list the ranks, as in profiler.ranks=[0, 1].'
        )
    return all(each.ranks[:1] == [events.rank] for each in groups)


def _is_data_parallel(description: str) -> bool:
    """Whether a group is, for example, mesh_dp_shard or DATA_PARALLEL_GROUP, but not mesh_dp_cp."""
    words = {*re.findall("[a-z]+", description.lower())} - _IN_ANY_NAME
    return bool(words) and words <= _DATA_PARALLEL


def _compress(folder: Path, name: str, packed: str, metadata: Mapping[str, Any]) -> None:
    raw = folder / name
    if not files.exists(raw):  # a process that was killed had compressed it
        return
    if not files.is_regular(raw):
        raise CaptureError(
            f"{queue.queued_path(folder) / name} is not a regular file (links are not followed): "
            "replace it with the trace file."
        )
    # torch's own export of metadata turns backslashes into slashes and writes invalid JSON
    rewrite(raw, folder / packed, metadata)
    raw.unlink()


def _summarize(capture: Capture, folder: Path, failed: set[str]) -> None:
    try:
        of_rank.write(capture, folder)
    except Exception as error:
        if of_rank.SUMMARY_FILE not in failed:
            failed.add(of_rank.SUMMARY_FILE)
            logger.warning(
                "{}: the file {}, which is needed to compare ranks, cannot be written ({}).",
                queue.name_of(folder),
                of_rank.SUMMARY_FILE,
                reason_of(error),
            )
