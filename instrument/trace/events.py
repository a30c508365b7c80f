"""What a trace holds, as parallel numpy columns with interned names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.range_names import MOMENT, STEP_PREFIX

Ints = NDArray[np.int64]
Codes = NDArray[np.int32]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float32]
Thread = tuple[int | str, int | str]

# The names before and after torch 1.12, when Kineto's categories became lower case.
OPERATOR = frozenset({"cpu_op", "Operator"})
ANNOTATION = frozenset({"user_annotation"})
PYTHON = frozenset({"python_function"})
_MTIA = frozenset({"mtia_ccp_events"})
DEVICE = (
    frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "hpu_op"})
    | _MTIA
)
# What MTIA writes among its device events where a stream waits for another.
_DEVICE_WAITS = frozenset({"event_wait", "event_record"})
_MOST_DIGITS = 15  # of a step's number

_LOADER = re.compile(r"enumerate\(Data(Loader|Pipe)\)#")
_SYNCHRONISING = re.compile(r"synchronize|QueueFinish", re.IGNORECASE)
_BLOCKING_COPY = re.compile(r"MemcpyWithStream|^(cuda|hip)Memcpy(2D|3D)?$", re.IGNORECASE)
_WITH_OVERLOAD = re.compile(r"(\w+::\w+)\.([A-Za-z_]\w*)")


def is_runtime(category: str) -> bool:
    """Whether a category holds calls into a device's runtime or driver (`cuda_runtime`, `mtia_runtime`, …)."""
    return category == "Runtime" or category.endswith(("_runtime", "_driver"))


def is_step(name: str) -> bool:
    """Whether an event of this name is a step of the profiler."""
    number = name.removeprefix(STEP_PREFIX)
    return name.startswith(STEP_PREFIX) and number.isdecimal() and len(number) <= _MOST_DIGITS


def is_moment(name: str) -> bool:
    """Whether an event of this name is a moment that the user marked."""
    return name.endswith(MOMENT)


def is_loader(name: str) -> bool:
    """Whether an event of this name is the wait for a batch of torch's DataLoader, as the profiler records it."""
    return _LOADER.match(name) is not None


def is_synchronising(name: str) -> bool:
    """Whether in a runtime call of this name the CPU does nothing but wait for the device."""
    return _SYNCHRONISING.search(name) is not None


def is_wait(name: str) -> bool:
    """Whether a runtime call of this name returns only when the device has done what it waits for."""
    return is_synchronising(name) or _BLOCKING_COPY.search(name) is not None


def split_overload(name: str) -> tuple[str, str]:
    """An operator's name and its overload, "" for the default one; `aten::add.Tensor` is what torch writes of both.

    A range that is recorded as an operator and named like that cannot be told from one.
    """
    found = _WITH_OVERLOAD.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


