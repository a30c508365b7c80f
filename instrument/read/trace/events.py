"""`Events`: a trace as parallel numpy columns. Each distinct name is stored once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.base.range_names import COMPILED_CODE, MOMENT, STEP_PREFIX

Ints = NDArray[np.int64]
Codes = NDArray[np.int32]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
Thread = tuple[int | str, int | str]

# From torch 1.12, Kineto writes categories in lower case.
OPERATOR = frozenset({"cpu_op", "Operator"})
ANNOTATION = frozenset({"user_annotation"})
PYTHON = frozenset({"python_function"})
_MTIA = frozenset({"mtia_ccp_events"})
COPIES = frozenset({"gpu_memcpy", "Memcpy"})
DEVICE = (
    frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "hpu_op"})
    | _MTIA
)
# What torch also writes: the tables take from it what they need, or nothing.
_OTHERS = frozenset(
    {"Trace", "overhead", "gpu_user_annotation", "cpu_instant_event", "external_correlation"}
    | {"cuda_sync", "xpu_sync", "cuda_event", "cuda_profiler_range", "collective_comm"}
    | {"mtia_insight", "mtia_counters"}
)
# Device events of MTIA with these names are waits of one stream for another stream.
_DEVICE_WAITS = frozenset({"event_wait", "event_record"})
_MOST_DIGITS = 15  # in the number of a step

# For example, "dynamo_data: compile_id=0/0" only describes a phase; the phase itself is another
# event.
_NOTE, _COMPILE_ID = "_data: ", re.compile(r"(^|_data: |, )compile_id=\d")
_LOADER = re.compile(r"enumerate\(Data(?:Loader|Pipe)\)#(\w*)")
_SYNCHRONISING = re.compile(r"synchronize|QueueFinish", re.IGNORECASE)
_BLOCKING_COPY = re.compile(r"MemcpyWithStream|^(cuda|hip)Memcpy(2D|3D)?$", re.IGNORECASE)
_WITH_OVERLOAD = re.compile(r"(\w+::\w+)\.([A-Za-z_]\w*)")


def is_runtime(category: str) -> bool:
    """Whether a category holds calls of a device's runtime or driver, such as `cuda_runtime`."""
    return category == "Runtime" or category.endswith(("_runtime", "_driver"))


def is_known(category: str) -> bool:
    """Whether torch writes events of this category."""
    known = OPERATOR | ANNOTATION | PYTHON | DEVICE | _OTHERS
    return category in known or is_runtime(category)


def is_step(name: str) -> bool:
    """Whether an event of this name is a step of the profiler."""
    number = name.removeprefix(STEP_PREFIX)
    return name.startswith(STEP_PREFIX) and number.isdecimal() and len(number) <= _MOST_DIGITS


def is_moment(name: str) -> bool:
    """Whether an event of this name is a mark (`instrument.mark`)."""
    return name.endswith(MOMENT)


def is_compiler_note(name: str) -> bool:
    """Whether an annotation of this name is a note of torch.compile about one of its phases."""
    _, mark, fields = name.partition(_NOTE)
    return bool(mark) and _COMPILE_ID.search(fields) is not None


def is_loader(name: str) -> bool:
    """Whether an event of this name is a wait for a batch from torch's DataLoader."""
    return _LOADER.match(name) is not None


def loader_iterator(name: str) -> str | None:
    """The class of the DataLoader's iterator in an event's name; None if it has none."""
    found = _LOADER.match(name)
    return (found[1] or None) if found else None


def is_synchronising(name: str) -> bool:
    """Whether a runtime call of this name only waits for the device."""
    return _SYNCHRONISING.search(name) is not None


def is_wait(name: str) -> bool:
    """Whether a runtime call of this name returns only after the device has finished some work."""
    return is_synchronising(name) or is_blocking_copy(name)


def is_blocking_copy(name: str) -> bool:
    """Whether a runtime call of this name copies, and returns after the copy."""
    return _BLOCKING_COPY.search(name) is not None


