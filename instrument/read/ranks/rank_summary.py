"""The summary of a capture: a small file with the data that is needed to compare ranks.

A thousand summaries are read in seconds, without their traces.
"""

from __future__ import annotations

import os
import struct
import sys
import warnings
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import polars as pl

from instrument.base import files, storage
from instrument.base.errors import InstrumentError, TraceWarning
from instrument.read.facts.groupby import intern
from instrument.read.trace.capture_json import BAD_JSON, Number, Rank, WorldSize, unix_time
from instrument.read.trace.columns import BEYOND_NS
from instrument.read.trace.events import Ints
from instrument.read.trace.reader import collector_off
from instrument.read.views.collectives import OF_GROUP, SYNCHRONISING, cpu_waits
from instrument.read.views.find_captures import Place
from instrument.read.views.ranges import DIRECT, work
from instrument.read.views.table import known_sum
from instrument.read.views.views import Views

SUMMARY_FILE = "summary.json"
# A summary keeps the 500 ranges with the most CPU time, and 512 collectives. So a file has some
# tens of kilobytes. The early collectives are for the drift of the clock.
_MOST_RANGES, _MOST_COLLECTIVES, _EARLY_COLLECTIVES = 500, 512, 128
#: The limit for a `summary.json`; a larger file is not read.
MOST_BYTES = 16 << 20
UNKNOWN = -1

# A number whose sum with another one fits into 64 bits.
_Int = Annotated[int, msgspec.Meta(gt=-BEYOND_NS, lt=BEYOND_NS)]
if TYPE_CHECKING:  # msgspec checks the lists, and `__post_init__` converts them
    Numbers: TypeAlias = Sequence[int | None]
    KnownNumbers: TypeAlias = Sequence[int]
    Kinds: TypeAlias = list[str | None]
else:
    Numbers, KnownNumbers, Kinds = list[_Int | None], list[_Int], list[Literal[SYNCHRONISING]]
Texts: TypeAlias = list[str | None]


class _Columns(msgspec.Struct, kw_only=True):
    """Columns of one length: lists of texts, and arrays of integers, in which -1 is unknown.

    A column that is left out is unknown in all rows.
    """

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in self.__struct_fields__}
        size = max(map(len, columns.values()))
        for name, column in columns.items():
            if len(column) not in (0, size):
                raise ValueError(f"the column {name} has another length than others")
            if name in _TEXTS:
                setattr(self, name, _texts(tuple(column or [None] * size)))
            elif not isinstance(column, array):
                setattr(self, name, _packed(column or [UNKNOWN] * size))

    def __len__(self) -> int:
        return len(getattr(self, self.__struct_fields__[0]))


class Ranges(_Columns):
    """The ranges, with times per counted step; if no step is finished, of the whole recording."""

    path: Texts = []
    calls: Numbers = []
    cpu_ns: Numbers = []
    device_ns: Numbers = []
    self_cpu_ns: Numbers = []
    self_device_ns: Numbers = []


class Steps(_Columns):
    """The finished steps, with the time of each kind of device work in the step.

    Without device events, communication is the time of collectives on the CPU (gloo).
    """

    number: Numbers = []
    duration_ns: KnownNumbers = []
    compute_ns: Numbers = []
    communication_ns: Numbers = []
    exposed_communication_ns: Numbers = []
    exposed_copy_ns: Numbers = []
    idle_ns: Numbers = []


class Collectives(_Columns):
    """The collectives that end at the same moment on all ranks, in Unix time minus `base_ns`.

    Of more than 512, the first 128 after the first step, and the last ones. `group` is the index of
    a row of `CollectiveGroups`.
    """

    group: KnownNumbers = []
    step: Numbers = []
    ordinal: Numbers = []
    number: Numbers = []
    start_ns: KnownNumbers = []
    end_ns: KnownNumbers = []
    bytes: Numbers = []


class CollectiveGroups(_Columns):
    """The names, process groups and kinds of collectives, with columns of `collective_calls`."""

    name: Texts = []
    kind: Kinds = []
    process_group: Texts = []
    description: Texts = []
    ranks: Texts = []
    group_size: Numbers = []
    runs_on: Texts = []


_TEXTS = {"path", "name", *OF_GROUP} - {"group_size"}


def _packed(column: Sequence[int | None]) -> array[int]:
    try:
        return array("q", struct.pack(f"{len(column)}q", *column))  # in half the time of array()
    except struct.error:
        return array("q", [UNKNOWN if cell is None else cell for cell in column])


@lru_cache(1024)
def _texts(cells: tuple[str | None, ...]) -> Texts:
    """The same list for equal cells: the texts are the same on most ranks."""
    return [None if cell is None else sys.intern(cell) for cell in cells]


