"""The summary of a capture: a small file with the data that is needed to compare ranks.

A thousand summaries are read in seconds, without their traces.
"""

from __future__ import annotations

import os
import struct
import sys
import warnings
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import polars as pl

from instrument.base import files, storage
from instrument.base.errors import InstrumentError, TraceWarning
from instrument.read.facts.groupby import intern
from instrument.read.facts.schema import names_of
from instrument.read.trace.capture_json import BAD_JSON, Number, Rank, WorldSize, unix_time
from instrument.read.trace.columns import BEYOND_NS, ints
from instrument.read.trace.events import Ints
from instrument.read.trace.reader import collector_off
from instrument.read.views.breakdown import BREAKDOWN
from instrument.read.views.collectives import SYNCHRONISING, cpu_waits
from instrument.read.views.find_captures import Place
from instrument.read.views.table import Table
from instrument.read.views.views import Views

SUMMARY_FILE = "summary.json"
VERSION = 4
# A summary keeps the 500 ranges with the most CPU time, and 512 collectives. So a file has some
# tens of kilobytes. The early collectives are for the drift of the clock.
_MOST_RANGES, _MOST_COLLECTIVES, _EARLY_COLLECTIVES = 500, 512, 128
#: The limit for a `summary.json`; a larger file is not read.
MOST_BYTES = 16 << 20
_OF_COLLECTIVES = ("step", "ordinal", "number", "start_ns", "end_ns", "bytes")
#: The columns that are equal for all collectives of one process group and kind.
OF_COLLECTIVE_GROUP = (
    "kind",
    "process_group",
    "description",
    "ranks",
    "group_size",
    "runs_on",
)
_NUMBERS = ("group_size",)
#: The columns that hold text.
TEXTS = ("path", "name", "module_type", *(n for n in OF_COLLECTIVE_GROUP if n not in _NUMBERS))
# Columns that can be computed from other columns are not written.
_DERIVED = ("share", "device_share", "flops_per_second")
_OF_STEPS = (
    "compute_ns",
    "exposed_communication_ns",
    "exposed_copy_ns",
    "idle_ns",
    "communication_ns",
    "copy_ns",
)

_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# A time whose sum with another one fits into 64 bits.
_Time = Annotated[int, msgspec.Meta(gt=-BEYOND_NS, lt=BEYOND_NS)]
if TYPE_CHECKING:  # all cells of a column have one type
    Columns = dict[str, list[Any] | array[int] | None]
    TimeColumns = dict[str, list[Any] | array[int] | None]
else:
    Columns = dict[str, list[_Number | str | None] | None]
    TimeColumns = dict[str, list[_Time | None] | None]


class RankSummary(msgspec.Struct, kw_only=True):
    """The summary of one capture: the content of `summary.json`.

    Unknown values and columns are None. A column of integers that are all known is an `array`, with
    a quarter of a list's memory.

    - `ranges` has the columns of `capture.ranges`, for at most 500 ranges.
    - `steps` are the finished steps, with the time of each kind of device work in the step; without
      device events, communication is the time of collectives on the CPU (gloo).
    - `breakdown` is the row of `capture.breakdown`, for the whole trace.
    - `collectives` are the collectives that end at the same moment on all ranks, in Unix time minus
      `base_ns`: of more than 512, the first 128 after the first step, and the last ones. `group` is
      the index of a row of `collective_groups`.
    - `truncated`: the window ended before its last planned step; `cut_short`: the trace file is.
    - `ranks` is the option `profiler.ranks`: the ranks that should have recorded.
    """

    version: int = VERSION
    name: str
    rank: Rank | None
    world_size: WorldSize | None
    ranks: str | list[Rank] = "all"
    host: str | None = None
    started_at: str | None = None
    phase: str | None = None
    first_step: Number | None = None
    last_step: Number | None = None
    truncated: bool | None = None
    cut_short: bool = False
    versions: dict[str, str] = {}
    devices: list[str] | None = None
    base_ns: _Time = 0
    ranges_left_out: int = 0
    ranges: Columns = {}
    steps: Columns = {}
    breakdown: dict[str, _Number | None] = {}
    collectives: TimeColumns = {}
    collective_groups: Columns = {}

    def __post_init__(self) -> None:
        self.ranges, self.steps = _compact(self.ranges), _compact(self.steps)
        self.collectives = _compact(self.collectives)
        self.collective_groups = _compact(self.collective_groups)