def split_overload(name: str) -> tuple[str, str]:
    """Split the name of an operator: `aten::add.Tensor` gives `aten::add` and `Tensor`.

    The default overload is "".
    """
    found = _WITH_OVERLOAD.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


# The names of events by category, as torch and CUPTI write them; the first match counts.
_NAMES = (
    ("gpu_memcpy", r"\[?memcpy\b"),
    ("gpu_memset", r"\[?memset\b"),
    ("user_annotation", r"ProfilerStep#|Optimizer\.|enumerate\(Data"),
    ("python_function", r".*\.py\(\d+\): |<built-in |nn\.Module: "),
    ("cuda_runtime", r"(cuda|cu|hip)[A-Z]\w+$"),
    ("cpu_op", r"[a-z]\w*::[\w.:]+$|\w+Backward\d*$|autograd::engine::|torch::autograd::"),
    ("kernel", r"void .*[<(]|_Z\w|nccl\w*(kernel|_)|\w*(_kernel|gemm|triton_)|.*>\(.*\)$|Kernel"),
)
_BY_NAME = [
    (category, re.compile(pattern, re.IGNORECASE if category.startswith("gpu_") else 0))
    for category, pattern in _NAMES
]


def category_of(name: str) -> str:
    """The category that events of this name have in torch's traces; "" if the name shows none."""
    return next((category for category, names in _BY_NAME if names.match(name)), "")


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """The allocations and frees of a trace, one row each, in the order of the file.

    Attributes:
        thread: an index into `Events.threads`.
        time_ns: the time, on the same clock as `Events.start_ns`.
        size_bytes: the size of the memory; negative for a free.
        device_type: torch's number of the `DeviceType`; 0 is the CPU.
        device_index: the index of the device; -1 if the trace does not have it.
        allocated_bytes, reserved_bytes: the totals of the device after the event; 0 if the trace
            does not have them.
        address: the address of the memory; 0 if the trace does not have it.
    """

    thread: Codes
    time_ns: Ints
    size_bytes: Ints
    device_type: Codes
    device_index: Codes
    allocated_bytes: Ints
    reserved_bytes: Ints
    address: Ints

    def __len__(self) -> int:
        return len(self.time_ns)


