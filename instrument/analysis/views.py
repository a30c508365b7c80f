"""`Views`: a capture's metadata, its events, and the tables on them, each made once."""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

from instrument import files, storage
from instrument.analysis.breakdown import (
    BREAKDOWN,
    COMMUNICATION_NAMES,
    Work,
    check_names,
    device_work,
)
from instrument.analysis.breakdown import breakdown as _breakdown
from instrument.analysis.kernels import COPIES, KERNELS, LAUNCHES, STREAMS
from instrument.analysis.kernels import copies as _copies
from instrument.analysis.kernels import kernels as _kernels
from instrument.analysis.kernels import launches as _launches
from instrument.analysis.kernels import streams as _streams
from instrument.analysis.memory_categories import MEMORY_CATEGORIES, Categories
from instrument.analysis.memory_categories import read as _categories
from instrument.analysis.memory_categories import table as _memory_categories
from instrument.analysis.memory_timeline import (
    LIVE,
    MEMORY_DEVICES,
    MEMORY_EVENTS,
    MEMORY_STEPS,
    SIZES,
    MemoryView,
)
from instrument.analysis.operators import OPERATORS, OPS_WITHOUT_FLOPS, OperatorTable
from instrument.analysis.operators import operators as _operators
from instrument.analysis.ranges import ATTRIBUTION, RANGES, REST, RangeTable
from instrument.analysis.ranges import ranges as _ranges
from instrument.analysis.stacks import Stack
from instrument.analysis.stacks import stacks as _stacks
from instrument.analysis.steps import MOMENTS, STEPS
from instrument.analysis.steps import moments as _moments
from instrument.analysis.steps import steps as _steps
from instrument.analysis.table import Schema, Table, schema
from instrument.analysis.tensorboard_overview import DEVICES, OVERVIEW
from instrument.analysis.tensorboard_overview import devices as _devices
from instrument.analysis.tensorboard_overview import overview as _overview
from instrument.errors import CaptureError
from instrument.links.links import Links
from instrument.patterns import Pattern
from instrument.printable import printable
from instrument.range_names import REGION
from instrument.trace import capture_json, column_cache
from instrument.trace.events import Events

METADATA_FILE = capture_json.METADATA_FILE
TRACE_FILES = ("trace.json.gz", "trace.json")
# Says where a capture was sent, and is of no use there.
NOTE_FILE = "upload.json"
# Files are named after a capture, with more before and behind.
_LONGEST_NAME = 128


COMPILED_RANGES: Schema = schema(
    name="the range, which was called and cannot be timed",
    region="the compiled region that holds it, as torch names it",
)
#: The columns of each view that is a table, by its name; dots lead further in.
SCHEMAS: dict[str, Schema] = {
    "operators": OPERATORS,
    "operators.ops_without_flops": OPS_WITHOUT_FLOPS,
    "ranges": RANGES,
    "ranges.attribution": ATTRIBUTION,
    "ranges.rest": REST,
    "steps": STEPS,
    "moments": MOMENTS,
    "breakdown": BREAKDOWN,
    "kernels": KERNELS,
    "copies": COPIES,
    "launches": LAUNCHES,
    "streams": STREAMS,
    "overview": OVERVIEW,
    "devices": DEVICES,
    "memory.devices": MEMORY_DEVICES,
    "memory.steps": MEMORY_STEPS,
    "memory.sizes": SIZES,
    "memory.events": MEMORY_EVENTS,
    "memory.live()": LIVE,
    "memory_categories": MEMORY_CATEGORIES,
    "compiled_ranges": COMPILED_RANGES,
}