def _compact(columns: Columns) -> Columns:
    found: Columns = {}
    for name, column in columns.items():
        if column is None or isinstance(column, array):
            found[name] = column
        elif name in TEXTS:
            found[name] = _texts(tuple(column))
        else:
            try:  # an array takes a list in twice the time
                found[name] = array("q", struct.pack(f"{len(column)}q", *column))
            except struct.error:  # unknown values
                found[name] = column
    return found


@lru_cache(1024)
def _texts(cells: tuple[Any, ...]) -> list[Any]:
    """The same list for equal cells: the texts are the same on most ranks."""
    return [sys.intern(cell) if type(cell) is str else cell for cell in cells]


def summarize(capture: Views) -> RankSummary:
    """Make the summary of a capture.

    Raises:
        CaptureError, TraceError: the capture holds no trace, or it cannot be read.
    """
    about, events = capture.about, capture.events
    window, numbers = about.window, capture.steps.column("number")
    ranges = _chosen_ranges(capture.ranges)
    collectives, collective_groups = _collectives(capture.collective_calls)
    return RankSummary(
        name=capture.name,
        rank=capture.rank,
        world_size=events.world_size if about.world_size is None else about.world_size,
        host=about.host,
        started_at=about.started_at,
        devices=about.devices,
        ranks=about.config.ranks or "all",
        phase=window.phase,
        first_step=min(numbers, default=None) if window.first_step is None else window.first_step,
        last_step=max(numbers, default=None) if window.first_step is None else window.last_step,
        truncated=window.truncated,
        cut_short=events.cut_short,
        versions=about.versions,
        base_ns=events.base_ns,
        ranges_left_out=len(capture.ranges) - len(ranges),
        ranges=_columns(ranges, _DERIVED),
        steps=_steps(capture),
        breakdown=capture.breakdown[0]._asdict(),
        collectives=collectives,
        collective_groups=collective_groups,
    )


def _collectives(calls: Table) -> tuple[Columns, Columns]:
    every = Table(
        calls.frame.filter(pl.col("kind").is_in(SYNCHRONISING), pl.col("end_ns").is_not_null())
    )
    step, count = every.column("step"), len(every)
    older = range(max(count - _MOST_COLLECTIVES, 0))
    early = [k for k in older if step[k] != step[0]][:_EARLY_COLLECTIVES]
    kept = Table(every.frame[[*early, *range(len(older) + len(early), count)]])
    names = ("name", *OF_COLLECTIVE_GROUP)
    group, groups = intern(zip(*(kept.column(name) for name in names)))
    listed = {name: [each[k] for each in groups] for k, name in enumerate(names)}
    rows = {"group": group.tolist(), **{name: kept.column(name) for name in _OF_COLLECTIVES}}
    return _columns(Table(rows)), _columns(Table(listed))


def _chosen_ranges(table: Table) -> Table:
    if len(table) <= _MOST_RANGES:
        return table
    most = table.frame.with_row_index("row").sort("cpu_ns", descending=True, maintain_order=True)
    return Table(most.head(_MOST_RANGES).sort("row").drop("row"))


def _columns(table: Table, without: Sequence[str] = ()) -> Columns:
    cells = {name: table.column(name) for name in table.columns if name not in without}
    return {
        name: None if column.count(None) == len(column) else column
        for name, column in cells.items()
    }


def _steps(capture: Views) -> Columns:
    steps = capture.steps
    found: Columns = {name: steps.column(name) for name in ("number", "start_ns", "duration_ns")}
    if len(capture.work.event):
        return found | {name: steps.column(f"clipped_{name}") for name in _OF_STEPS}
    return found | dict.fromkeys(_OF_STEPS) | cpu_waits(capture.links)


def column_of_all(ranks: Sequence[Columns], name: str, sizes: Sequence[int]) -> Ints:
    """The column `name` of all ranks, one rank after the other; unknown values are -1.

    `sizes` are the numbers of rows of each rank.
    """
    parts = [_numbers(each.get(name), size) for each, size in zip(ranks, sizes)]
    return np.frombuffer(bytearray().join(parts), np.int64)


def _numbers(column: list[Any] | array[int] | None, size: int) -> array[int] | memoryview:
    if isinstance(column, array):
        return column
    return (np.full(size, -1) if column is None else ints(column, -1)).data


