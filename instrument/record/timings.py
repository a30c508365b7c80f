"""Measures how long all ranges and steps of a run take, without Kineto and in constant memory.

A range costs two readings of the clock and an append to a list; batches of 256 durations go into a
histogram. After every `profiler.timings.every` steps, a line is added to `timings_rank0.jsonl`: a
summary of the time since the previous line, also for TensorBoard, and one of the whole run.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from threading import Lock
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from instrument.annotate import backends
from instrument.annotate.modules import ModuleRanges, instrumented_models
from instrument.base.files import TIMINGS_FORMAT, make_folder, open_to_append
from instrument.base.log import lines_logger, logger
from instrument.base.printable import printable_lines
from instrument.base.range_names import STEP, from_trace
from instrument.record.config.schema import TimingsConfig

if TYPE_CHECKING:
    from instrument.read.views.table import Table

#: After the first `_MOST_NAMES` range names, all further ranges are counted under this name.
OTHERS = "(other ranges)"
_MOST_NAMES = 1000
_BATCH = 256  # at most 10 kB per name; counting a batch takes 14 µs
GROWTH = 1.04  # a bin begins at a power of this, in ns
_BINS = 900  # the last bin begins at 23 days
_MOST_WAITING = 16_384  # how many ranges may wait for the device; further ranges are not timed


class DurationHistogram:
    """A histogram of durations, with their exact count, sum and maximum; takes 7 kB of memory."""

    def __init__(self) -> None:
        self.calls = 0
        self.total_ns = 0
        self.max_ns = 0
        self.bins = np.zeros(_BINS, np.int64)

    def add(self, durations_ns: list[int]) -> None:
        """Add durations to the histogram; `durations_ns` must not be empty."""
        values = np.array(durations_ns, np.int64)
        self.calls += len(values)
        self.total_ns += int(values.sum())
        self.max_ns = max(self.max_ns, int(values.max()))
        bins = (np.log(np.maximum(values, 1)) / math.log(GROWTH)).astype(np.int64)
        self.bins += np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)

    def merge(self, other: DurationHistogram) -> None:
        """Add the durations of another histogram."""
        self.calls += other.calls
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self.bins += other.bins

    def quantile_ns(self, share: float) -> int:
        """Estimate a quantile of one duration or more; for the median, `share` is 0.5.

        The exact one is the duration at position ceil(share · count) of the sorted durations. The
        error is at most 2 %, because the bins are 4 % wide.
        """
        position = math.ceil(share * self.calls)
        bin_index = int(np.searchsorted(np.cumsum(self.bins), position))
        middle_ns: float = GROWTH ** (bin_index + 0.5)
        return min(round(middle_ns), self.max_ns)

    def summary(self) -> dict[str, int]:
        """The count, mean, median, 95th percentile and maximum; the histogram must not be empty."""
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
        uncounted: durations that are not in a histogram yet; any thread may append to it.
        run: a histogram of all durations up to the last call of `take_recent`.
    """

    def __init__(self) -> None:
        self.uncounted: list[int] = []
        self.run = DurationHistogram()
        self._recent = DurationHistogram()
        self._counting = Lock()

    def count(self) -> None:
        """Move `uncounted` into the histogram of recent durations, unless another thread does."""
        if self._counting.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._counting.release()

    def take_recent(self) -> DurationHistogram:
        """Return the durations since the last call, after adding them to `run`."""
        with self._counting:
            self._count()
            recent, self._recent = self._recent, DurationHistogram()
            self.run.merge(recent)
        return recent

    def histogram(self) -> DurationHistogram:
        """A copy of the histogram of all durations up to now; any thread may call this."""
        whole = DurationHistogram()
        with self._counting:
            self._count()
            whole.merge(self.run)
            whole.merge(self._recent)
        return whole

    def _count(self) -> None:
        taken = self.uncounted[:]  # a copy, because other threads may append to the list now
        if taken:
            del self.uncounted[: len(taken)]
            self._recent.add(taken)


class Rows:
    """A `Row` for each of the first 1,000 range names, and one `Row` for all further names."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def add(self, name: str, duration_ns: int) -> None:
        """Add a duration, on any thread; never blocks."""
        row = self._rows.get(name) or self._new_row(name)
        row.uncounted.append(duration_ns)
        if len(row.uncounted) >= _BATCH:
            row.count()

    def items(self) -> list[tuple[str, Row]]:
        """The names with their rows."""
        return list(self._rows.items())  # a copy, because other threads may add rows

    def _new_row(self, name: str) -> Row:
        if len(self._rows) < _MOST_NAMES or name == STEP:
            return self._rows.setdefault(name, Row())
        if OTHERS not in self._rows:
            logger.warning(
                "Timings keep at most {} range names: {!r} and all later names are counted "
                "together as {!r}. The usual cause of so many names is a range name that contains "
                "arguments of the call.",
                _MOST_NAMES,
                name,
                OTHERS,
            )
            self._rows.setdefault(OTHERS, Row())
        return self._rows[OTHERS]


class CpuTimes:
    """Measures how long ranges take on the CPU. A range's time includes the ranges inside it."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.backend = backends.Backend(self._open, self._close)

    def _open(self, name: str) -> tuple[str, int]:
        return name, perf_counter_ns()

    def _close(self, handle: tuple[str, int]) -> None:
        ended_ns = perf_counter_ns()
        self.rows.add(handle[0], ended_ns - handle[1])


