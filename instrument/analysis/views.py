"""`Views`: a capture's metadata, its events, and the tables made from them.

`VIEWS` lists the tables. A function that makes a table is imported when the table is first used. So
`instrument show --help` can read the list without numpy.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from instrument import files
from instrument.analysis import coverage_rows
from instrument.analysis.table import Schema, Table, schema
from instrument.errors import CaptureError, ConfigError, TraceWarning
from instrument.globs import check_globs
from instrument.peak_flops import check_peak_flops
from instrument.printable import printable
from instrument.range_names import REGION, whole

if TYPE_CHECKING:
    from typing import Self

    from instrument.analysis.breakdown import Work
    from instrument.analysis.coverage import Part
    from instrument.analysis.cuda_graphs import CudaGraphTable
    from instrument.analysis.efficiency import EfficiencyTable
    from instrument.analysis.launch_queue import QueueTable
    from instrument.analysis.memory_categories import Categories
    from instrument.analysis.memory_timeline import MemoryView
    from instrument.analysis.operators import OperatorTable
    from instrument.analysis.peak_rates import PeakFlops
    from instrument.analysis.ranges import RangeTable
    from instrument.analysis.stacks import Stack
    from instrument.links.links import Links
    from instrument.trace.capture_json import Metadata
    from instrument.trace.events import Events

# The longest name of a capture in bytes. Names of files consist of a prefix, this name and a
# suffix, so the limit leaves room for both.
_LONGEST_NAME = 128

#: The phase of a capture that names none.
TRAIN = "train"
# A rank in the name of a capture or trace.
_RANK = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)

# The properties by which `OperatorTable.by` can group, together with the name.
Grouping = Literal[
    "input_shapes", "input_types", "stack", "overload", "thread", "step", "device", "range"
]

COMPILED_RANGES: Schema = schema(
    name="the name of the range, which was called but cannot be timed",
    region="the compiled region that contains the range, as torch names the region",
)


class View(NamedTuple):
    """A table of a capture, and the option of `instrument show` that prints it.

    Attributes:
        columns: where the schema of the table is: "module:NAME" in `instrument.analysis`.
        option: the option, without dashes; empty if the table has no option.
        help: the help text of the option.
        coverage: the names of the rows of `capture.coverage` (the table of what is missing from
            the capture) that matter to this table.
    """

    columns: str
    option: str = ""
    help: str = ""
    coverage: tuple[str, ...] = ()

    @property
    def schema(self) -> Schema:
        """The schema of the table. This property imports the module that makes the table."""
        module, name = self.columns.split(":")
        found: Schema = getattr(import_module(f"instrument.analysis.{module}"), name)
        return found


#: The tables of a capture, by the attribute of `Capture` that holds the table, such as
#: "memory.steps".
VIEWS = {
    "ranges": View(
        "ranges:RANGES",
        "ranges",
        "the range tree: time on CPU and device, forward and backward",
        coverage=coverage_rows.RANGES,
    ),
    "ranges.attribution": View(
        "ranges:ATTRIBUTION",
        coverage=coverage_rows.PARTS,
    ),
    "ranges.rest": View(
        "ranges:REST",
        coverage=coverage_rows.PARTS,
    ),
    "operators": View(
        "operators:OPERATORS",
        "ops",
        "the operators, grouped by name or --by",
        coverage=coverage_rows.CALLS,
    ),
    "operators.ops_without_flops": View(
        "operators:OPS_WITHOUT_FLOPS",
        coverage=coverage_rows.CALLS,
    ),
    "kernels": View(
        "kernels:KERNELS",
        "kernels",
        "the device's kernels by name, with the CPU time of their launches",
        coverage=coverage_rows.LAUNCHING,
    ),
    "steps": View(
        "steps:STEPS",
        "steps",
        "each step, its device work, and the causes of the device's idle time",
        coverage=coverage_rows.STEPS,
    ),
    "moments": View(
        "steps:MOMENTS",
        "moments",
        "the moments that were marked with instrument.mark",
        coverage=coverage_rows.FILE,
    ),
    "interruptions": View(
        "interruptions:INTERRUPTIONS",
        "interruptions",
        "what interrupted training: loader, garbage collection, compilation, allocation",
        coverage=coverage_rows.INTERRUPTIONS,
    ),
    "memory.devices": View(
        "memory_timeline:MEMORY_DEVICES",
        "memory",
        "the memory allocated and freed on each device, and its peak",
        coverage=coverage_rows.MEMORY,
    ),
    "memory.steps": View(
        "memory_timeline:MEMORY_STEPS",
        coverage=coverage_rows.MEMORY,
    ),
    "memory.sizes": View(
        "memory_timeline:SIZES",
        coverage=coverage_rows.MEMORY,
    ),
    "memory.events": View(
        "memory_timeline:MEMORY_EVENTS",
        coverage=coverage_rows.OWNERS,
    ),
    "memory.live()": View(
        "memory_timeline:LIVE",
        coverage=coverage_rows.OWNERS,
    ),
    "memory_categories": View(
        "memory_categories:MEMORY_CATEGORIES",
        "memory-categories",
        "memory by torch's categories, if profiler.memory_categories was on",
        coverage=coverage_rows.FILE,
    ),
    "breakdown": View(
        "breakdown:BREAKDOWN",
        "breakdown",
        "the device's time: compute, communication, copies, idle",
        coverage=coverage_rows.DEVICE,
    ),
    "copies": View(
        "kernels:COPIES",
        "copies",
        "copies and memsets, with their bandwidth",
        coverage=coverage_rows.LAUNCHING,
    ),
    "efficiency": View(
        "efficiency:EFFICIENCY",
        "efficiency",
        "FLOP/s and bandwidth of matrix products, convolutions and attention, and the device's "
        "peak",
        coverage=coverage_rows.LAUNCHERS,
    ),
    "efficiency.steps": View(
        "efficiency:EFFICIENCY_STEPS",
        "efficiency-steps",
        "the model FLOPs utilization (MFU) of each step",
        coverage=coverage_rows.LAUNCHERS_IN_STEPS,
    ),
    "collectives": View(
        "collectives:COLLECTIVES",
        "collectives",
        "the collectives by process group and kind: sizes, exposed time, bus bandwidth",
        coverage=coverage_rows.LAUNCHING,
    ),
    "collective_calls": View(
        "collectives:COLLECTIVE_CALLS",
        "collective-calls",
        "each collective, in order of its end",
        coverage=coverage_rows.LAUNCHING,
    ),
    "launches": View(
        "launches:LAUNCHES",
        "launches",
        "the CPU calls that launch device work, and the delay until the work starts",
        coverage=coverage_rows.ORDERED,
    ),
    "streams": View(
        "kernels:STREAMS",
        "streams",
        "what ran on each stream of each device",
        coverage=coverage_rows.DEVICE,
    ),
    "cuda_graphs": View(
        "cuda_graphs:CUDA_GRAPHS",
        "cuda-graphs",
        "the CUDA and HIP graphs: replays, device time, idle time, and what launched them",
        coverage=coverage_rows.LAUNCHING,
    ),
    "cuda_graphs.nodes": View(
        "cuda_graphs:CUDA_GRAPH_NODES",
        "cuda-graph-nodes",
        "the nodes of the graphs, with the names that torch's tool gave to them",
        coverage=coverage_rows.LAUNCHING,
    ),
    "queue": View(
        "launch_queue:QUEUE",
        "queue",
        "for each stream, how many launches waited until the device started their work, and how "
        "many calls a full queue blocked",
        coverage=coverage_rows.ORDERED,
    ),
    "queue.series()": View("launch_queue:QUEUE_SERIES", coverage=coverage_rows.ORDERED),
    "synchronisations": View(
        "synchronisations:SYNCHRONISATIONS",
        "synchronisations",
        "the calls that wait for device work, where they are, and what they wait for",
        coverage=coverage_rows.ORDERED,
    ),
    "devices": View(
        "devices:DEVICES",
        "devices",
        "how well each device was used",
        coverage=coverage_rows.DEVICE,
    ),
    "compiled_ranges": View(
        "views:COMPILED_RANGES",
        "compiled-ranges",
        "the ranges inside compiled regions, which cannot be timed",
        coverage=coverage_rows.COMPILED,
    ),
    "coverage": View(
        "coverage:COVERAGE",
        "coverage",
        "how complete the capture is: the recorded fractions of time, launches and memory",
    ),
}


def rows_of(views: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the rows of `capture.coverage` that matter to the given views.

    `capture.coverage` is the table of what is missing from the capture.

    A report with both "ranges" and "operators" describes the whole capture. So if `views` has both,
    the result has the rows for all views.
    """
    if {"ranges", "operators"}.issubset(views):
        return coverage_rows.TABLES
    chosen = {name for view in views if view in VIEWS for name in VIEWS[view].coverage}
    return tuple(name for name in coverage_rows.EVERY if name in chosen)


