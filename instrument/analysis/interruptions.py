"""The table of interruptions: the loader, garbage collection, compilation and other causes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from instrument.analysis.steps import is_loading
from instrument.analysis.table import Schema, Table, schema
from instrument.links.call_tree import nest
from instrument.links.groupby import Groups, groupby
from instrument.links.intervals import sweep
from instrument.links.step_index import finished_steps
from instrument.trace.events import (
    ANNOTATION,
    OPERATOR,
    PYTHON,
    Events,
    Flags,
    Ints,
    is_runtime,
    loader_iterator,
)

KINDS = (
    "loader",
    "garbage collection",
    "compilation",
    "guards",
    "module loading",
    "memory allocation",
    "full launch queue",
    "profiler",
    "other overhead",
)
(
    LOADER,
    GARBAGE_COLLECTION,
    COMPILATION,
    GUARDS,
    MODULE_LOADING,
    ALLOCATION,
    FULL_QUEUE,
    PROFILER,
    OTHER,
) = range(len(KINDS))

# torch writes this event if its experimental option `record_python_gc_info` is on.
_GARBAGE_COLLECTION = "Python GC"
# `dynamo_timed` in torch/_dynamo/utils.py adds this to the names of all parts of a compilation.
_COMPILING = " (dynamo_timed)"
_GUARDS = "TorchDynamo Cache Lookup"
_MODULES = re.compile(r"(cu|cuda|hip|ze)(Module|Library)(Load|Unload|Create|Get)")
_ALLOCATES = re.compile(
    r"(cu|cuda|hip|hipExt)(Malloc|Free|Host(Malloc|Alloc|Free|Register|Unregister)"
    r"|Mem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|Address(Reserve|Free)))"
    r"|zeMem(Alloc|Free)|(ur|pi(ext)?)USM\w*(Alloc|Free)"
)
# Kineto writes the overhead that the device's tracing library (CUPTI, or Intel's PTI) reports. The
# names are those of `overheadKindString` in Kineto's cupti_strings.cpp.
_OVERHEAD = frozenset({"overhead"})
_OVERHEADS = {
    "Driver Compiler": COMPILATION,
    "Runtime Triggered Module Loading": MODULE_LOADING,
    "Lazy Function Loading": MODULE_LOADING,
    "Command Buffer Full": FULL_QUEUE,
    "Activity Buffer Request": PROFILER,
    "Buffer Flush": PROFILER,
    "Instrumentation": PROFILER,
    "Resource": PROFILER,
}
# torch's own DataLoader iterators, and whether they load in worker processes.
_WORKERS = {"_MultiProcessingDataLoaderIter": True, "_SingleProcessDataLoaderIter": False}

INTERRUPTIONS: Schema = schema(
    kind="loader, garbage collection, compilation, guards (torch.compile checks whether its code "
    "still fits), module loading (code of the device), memory allocation (calls that allocate or "
    "free memory of a device or pinned memory), full launch queue, profiler, or other overhead "
    "(reported without a known cause)",
    name="the event's name in the trace",
    calls="the number of interruptions; an interruption inside another one of the same kind is not "
    "counted",
    cpu_ns="CPU time of the interruptions. Each nanosecond of a thread counts once for a kind. If "
    "interruptions of several kinds are nested, it counts once for each of these kinds",
    max_ns="the duration of the longest interruption",
    threads="the number of threads with these interruptions; None for Kineto's category "
    "`overhead`, which names no thread",
    step_ns="the time in finished steps during which any of these interruptions was running, on "
    "any thread; None if no step finished in the trace",
    steps="the number of finished steps with these interruptions; None if no step finished",
    share="`step_ns` as a share of the time of all finished steps; None if no step finished",
    workers="for the kind `loader`: whether torch's DataLoader loads in worker processes; None if "
    "the loader is not torch's DataLoader. None for all other kinds of interruptions",
    iterator="for the kind `loader`: the class of the loader's iterator; None if `name` does not "
    "contain the class. None for all other kinds of interruptions",
)


def interruptions(events: Events) -> Table:
    """Return one row for each kind and name of an interruption; see `INTERRUPTIONS`.

    The row with the most CPU time comes first. A trace holds garbage collections only if it was
    recorded with Python stacks and torch's experimental option `record_python_gc_info`. A trace
    holds module loading only if the driver's calls were recorded, or if CUPTI reports module
    loading as overhead. So if a kind has no row, it may have occurred without being recorded.

    Limit: the training thread does not wait for every interruption. For example, an allocation by
    the thread that pins memory may delay nothing.

    Cost: a test of each distinct name, a pass over the categories of all events, and several sorts
    of the interruptions and steps.
    """
    kind = kinds_of(events)
    width = np.int32(len(KINDS))
    # Calls of different kinds are put on different threads, so a call nests only in its kind.
    tree = nest(events, kind >= 0, events.thread * width + kind.astype(np.int32))
    outermost = tree.parent < 0
    index, start = tree.index[outermost], tree.start_ns[outermost]
    end = tree.ends_before_overlap[outermost]
    keys, groups = groupby(kind[index] * len(events.names) + events.name[index])
    names = [events.names[k % len(events.names)] for k in keys.tolist()]
    kinds = [KINDS[k // len(events.names)] for k in keys.tolist()]
    rows = groups.rows()
    steps = finished_steps(events)
    begun, ended = events.start_ns[steps], events.end_ns[steps]
    step_ns, touched = (each.tolist() for each in _in_steps(start, end, groups, begun, ended))
    whole = int((ended - begun).sum())
    iterators = [loader_iterator(name) for name in names]
    has_thread = ~events.among(_OVERHEAD)[index]
    columns = {
        "kind": kinds,
        "name": names,
        "calls": groups.size.tolist(),
        "cpu_ns": groups.sum(end - start).tolist(),
        "max_ns": [int(events.duration_ns[index[row]].max()) for row in rows],
        "threads": [
            len(np.unique(events.thread[index[row]])) if has_thread[row].all() else None
            for row in rows
        ],
        "step_ns": step_ns if len(steps) else [None] * len(rows),
        "steps": touched if len(steps) else [None] * len(rows),
        "share": [each / whole if whole else None for each in step_ns],
        "workers": [_WORKERS.get(each or "") for each in iterators],
        "iterator": iterators,
    }
    return Table.of(INTERRUPTIONS, columns).sort("cpu_ns")


def is_compilation(name: str) -> bool:
    """Whether an event of this name is a part of a compilation by torch.compile."""
    return name.endswith(_COMPILING)


def kinds_of(events: Events) -> Ints:
    """The kind of each event, as an index into `KINDS`; -1 for events that are no interruption."""
    on_cpu, calls = events.among(OPERATOR | ANNOTATION), events.among(is_runtime)
    found: list[tuple[int, Flags, Callable[[str], bool]]] = [
        (GARBAGE_COLLECTION, events.among(PYTHON), _GARBAGE_COLLECTION.__eq__),
        (COMPILATION, on_cpu, is_compilation),
        (GUARDS, on_cpu, _GUARDS.__eq__),
        (MODULE_LOADING, calls, lambda name: _MODULES.match(name) is not None),
        (ALLOCATION, calls, lambda name: _ALLOCATES.match(name) is not None),
    ]
    kind = np.full(len(events), -1)
    kind[is_loading(events)] = LOADER
    for number, among, test in found:
        if among.any():
            kind[among & events.named(test)] = number
    overhead = np.flatnonzero(events.among(_OVERHEAD))
    of_name = np.array([_OVERHEADS.get(name, OTHER) for name in events.names], np.int64)
    kind[overhead] = of_name[events.name[overhead]]
    return kind


def _in_steps(
    start: Ints, end: Ints, groups: Groups, begun: Ints, ended: Ints
) -> tuple[Ints, Ints]:
    """For each group of intervals, the time inside steps, and how many steps the group overlaps.

    Time in which intervals of a group overlap counts once. Time in which two steps overlap counts
    twice. The steps begin at `begun`, which is sorted, and end at `ended`.

    Memory grows with the number of intervals plus the number of steps, not with their product.
    """
    lasting = ended > begun
    begun, ended = begun[lasting], ended[lasting]
    timeline = sweep([(start, end)], [groups.of])
    active = timeline.active[0] & (timeline.end_ns > timeline.start_ns)
    start, end, group = timeline.start_ns[active], timeline.end_ns[active], timeline.group[active]
    step_ns = _until(end, begun, ended) - _until(start, begun, ended)
    # A step counts once for a group: at the first interval of the group that ends after the step
    # begins. If this interval does not overlap the step, no interval of the group does.
    is_first = np.append(True, group[1:] != group[:-1])[: len(group)]
    begins_before_end = np.searchsorted(begun, end)
    begins_before = np.where(is_first, 0, np.roll(begins_before_end, 1))
    order = np.argsort(ended, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    ends_before = np.searchsorted(ended[order], start, "right")
    over = ends_before - _smaller(rank, begins_before, ends_before)
    steps = begins_before_end - begins_before - over
    pieces = Groups(group, groups.count)
    return pieces.sum(step_ns), pieces.sum(steps)


def _until(time_ns: Ints, begun: Ints, ended: Ints) -> Ints:
    """For each point in time, how long each step ran before the point, summed over the steps."""
    times = np.concatenate([begun, ended])
    order = np.argsort(times, kind="stable")
    at_ns = times[order]
    depth = np.cumsum(np.repeat([1, -1], len(begun))[order])
    before = np.concatenate([[0], np.cumsum(depth[:-1] * np.diff(at_ns))])
    at = np.searchsorted(at_ns, time_ns, "right") - 1
    if not len(times):
        return np.zeros(len(time_ns), np.int64)
    total: Ints = np.where(at >= 0, before[at] + depth[at] * (time_ns - at_ns[at]), 0)
    return total


def _smaller(values: Ints, first: Ints, limit: Ints) -> Ints:
    """For each k, how many of `values[: first[k]]` are smaller than `limit[k]`.

    `values` are the numbers from 0 to `len(values) - 1` in any order. `values[: first[k]]` is cut
    into blocks whose sizes are powers of two, and a binary search counts in each sorted block.
    """
    found, size = np.zeros(len(first), np.int64), 1
    width = len(values) + 1
    while size <= len(values):
        block = np.arange(len(values)) // size
        ordered = np.sort(block * width + values)
        query = np.flatnonzero(first & size)
        last = first[query] // size - 1
        found[query] += np.searchsorted(ordered, last * width + limit[query]) - last * size
        size *= 2
    return found
