"""`Views`: a capture's metadata, its events, and the tables made from them.

`VIEWS` lists the tables. A function that makes a table is imported when the table is first used. So
`instrument show --help` can read the list without numpy.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from instrument.base import files
from instrument.base.errors import CaptureError, ConfigError, TraceError, TraceWarning
from instrument.base.globs import check_globs
from instrument.base.peak_flops import check_peak_flops
from instrument.base.polars_forks import use_polars
from instrument.base.printable import printable
from instrument.base.range_names import whole
from instrument.read.facts.once import Once
from instrument.read.facts.schema import Grouping, Schema
from instrument.read.views import coverage_rows as rows

if TYPE_CHECKING:
    from typing import Self

    import polars

    from instrument.read.facts.device_work import Work
    from instrument.read.facts.facts import Facts
    from instrument.read.facts.lines import Sampled
    from instrument.read.facts.links import Links
    from instrument.read.facts.memory_attribution import By
    from instrument.read.facts.scope import Scope
    from instrument.read.trace.capture_json import Loader, Metadata
    from instrument.read.trace.events import Events, Flags
    from instrument.read.trace.line_samples import LineSamples
    from instrument.read.views.memory_categories import Categories
    from instrument.read.views.memory_timeline import MemoryView
    from instrument.read.views.peak_rates import PeakFlops
    from instrument.read.views.stacks import Stack
    from instrument.read.views.table import Table

# The longest name of a capture in bytes. Names of files consist of a prefix, this name and a
# suffix, so the limit leaves room for both.
_LONGEST_NAME = 128

#: The phase of a capture that names none.
TRAIN = "train"
T = TypeVar("T")
# A rank in the name of a capture or trace.
_RANK = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)


def rank_in(name: str) -> int | None:
    """The rank in the name of a capture or trace; None if there is none."""
    found = _RANK.search(name)
    return int(found[1]) if found else None


class View:
    """A table of a capture, and the option of `instrument show` that prints it.

    The view NAME is what the function NAME in `module` returns for the capture, with the schema
    NAME in capitals. A view is made when it is first read, and only once.

    Attributes:
        module: a module of `instrument.read.views`.
        help: what the table holds, the help text of the option.
        coverage: the rows of `capture.coverage` that matter to this table.
        option: the option of `instrument show`, without dashes.
        is_scoped: whether the table can be restricted to a range, a stream or a condition.
    """

    def __init__(
        self,
        module: str,
        help: str,
        coverage: tuple[str, ...] = (),
        *,
        option: str = "",
        name: str = "",
        is_scoped: bool = False,
    ) -> None:
        self.module, self.help, self.coverage = module, help, coverage
        self.option, self.name, self.is_scoped = option, name, is_scoped

    def __set_name__(self, owner: type[Views], name: str) -> None:
        self.name = name
        self.option = self.option or name.replace("_", "-")

    @overload
    def __get__(self, capture: None, owner: type[Views]) -> View: ...

    @overload
    def __get__(self, capture: Views, owner: type[Views]) -> Table: ...

    def __get__(self, capture: Views | None, owner: type[Views]) -> View | Table:
        if capture is None:
            return self
        if not self.is_scoped:
            capture.require_whole(self.name)
        made: Table = self._member(self.name)(capture)
        vars(capture)[self.name] = made  # Python reads it there from now on
        return made

    @property
    def schema(self) -> Schema:
        """The schema of the table. This property imports the module that makes the table."""
        found: Schema = self._member(self.name.upper())
        return found

    def _member(self, name: str) -> Any:
        return getattr(import_module(f"instrument.read.views.{self.module}"), name)


class Views:
    """One recorded window on one rank, or a trace file: its metadata and the tables of its events.

    Users get the subclass `Capture`, which documents the attributes.
    """

    ranges = View(
        "ranges", "the range tree: time on CPU and device, forward and backward", rows.RANGES
    )
    ranges_by_name = View("ranges", "the ranges, grouped by name", rows.RANGES)
    ranges_attribution = View("ranges", "all CPU time, by range and kind of work", rows.PARTS)
    ranges_rest = View("ranges", "the time outside of all ranges", rows.PARTS)
    operators = View(
        "operators",
        "the operators, grouped by name or --by",
        rows.CALLS,
        option="ops",
        is_scoped=True,
    )
    operators_without_flops = View(
        "operators", "the operators whose FLOPs are not counted", rows.CALLS
    )
    kernels = View(
        "kernels",
        "the device's kernels by name, with the CPU time of their launches",
        rows.LAUNCHING,
        is_scoped=True,
    )
    steps = View(
        "steps", "each step, its device work, and the causes of the device's idle time", rows.STEPS
    )
    phases = View(
        "phases",
        "prefill and decode of an inference engine, or forward and backward of a pipeline: steps, "
        "tokens, idle time, CUDA graphs",
        rows.LAUNCHING,
    )
    moments = View("steps", "the moments that were marked with instrument.mark", rows.FILE)
    interruptions = View(
        "interruptions",
        "what interrupted training: loader, garbage collection, compilation, allocation",
        rows.INTERRUPTIONS,
    )
    memory_devices = View(
        "memory_timeline",
        "the memory allocated and freed on each device, and its peak",
        rows.FILE,
        option="memory",
    )
    memory_steps = View("memory_timeline", "the memory allocated and freed in each step", rows.FILE)
    memory_events = View(
        "memory_timeline", "every allocation and free, and what made it", rows.OWNERS
    )
    memory_categories = View(
        "memory_categories",
        "memory by torch's categories, if profiler.memory_categories was on",
        rows.FILE,
    )
    breakdown = View(
        "breakdown", "the device's time: compute, communication, copies, idle", rows.DEVICE
    )
    layers = View(
        "layers",
        "the layers of the model: device time, kinds of kernels, and what the layer is known from",
        rows.LAYERS,
        is_scoped=True,
    )
    copies = View(
        "kernels", "copies and memsets, with their bandwidth", rows.LAUNCHING, is_scoped=True
    )
    efficiency = View(
        "efficiency",
        "FLOP/s and bandwidth of matrix products, convolutions and attention, and the device's "
        "peak",
        rows.LAUNCHERS,
    )
    efficiency_steps = View(
        "efficiency", "the model FLOPs utilization (MFU) of each step", rows.LAUNCHERS_IN_STEPS
    )
    collectives = View(
        "collectives",
        "the collectives by process group and kind: sizes, exposed time, bus bandwidth",
        rows.LAUNCHING,
    )
    collective_calls = View("collectives", "each collective, in order of its end", rows.LAUNCHING)
    launches = View(
        "kernels",
        "the CPU calls that launch device work, and the delay until the work starts",
        rows.ORDERED,
        is_scoped=True,
    )
    streams = View("kernels", "what ran on each stream of each device", rows.DEVICE, is_scoped=True)
    cuda_graphs = View(
        "cuda_graphs",
        "the CUDA and HIP graphs: replays, device time, idle time, and what launched them",
        rows.LAUNCHING,
    )
    cuda_graph_nodes = View(
        "cuda_graphs",
        "the nodes of the graphs, with the names that torch's tool gave to them",
        rows.LAUNCHING,
    )
    queue = View(
        "launch_queue",
        "for each stream, how many launches waited until the device started their work, and how "
        "many calls a full queue blocked",
        rows.ORDERED,
    )
    synchronisations = View(
        "synchronisations",
        "the calls that wait for device work, where they are, and what they wait for",
        rows.ORDERED,
    )
    lines = View(
        "lines",
        "the lines of the code that ran in most samples, if profiler.lines was on",
        rows.FILE,
    )
    compiled_ranges = View(
        "ranges", "the ranges inside compiled regions, which cannot be timed", rows.FILE
    )
    coverage = View(
        "coverage",
        "how complete the capture is: the recorded fractions of time, launches and memory",
    )

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
        #: Another capture of the same program, by which layers are found; see `load`.
        self.like: Self | None = None
        #: The rank of a capture that names none, by its place among those that a user names.
        self.given_rank: int | None = None
        #: The part of the trace that is asked about; see `during`.
        self.scope: Scope | None = None
        self._unrestricted: Self | None = None
        #: False if the events are those of some steps; see `during`.
        self.has_all_steps = True
        #: What was computed about the trace.
        self.once = Once()

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        communication: Sequence[str] | None = None,
        peak_flops: PeakFlops | None = None,
        like: str | PathLike[str] | None = None,
    ) -> Self:
        """Open a capture folder or a trace file.

        The events of the trace are read later, when a view first needs them.

        Args:
            path: the folder or file, or a URL such as `s3://bucket/run/NAME`. A URL is downloaded
                at once; see `instrument.base.storage`. The copy is removed when this process ends.
            communication: globs, such as `["*nccl*", "*rccl*"]`. Kernels whose names match one of
                them are communication; case is ignored. None means
                `facts.device_work.COMMUNICATION_NAMES` and the globs of
                `profiler.communication` when the capture was recorded.
            peak_flops: the peak FLOP/s of the devices, for `efficiency`: a number, or a mapping
                from precisions to numbers, such as `{"bfloat16": 989e12}`. For other precisions,
                the peaks are those of `instrument.read.views.peak_rates`. None means
                `profiler.peak_flops` of the recording.
            like: the folder, file or URL of another capture of the same program whose layers are
                recorded, such as one without CUDA graphs. Kernels that run in the same order have
                the same layers.

        Raises:
            CaptureError: nothing is at the path, the folder has no readable capture.json, or the
                URL cannot be fetched.
            ConfigError: `communication` is not a list of globs, `peak_flops` cannot be used,
                or the URL's protocol is unknown.
            MissingPackage: a package for the URL's protocol is not installed.
        """
        from instrument.base import storage
        from instrument.read.trace import capture_json
        from instrument.read.views.find_captures import kind_of

        url = path if storage.is_url(path) else None
        path = Path(path) if url is None else storage.fetch(url)
        if communication is not None:
            check_globs(communication, "communication")
        peak_flops = check_peak_flops(peak_flops, "peak_flops")
        trace: Path | None = path
        folder, metadata = None, dict[str, Any]()
        if kind_of(path) == "folder":
            folder, metadata = path, capture_json.read_metadata(path)
            traces = (path / name for name in capture_json.TRACE_FILES)
            trace = next((file for file in traces if files.is_regular(file)), None)
        elif not path.is_file():  # reading a named pipe without a writer would block
            raise CaptureError(
                f"{path} is not a regular file: give a capture folder or a trace file."
            )
        capture = cls(trace, folder, metadata, communication, peak_flops)
        capture.url = url
        capture.like = None if like is None else cls.load(like)
        return capture

    def during(
        self,
        *,
        steps: int | tuple[int, int] | None = None,
        range: str | None = None,
        stream: int | str | None = None,
        where: str | None = None,
    ) -> Self:
        """Return the capture restricted to a part of its trace.

        Args:
            steps: a step, or the first and the last step; all of them count. Everything can be
                asked about them: tables, diagnoses, simulations.
            range: a glob for paths of ranges, such as `forward/*`; what lies inside counts too.
            stream: the stream of device work.
            where: a condition in SQL over the columns of `events`, such as `device_ns > 1000000`.

        With `range`, `stream` or `where`, only the tables of operators, kernels, copies, launches
        and streams can be asked for, and `sql`.

        Raises:
            CaptureError: the capture holds no trace.
            ConfigError: no step, range or stream fits, or the condition is not one.
            TraceError: the trace cannot be read.
        """
        from instrument.read.facts.links import Links
        from instrument.read.facts.scope import Scope, only_steps

        scope = self.scope
        if not range is stream is where is None:
            scope = Scope(range, None if stream is None else str(stream), where, scope)
        whole = self.whole
        if steps is not None:
            first, last = (steps, steps) if isinstance(steps, int) else steps
            events = only_steps(self.links, first, last)
            first = max(first, self.links.step_numbers[0])
            links = Links(events, first_step=first)
            whole = self._alike(events=events, links=links, has_all_steps=False)
        if scope is None:
            return whole
        shared = {"events": whole.events, "links": whole.links, "facts": whole.facts}
        part = whole._alike(**shared, _work=whole._work)
        part.scope, part._unrestricted = scope, whole
        _ = part.work  # raises if nothing fits
        return part

    def _alike(self, **known: Any) -> Self:
        """A capture of the same files, about which some is known already."""
        given = (self.trace_path, self.folder, self.metadata, self.communication, self.peak_flops)
        made = type(self)(*given)
        made.url, made.given_rank, made.like = self.url, self.given_rank, self.like
        vars(made).update(known)
        return made

    @property
    def whole(self) -> Self:
        """The same steps, without the restriction to a range, a stream or a condition."""
        return self._unrestricted or self

    def sql(self, query: str) -> Table:
        """Return the answer to a query in SQL over the tables `events` and `segments`.

        docs/tables.md lists their columns. Nothing else can be read: no file, no URL.

        Raises:
            CaptureError: the capture holds no trace.
            ConfigError: the query cannot be answered.
            TraceError: the trace cannot be read.
        """
        if re.search(r"\bsegments\b", query, re.IGNORECASE):
            self.require_whole("The table segments")
        from instrument.read.facts.queries import answer
        from instrument.read.views.table import Table

        return Table(answer(self.facts, query, self._chosen), begin_ns=self.events.begin_ns)

    def require_whole(self, what: str) -> None:
        """Refuse a question that cannot be asked about a part of the events.

        Raises:
            ConfigError: the capture is restricted to a range, a stream or a condition.
        """
        if self.scope is not None:
            tables = [name for name, view in VIEWS.items() if view.is_scoped]
            raise ConfigError(
                f"{what} cannot be restricted to {self.scope}; these tables can: "
                f"{', '.join(tables)}; and sql."
            )

    @property
    def about(self) -> Metadata:
        """The fields of `metadata` that the views use, as attributes with checked types.

        Raises:
            CaptureError: a value in `metadata` has the wrong type.
        """
        from instrument.read.trace.capture_json import typed

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

        `given_rank` replaces it, unless it is None.

        Raises:
            CaptureError: the capture holds no trace.
            TraceError: the trace cannot be read.
        """
        if self.given_rank is not None:
            return self.given_rank
        recorded = self.about.rank
        rank = self.events.rank if recorded is None else recorded
        return rank_in(self.name) if rank is None else rank

    @property
    def place(self) -> Path | str | None:
        """The URL of the capture, its folder under its final name, or the trace file."""
        if self.url is not None:
            return self.url
        if self.folder and self.folder.name.startswith(".") and self.folder.name != "..":
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
        from instrument.read.trace import reader

        if not use_polars():
            raise CaptureError(
                f"{self.place} cannot be read here: this process was forked after another capture "
                "had been read, and polars hangs in such a process. Read it in a new process, or "
                "with the command `instrument`."
            )

        trace = self.require_trace()
        events = reader.read(trace)
        if events.cut_short:
            warnings.warn(
                f"The trace file {printable(str(trace))} is cut short: only its first "
                f"{events.recorded} events could be read. Copy or record it again.",
                TraceWarning,
                stacklevel=1,  # shown once for each file, not once for each caller
            )
        if self._detail_file is None or events.records_inputs:
            return events
        from instrument.read.facts.detail import DetailedEvents, inputs_of

        def find() -> dict[str, Any]:
            detail = self.detail
            return inputs_of(self.links, events.texts, None if detail is None else detail.links)

        return DetailedEvents(events, find)

    @property
    def _detail_file(self) -> Path | None:
        file = self.folder and self.folder / files.DETAIL_FILE
        return file if file and files.is_regular(file) else None

    @cached_property
    def detail(self) -> Self | None:
        """The detail window: the steps after the window, which only say what its events are.

        None if the capture has none, or if its trace is damaged.
        """
        from instrument.read.trace import reader

        if self._detail_file is None:
            return None
        try:
            events = reader.read(self._detail_file)
        except (TraceError, OSError):
            return None
        made = type(self)(self._detail_file, None, {}, self.communication, self.peak_flops)
        vars(made)["events"] = events
        return None if events.cut_short else made

    def require_trace(self) -> Path:
        """Return `trace_path`.

        Raises:
            CaptureError: the folder holds no trace.
        """
        if self.trace_path is None:
            raise CaptureError(
                f"The capture {self.place} holds no trace: there is no trace.json.gz in it. "
                "Record again without chrome_trace.keep=false. With profiler.ranks=one_per_role, "
                "give the capture of a rank that keeps its trace, such as rank 0."
            )
        return self.trace_path

    @cached_property
    def links(self) -> Links:
        """The call tree of the CPU, and the device work of calls; see `facts.links`."""
        from instrument.read.facts.links import Links

        return Links(self.events)

    @property
    def work(self) -> Work:
        """The work of the devices, with its kind and launch; see `facts.device_work`."""
        if self.scope is None:
            return self._work
        return self.once("work", lambda: self._work.only(self._chosen[self._work.event]))

    @cached_property
    def _work(self) -> Work:
        from instrument.read.facts.device_work import COMMUNICATION_NAMES, device_work

        if self.communication is not None:
            return device_work(self.links, self.communication)
        return device_work(self.links, [*COMMUNICATION_NAMES, *self._recorded_globs()])

    @cached_property
    def line_samples(self) -> LineSamples | None:
        """The samples of the run's stacks (`profiler.lines`); None without them.

        Raises:
            CaptureError: the file of the samples cannot be read, or is not one.
        """
        from instrument.read.trace import line_samples

        if self.folder is None or self.url is not None:
            return None
        path = self.folder.parent / files.lines_file(self.rank or 0)
        return line_samples.read(path, self.metadata.get("run"))

    @cached_property
    def facts(self) -> Facts:
        """The tables of events and segments, from which answers are computed."""
        from instrument.read.facts.facts import Facts

        def samples() -> LineSamples | None:
            with suppress(CaptureError):  # only `lines` says that the file is damaged
                return self.line_samples
            return None

        return Facts(
            self.links, self._work, phase=self.phase, is_ours=self.is_ours, once=self.once,
            samples=samples, detail=lambda: None if self.detail is None else self.detail.links,
            like=lambda: None if self.like is None else self.like.facts,
        )  # fmt: skip

    @property
    def sampled(self) -> Sampled:
        """The samples of the stacks in the window; none without `profiler.lines`."""
        return self.facts.sampled

    @property
    def detailed(self) -> tuple[Links, Sampled] | None:
        """The detail window, and the samples in it; None without one."""
        return self.facts.detailed

    def rows(self, *columns: str) -> polars.DataFrame:
        """Return columns of the table of events, for the events that are asked about."""
        frame = self.facts.events(*columns)
        return frame if self.scope is None else frame.filter(self._chosen)

    @cached_property
    def _chosen(self) -> Flags:
        """A mask of the events that are asked about."""
        from instrument.read.facts.scope import Scope, chosen_events

        return chosen_events(self.facts, self.scope or Scope())

    @property
    def is_ours(self) -> bool:
        """Whether a session recorded the capture, so that its ranges have the session's names."""
        return self.folder is not None

    @property
    def loader(self) -> Loader | None:
        """The settings of the only loader of the window; None if unknown."""
        environment = self.about.environment
        loaders = (environment.loaders if environment else None) or []
        own = [loader for loader in loaders if (loader.phase or TRAIN) == self.phase]
        return own[0] if len(own) == 1 else None

    @property
    def module_types(self) -> dict[str, str]:
        """The class of each submodule, by the name of its range."""
        return self.about.module_types

    def operators_by(self, what: Grouping, *, depth: int = 5) -> Table:
        """Group the operators by name and one more property; the property is the second column.

        docs/cli.md describes the properties. `depth` is the number of frames of a `stack`.

        Raises:
            CaptureError: `what` is "device", and the trace has more than 64 devices.
            ConfigError: operators cannot be grouped by `what`.
        """
        from instrument.read.views.operators import operators_by

        return self.once(
            f"operators by {what}, {depth}",
            lambda: operators_by(self, what, depth),
        )

    def kernels_by_layer(self) -> Table:
        """Return the table of kernels with a row for each name and layer."""
        from instrument.read.views.kernels import kernels_by_layer

        return self.once("kernels by layer", lambda: kernels_by_layer(self))

    def memory_live(
        self, by: By = "operator", *, device: str | None = None, at_ns: int | None = None
    ) -> Table:
        """Return which operators, ranges or modules own the memory in use at a given time.

        The row with the most bytes comes first. The rows sum to the memory in use. At the peak, the
        sum is `peak_bytes` of `memory_devices`, or `peak_net_bytes` if `peak_bytes` is None. Memory
        that a backward operator allocates belongs to the range of its forward operator. If the
        trace has no addresses, one row without a name has all memory.

        Args:
            by: operator, range or module. A trace holds modules if it was recorded with
                `with_stack`.
            device: the device; None means the first device of `memory_devices`.
            at_ns: the time on the trace's own clock; None means the peak.

        Raises:
            CaptureError: the trace holds no memory events, no memory events of that device, or no
                modules for `by="module"`.
            ConfigError: `by` is not "operator", "range" or "module".
        """
        from instrument.read.views.memory_timeline import memory_live

        return memory_live(self.memory, by, device, at_ns)

    @cached_property
    def memory(self) -> MemoryView:
        """The memory in use over time, by device; see `instrument.read.views.memory_timeline`.

        If only the detail window recorded memory, it is that of the detail window.
        """
        from instrument.read.views.memory_timeline import MemoryView

        about, detail = self.about.detail, None
        if about is not None and about.memory and not len(self.events.memory):
            detail = self.detail
        return MemoryView(self.links if detail is None else detail.links)

    @cached_property
    def categories(self) -> list[Categories]:
        """The memory in use over time by torch's categories, for each device."""
        from instrument.read.views.memory_categories import read

        return [] if self.folder is None else read(self.folder, self.events.base_ns)

    def stacks(
        self,
        metric: Literal["cpu", "device"] = "cpu",
        *,
        range: str | None = None,
    ) -> list[Stack]:
        """Return call paths, each with the self time of its last frame; see `views.stacks`.

        If the trace holds no Python frames, those that samples found in the whole run
        (`profiler.lines`) are returned, for the CPU and without a range.

        Raises:
            CaptureError: there are no Python frames, or no such range; or `metric` is "device", and
                the trace holds no device events.
        """
        from instrument.read.facts.places import has_sources
        from instrument.read.views.stacks import sampled_stacks, stacks

        is_sampled = metric == "cpu" and range is None and not has_sources(self)
        if is_sampled and (samples := self.line_samples):
            return sampled_stacks(samples, self.phase)
        return stacks(self.events, metric, range=range)

    def _recorded_globs(self) -> Sequence[str]:
        """`profiler.communication` of the recording; warns if it cannot be used."""
        globs = self.about.config.communication
        try:
            return check_globs(globs, "config.communication")
        except ConfigError as error:
            from instrument.base.log import logger

            logger.warning(
                "{} is read with the default names of communication kernels, because {}",
                self.name,
                error,
            )
            return []

    def __repr__(self) -> str:
        where = self.url or self.folder or self.trace_path
        return printable(f"<{type(self).__name__} {self.name!r} at {where}>")


#: The tables of a capture, by the attribute of `Capture` that holds the table. A name with "()" is
#: a method, which takes arguments.
VIEWS = {name: view for name, view in vars(Views).items() if isinstance(view, View)} | {
    f"{view.name}()": view
    for view in (
        View("memory_timeline", "what owns the memory at a time", rows.OWNERS, name="memory_live"),
    )
}


def rows_of(views: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the rows of `capture.coverage` that matter to the given views.

    "ranges" and "operators" together stand for all views.
    """
    if {"ranges", "operators"}.issubset(views):
        return rows.EVERY
    chosen = {name for view in views if view in VIEWS for name in VIEWS[view].coverage}
    return tuple(name for name in rows.EVERY if name in chosen)