class Views:
    """One recorded window on one rank, or a trace file: its metadata and the tables of its events.

    The trace is read when a view first needs its events. Each view is computed once. Users get the
    subclass `Capture`.

    Attributes:
        trace_path: the trace file; None if the capture holds no trace.
        folder: the capture's folder; None for a trace file alone.
        metadata: the content of `capture.json`; empty for a trace file alone.
        communication: the argument `communication` of `load`: globs for the names of communication
            kernels, or None.
        peak_flops: the argument `peak_flops` of `load`: the peak FLOP/s of the devices, or None.
    """

    def __init__(
        self,
        trace_path: Path | None,
        folder: Path | None,
        metadata: dict[str, Any],
        communication: Sequence[str] | None = None,
        peak_flops: PeakFlops | None = None,
    ) -> None:
        self.trace_path = trace_path
        self.folder = folder
        self.metadata = metadata
        self.communication = communication
        self.peak_flops = peak_flops
        #: The URL that `trace_path` or `folder` is a copy of; None for a local capture.
        self.url: str | None = None
        #: The rows of `coverage` that were already computed; see `analysis.coverage.part`.
        self.coverage_parts: dict[str, Part | None] = {}

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        communication: Sequence[str] | None = None,
        peak_flops: PeakFlops | None = None,
    ) -> Self:
        """Open a capture folder or a trace file.

        The events of the trace are read later, when a view first needs them.

        Args:
            path: the folder or file, or a URL such as `s3://bucket/run/NAME`. A URL is downloaded
                at once; see `instrument.storage`. The copy is removed when this process ends.
            communication: globs, such as `["*nccl*", "*rccl*"]`. Kernels whose names match one of
                them are communication; case is ignored. None means
                `instrument.analysis.breakdown.COMMUNICATION_NAMES` and the globs of
                `profiler.communication` when the capture was recorded.
            peak_flops: the peak FLOP/s of the devices, for `efficiency`: a number, or a mapping
                from precisions to numbers, such as `{"bfloat16": 989e12}`. For other precisions,
                the peaks are those of `instrument.analysis.peak_rates`. None means
                `profiler.peak_flops` of the recording.

        Raises:
            CaptureError: nothing is at the path, the folder has no readable capture.json, or the
                URL cannot be fetched.
            ConfigError: `communication` is not a list of globs, `peak_flops` cannot be used,
                or the URL's protocol is unknown.
            MissingPackage: a package for the URL's protocol is not installed.
        """
        from instrument import storage
        from instrument.analysis.find_captures import kind_of
        from instrument.trace import capture_json

        url = path if storage.is_url(path) else None
        path = Path(path) if url is None else storage.fetch(url)
        if communication is not None:
            check_globs(communication, "communication")
        peak_flops = check_peak_flops(peak_flops, "peak_flops")
        kind = kind_of(path)
        if kind == "folder":
            about = capture_json.read(path)
            traces = (path / name for name in capture_json.TRACE_FILES)
            trace = next((file for file in traces if files.is_regular(file)), None)
            capture = cls(trace, path, about, communication, peak_flops)
            capture.url = url
            return capture
        if not path.is_file():  # reading a named pipe without a writer would block
            raise CaptureError(
                f"{path} is not a regular file: give a capture folder or a trace file."
            )
        capture = cls(path, None, {}, communication, peak_flops)
        capture.url = url
        return capture

    @property
    def about(self) -> Metadata:
        """The fields of `metadata` that the views use, as attributes with checked types.

        Raises:
            CaptureError: a value in `metadata` has the wrong type.
        """
        from instrument.trace.capture_json import typed

        return typed(self.metadata)

    @property
    def name(self) -> str:
        """The recorded name of a capture, or else its folder's name.

        For a trace file alone, the file's name without `.json` or `.json.gz`.
        """
        if self.folder is None:
            file = whole(self.trace_path.name) if self.trace_path else ""
            return file.removesuffix(".gz").removesuffix(".json")
        recorded = Path(self.about.name or "").name
        is_plain = recorded.isprintable() and len(recorded.encode()) <= _LONGEST_NAME
        return recorded if is_plain and recorded not in ("", "..") else whole(self.folder.name)

    @property
    def phase(self) -> str:
        """The phase that the capture recorded, such as "validation"; "train" if not known."""
        return self.about.window.phase or TRAIN

    @property
    def rank(self) -> int | None:
        """The rank that recorded, from `capture.json`, the trace or the name; None if not known.

        Raises:
            CaptureError: the capture holds no trace.
            TraceError: the trace cannot be read.
        """
        recorded = self.about.rank
        rank = self.events.rank if recorded is None else recorded
        in_name = _RANK.search(self.name)
        return int(in_name[1]) if rank is None and in_name else rank

    @property
    def place(self) -> Path | str | None:
        """The URL of the capture, or its folder under its final name, or else the trace file.

        While sinks write the capture's files, the folder has a temporary name that begins with a
        dot.
        """
        if self.url is not None:
            return self.url
        if (
            self.folder is not None
            and self.folder.name.startswith(".")
            and self.folder.name != ".."
        ):
            return self.folder.with_name(self.name)
        return self.folder or self.trace_path

    @cached_property
    def events(self) -> Events:
        """Every event with a duration, and the allocations and frees, as columns.

        If the trace file is cut short, a `TraceWarning` says so, and `events.cut_short` is True.

        Raises:
            CaptureError: the folder holds no trace.
            TraceError: the trace file cannot be read.
        """
        from instrument.trace import reader

        trace = self.require_trace()
        events = reader.read(trace)
        if events.cut_short:
            warnings.warn(
                f"The trace file {printable(str(trace))} is cut short: only its first "
                f"{events.recorded} events could be read. Copy or record it again.",
                TraceWarning,
                stacklevel=1,  # shown once for each file, not once for each caller
            )
        return events

    def require_trace(self) -> Path:
        """Return `trace_path`.

        Raises:
            CaptureError: the folder holds no trace.
        """
        if self.trace_path is None:
            raise CaptureError(
                f"The capture {self.place} holds no trace: there is no trace.json.gz in it. "
                "Record again; if chrome_trace.keep=false was set, remove this option."
            )
        return self.trace_path

    @cached_property
    def links(self) -> Links:
        """The call tree of the CPU, and the device work of calls; see `instrument.links.links`."""
        from instrument.links.links import Links

        return Links(self.events)

    @cached_property
    def operators(self) -> OperatorTable:
        """The operator table, like torch's `key_averages()`; see `analysis.operators`."""
        from instrument.analysis.operators import operators

        return operators(self.links)

    @cached_property
    def ranges(self) -> RangeTable:
        """The range tree of the annotations; see `instrument.analysis.ranges.RangeTable`."""
        from instrument.analysis.ranges import ranges

        return ranges(self.links, self.about.module_types)

    @cached_property
    def work(self) -> Work:
        """The work of the devices, with its kind and launch; see `analysis.breakdown`."""
        from instrument.analysis.breakdown import COMMUNICATION_NAMES, device_work

        if self.communication is not None:
            return device_work(self.links, self.communication)
        return device_work(self.links, [*COMMUNICATION_NAMES, *self._recorded_globs()])

    @cached_property
    def breakdown(self) -> Table:
        """The device time of compute, communication and copies; see `analysis.breakdown`."""
        from instrument.analysis.breakdown import breakdown

        return breakdown(self.work)

    @cached_property
    def steps(self) -> Table:
        """The finished steps, and the device work of each; see `instrument.analysis.steps`."""
        from instrument.analysis.steps import steps

        return steps(self.events, self.work)

    @cached_property
    def moments(self) -> Table:
        """The moments marked with `instrument.mark`; see `instrument.analysis.steps.moments`."""
        from instrument.analysis.steps import moments

        return moments(self.events)

    @cached_property
    def interruptions(self) -> Table:
        """The loader and other interruptions of the training code; see `analysis.interruptions`."""
        from instrument.analysis.interruptions import interruptions

        return interruptions(self.events)

    @cached_property
    def kernels(self) -> Table:
        """The kernels by name, with the CPU time of their launches; see `analysis.kernels`."""
        from instrument.analysis.kernels import kernels

        return kernels(self.events, self.work)

    @cached_property
    def efficiency(self) -> EfficiencyTable:
        """The achieved FLOP/s of operators, and the device's peak; see `analysis.efficiency`.

        `efficiency.steps` has the model FLOPs utilization of each step.
        """
        from instrument.analysis.efficiency import efficiency

        given = self.peak_flops
        if given is None:
            given = self.about.config.peak_flops
        return efficiency(self.links, self.work, given)

    @cached_property
    def collectives(self) -> Table:
        """The collectives by process group and kind; see `instrument.analysis.collectives`."""
        from instrument.analysis.collectives import collectives

        return collectives(self.collective_calls)

    @cached_property
    def collective_calls(self) -> Table:
        """Each collective, in order of its end; see `instrument.analysis.collectives`."""
        from instrument.analysis.collectives import collective_calls

        return collective_calls(self.links, self.work)

    @cached_property
    def copies(self) -> Table:
        """The copies and memsets by kind, with their bandwidth; see `analysis.kernels`."""
        from instrument.analysis.kernels import copies

        return copies(self.events, self.work)

    @cached_property
    def launches(self) -> Table:
        """The CPU calls that launch device work, and how long the work waited to begin.

        See `analysis.launches`.
        """
        from instrument.analysis.launches import launches

        return launches(self.events, self.work)

    @cached_property
    def cuda_graphs(self) -> CudaGraphTable:
        """The CUDA graphs, and their nodes as `cuda_graphs.nodes`; see `analysis.cuda_graphs`."""
        from instrument.analysis.cuda_graphs import cuda_graphs

        return cuda_graphs(self.links, self.work)

    @cached_property
    def streams(self) -> Table:
        """The work of each stream of each device; see `analysis.kernels`."""
        from instrument.analysis.kernels import streams

        return streams(self.events, self.work)

    @cached_property
    def queue(self) -> QueueTable:
        """How much launched work waits to start on each stream; see `analysis.launch_queue`."""
        from instrument.analysis.launch_queue import launch_queue

        return launch_queue(self.events, self.work)

    @cached_property
    def synchronisations(self) -> Table:
        """Where the CPU or a stream waits for device work; see `analysis.synchronisations`."""
        from instrument.analysis.synchronisations import synchronisations

        return synchronisations(self.links)

    @cached_property
    def devices(self) -> Table:
        """The utilization and occupancy of each device; see `analysis.devices`."""
        from instrument.analysis.devices import devices

        return devices(self.events, self.work)

    @cached_property
    def memory(self) -> MemoryView:
        """The memory in use over time, by device; see `instrument.analysis.memory_timeline`."""
        from instrument.analysis.memory_timeline import MemoryView

        return MemoryView(self.links)

    @cached_property
    def categories(self) -> list[Categories]:
        """The memory in use over time, by torch's categories, such as parameters and gradients.

        The list has one entry for each device; see `instrument.analysis.memory_categories`.
        """
        from instrument.analysis.memory_categories import read

        return [] if self.folder is None else read(self.folder, self.events.base_ns)

    @cached_property
    def memory_categories(self) -> Table:
        """The memory of each of torch's categories at the start, peak and end of the window.

        There are eight categories, such as "parameter" or "gradient". The table has one row for
        each device and category; see `instrument.analysis.memory_categories`.
        """
        from instrument.analysis.memory_categories import table

        return table(self.categories)

    @cached_property
    def compiled_ranges(self) -> Table:
        """The ranges inside the compiled regions that ran in this window; see `COMPILED_RANGES`.

        Compiled code does not record where a range begins and ends. So the time of these ranges is
        known only as part of the region's time.
        """
        ran = {name.removeprefix(REGION) for name in self.events.names if name.startswith(REGION)}
        here = [entry for entry in self.about.compiled_ranges if entry.region in ran]
        return Table.of_rows(COMPILED_RANGES, [(entry.range, entry.region) for entry in here])

    @cached_property
    def coverage(self) -> Table:
        """How much of each kind of data was recorded; see `analysis.coverage`."""
        from instrument.analysis.coverage import coverage

        return coverage(self)

    def stacks(
        self,
        metric: Literal["cpu", "device"] = "cpu",
        *,
        range: str | None = None,
        threads: bool = False,
    ) -> list[Stack]:
        """Return call paths, each with the self time of its last frame; see `analysis.stacks`.

        Raises:
            CaptureError: the trace holds no Python frames, or no such range; or `metric` is
                "device", and the trace holds no device events.
        """
        from instrument.analysis.stacks import stacks

        return stacks(self.events, metric, range=range, threads=threads)

    def _recorded_globs(self) -> Sequence[str]:
        """Return `profiler.communication` of the recording; warn if it cannot be used."""
        globs = self.about.config.communication
        try:
            return check_globs(globs, "config.communication")
        except ConfigError as error:
            from instrument.log import logger

            logger.warning(
                "{} is read with the default names of communication kernels, because {}",
                self.name,
                error,
            )
            return []

    def __repr__(self) -> str:
        where = self.url or self.folder or self.trace_path
        return printable(f"<{type(self).__name__} {self.name!r} at {where}>")