class Details(NamedTuple):
    """Arguments that only events of collectives, CUDA graphs, waits and launches have.

    A value is None if the trace does not have it.

    Attributes:
        collective: the name of a collective, such as `allreduce`, on its kernel and on the CPU
            event `record_param_comms`.
        element_type: the type of the collective's elements, such as `Float`.
        input_elements, output_elements: the number of elements on this rank.
        ranks: the ranks that take part, as text such as "[0, 1]"; torch shortens a long list.
        group_size: how many ranks take part.
        process_group, group_description: the process group, such as "0", and its description.
        collective_number: torch's sequence number of the collective in its process group.
        source_rank, destination_rank: the two ranks of a transfer.
        graph, graph_node: the CUDA graph that launched a device event, and the node of the graph.
        sync_kind: the kind of a `cuda_sync` event, such as "Stream Wait Event".
        waits_for_stream, waits_for_event: what a `cuda_sync` event waits for.
        waits_for_correlation: the correlation of the call that recorded this CUDA event.
        launched_kernel: the name of the kernel that a call launches; only ROCm records this.
        annotation: the name that `torch.cuda._graph_annotations.mark_kernels` gave to the node of a
            CUDA graph, if torch's tool `_annotate_cuda_graph_trace` wrote this name into the trace.
    """

    collective: str | None = None
    element_type: str | None = None
    input_elements: int | None = None
    output_elements: int | None = None
    ranks: str | None = None
    group_size: int | None = None
    process_group: str | None = None
    group_description: str | None = None
    collective_number: int | None = None
    source_rank: int | None = None
    destination_rank: int | None = None
    graph: int | None = None
    graph_node: int | None = None
    sync_kind: str | None = None
    waits_for_stream: int | None = None
    waits_for_event: int | None = None
    waits_for_correlation: int | None = None
    launched_kernel: str | None = None
    annotation: str | None = None


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group: its description, and the ranks in it."""

    pg_desc: str = ""
    ranks: list[int] = []


class Device(NamedTuple):
    """A device of the machine that recorded a trace; a value is None if the trace lacks it."""

    id: int | None
    name: str | None
    memory_bytes: int | None
    multiprocessors: int | None


@dataclass(frozen=True, slots=True)
class Events:
    """All events of a trace that have a duration, as parallel columns in the order of the file.

    Flows (the arrows between events), thread labels, events that are two entries of the file (start
    and end; torch writes none), and arguments without a column here or a field in `Details` are not
    kept. A column of equal values may be a read-only array of stride 0.

    Attributes:
        categories, names: the distinct categories and names. The name of an MTIA copy ends with its
            direction.
        threads: the distinct pairs of process and thread; for device events, of device and stream.
        texts, grids: the distinct arguments of events, as JSON text.
        details: the distinct details of events.
        category, name, thread: for each event, an index into `categories`, `names`, `threads`.
        start_ns, end_ns: in nanoseconds; add `base_ns` to get Unix time.
        external_id, correlation: the ids that join device events to the CPU events that launched
            them; 0 if missing.
        sequence: the sequence number of autograd; -1 if missing.
        forward_thread: for a backward node, torch's number for the thread of its forward; 0 if
            missing.
        shapes, concrete, types: the input shapes, concrete inputs and input types of an operator,
            as indices into `texts`; -1 if missing.
        finished: false if the event had not ended when recording stopped, or if its end is unknown.
            A Python frame whose end CPython 3.12.0 to 3.12.4 does not report ends with its caller.
        call_stack: an index into `texts`; -1 if missing, or if the trace has Python frames as
            events.
        python_id, python_parent: the ids of a Python frame and of its parent; -1 if missing.
        moved_bytes: the bytes that a copy or memset moves; -1 if missing.
        grid, block: the grid and block sizes of a kernel, as indices into `grids`; -1 if missing.
        blocks_per_sm: the blocks of a kernel per multiprocessor of its device; NaN if missing.
        occupancy: Kineto's estimate of the occupancy in percent; 0 if Kineto made none, NaN if
            missing.
        detail: an index into `details`; -1 if the event has none of the arguments in `Details`.
        memory: allocations and frees.
        recorded: the number of all events in the file.
        counters: the number of counter events in the file (`ph` is "C"), whose values are not read.
        base_ns: what to add to `start_ns` and `end_ns` to get Unix time; 0 if missing.
        cut_short: whether the file is truncated. The columns then hold the events before the cut.
        rank, world_size: those of the recording process; None if missing.
        process_groups: the process groups of the recording process.
        devices: the devices of the machine.
        versions: the version of the device's runtime, such as `{"cuda_runtime_version": 12040}`;
            empty if the file does not name it.
        left_out: the number of events that are left out because their times are out of range,
            more than a day from most events, or 0 while all others are more than a minute later.
        unreadable: the number of events in the file that are not JSON, even after repairs.
        no_category: the number of events without a category (`cat`) whose name and thread do not
            show one either. No table has them.
        unknown_category: the number of events with a category that torch does not write. No table
            has them.
        no_duration: the number of events without a duration (`dur`); in the columns they last 0 ns.
        overlapping: the number of device events that end earlier in the columns than in the file,
            where the next event of their stream begins.
        negative_durations: the number of events that end before they begin, because the clock was
            set back. In the columns, they last 0 ns and are not finished.
    """

    categories: tuple[str, ...]
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    texts: tuple[bytes, ...]
    grids: tuple[bytes, ...]
    details: tuple[Details, ...]
    category: Codes
    name: Codes
    thread: Codes
    start_ns: Ints
    end_ns: Ints
    external_id: Ints
    correlation: Ints
    sequence: Ints
    forward_thread: Ints
    finished: Flags
    shapes: Codes
    concrete: Codes
    types: Codes
    call_stack: Codes
    python_id: Ints
    python_parent: Ints
    moved_bytes: Ints
    grid: Codes
    block: Codes
    blocks_per_sm: Floats
    occupancy: Floats
    detail: Codes
    memory: MemoryEvents
    recorded: int
    base_ns: int
    counters: int = 0
    cut_short: bool = False
    rank: int | None = None
    world_size: int | None = None
    process_groups: tuple[ProcessGroup, ...] = ()
    devices: tuple[Device, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    left_out: int = 0
    unreadable: int = 0
    no_category: int = 0
    unknown_category: int = 0
    no_duration: int = 0
    overlapping: int = 0
    negative_durations: int = 0

    def __len__(self) -> int:
        return len(self.start_ns)

    def __repr__(self) -> str:
        counts = f"{len(self)} with a duration, {len(self.memory)} memory"
        return f"<Events: {counts}, {self.recorded} in the file>"

    def devices_of(self, processes: Iterable[int | str]) -> list[Device | None]:
        """The device of each process of device events; None if the trace does not describe it."""
        by_id: dict[int | str | None, Device] = {device.id: device for device in self.devices[::-1]}
        return [by_id.get(process) for process in processes]

    @property
    def begin_ns(self) -> int:
        """The start of the first event or memory event; 0 if there are no events."""
        return min(
            (int(times.min()) for times in (self.start_ns, self.memory.time_ns) if len(times)),
            default=0,
        )

    @property
    def records_inputs(self) -> bool:
        """Whether the trace itself has the inputs of operators."""
        return bool(((self.shapes >= 0) | (self.types >= 0)).any())

    @property
    def duration_ns(self) -> Ints:
        """The duration of each event; 0 if it is negative in the file."""
        return self.end_ns - self.start_ns

    @property
    def records_gradients(self) -> Flags:
        """A mask of the operators that ran in grad mode; false for backward nodes."""
        found: Flags = self.among(OPERATOR) & (self.sequence >= 0) & (self.forward_thread == 0)
        return found

    def among(self, test: frozenset[str] | Callable[[str], bool]) -> Flags:
        """A mask of the events whose category is in a set or passes a test."""
        passes = test.__contains__ if isinstance(test, frozenset) else test
        return _taken(flags(passes, self.categories), self.category)

    def named(self, test: Callable[[str], bool]) -> Flags:
        """A mask of the events whose name passes a test. Each distinct name is tested once."""
        return _taken(flags(test, self.names), self.name)


def is_compiled_code(events: Events) -> Flags:
    """A mask of the calls of compiled code; their own time is that of generated kernels."""
    return events.named(lambda name: COMPILED_CODE.search(name) is not None)


def called_operators(events: Events) -> Flags:
    """A mask of the operators; false for the steps, which torch records as operators too."""
    return events.among(OPERATOR) & ~events.named(is_step)


def works_on_device(events: Events) -> Flags:
    """A mask of the kernels, copies and memsets."""
    return events.among(DEVICE) & ~(events.among(_MTIA) & events.named(_DEVICE_WAITS.__contains__))


# Comparing all codes with one code takes 1/15 of a lookup for each.
_MOST_COMPARED = 4


def _taken(chosen: Flags, code: Codes) -> Flags:
    codes = np.flatnonzero(chosen).tolist()
    if len(codes) > _MOST_COMPARED:
        return chosen.take(code)
    found = np.zeros(len(code), np.bool_)
    for each in codes:
        found |= code == each
    return found


def decoded(text: bytes) -> Any:
    """Decode a JSON text; return the text itself if Python cannot hold its value, as 1e400."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text.decode("utf-8", "replace")


def flags(test: Callable[[Any], bool], values: Sequence[Any]) -> Flags:
    """The result of a test for each value, as a mask."""
    return np.fromiter(map(test, values), np.bool_, len(values))