class DeviceTimes:
    """Measures how long ranges take on the CUDA device, by CUDA events at their start and end.

    The events are on the current stream, so a time includes the waits of this stream. The CPU never
    waits for the device: at the end of each step, `collect` reads the events that the device has
    reached. Cost: two events per range.

    A range is not timed if it begins before CUDA is in use or while 16,384 ranges wait for the
    device, begins or ends during a stream capture (of a CUDA graph), ends on another device, or
    ends on another stream and the device reaches its end before its start.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.rows = Rows()
        self.backend = backends.Backend(self._open, self._close)
        self._cuda = cuda
        # unused events by device: an event belongs to the device that it was first recorded on
        self._spare: dict[int, list[Any]] = {}
        self._waiting: deque[tuple[str, int, Any, Any]] = deque()
        self._failed = False

    def _open(self, name: str) -> tuple[str, int, Any] | None:
        try:
            if self._usable() and len(self._waiting) < _MOST_WAITING:
                return name, *self._record_event()
        except Exception as error:
            self._fail(error)
        return None

    def _close(self, handle: tuple[str, int, Any] | None) -> None:
        if handle is None:
            return
        name, device, begin = handle
        try:
            if self._usable() and device == self._cuda.current_device():
                self._waiting.append((name, device, begin, self._record_event()[1]))
        except Exception as error:
            self._fail(error)

    def collect(self) -> None:
        """Add the durations of ranges that the device has finished; call it on one thread only."""
        try:
            while self._waiting and self._usable():
                name, device, begin, end = self._waiting[0]
                if not (end.query() and begin.query()):
                    break
                self._waiting.popleft()
                took_ns = round(begin.elapsed_time(end) * 1e6)
                # negative if the range ended on another stream, and this stream was ahead
                if took_ns >= 0:
                    self.rows.add(name, took_ns)
                self._spare[device] += (begin, end)
        except Exception as error:
            self._fail(error)

    def _usable(self) -> bool:
        cuda = self._cuda  # the query of an event during a stream capture makes the capture fail
        return not self._failed and cuda.is_initialized() and not cuda.is_current_stream_capturing()

    def _record_event(self) -> tuple[int, Any]:
        device = self._cuda.current_device()
        spare = self._spare.setdefault(device, [])
        try:
            event = spare.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record()
        return device, event

    def _fail(self, error: Exception) -> None:
        if not self._failed:  # usually an earlier CUDA error of the program
            self._failed = True
            logger.error("Timings measure no device times from now on: {}", error)


class Timings:
    """Measures how long ranges and steps take from `start` to `stop`, and writes summaries.

    Each call counts with its full duration, even a call inside a call of the same name. Coroutines
    and generators are timed in slices, from one suspension to the next: the first slice is named
    `name`, the later slices are named `name (resumed)`. Steps and ranges inside a window count too,
    although recording makes them slower. The session's work between two steps does not count.
    Ranges that torch.compile traces into a compiled region are not timed.

    Cost on the CPU: 0.5 to 1 µs per range if ranges follow each other directly. In a step of 2 ms,
    a range costs 2 to 5 µs, because the work of the step evicts this code from the CPU caches. With
    `profiler.timings.modules`, a call of a submodule costs 3 µs. A step costs 1 µs. Each range name
    takes 25 kB of memory. Each write takes 0.05 ms on the training thread, and 0.2 kB of disk per
    range name. If the process is killed, the durations since the last write are lost.

    Attributes:
        path: the file to which each write appends a line.
    """

    def __init__(self, config: TimingsConfig, folder: Path, rank: int) -> None:
        self.path = folder / f"timings_rank{rank}.jsonl"
        self._every = config.every
        self._cpu = CpuTimes()
        self._device = DeviceTimes() if config.device and torch.cuda.is_available() else None
        self._ranges = self._cpu.backend
        # The CPU range opens after and closes before the device range, so that the CPU time
        # excludes the cost of CUDA events.
        if self._device:
            self._ranges = backends.both(self._device.backend, self._cpu.backend)
        self._step: Any = None
        self._last_step: int | None = None
        self._failed = False
        self._process = os.getpid()
        self._modules = ModuleRanges() if config.modules else None
        self._write_scalars = _tensorboard_writer(folder, rank) if config.tensorboard else None

    def start(self) -> None:
        """Begin to measure how long ranges take."""
        if self._modules is not None:
            self._modules.__enter__()
        backends.arm(self._ranges)
        untimed = self._modules is None and bool(instrumented_models())
        more = "; profiler.timings.modules=true also times submodules" if untimed else ""
        logger.info(
            "Timing every range and step; the results are written to {} every {} steps{}",
            self.path,
            self._every,
            more,
        )

    def begin_step(self) -> None:
        """Begin a step."""
        self._step = self._ranges.open(STEP)

    def discard_step(self) -> None:
        """Do not count the current step, because another phase interrupts it."""
        self._step = None

    def end_step(self, number: int) -> None:
        """End the step that `begin_step` began, if any; after every `every` steps, write a line."""
        if self._step is not None:
            self._ranges.close(self._step)
        self._step, self._last_step = None, number
        if self._device is not None:
            self._device.collect()
        if (number + 1) % self._every == 0:
            self._write()

    def stop(self) -> None:
        """Stop timing, write the last line, and log the table of the whole run."""
        backends.disarm(self._ranges)
        if self._modules is not None:
            self._modules.__exit__()
        if self._device is not None:
            self._device.collect()
        self._write()
        table = self.table()
        if len(table):
            lines = [f"Timings of the run, also in {self.path}", *repr(table).split("\n")]
            inside = dict.fromkeys(each["range"] for each in backends.current_compiled_ranges())
            if names := ", ".join(inside):
                lines.append(f"Not timed, because they are inside compiled regions: {names}.")
            lines_logger.info("{}", printable_lines(*lines))

    def table(self) -> Table:
        """One row for each range of the run up to the last write, longest total time first."""
        from instrument.read.views.timings_file import summary_table

        runs: dict[str, dict[str, int]] = {}
        for prefix, rows in self.rows_by_prefix():
            for name, row in rows.items():
                if row.run.calls:
                    runs.setdefault(from_trace(name), {}).update(_prefixed(prefix, row.run))
        return summary_table(runs)

    def rows_by_prefix(self) -> list[tuple[str, Rows]]:
        """The rows of CPU times, with the prefix "", and of device times, if they are measured."""
        return [("", self._cpu.rows)] + ([("device_", self._device.rows)] if self._device else [])

    def _summaries(self) -> dict[str, dict[str, dict[str, int]]]:
        """For each range called since the last write: summaries of these calls and of the run's."""
        summaries: dict[str, dict[str, dict[str, int]]] = {}
        for prefix, rows in self.rows_by_prefix():
            for name, row in rows.items():
                recent = row.take_recent()
                if recent.calls:
                    entry = summaries.setdefault(from_trace(name), {"since": {}, "run": {}})
                    entry["since"].update(_prefixed(prefix, recent))
                    entry["run"].update(_prefixed(prefix, row.run))
        return summaries

    def _write(self) -> None:
        if os.getpid() != self._process:  # a forked child: the file belongs to its parent
            return
        try:
            ranges = self._summaries()
            if ranges:
                line = {
                    "format": TIMINGS_FORMAT,
                    "step": self._last_step,
                    "time": datetime.now(UTC).isoformat(timespec="seconds"),
                    "ranges": ranges,
                }
                _append(self.path, json.dumps(line))
                if self._write_scalars is not None:
                    since = {name: entry["since"] for name, entry in ranges.items()}
                    self._write_scalars(self._last_step or 0, since)
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.error(
                    "Timings cannot be written to {}: {}. Later writes are tried, but further "
                    "errors are not logged.",
                    self.path,
                    error,
                )


