"""The events, allocations and frees of a trace as one Arrow table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from instrument.read.facts.device_work import COPY, MEMSET, Work, device_work, moved_bytes
from instrument.read.facts.links import Links
from instrument.read.facts.schema import Schema, names_of, schema
from instrument.read.trace.events import Codes, Details, Events, Flags, Ints, decoded

if TYPE_CHECKING:
    import pyarrow

# Kineto's categories before torch 1.12, and the names of these categories in later versions.
_CURRENT_CATEGORIES = {
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
_LARGEST = np.iinfo(np.int64).max
# The fields of `Details` that are text; all others are numbers.
_TEXT_DETAILS = frozenset(
    name for name, kind in get_type_hints(Details).items() if kind == (str | None)
)

# The texts begin with the column's type, in brackets.
EVENTS: Schema = schema(
    event="(int64) the number of the row in this window, from 0",
    category="(string) Kineto's category: `cpu_op`, `user_annotation`, `cuda_runtime`, `kernel`, "
    "…; `memory` for allocations and frees",
    name="(string) the name of the event, such as an operator, range, call or kernel",
    process="(string) the process; for device events, the device",
    thread="(string) the thread; for device events, the stream",
    start_ns="(int64) the start, on the trace's own clock",
    start_unix_ns="(int64) the start as Unix time, for comparing ranks; null if the trace does "
    "not hold its Unix time",
    duration_ns="(int64) the duration; null for allocations and frees",
    self_ns="(int64) the duration without the time of the operators, ranges and calls directly "
    "inside this event; null for device events and Python frames",
    parent="(int64) the `event` of the operator, range or call directly around this event",
    launched_by="(int64) for device work, the `event` of the operator or range that launched it",
    correlation="(int64) a number that a launch shares with the device work that it started",
    external_id="(int64) torch's number for the operator; launches and device work carry the "
    "number of their operator",
    sequence="(int64) a number that a forward operator shares with its backward, unique on each "
    "`forward_thread`",
    forward_thread="(int64) for a backward operator, torch's number of the thread that ran the "
    "forward",
    finished="(bool) whether the event ended within the window; null for allocations and frees",
    input_shapes="(string) the input shapes as JSON, as recorded",
    input_types="(string) the input types as JSON, as recorded",
    concrete_inputs="(string) the values of the inputs that are not tensors as JSON, as recorded",
    call_stack="(string) the Python frames around an operator, the innermost first, joined by `;`; "
    "null if the trace has the Python frames as events of their own",
    grid="(string) the blocks of a kernel in each dimension, as JSON",
    block="(string) the threads of a block in each dimension, as JSON",
    blocks_per_sm="(float) for a kernel, blocks per multiprocessor of the device",
    occupancy="(double) Kineto's estimate of the achieved occupancy of a kernel, as a fraction; "
    "null if Kineto made no estimate",
    moved_bytes="(int64) the bytes that a copy or memset moves, as recorded on the device event or "
    "else on the CPU call that launched it",
    bytes_per_second="(int64) for a copy or memset on the device, `moved_bytes` divided by "
    "`duration_ns`; null if `duration_ns` is 0",
    collective="(string) for a collective, its name, such as `allreduce`. The collective's kernel "
    "and the event `record_param_comms` have this column and the next ones, up to "
    "`destination_rank`",
    element_type="(string) the type of the elements of a collective",
    input_elements="(int64) the number of elements in this rank's input of the collective",
    output_elements="(int64) the number of elements in this rank's output of the collective",
    ranks="(string) the ranks that take part, as JSON; torch shortens a long list",
    group_size="(int64) how many ranks take part",
    process_group="(string) the name of the process group",
    group_description="(string) torch's description of the process group, such as `default_pg`",
    collective_number="(int64) torch's sequence number of the collective in its process group",
    source_rank="(int64) the rank that sends, for a transfer between two ranks",
    destination_rank="(int64) the rank that receives",
    graph="(int64) the CUDA graph that launched a device event",
    graph_node="(int64) the node of the CUDA graph that the device event ran",
    sync_kind="(string) the kind of an event of the category `cuda_sync`, such as `Stream Wait "
    "Event`",
    waits_for_stream="(int64) the stream that an event of `cuda_sync` waits for",
    waits_for_event="(int64) the CUDA event that an event of `cuda_sync` waits for",
    waits_for_correlation="(int64) the `correlation` of the call that recorded this CUDA event",
    launched_kernel="(string) for a call, the kernel that it launches; only ROCm records this",
    annotation="(string) the text that `torch.cuda._graph_annotations.mark_kernels` gave to a node "
    "of a CUDA graph, if torch's tool wrote it into the trace",
    python_id="(int64) the id of a Python frame",
    python_parent="(int64) for a Python frame, the id of the frame that called it",
    size_bytes="(int64) the size of an allocation; negative for a free",
    address="(int64) the address of an allocation or free; null if it was not recorded",
    device_type="(int64) for an allocation or free, torch's `DeviceType`; 0 is the CPU",
    device_index="(int64) for an allocation or free, the index of the device, such as 1 for "
    "`cuda:1`; null for the CPU",
    allocated_bytes="(int64) the memory that is allocated on the device after the event; null if "
    "it was not recorded",
    reserved_bytes="(int64) the memory that the allocator has reserved after the event; null if "
    "it was not recorded",
)


def to_arrow(events: Events) -> pyarrow.Table:
    """Return the events, then the allocations and frees, as one Arrow table; see `EVENTS`.

    Needs pyarrow. Cost: about 1 µs per event.
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
    work = device_work(links)
    return {
        "event": _known(np.arange(len(events))),
        "category": _texts(events.category, categories),
        "name": _texts(events.name, events.names),
        **_place(events, events.thread, events.start_ns),
        "duration_ns": _known(events.duration_ns),
        "self_ns": _known(own, is_cpu),
        "parent": _known(parent, parent >= 0),
        "launched_by": _known(launcher, launcher >= 0),
        "correlation": _known(events.correlation, events.correlation != 0),
        "external_id": _known(events.external_id, events.external_id != 0),
        "sequence": _known(events.sequence, events.sequence >= 0),
        "forward_thread": _known(events.forward_thread, events.forward_thread != 0),
        "finished": _known(events.finished),
        "input_shapes": _arguments(events.shapes, events.texts, _as_recorded),
        "input_types": _arguments(events.types, events.texts, _as_recorded),
        "concrete_inputs": _arguments(events.concrete, events.texts, _as_recorded),
        "call_stack": _arguments(events.call_stack, events.texts, _frames),
        "grid": _arguments(events.grid, events.grids, _on_one_line),
        "block": _arguments(events.block, events.grids, _on_one_line),
        **_of_device(events, work),
        **_details(events),
        "python_id": _known(events.python_id, events.python_id >= 0),
        "python_parent": _known(events.python_parent, events.python_parent >= 0),
    }