class Views:
    """One recorded window on one rank, or a bare trace file: its metadata and the views on its events.

    The trace is read at the first view and kept; a view is computed once. `folder` is None for a bare trace.
    `metadata` is the content of `capture.json`, and `about` the part of it that the views use, typed. Users meet this
    as `Capture`, which adds what is made of the views.
    """

    def __init__(
        self,
        trace_path: Path | None,
        folder: Path | None,
        metadata: dict[str, Any],
        communication: str = COMMUNICATION_NAMES,
    ) -> None:
        self.trace_path = trace_path
        self.folder = folder
        self.metadata = metadata
        self.communication = communication
        self._added: Pattern | None = None  # more of it, by patterns of the capture's own

    @classmethod
    def load(cls, path: str | PathLike[str], *, communication: str | None = None) -> Self:
        """Open a capture folder, or any Chrome/Kineto trace file; the events are read when a view asks for them.

        One at a URL, `s3://bucket/run/NAME`, is fetched at once; see `instrument.storage`.

        `communication` is a regular expression for the names of the kernels that count as communication. None: those of
        `instrument.analysis.breakdown.COMMUNICATION_NAMES`, and what `profiler.communication` added in the recording,
        as far as `instrument.patterns` understands it.

        Raises:
            CaptureError: the path does not exist, or it is a folder without a readable capture.json; what is at a URL
                cannot be fetched.
            ConfigError: `communication` is no regular expression, or the URL's protocol is unknown.
            MissingPackage: a package for the URL's protocol is not installed.
        """
        path = storage.fetch(path) if storage.is_url(path) else Path(path)
        if communication is not None:
            check_names(communication)
        kind = kind_of(path)
        if kind == "folder":
            traces, about = (path / name for name in TRACE_FILES), capture_json.read(path)
            capture = cls(
                next((trace for trace in traces if files.is_regular(trace)), None), path, about
            )
            if communication is None:
                capture._added = _added_names(path, about)
            else:
                capture.communication = communication
            return capture
        if kind is None:
            raise CaptureError(
                f"There is no capture at {path}; give a capture folder or a trace file."
            )
        if not path.is_file():  # a pipe that nobody writes into would be waited for
            raise CaptureError(f"{path} is no regular file: give a capture folder or a trace file.")
        return cls(path, None, {}, COMMUNICATION_NAMES if communication is None else communication)

    @property
    def about(self) -> capture_json.Metadata:
        """The metadata that the views use, in the types of `instrument.trace.capture_json.Metadata`.

        Raises:
            CaptureError: what was put into `metadata` is of another type.
        """
        return capture_json.typed(self.metadata)

    @property
    def name(self) -> str:
        """The capture's name: as recorded, or that of its folder or file; never a path, as files are named after it."""
        if self.folder is None:
            return (
                self.trace_path.name.removesuffix(".gz").removesuffix(".json")
                if self.trace_path
                else ""
            )
        recorded = Path(self.about.name or "").name
        is_plain = (
            recorded.isprintable() and len(recorded.encode("utf-8", "replace")) <= _LONGEST_NAME
        )
        return recorded if is_plain and recorded not in ("", "..") else self.folder.name

    @property
    def place(self) -> Path | None:
        """Where the capture lies, or will lie once its sinks have run; of a bare trace the file."""
        if (
            self.folder is not None
            and self.folder.name.startswith(".")
            and self.folder.name != ".."
        ):
            return self.folder.with_name(self.name)
        return self.folder or self.trace_path

    @cached_property
    def events(self) -> Events:
        """Every event with a duration, and memory, as columns.

        Raises:
            CaptureError: the folder holds no trace.
            TraceError: the trace file cannot be read.
        """
        if self.trace_path is None:
            raise CaptureError(
                f"The capture {self.folder} holds no trace, as after chrome_trace.keep=false; record it with keep=true."
            )
        place = self.place if self.folder else None
        return column_cache.read(self.trace_path, place and place / self.trace_path.name)

    @cached_property
    def links(self) -> Links:
        """The CPU's side as one nesting, which several views stand on; see `instrument.links.links`."""
        return Links(self.events)

    @cached_property
    def operators(self) -> OperatorTable:
        """The operator table, as torch's `key_averages()`; see `instrument.analysis.operators`."""
        return _operators(self.links)

    @cached_property
    def ranges(self) -> RangeTable:
        """The range tree of the annotations, and the whole in parts; see `instrument.analysis.ranges.RangeTable`."""
        return _ranges(self.links, self.about.module_types)

    @cached_property
    def work(self) -> Work:
        """What ran on the devices, with its kind and launch; see `instrument.analysis.breakdown`."""
        return device_work(self.events, self.communication, self._added)

    @cached_property
    def breakdown(self) -> Table:
        """One row: the device's time by what it did; see `instrument.analysis.breakdown`."""
        return _breakdown(self.work)

    @cached_property
    def steps(self) -> Table:
        """The finished steps and what the device did for each; see `instrument.analysis.steps`."""
        return _steps(self.events, self.work)

    @cached_property
    def moments(self) -> Table:
        """The moments marked with `instrument.mark`; see `instrument.analysis.steps.moments`."""
        return _moments(self.events)

    @cached_property
    def kernels(self) -> Table:
        """The kernels by name, with what launching them cost; see `analysis.kernels`."""
        return _kernels(self.events, self.work)

    @cached_property
    def copies(self) -> Table:
        """The copies and memsets by kind, with their bandwidth; see `analysis.kernels`."""
        return _copies(self.events, self.work)

    @cached_property
    def launches(self) -> Table:
        """The CPU calls that launched device work, and how long it took to start; see `analysis.kernels`."""
        return _launches(self.events, self.work)

    @cached_property
    def streams(self) -> Table:
        """What ran on each stream of each device; see `analysis.kernels`."""
        return _streams(self.events, self.work)

    @cached_property
    def overview(self) -> Table:
        """The steps as TensorBoard's plugin breaks them down; see `analysis.tensorboard_overview`."""
        return _overview(self.events, self.work)

    @cached_property
    def devices(self) -> Table:
        """How well each device was used, by utilization and occupancy; see `analysis.tensorboard_overview`."""
        return _devices(self.events, self.work)

    @cached_property
    def memory(self) -> MemoryView:
        """What lived in memory over time, by device; see `instrument.analysis.memory_timeline`."""
        return MemoryView(self.links)

    @cached_property
    def categories(self) -> list[Categories]:
        """What lived in memory over time by torch's categories, by device; see `analysis.memory_categories`."""
        return [] if self.folder is None else _categories(self.folder, self.events.base_ns)

    @cached_property
    def memory_categories(self) -> Table:
        """What each of torch's categories of memory held, by device; see `analysis.memory_categories`."""
        return _memory_categories(self.categories)

    @cached_property
    def compiled_ranges(self) -> Table:
        """The ranges that torch.compile traced into a region that ran in this window; see `COMPILED_RANGES`.

        They were called, and their time is part of the region's; the compiled code does not know where they stood.
        """
        ran = {name.removeprefix(REGION) for name in self.events.names if name.startswith(REGION)}
        here = [entry for entry in self.about.compiled_ranges if entry.region in ran]
        cells = {
            "name": [entry.range for entry in here],
            "region": [entry.region for entry in here],
        }
        return Table.of(COMPILED_RANGES, cells)

    def stacks(
        self,
        metric: Literal["cpu", "device"] = "cpu",
        *,
        range: str | None = None,
        threads: bool = False,
    ) -> list[Stack]:
        """Call paths with the time that belongs to the last frame of each; see `instrument.analysis.stacks`.

        Raises:
            CaptureError: the trace holds no Python frames, no such range, or, for `device`, nothing that ran there.
        """
        return _stacks(self.events, metric, range=range, threads=threads)

    def __repr__(self) -> str:
        where = self.folder or self.trace_path
        return printable(f"<{type(self).__name__} {self.name!r} at {where}>")