def _prefixed(prefix: str, durations: DurationHistogram) -> dict[str, int]:
    return {prefix + key: value for key, value in durations.summary().items()}


def _append(path: Path, line: str) -> None:
    with open_to_append(path, buffering=0) as file:  # ends an incomplete last line first
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        incomplete = size > 0 and file.read(1) != b"\n"
        data = ("\n" * incomplete + line + "\n").encode()
        if file.write(data) < len(data):
            raise OSError("only a part of the line was written")


def _tensorboard_writer(
    folder: Path, rank: int
) -> Callable[[int, dict[str, dict[str, int]]], None]:
    # The file is alone in its folder: TensorBoard stops reading a file when a newer one appears.
    # Imports everything now, because this takes half a second: too long between two steps.
    import_module("tensorboard.compat.proto.event_pb2")
    import_module("tensorboard.compat.proto.summary_pb2")
    import_module("tensorboard.summary.writer.record_writer")
    from instrument.base.event_file import append_scalars, event_file_name

    below = ("tensorboard", f"timings_rank{rank}" if rank else "timings")
    name = event_file_name(time.time(), socket.gethostname(), os.getpid(), "timings")

    def write(step: int, summaries: dict[str, dict[str, int]]) -> None:
        file = make_folder(folder, *below) / name
        append_scalars(file, time.time(), step, _tagged(summaries).items())

    return write


def _tagged(summaries: dict[str, dict[str, int]]) -> dict[str, float]:
    """Convert summaries to scalars with tags such as `timings/<range>/p50_ms`."""
    scalars: dict[str, float] = {}
    for name, summary in summaries.items():
        for key, value in summary.items():
            is_time = key.endswith("_ns")
            tag = f"timings/{name}/{key.removesuffix('_ns')}"
            scalars[f"{tag}_ms" if is_time else tag] = value / 1e6 if is_time else value
    return scalars
