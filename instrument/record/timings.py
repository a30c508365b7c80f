"""Times every range and step of a whole run, without Kineto and in constant memory.

A range costs two looks at the clock and an append to a list; batches of 256 are counted into a histogram. Every n steps
what came since the last time, and all so far, goes to `timings_rank0.jsonl`, and to TensorBoard where that is wanted.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from threading import Lock
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from loguru import logger

from instrument.analysis.table import Table
from instrument.annotate import backends
from instrument.annotate.modules import ModuleRanges, any_instrumented
from instrument.config.schema import TimingsConfig
from instrument.files import make_folder, open_to_append
from instrument.range_names import from_trace
from instrument.runs.timings_file import summary_table

#: The row of whole steps, named as the operator table names them.
STEP = "ProfilerStep*"
#: The row of all ranges whose names came after the first `_MOST_NAMES`.
OTHERS = "(other ranges)"
_MOST_NAMES = 1000
_BATCH = 256  # at most 10 kB a name; to count one takes 14 µs
_GROWTH = 1.04
_BINS = 900  # the last begins at 23 days
_MOST_WAITING = 16_384  # ranges that the device has yet to pass; more are unknown there


class DurationHistogram:
    """Durations in 7 kB, however many: their exact count, sum and maximum, and a histogram for quantiles.

    Its bins are 4 % wide, so that a quantile is within 2 % of the true one: the duration that stands at place
    ceil(share · count) when all are put in order.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.total_ns = 0
        self.max_ns = 0
        self._bins = np.zeros(_BINS, np.int64)

    def add(self, durations_ns: list[int]) -> None:
        """Count durations; at least one."""
        values = np.array(durations_ns, np.int64)
        self.calls += len(values)
        self.total_ns += int(values.sum())
        self.max_ns = max(self.max_ns, int(values.max()))
        bins = (np.log(np.maximum(values, 1)) / math.log(_GROWTH)).astype(np.int64)
        self._bins += np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)

    def merge(self, other: DurationHistogram) -> None:
        """Count what another has counted, too."""
        self.calls += other.calls
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self._bins += other._bins

    def quantile_ns(self, share: float) -> int:
        """The duration that this share of all do not exceed, within 2 %; there must be one."""
        place = math.ceil(share * self.calls)
        found = int(np.searchsorted(np.cumsum(self._bins), place))
        middle_ns: float = _GROWTH ** (found + 0.5)
        return min(round(middle_ns), self.max_ns)

    def summary(self) -> dict[str, int]:
        """What is written of it; there must be a duration."""
        return {
            "calls": self.calls,
            "mean_ns": round(self.total_ns / self.calls),
            "p50_ns": self.quantile_ns(0.5),
            "p95_ns": self.quantile_ns(0.95),
            "max_ns": self.max_ns,
        }


class Row:
    """The durations of one range name.

    Attributes:
        waiting: those yet to be counted; appending is atomic, so that any thread may.
        run: those up to the last `turn`.
    """

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.run = DurationHistogram()
        self._since = DurationHistogram()
        self._counting = Lock()

    def count(self) -> None:
        """Count those that wait, unless somebody is at it: a signal handler may come into the midst of counting."""
        if self._counting.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._counting.release()

    def turn(self) -> DurationHistogram:
        """What came since the last turn; it counts in `run` from now on."""
        with self._counting:
            self._count()
            since, self._since = self._since, DurationHistogram()
        self.run.merge(since)
        return since

    def _count(self) -> None:
        taken = self.waiting[:]  # others may append meanwhile, at the end
        if taken:
            del self.waiting[: len(taken)]
            self._since.add(taken)


class Rows:
    """The durations of every range by its name; of 1,000 names, with one row for all that come later."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def add(self, name: str, duration_ns: int) -> None:
        """Take a duration, from any thread; nobody ever waits here."""
        row = self._rows.get(name) or self._admitted(name)
        row.waiting.append(duration_ns)
        if len(row.waiting) >= _BATCH:
            row.count()

    def items(self) -> list[tuple[str, Row]]:
        """The names so far and their rows; other threads may add more meanwhile."""
        return list(self._rows.items())

    def _admitted(self, name: str) -> Row:
        if len(self._rows) < _MOST_NAMES or name == STEP:
            return self._rows.setdefault(name, Row())
        if OTHERS not in self._rows:
            logger.warning(
                "Timings keep {} range names, and {!r} is one more: it and all others count together as {!r}. Names "
                "made from arguments are the usual cause.",
                _MOST_NAMES,
                name,
                OTHERS,
            )
            self._rows.setdefault(OTHERS, Row())
        return self._rows[OTHERS]


class CpuTimes:
    """Times ranges on the CPU, each call with all that happens within it."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.backend = backends.Backend(self._open, self._close)

    def _open(self, name: str) -> tuple[str, int]:
        return name, perf_counter_ns()

    def _close(self, handle: tuple[str, int]) -> None:
        ended_ns = perf_counter_ns()
        self.rows.add(handle[0], ended_ns - handle[1])