def write(capture: Views, folder: Path) -> None:
    """Write a capture's summary into a folder. After an error, no incomplete file is left.

    Raises:
        CaptureError, TraceError: as for `summarize`.
        OSError: the file cannot be written.
    """
    files.write(folder / SUMMARY_FILE, encoded(summarize(capture)))


def encoded(summary: RankSummary) -> bytes:
    """The content of `summary.json`."""
    return msgspec.json.encode(summary, enc_hook=list)


_DECODER = msgspec.json.Decoder(RankSummary)


@collector_off()
def written(paths: Sequence[Place]) -> dict[Place, RankSummary | None]:
    """Return the stored summary of each capture, by the capture's path or URL.

    None stands for a summary that is missing, or that this version cannot read.

    Raises:
        CaptureError: a summary at a URL cannot be fetched.
    """
    urls = {path: f"{path.rstrip('/')}/{SUMMARY_FILE}" for path in paths if storage.is_url(path)}
    fetched = storage.contents([*urls.values()], _decoded, MOST_BYTES) if urls else {}
    return {
        path: fetched.get(urls[path]) if path in urls else _stored(Path(path)) for path in paths
    }


def _stored(folder: Path) -> RankSummary | None:
    try:
        return _decoded(files.read_bytes(folder / SUMMARY_FILE, MOST_BYTES))
    except OSError:
        return None


def _decoded(text: bytes) -> RankSummary | None:
    try:
        found = _DECODER.decode(text)
    except BAD_JSON:
        return None
    return found if is_sound(found) else None


def is_sound(found: RankSummary) -> bool:
    """Whether a summary of this version can be compared: complete rows, and valid indices."""
    if found.version != VERSION:
        return False
    try:
        unix_time(found.started_at)
    except ValueError:
        return False
    group, *times = (found.collectives.get(name) for name in ("group", "start_ns", "end_ns"))
    count = max((len(column or ()) for column in found.collective_groups.values()), default=0)
    whole = [*found.steps.values(), found.ranges.get("path"), group, *times]
    grouped = [each is None for each in (group, *times)]
    return (
        all(isinstance(column, array) or None not in (column or ()) for column in whole)
        and (found.ranges.get("path") is not None or not any(found.ranges.values()))
        and (not any(grouped) or not any(found.collectives.values()))
        and {*(group or ())} <= {*range(count)}
        and found.breakdown.keys() <= set(names_of(BREAKDOWN))
        and all(map(_is_table, (found.ranges, found.steps, found.collective_groups)))
        and len({len(column) for column in found.collectives.values() if column is not None}) < 2
    )


def _is_table(columns: Columns) -> bool:
    """Whether all columns are equally long, and each holds only text or only numbers."""
    lengths = {len(column) for column in columns.values() if column is not None}
    return len(lengths) < 2 and all(
        not column
        or (isinstance(column, array) and name not in TEXTS)
        or {*map(type, column)} <= {str if name in TEXTS else int, type(None)}
        for name, column in columns.items()
    )


def without_trace(capture: Views) -> RankSummary | None:
    """The stored summary of a rank of several whose capture holds no trace; None for others."""
    is_known = capture.trace_path is not None or "events" in vars(capture)
    found = None if is_known or capture.folder is None else _stored(capture.folder)
    return found if found is not None and (found.world_size or 1) > 1 else None


def read_all(paths: Sequence[Place], *, keep_copies: bool = True) -> dict[Place, RankSummary | str]:
    """The summary of each capture or trace, or a sentence that says why it has none.

    Captures without a summary are read by one thread for each CPU of this process. A trace
    at a URL is downloaded; with `keep_copies`, the copy stays until this process ends.
    """
    cpus = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
    stored = written(paths)
    missing = [path for path, summary in stored.items() if summary is None]
    with warnings.catch_warnings(), ThreadPoolExecutor(len(cpus)) as pool:
        warnings.simplefilter("ignore", TraceWarning)  # the summary says it
        read = partial(summarize_at, keep_copy=keep_copies)
        made = dict(zip(missing, pool.map(read, missing)))
    return {path: summary or made[path] for path, summary in stored.items()}


def summarize_at(path: Place, *, keep_copy: bool = False) -> RankSummary | str:
    """Make the summary of a capture or trace; a sentence if it cannot be read."""
    try:
        return summarize(Views.load(path))
    except InstrumentError as error:
        return str(error)
    finally:
        if storage.is_url(path) and not keep_copy:
            storage.release(path)