def _of_device(events: Events, work: Work) -> dict[str, Any]:
    occupancy = estimated_occupancy(events, np.arange(len(events)))
    copies = np.isin(work.kind, (COPY, MEMSET))
    event, moved = work.event[copies], events.moved_bytes.copy()
    moved[event] = moved_bytes(events, event, work.call[copies])
    rate = np.full(len(events), -1)
    rate[event] = bytes_per_second(moved[event], events.duration_ns[event])
    return {
        "blocks_per_sm": _known(events.blocks_per_sm, ~np.isnan(events.blocks_per_sm)),
        "occupancy": _known(occupancy, ~np.isnan(occupancy)),
        "moved_bytes": _known(moved, moved >= 0),
        "bytes_per_second": _known(rate, rate >= 0),
    }


def _details(events: Events) -> dict[str, Any]:
    import pyarrow

    index = pyarrow.array(np.where(events.detail >= 0, events.detail, len(events.details)))
    columns = {}
    # The last entry, `Details()`, is for events without details.
    for field, values in zip(Details._fields, zip(*events.details, Details())):
        if field in _TEXT_DETAILS:
            distinct = pyarrow.array(values, pyarrow.string()).dictionary_encode()
        else:
            fits = [each if each is not None and abs(each) <= _LARGEST else None for each in values]
            distinct = pyarrow.array(fits, pyarrow.int64())
        columns[field] = distinct.take(index)
    return columns