class DeviceTimes:
    """Times ranges on the CUDA device: from when its current stream reaches their begin until it reaches their end.

    What the stream waits for in between counts. The CPU never waits for the device: `collect`, at the end of each
    step, reads those events that the device has passed. Unknown remain ranges that begin before CUDA is in use, end on
    another device, lie within the capture of a CUDA graph, or find 16,384 others waiting. Cost: two events a range.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.rows = Rows()
        self.backend = backends.Backend(self._open, self._close)
        self._cuda = cuda
        self._spare: dict[
            int, list[Any]
        ] = {}  # an event belongs to the device that it was first recorded on
        self._waiting: deque[tuple[str, int, Any, Any]] = deque()
        self._failed = False

    def _open(self, name: str) -> tuple[str, int, Any] | None:
        try:
            return (
                (name, *self._recorded())
                if self._usable() and len(self._waiting) < _MOST_WAITING
                else None
            )
        except Exception as error:
            self._fail(error)
            return None

    def _close(self, handle: tuple[str, int, Any] | None) -> None:
        if handle is None:
            return
        name, device, begin = handle
        try:
            if self._usable() and device == self._cuda.current_device():
                self._waiting.append((name, device, begin, self._recorded()[1]))
        except Exception as error:
            self._fail(error)

    def collect(self) -> None:
        """Take the durations that the device has finished by now; for one thread."""
        try:
            while self._waiting and self._usable() and self._passed(*self._waiting[0][2:]):
                name, device, begin, end = self._waiting.popleft()
                took_ns = round(begin.elapsed_time(end) * 1e6)
                if took_ns >= 0:  # it may have ended in another stream, which was ahead
                    self.rows.add(name, took_ns)
                self._spare[device] += (begin, end)
        except Exception as error:
            self._fail(error)

    def _passed(self, begin: Any, end: Any) -> bool:
        return bool(end.query() and begin.query())

    def _usable(self) -> bool:
        """Whether events may be touched; one that is looked at while a CUDA graph is captured ends the capture."""
        cuda = self._cuda
        return not self._failed and cuda.is_initialized() and not cuda.is_current_stream_capturing()

    def _recorded(self) -> tuple[int, Any]:
        device = self._cuda.current_device()
        spare = self._spare.setdefault(device, [])
        try:
            event = spare.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record()
        return device, event

    def _fail(self, error: Exception) -> None:
        """No more device times: what fails here is most often the program's own failure, seen late."""
        if not self._failed:
            self._failed = True
            logger.error("Timings know no device times from here on: {}", error)


