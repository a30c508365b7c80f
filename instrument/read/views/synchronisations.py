"""Calls that make the CPU or a stream wait, and the device work that they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.read.facts.groupby import Groups, groupby, groupby_rows, intern
from instrument.read.facts.places import callers
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.synchronisation import STREAM_WAIT, Synchronisations
from instrument.read.trace.events import Events, Flags, Ints, split_overload
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

SYNCHRONISATIONS: Schema = schema(
    name="the CPU call that waits, such as cudaStreamSynchronize, or that makes a stream wait, "
    "such as cudaStreamWaitEvent. A call that copies counts as waiting if it returned after the "
    "end of the copy",
    operator="the outermost operator around the call, inside the innermost range; None if there "
    "is no such operator",
    range="the path of the range that the call belongs to; in the backward, the range of the "
    "forward operator; None outside of all ranges",
    calls="the number of calls",
    cpu_ns="CPU time of the calls",
    cpu_wait_ns="the part of `cpu_ns` before the end of the work that the calls waited for; None "
    "if this work is not known, or if a stream waits and not the CPU",
    stream_wait_ns="time in which work was launched and its stream was free, but the work had to "
    "wait for work of another stream; None if this other work is not known, or if the CPU waits",
    device="the device of the work that the calls waited for; None if this work is not known",
    stream="the stream of the work that the calls waited for; None if this work is not known",
    waiting_stream="the stream that waits; None if the CPU waits",
    kernel="the kernel or copy that the calls waited for longest; if no call had to wait, the "
    "kernel or copy with which most calls synchronised",
    known_calls="the number of calls for which the awaited work is known",
    recorded_calls="the number of `known_calls` for which a cuda_sync event shows what the call "
    "waited for: a CUDA event, a stream or a device. For the other `known_calls`, the awaited work "
    "is inferred from times",
)


def synchronisations(capture: Views) -> Table:
    """Return the calls that wait, by name, operator, range, awaited stream and waiting stream.

    See `SYNCHRONISATIONS`. The row with the longest `stream_wait_ns`, or else `cpu_ns`, comes
    first. A call that waits for several streams counts for the stream whose work ended last.

    Limit: waiting inside kernels or inside other calls, such as `cudaFree`, is not counted.
    """
    links = capture.links
    events, found = links.events, links.synchronisations
    of_stream = found.kind == STREAM_WAIT
    edge = _last_edges(events, found, found.wait, len(found.call))
    is_known = edge >= 0
    earlier, later = (np.append(side, -1)[edge] for side in (found.earlier, found.later))
    source = np.where(is_known, events.thread[earlier], -1)
    waiting = np.where(is_known & of_stream, events.thread[later], -1)
    recorded = np.append(found.recorded, False)[edge]
    waited_ns = _waited_ns(events, found, edge, of_stream)
    operator, path = callers(links, found.call)
    numbers, operators = intern([split_overload(name)[0] for name in events.names])
    operator = np.append(numbers, -1)[operator]
    keys, groups = groupby_rows(events.name[found.call], operator, path, source, waiting)
    cpu_ns = events.duration_ns[found.call]
    longest = groups.sum(np.where(of_stream, waited_ns, cpu_ns))
    order = np.argsort(-longest, kind="stable")
    groups = groups.renumbered(order)
    name, operator, path, source, waiting = keys[:, order]
    texts, threads = [*links.scopes.paths.texts, None], [*events.threads, (None, None)]
    operators.append(None)
    columns: dict[str, list[Any]] = {
        "name": [events.names[k] for k in name.tolist()],
        "operator": [operators[k] for k in operator.tolist()],
        "range": [texts[k] for k in path.tolist()],
        "calls": groups.size.tolist(),
        "cpu_ns": groups.sum(cpu_ns).tolist(),
        "cpu_wait_ns": groups.sums(waited_ns, is_known & ~of_stream),
        "stream_wait_ns": groups.sums(waited_ns, is_known & of_stream),
        "device": [threads[k][0] for k in source.tolist()],
        "stream": [threads[k][1] for k in source.tolist()],
        "waiting_stream": [threads[k][1] for k in waiting.tolist()],
        "kernel": _kernels(events, groups, earlier, waited_ns),
        "known_calls": groups.number(is_known).tolist(),
        "recorded_calls": groups.number(is_known & recorded).tolist(),
    }
    return Table.of(SYNCHRONISATIONS, columns)


def _last_edges(events: Events, found: Synchronisations, of: Ints, count: int) -> Ints:
    """For each of `count` groups of edges, the edge whose work ended last; -1 for no edge."""
    order = np.lexsort((events.end_ns[found.earlier], of))
    last = np.full(count, -1)
    last[of[order]] = order  # if an index occurs several times, numpy keeps the last value
    return last


def _waited_ns(events: Events, found: Synchronisations, edge: Ints, of_stream: Flags) -> Ints:
    """For each call, how long it waited, or made a stream wait: the longest wait of each work."""
    cause = _last_edges(events, found, found.later, len(events))
    counts = cause[found.later] == np.arange(len(found.later))
    of_waits = Groups(found.wait, len(found.call)).sum(found.waited_ns, counts)
    return np.where(of_stream, of_waits, np.append(found.waited_ns, 0)[edge])


def _kernels(events: Events, groups: Groups, earlier: Ints, waited_ns: Ints) -> list[str | None]:
    known = np.flatnonzero(earlier >= 0)
    width = len(events.names)
    pairs, by_name = groupby(groups.of[known] * width + events.name[earlier[known]])
    best = Groups(pairs // width, groups.count).sorted_by(
        by_name.sum(waited_ns[known]), by_name.size
    )
    row = best.row(100)
    return [events.names[pairs[k] % width] if k >= 0 else None for k in row.tolist()]
