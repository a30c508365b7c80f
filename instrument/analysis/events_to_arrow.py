"""The events, allocations and frees of a trace as one Arrow table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from instrument.analysis.table import Schema, names_of, schema
from instrument.links.links import Links
from instrument.trace.events import Codes, Events, Flags, Ints

if TYPE_CHECKING:
    import pyarrow

# Kineto's categories before torch 1.12, and their names since.
_CURRENT_CATEGORIES = {
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}


# The type of a column is in brackets; all numbers are 64-bit integers.
EVENTS: Schema = schema(
    event="(int64) the number of the row in this window, from 0",
    category="(string) Kineto's category: `cpu_op`, `user_annotation`, `cuda_runtime`, `kernel`, "
    "…; `memory` for allocations and frees",
    name="(string) the name of the operator, range, call or kernel",
    process="(string) the process; for device events, the device",
    thread="(string) the thread; for device events, the stream",
    start_ns="(int64) the start, on the trace's own clock",
    start_unix_ns="(int64) the start as Unix time, for comparing ranks; null if the trace does "
    "not hold its Unix time",
    duration_ns="(int64) the duration; null for allocations and frees",
    self_ns="(int64) the duration without the operators, ranges and calls directly inside; null "
    "for device events and Python frames",
    parent="(int64) the `event` of the operator, range or call directly around this event",
    launched_by="(int64) for device work, the `event` of the operator or range that launched it",
    correlation="(int64) a number that a launch shares with the device work that it started",
    external_id="(int64) torch's number of the operator",
    sequence="(int64) a number that a forward operator shares with its backward, unique on each "
    "`forward_thread`",
    forward_thread="(int64) for a backward operator, torch's number of the thread that ran the "
    "forward",
    finished="(bool) whether the event ended within the window; null for allocations and frees",
    input_shapes="(string) the input shapes as JSON, as recorded",
    input_types="(string) the input types as JSON, as recorded",
    concrete_inputs="(string) the values of the inputs that are not tensors as JSON, as recorded",
    python_id="(int64) for a Python frame, its number",
    python_parent="(int64) for a Python frame, the number of the frame around it",
    size_bytes="(int64) the size of an allocation; negative for a free",
    device_type="(int64) for an allocation or free, torch's `DeviceType`; 0 is the CPU",
    device_index="(int64) for an allocation or free, the number of the device; null for the CPU",
    allocated_bytes="(int64) the memory that is allocated on the device after the event; null if "
    "it was not recorded",
    reserved_bytes="(int64) the memory that the allocator has reserved after the event; null if "
    "it was not recorded",
)


def to_arrow(events: Events) -> pyarrow.Table:
    """Return the events, then the allocations and frees, as one Arrow table; see `EVENTS`.

    Needs pyarrow. Cost: about 1 µs an event.
    """
    import pyarrow

    parts = [pyarrow.table(columns) for columns in (_spans(events), _allocations(events))]
    return pyarrow.concat_tables(parts, promote_options="default").select(names_of(EVENTS))


def _spans(events: Events) -> dict[str, Any]:
    categories = [_CURRENT_CATEGORIES.get(category, category) for category in events.categories]
    links = Links(events)
    call_tree = links.call_tree
    is_cpu = np.zeros(len(events), np.bool_)
    parent, own = np.full(len(events), -1), np.zeros(len(events), np.int64)
    is_cpu[call_tree.index] = True
    parent[call_tree.index] = np.where(call_tree.parent >= 0, call_tree.index[call_tree.parent], -1)
    own[call_tree.index] = call_tree.own(links.spent_ns)
    device, node = links.launched
    launcher = np.full(len(events), -1)
    launcher[device] = np.append(call_tree.index, -1)[node]
    # A file may hold bytes that are not UTF-8.
    texts = [text.decode("utf-8", "replace") for text in events.texts]
    return {
        "event": _known(np.arange(len(events))),
        "category": _texts(events.category, categories),
        "name": _texts(events.name, events.names),
        **_places(events, events.thread),
        **_starts(events, events.start_ns),
        "duration_ns": _known(events.duration_ns),
        "self_ns": _known(own, is_cpu),
        "parent": _known(parent, parent >= 0),
        "launched_by": _known(launcher, launcher >= 0),
        "correlation": _known(events.correlation, events.correlation != 0),
        "external_id": _known(events.external_id, events.external_id != 0),
        "sequence": _known(events.sequence, events.sequence >= 0),
        "forward_thread": _known(events.forward_thread, events.forward_thread != 0),
        "finished": _known(events.finished),
        "input_shapes": _texts(events.shapes, texts),
        "input_types": _texts(events.types, texts),
        "concrete_inputs": _texts(events.concrete, texts),
        "python_id": _known(events.python_id, events.python_id >= 0),
        "python_parent": _known(events.python_parent, events.python_parent >= 0),
    }


def _allocations(events: Events) -> dict[str, Any]:
    memory = events.memory
    every = np.zeros(len(memory), np.int32)
    numbers = ("size_bytes", "device_type", "device_index", "allocated_bytes", "reserved_bytes")
    size, kind, number, allocated, reserved = (
        getattr(memory, name).astype(np.int64) for name in numbers
    )
    return {
        "event": _known(np.arange(len(events), len(events) + len(memory))),
        "category": _texts(every, ["memory"]),
        "name": _texts(every, ["[memory]"]),
        **_places(events, memory.thread),
        **_starts(events, memory.time_ns),
        "size_bytes": _known(size),
        "device_type": _known(kind),
        "device_index": _known(number, number >= 0),
        "allocated_bytes": _known(allocated, np.full(len(memory), allocated.any())),
        "reserved_bytes": _known(reserved, np.full(len(memory), reserved.any())),
    }


def _places(events: Events, thread: Codes) -> dict[str, Any]:
    processes, threads = zip(*events.threads) if events.threads else ((), ())
    return {
        "process": _texts(thread, [*map(str, processes)]),
        "thread": _texts(thread, [*map(str, threads)]),
    }


def _starts(events: Events, start: Ints) -> dict[str, Any]:
    unix = _known(start + events.base_ns, np.full(len(start), events.base_ns != 0))
    return {"start_ns": _known(start), "start_unix_ns": unix}


def _known(values: NDArray[Any], known: Flags | None = None) -> Any:
    """An Arrow column of values; null where `known` is False."""
    import pyarrow

    return pyarrow.array(values, mask=None if known is None else ~known)


def _texts(codes: Codes, values: Sequence[str]) -> Any:
    """An Arrow column with the text at the position of each code; null for a negative code."""
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(
        _known(codes, codes >= 0), pyarrow.array(values, pyarrow.string())
    )
