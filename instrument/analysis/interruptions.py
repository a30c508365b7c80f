"""What interrupted the training code: the loader, garbage collection, compilation and others."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from instrument.analysis.steps import is_loading
from instrument.analysis.table import Schema, Table, schema
from instrument.links.call_tree import nest
from instrument.links.groupby import groupby
from instrument.links.intervals import merged, sweep
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
# Kineto writes what the tracing library of the device reports (CUPTI, or PTI of Intel) with these
# names (`overheadKindString` in Kineto's cupti_strings.cpp).
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
# Whether torch's own iterators load in worker processes.
_WORKERS = {"_MultiProcessingDataLoaderIter": True, "_SingleProcessDataLoaderIter": False}

INTERRUPTIONS: Schema = schema(
    kind="loader, garbage collection, compilation, guards (torch.compile checks whether its code "
    "still fits), module loading (code of the device), memory allocation (calls that allocate or "
    "free memory of a device or pinned memory), full launch queue, profiler, or other overhead "
    "(reported without a known cause)",
    name="the event's name in the trace",
    calls="how often it happened; inside another one of the same kind it does not count",
    cpu_ns="CPU time of these calls; each nanosecond of a thread counts once for a kind, but a "
    "call can contain calls of other kinds",
    max_ns="the longest call",
    threads="the number of threads that it happened on; None for Kineto's category `overhead`, "
    "which names no thread",
    step_ns="the time in finished steps during which it went on, on any thread; None if no step "
    "finished in the trace, as in the next two columns",
    steps="the number of finished steps in which it went on",
    share="`step_ns` as a share of the time of all finished steps",
    workers="for torch's DataLoader, whether it loads in worker processes; None for all else",
    iterator="for a loader, the class of its iterator; None for all else",
)


def interruptions(events: Events) -> Table:
    """Return one row for each kind and name of an interruption, the longest CPU time first.

    See `INTERRUPTIONS`. A trace holds garbage collections only if it was recorded with Python
    stacks and torch's experimental option `record_python_gc_info`. It holds module loading only as
    overhead that CUPTI reports. So a kind without a row may not have been recorded.

    Lost: whether the training thread waited. A call on another thread, such as an allocation by
    the thread that pins memory, may have interrupted nothing.

    Cost: a test of each distinct name, and a pass over the categories.
    """
    kind = _kinds(events)
    width = np.int32(len(KINDS))
    # Calls nest among those of their own kind.
    tree = nest(events, kind >= 0, events.thread * width + kind.astype(np.int32))
    outermost = tree.parent < 0
    index, start = tree.index[outermost], tree.start_ns[outermost]
    end = tree.ends_before_overlap()[outermost]
    keys, groups = groupby(kind[index] * len(events.names) + events.name[index])
    names = [events.names[k % len(events.names)] for k in keys.tolist()]
    kinds = [KINDS[k // len(events.names)] for k in keys.tolist()]
    rows = groups.rows()
    steps = finished_steps(events)
    begun, ended = events.start_ns[steps], events.end_ns[steps]
    in_steps = [_within(start[row], end[row], begun, ended) for row in rows]
    step_ns, whole = [int(each.sum()) for each in in_steps], int((ended - begun).sum())
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
        "steps": [int(np.count_nonzero(each)) if len(steps) else None for each in in_steps],
        "share": [each / whole if whole else None for each in step_ns],
        "workers": [_WORKERS.get(each or "") for each in iterators],
        "iterator": iterators,
    }
    return Table.of(INTERRUPTIONS, columns).sort("cpu_ns")


def _kinds(events: Events) -> Ints:
    """The kind of each event, as an index into `KINDS`; -1 for events that interrupt nothing."""
    on_cpu, calls = events.among(OPERATOR | ANNOTATION), events.among(is_runtime)
    found: list[tuple[int, Flags, Callable[[str], bool]]] = [
        (GARBAGE_COLLECTION, events.among(PYTHON), _GARBAGE_COLLECTION.__eq__),
        (COMPILATION, on_cpu, lambda name: name.endswith(_COMPILING)),
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


def _within(start: Ints, end: Ints, begun: Ints, ended: Ints) -> Ints:
    """For each step, how long at least one of the intervals went on."""
    timeline = sweep([merged(start, end)])
    return timeline.within(timeline.active[0], begun, ended)