def _allocations(events: Events) -> dict[str, Any]:
    memory = events.memory
    every = np.zeros(len(memory), np.int32)
    device, index = (side.astype(np.int64) for side in (memory.device_type, memory.device_index))
    totals = {"allocated_bytes": memory.allocated_bytes, "reserved_bytes": memory.reserved_bytes}
    return {
        "event": _known(np.arange(len(events), len(events) + len(memory))),
        "category": _texts(every, ["memory"]),
        "name": _texts(every, ["[memory]"]),
        **_place(events, memory.thread, memory.time_ns),
        "size_bytes": _known(memory.size_bytes),
        "address": _known(memory.address, memory.address != 0),
        "device_type": _known(device),
        "device_index": _known(index, index >= 0),
        **{name: _known(each, np.full(len(each), each.any())) for name, each in totals.items()},
    }


def _place(events: Events, thread: Codes, start_ns: Ints) -> dict[str, Any]:
    processes, threads = zip(*events.threads) if events.threads else ((), ())
    has_unix_time = np.full(len(start_ns), events.base_ns != 0)
    return {
        "process": _texts(thread, [*map(str, processes)]),
        "thread": _texts(thread, [*map(str, threads)]),
        "start_ns": _known(start_ns),
        "start_unix_ns": _known(start_ns + events.base_ns, has_unix_time),
    }


def _known(values: NDArray[Any], known: Flags | None = None) -> Any:
    """An Arrow column of values; null where `known` is False."""
    import pyarrow

    return pyarrow.array(values, mask=None if known is None else ~known)


def _texts(codes: Codes, values: Sequence[str]) -> Any:
    """An Arrow column with `values[code]` for each code; null for a negative code."""
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(
        _known(codes, codes >= 0), pyarrow.array(list(values), pyarrow.string())
    )


def _arguments(codes: Codes, texts: Sequence[bytes], converted: Callable[[bytes], str]) -> Any:
    """An Arrow column with `converted(texts[code])` for each code; null for -1."""
    used = np.flatnonzero(np.bincount(codes[codes >= 0], minlength=len(texts)))
    position = np.full(len(texts) + 1, -1, np.int32)  # the last entry is for code -1
    position[used] = np.arange(len(used))
    return _texts(position[codes], [converted(texts[k]) for k in used.tolist()])


def _as_recorded(text: bytes) -> str:
    return text.decode("utf-8", "replace")  # a file may hold bytes that are not UTF-8


def _on_one_line(text: bytes) -> str:
    return json.dumps(decoded(text))  # some versions of torch write each number on its own line


def _frames(text: bytes) -> str:
    found = decoded(text)
    return found if isinstance(found, str) else _as_recorded(text)


def bytes_per_second(size: Ints, duration_ns: Ints) -> Ints:
    """Each size divided by its duration; -1 for a rate that is unknown or too large for 64 bits."""
    pairs = zip(size.tolist(), duration_ns.tolist())
    rates = [each * 10**9 // ns if ns > 0 and each >= 0 else -1 for each, ns in pairs]
    return np.array([rate if rate < 2**63 else -1 for rate in rates], np.int64)


def estimated_occupancy(events: Events, kernel: Ints) -> NDArray[np.float64]:
    """Kineto's estimates of the occupancy of kernels as fractions; NaN without an estimate."""
    percent = events.occupancy[kernel].astype(np.float64)
    return np.where(percent > 0, percent / 100, np.nan)