@dataclass(frozen=True, slots=True)
class Memory:
    """The allocations and frees of a trace, one row each, in the order of the file.

    `size_bytes` is negative for a free. `device_type` is torch's `DeviceType` number (0 is the CPU).
    `allocated_bytes` and `reserved_bytes` are the running totals of that device, and `address` is where the memory
    lies: 0 where they were not written.
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


class Event(NamedTuple):
    """One event of a trace as a row; what was not recorded is None.

    Times are nanoseconds on the trace's own clock. `process` and `thread` are device and stream of what ran on one.
    `input_shapes` to `call_stack` are as the trace holds them, decoded; `occupancy` is a fraction.
    """

    category: str
    name: str
    process: int | str
    thread: int | str
    start_ns: int
    duration_ns: int
    finished: bool
    external_id: int | None
    correlation: int | None
    sequence: int | None
    forward_thread: int | None
    input_shapes: Any
    concrete_inputs: Any
    input_types: Any
    call_stack: str | None
    bytes: int | None
    grid: list[int] | None
    block: list[int] | None
    group: Any
    blocks_per_sm: float | None
    occupancy: float | None


@dataclass(frozen=True, slots=True)
class Events:
    """Every event of a trace that has a duration, as parallel columns in the order of the file.

    It can be iterated and indexed for rows, each an `Event`, at some 5 µs a row; the columns are what is fast.

    `category`, `name` and `thread` are indices into `categories`, `names` and `threads`; `shapes`, `concrete`, `types`,
    `call_stack` and `group` are indices into `texts`, `grid` and `block` into `grids`, which hold JSON text as it
    stood in the file, and -1 where nothing was recorded. `call_stack` is left out of traces that hold Python frames as
    events. Times are integer nanoseconds; `base_ns` added to them gives Unix time, where it is not 0. A `thread` is a
    pair of process and thread, on a device of device and stream. `group` is the ranks that take part in a collective's
    kernel, `moved_bytes` what a copy or memset moves (the direction of MTIA's copies stands behind their name),
    `blocks_per_sm` a kernel's blocks over the device's multiprocessors, `occupancy` Kineto's estimate in percent, 0
    where it made none. Missing numbers: 0 in `external_id`, `correlation` and `forward_thread`, -1 in `sequence`,
    `python_id`, `python_parent` and `moved_bytes`, NaN in `blocks_per_sm` and `occupancy`.

    `rank` and `world_size` are the recording process's, where the trace itself tells. `cut_short`: the file ends too
    early, and these are the events before its end. `negative_durations` is how many of them end before they begin, as
    when the clock was set back meanwhile: they last 0 ns here and are not finished. `left_out` is how many are not here
    because no recording has such times.

    Lost: flows, thread labels, and those arguments of an event that have no column here.
    """

    categories: tuple[str, ...]
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    texts: tuple[bytes, ...]
    grids: tuple[bytes, ...]
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
    group: Codes
    blocks_per_sm: Floats
    occupancy: Floats
    memory: Memory
    recorded: int
    base_ns: int
    cut_short: bool = False
    rank: int | None = None
    world_size: int | None = None
    left_out: int = 0
    negative_durations: int = 0

    def __len__(self) -> int:
        return len(self.start_ns)

    def __getitem__(self, index: int) -> Event:
        at = range(len(self))[
            index
        ]  # as of a list: from the end where negative, and an IndexError beyond
        process, thread = self.threads[self.thread[at]]
        occupancy = float(self.occupancy[at])
        return Event(
            category=self.categories[self.category[at]],
            name=self.names[self.name[at]],
            process=process,
            thread=thread,
            start_ns=int(self.start_ns[at]),
            duration_ns=int(self.end_ns[at] - self.start_ns[at]),
            finished=bool(self.finished[at]),
            external_id=int(self.external_id[at]) or None,
            correlation=int(self.correlation[at]) or None,
            sequence=_at_least(0, self.sequence[at]),
            forward_thread=int(self.forward_thread[at]) or None,
            input_shapes=_argument(self.texts, self.shapes[at]),
            concrete_inputs=_argument(self.texts, self.concrete[at]),
            input_types=_argument(self.texts, self.types[at]),
            call_stack=_argument(self.texts, self.call_stack[at]),
            bytes=_at_least(0, self.moved_bytes[at]),
            grid=_argument(self.grids, self.grid[at]),
            block=_argument(self.grids, self.block[at]),
            group=_argument(self.texts, self.group[at]),
            blocks_per_sm=None
            if np.isnan(self.blocks_per_sm[at])
            else float(self.blocks_per_sm[at]),
            occupancy=occupancy / 100 if occupancy > 0 else None,
        )

    def __iter__(self) -> Iterator[Event]:
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return f"<Events: {len(self)} with a duration, {len(self.memory)} memory, {self.recorded} in the file>"

    @property
    def begin_ns(self) -> int:
        """When the first of all began, memory events too; 0 where there is none."""
        return min(
            (int(times.min()) for times in (self.start_ns, self.memory.time_ns) if len(times)),
            default=0,
        )

    @property
    def duration_ns(self) -> Ints:
        """How long each event took; 0 where the file gives a negative time."""
        return self.end_ns - self.start_ns

    @property
    def records_gradients(self) -> Flags:
        """The operators that were called while gradients were recorded, without the backward nodes."""
        found: Flags = self.among(OPERATOR) & (self.sequence >= 0) & (self.forward_thread == 0)
        return found

    def among(self, test: frozenset[str] | Callable[[str], bool]) -> Flags:
        """A mask of the events whose category is in a set, or passes a test."""
        passes = test.__contains__ if isinstance(test, frozenset) else test
        chosen = flags(passes, self.categories)
        return chosen[self.category] if chosen.any() else np.zeros(len(self), np.bool_)

    def named(self, test: Callable[[str], bool]) -> Flags:
        """A mask of the events whose name passes a test; the test runs once for each distinct name."""
        return flags(test, self.names)[self.name]


def works_on_device(events: Events) -> Flags:
    """The kernels, copies and memsets."""
    return events.among(DEVICE) & ~(events.among(_MTIA) & events.named(_DEVICE_WAITS.__contains__))


def _at_least(least: int, value: np.integer[Any]) -> int | None:
    return int(value) if value >= least else None


def _argument(texts: tuple[bytes, ...], code: np.integer[Any]) -> Any:
    return decoded(texts[code]) if code >= 0 else None


def decoded(text: bytes) -> Any:
    """The value of an argument kept as its JSON text; the text itself where Python cannot hold it, as of 1e400."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text.decode("utf-8", "replace")


def flags(test: Callable[[Any], bool], values: tuple[Any, ...]) -> Flags:
    """A test's answer for each value, as a mask."""
    return np.fromiter(map(test, values), np.bool_, len(values))
