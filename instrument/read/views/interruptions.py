"""The table of interruptions: the loader, garbage collection, compilation and other causes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.read.facts.call_tree import nest
from instrument.read.facts.groupby import Groups, cells, distinct, groupby
from instrument.read.facts.idle import is_loading
from instrument.read.facts.intervals import merged_in_groups
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import CountedSteps
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    PYTHON,
    Events,
    Flags,
    Ints,
    is_runtime,
    loader_iterator,
)
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

KINDS = (
    "loader", "garbage collection", "compilation", "guards", "module loading", "memory allocation",
    "full launch queue", "profiler", "other overhead",
)  # fmt: skip
(
    LOADER, GARBAGE_COLLECTION, COMPILATION, GUARDS, MODULE_LOADING, ALLOCATION, FULL_QUEUE,
    PROFILER, OTHER,
) = range(len(KINDS))  # fmt: skip

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
    step_ns="the time in the steps that count (all finished ones but the first) during which any "
    "of these interruptions was running, on any thread; None if no step finished in the trace",
    steps="in how many of the steps that count these interruptions ran; None if no step finished",
    share="`step_ns` as a share of the time of these steps; None if no step finished",
    workers="for the kind `loader`: whether torch's DataLoader loads in worker processes; None if "
    "the loader is not torch's DataLoader. None for all other kinds of interruptions",
    iterator="for the kind `loader`: the class of the loader's iterator; None if `name` does not "
    "contain the class. None for all other kinds of interruptions",
)


def interruptions(capture: Views) -> Table:
    """Return one row for each kind and name of an interruption; see `INTERRUPTIONS`.

    The row with the most CPU time comes first. Garbage collections need Python stacks and torch's
    option `record_python_gc_info`. Module loading needs the driver's calls, or CUPTI's overhead. So
    a kind without a row may have occurred without being recorded.

    Limit: the training thread does not wait for every interruption, such as those of the thread
    that pins memory.

    Cost: a test of each distinct name, and several sorts of the interruptions and steps.
    """
    links = capture.links
    events, steps = links.events, links.counted_steps
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
    step_ns, touched = _in_steps(merged_in_groups(groups.of, start, end), steps, groups)
    has_steps = len(links.steps) > 0
    whole = steps.total_ns if has_steps else 0
    iterators = [loader_iterator(name) for name in names]
    has_thread = groups.number(events.among(_OVERHEAD)[index]) == 0
    pairs = distinct(groups.of * len(events.threads) + events.thread[index])
    threads = np.bincount(pairs // len(events.threads), minlength=groups.count)
    in_steps = np.full(groups.count, has_steps)
    columns: dict[str, Any] = {
        "kind": kinds,
        "name": names,
        "calls": groups.size,
        "cpu_ns": groups.sum(end - start),
        "max_ns": -groups.min(-events.duration_ns[index]),
        "threads": cells(threads, has_thread),
        "step_ns": cells(step_ns, in_steps),
        "steps": cells(touched, in_steps),
        "share": [each / whole if whole else None for each in step_ns.tolist()],
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
    intervals: tuple[Ints, Ints, Ints], steps: CountedSteps, groups: Groups
) -> tuple[Ints, Ints]:
    """For each group of merged intervals, the time inside steps, and the number of these steps."""
    lasting = intervals[2] > intervals[1]
    group, start, until = (side[lasting] for side in intervals)
    in_groups = Groups(group, groups.count)
    lasting = steps.end_ns > steps.start_ns
    first = np.searchsorted(steps.end_ns[lasting], start, "right")
    last = np.searchsorted(steps.start_ns[lasting], until)  # the first step after the interval
    # A step counts for the first interval of the group that it overlaps.
    is_next = np.append(False, np.diff(group) == 0)[: len(group)]
    seen = np.where(is_next, np.append(0, last[:-1])[: len(last)], 0)
    touched = np.maximum(last - np.maximum(first, seen), 0)
    return in_groups.sum(steps.within(start, until)), in_groups.sum(touched)