class RankSummary(msgspec.Struct, kw_only=True):
    """The summary of one capture: the content of `summary.json`.

    - `truncated`: the window ended before its last planned step; `cut_short`: the trace file is.
    - `ranks` is the option `profiler.ranks`: the ranks that should have recorded.
    """

    version: Literal[5] = 5
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
    base_ns: _Int = 0
    ranges_left_out: int = 0
    ranges: Ranges = msgspec.field(default_factory=Ranges)
    steps: Steps = msgspec.field(default_factory=Steps)
    collectives: Collectives = msgspec.field(default_factory=Collectives)
    collective_groups: CollectiveGroups = msgspec.field(default_factory=CollectiveGroups)

    def __post_init__(self) -> None:
        unix_time(self.started_at)
        if not {*self.collectives.group} <= {*range(len(self.collective_groups))}:
            raise ValueError("a collective is in a group that is not in the summary")


def summarize(capture: Views) -> RankSummary:
    """Make the summary of a capture.

    Raises:
        CaptureError, TraceError: the capture holds no trace, or it cannot be read.
    """
    about, events = capture.about, capture.events
    window, numbers = about.window, capture.steps.column("number")
    ranges = _ranges(capture)
    collectives, collective_groups = _collectives(capture)
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
        ranges=ranges,
        steps=_steps(capture),
        collectives=collectives,
        collective_groups=collective_groups,
    )


def _ranges(capture: Views) -> Ranges:
    steps = capture.links.counted_steps.count if len(capture.links.steps) else 0
    scope = "_per_step" if steps else ""
    is_direct = pl.col("kind").is_in(DIRECT)
    own = (
        work(capture)
        .group_by(row="around")
        .agg(
            self_cpu_ns=pl.sum("counted_cpu_ns") // max(steps, 1),
            self_device_ns=known_sum(pl.col("counted_device_ns"), is_direct) // max(steps, 1),
        )
    )
    frame = capture.ranges.frame.select(
        "path",
        "calls",
        pl.col(f"cpu_ns{scope}").alias("cpu_ns"),
        pl.col(f"device_ns{scope}").alias("device_ns"),
        row=pl.int_range(pl.len()),
        most=pl.col("cpu_ns").rank("ordinal", descending=True),
    )
    kept = frame.filter(pl.col("most") <= _MOST_RANGES).drop("most")
    kept = kept.join(own, on="row", how="left", maintain_order="left").drop("row")
    return Ranges(**kept.to_dict(as_series=False))


def _steps(capture: Views) -> Steps:
    steps, columns = capture.steps, Steps.__struct_fields__
    times = {name: steps.column(name) for name in columns[:2]}
    if len(capture.work.event):
        return Steps(**times, **{name: steps.column(f"clipped_{name}") for name in columns[2:]})
    return Steps(**times, **cpu_waits(capture.links))


def _collectives(capture: Views) -> tuple[Collectives, CollectiveGroups]:
    is_joint = pl.col("kind").is_in(SYNCHRONISING) & pl.col("end_ns").is_not_null()
    every = capture.collective_calls.frame.filter(is_joint)
    step, count = every["step"].to_list(), len(every)
    older = range(max(count - _MOST_COLLECTIVES, 0))
    early = [k for k in older if step[k] != step[0]][:_EARLY_COLLECTIVES]
    kept = every[[*early, *range(len(older) + len(early), count)]]
    names = CollectiveGroups.__struct_fields__
    group, groups = intern(kept.select(names).iter_rows())
    rows = kept.select(Collectives.__struct_fields__[1:]).to_dict(as_series=False)
    return (
        Collectives(group=group.tolist(), **rows),
        CollectiveGroups(**{name: [each[k] for each in groups] for k, name in enumerate(names)}),
    )


def column_of_all(ranks: Iterable[_Columns], name: str) -> Ints:
    """The column `name` of all ranks, one rank after the other; unknown values are -1."""
    return np.frombuffer(bytearray().join(getattr(each, name) for each in ranks), np.int64)


def write(capture: Views, folder: Path) -> None:
    """Write a capture's summary into a folder. After an error, no incomplete file is left.

    Raises:
        CaptureError, TraceError: as for `summarize`.
        OSError: the file cannot be written.
    """
    files.write(folder / SUMMARY_FILE, encoded(summarize(capture)))


def encoded(summary: Any) -> bytes:
    """The content of `summary.json`, or of a line of a shard."""
    return msgspec.json.encode(summary, enc_hook=_cells)


def _cells(column: array[int]) -> list[int | None]:
    cells = [None if cell == UNKNOWN else cell for cell in column]
    return cells if any(cell is not None for cell in cells) else []


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
    with suppress(OSError):
        return _decoded(files.read_bytes(folder / SUMMARY_FILE, MOST_BYTES))
    return None


def _decoded(text: bytes) -> RankSummary | None:
    with suppress(*BAD_JSON):
        return _DECODER.decode(text)
    return None


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
        read = partial(_summarize_at, keep_copy=keep_copies)
        made = dict(zip(missing, pool.map(read, missing)))
    return {path: summary or made[path] for path, summary in stored.items()}


def _summarize_at(path: Place, *, keep_copy: bool) -> RankSummary | str:
    try:
        return summarize(Views.load(path))
    except InstrumentError as error:
        return str(error)
    finally:
        if storage.is_url(path) and not keep_copy:
            storage.release(path)