def kind_of(path: Path) -> Literal["folder", "file"] | None:
    """What there is at a path that the user has named, which may be a link; None: nothing.

    Raises:
        CaptureError: it cannot be looked at.
    """
    try:
        return "folder" if path.is_dir() else "file" if path.exists() else None
    except OSError as error:  # such as a name that is too long
        raise CaptureError(f"{path} cannot be read: {error.strerror}.") from None


def files_of(folder: Path) -> list[str]:
    """What of a capture's folder others get, capture.json last: whoever finds it there finds the rest too.

    Without hidden files, links, the columns that older versions kept beside its trace, and the note of where it was
    sent.
    """
    kept = {NOTE_FILE, *(f"{name}.columns" for name in TRACE_FILES)}
    inner = (file.relative_to(folder) for file in files.regular_files(folder))
    found = [
        each.as_posix() for each in inner if not any(part.startswith(".") for part in each.parts)
    ]
    return sorted(
        (file for file in found if file not in kept), key=lambda file: (file == METADATA_FILE, file)
    )


def _added_names(folder: Path, about: dict[str, Any]) -> Pattern | None:
    """What the recording's config added to the names that count as communication."""
    if not (added := capture_json.typed(about).config.communication):
        return None
    try:
        return Pattern(added)
    except ValueError as error:
        raise CaptureError(
            f"The file {folder / METADATA_FILE} has {added!r} for config.communication, which cannot be used "
            f"({error}): mend it there, or give Capture.load its communication."
        ) from None