class Timings:
    """Times ranges and steps from `start` to `stop`, and writes summaries.

    Every call counts with its whole duration, one inside another of its own name too. Coroutines and generators count
    by the slices between their suspensions, those after the first as `name (resumed)`. Steps and ranges inside a window
    count as they are there, slower; what a session does between two steps is no part of either. Ranges that
    torch.compile traces away are not timed.

    Cost: 2 to 5 µs a range on the CPU in a step of 2 ms, whose own work drives this code out of the caches; 0.5 to 1
    µs where ranges follow each other; 3 µs a submodule with `modules`, 1 µs a step; 25 kB a name; each write, on the
    training thread, 0.05 ms and 0.2 kB a name. Lost: where the process is killed, what came after the last write.

    Attributes:
        path: the file that gets a line for each write.
    """

    def __init__(self, config: TimingsConfig, folder: Path, rank: int) -> None:
        self.path = folder / f"timings_rank{rank}.jsonl"
        self._every = config.every
        self._host = CpuTimes()
        self._device = DeviceTimes() if config.device and torch.cuda.is_available() else None
        # the clock of the CPU inside, so that it does not count what events cost
        self._ranges = (
            backends.both(self._device.backend, self._host.backend)
            if self._device
            else self._host.backend
        )
        self._step: Any = None
        self._last_step: int | None = None
        self._failed = False
        self._process = os.getpid()
        self._modules = ModuleRanges() if config.modules else None
        self._curves = _curves(folder, rank) if config.tensorboard else None

    def start(self) -> None:
        """Begin to time ranges."""
        if self._modules is not None:
            self._modules.__enter__()
        backends.arm(self._ranges)
        more = (
            ""
            if self._modules or not any_instrumented()
            else "; submodules too with profiler.timings.modules=true"
        )
        logger.info(
            "Times every range and step, into {} every {} steps{}", self.path, self._every, more
        )

    def begin_step(self) -> None:
        """Count a step from now on."""
        self._step = self._ranges.open(STEP)

    def leave_out_step(self) -> None:
        """Count the step that runs not at all: another phase interrupts it."""
        self._step = None

    def end_step(self, number: int) -> None:
        """Count the step that was begun, and write where it is time."""
        if self._step is not None:
            self._ranges.close(self._step)
        self._step, self._last_step = None, number
        if self._device is not None:
            self._device.collect()
        if (number + 1) % self._every == 0:
            self._write()

    def stop(self) -> None:
        """Time no more, write what has not been written, and log the whole."""
        backends.disarm(self._ranges)
        if self._modules is not None:
            self._modules.__exit__()
        if self._device is not None:
            self._device.collect()
        self._write()
        table = self.table()
        inside = ", ".join(
            dict.fromkeys(each["range"] for each in backends.still_compiled_ranges())
        )
        note = f"\nInside compiled regions, not timed: {inside}." if inside else ""
        if len(table):
            logger.info("Timings of the run, also in {}\n{!r}{}", self.path, table, note)

    def table(self) -> Table:
        """All up to the last write, a row a range, the most time first."""
        runs: dict[str, dict[str, int]] = {}
        for prefix, rows in self._kinds():
            for name, row in rows.items():
                if row.run.calls:
                    runs.setdefault(from_trace(name), {}).update(_prefixed(prefix, row.run))
        return summary_table(runs)

    def _kinds(self) -> list[tuple[str, Rows]]:
        return [("", self._host.rows)] + ([("device_", self._device.rows)] if self._device else [])

    def _turn(self) -> dict[str, dict[str, dict[str, int]]]:
        """Name -> summaries since the last turn and of the run, for those called since."""
        turned: dict[str, dict[str, dict[str, int]]] = {}
        for prefix, rows in self._kinds():
            for name, row in rows.items():
                since = row.turn()
                if since.calls:
                    entry = turned.setdefault(from_trace(name), {"since": {}, "run": {}})
                    entry["since"].update(_prefixed(prefix, since))
                    entry["run"].update(_prefixed(prefix, row.run))
        return turned

    def _write(self) -> None:
        if os.getpid() != self._process:  # in a forked child: the file is its parent's
            return
        try:
            ranges = self._turn()
            if ranges:
                now = datetime.now(timezone.utc).isoformat(timespec="seconds")
                _append(
                    self.path, json.dumps({"step": self._last_step, "time": now, "ranges": ranges})
                )
                if self._curves is not None:
                    self._curves(
                        self._last_step or 0,
                        {name: entry["since"] for name, entry in ranges.items()},
                    )
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.error(
                    "Timings cannot be written to {}: {}. Later ones are tried, but no further failure is told.",
                    self.path,
                    error,
                )


def _prefixed(prefix: str, tally: DurationHistogram) -> dict[str, int]:
    return {prefix + key: value for key, value in tally.summary().items()}


def _append(path: Path, line: str) -> None:
    """Add a line, on a new one where what was written last is cut short."""
    with open_to_append(path, buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        cut = size > 0 and file.read(1) != b"\n"
        data = ("\n" * cut + line + "\n").encode()
        if file.write(data) < len(data):
            raise OSError("the disk took a part of the line alone")


def _curves(folder: Path, rank: int) -> Callable[[int, dict[str, dict[str, int]]], None]:
    """What writes summaries into an event file of its own folder: TensorBoard never goes back to an older file."""
    # all of it now, half a second, and not between two steps
    from tensorboard.compat.proto import event_pb2, summary_pb2  # type: ignore[import-untyped] # noqa: F401
    from tensorboard.summary.writer import record_writer  # type: ignore[import-untyped] # noqa: F401

    from instrument.sinks.tensorboard import append_scalars, event_file_name

    below = ("tensorboard", f"timings_rank{rank}" if rank else "timings")
    name = event_file_name(time.time(), socket.gethostname(), os.getpid(), "timings")

    def write(step: int, summaries: dict[str, dict[str, int]]) -> None:
        append_scalars(
            make_folder(folder, *below) / name, time.time(), step, _tagged(summaries).items()
        )

    return write


def _tagged(summaries: dict[str, dict[str, int]]) -> dict[str, float]:
    """`timings/<range>/p50_ms` and so on; `calls` as they are."""
    return {
        f"timings/{name}/{key.removesuffix('_ns')}{'_ms' if key.endswith('_ns') else ''}": (
            value / 1e6 if key.endswith("_ns") else value
        )
        for name, summary in summaries.items()
        for key, value in summary.items()
    }
