"""The parts of the steps: each nanosecond counts for one range and one kind of time.

At each moment of a step, the first of these kinds applies:

- compute: a kernel that is no communication, or a memset, runs on a device.
- exposed communication: communication runs on a device. In a trace without device work: process
  groups communicate on the CPU, and no thread runs another operator.
- copy: a copy runs on a device.
- waiting for data: the thread of the step waits for a batch.
- launch: the CPU is in a call that launches device work, or it has launched the next work, and the
  device has not begun this work.
- other CPU: the thread of the step, or the autograd engine for it, is in an operator, a range or a
  call of the runtime that does not wait for the device.
- idle: everything else. The CPU waits for a device that has no work, or the trace shows nothing.

Device work, and the delay before it, count for the range that launched it. If several devices or
streams work at one moment, the work that began first counts. A wait for data and a call that
launches count for the range around them; a loader outside of all ranges stands for a range itself.
At all other times, the innermost range on the CPU counts: on the thread of the autograd engine
while it runs a backward node, and else on the thread of the step. The time of a backward node
belongs to the range of its forward operator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from instrument.analysis.breakdown import COMMUNICATION, COPY, KERNEL, MEMSET
from instrument.analysis.collectives import exposed_on_cpu
from instrument.analysis.ranges import NO_LAUNCH, NO_RANGE
from instrument.analysis.steps import gaps
from instrument.analysis.views import Views
from instrument.findings.loader_wait import waits_for_data
from instrument.findings.places import Measured, measured, range_codes
from instrument.links.call_tree import CallTree
from instrument.links.groupby import distinct, groupby
from instrument.links.links import Links
from instrument.trace.events import Codes, Ints, is_runtime, is_step, is_wait

KINDS = (
    "compute",
    "exposed communication",
    "copy",
    "waiting for data",
    "launch",
    "other CPU",
    "idle",
)
COMPUTE, EXPOSED_COMMUNICATION, EXPOSED_COPY, WAITING, LAUNCH, OTHER_CPU, IDLE = range(len(KINDS))
#: The kinds of `split_parts`: those of `KINDS`, where two kinds take the place of "other CPU".
SPLIT_KINDS = (*KINDS[:OTHER_CPU], "CPU operators", "Python", *KINDS[IDLE:])
_OPERATORS, _PYTHON, _SPLIT_IDLE = OTHER_CPU, OTHER_CPU + 1, OTHER_CPU + 2
_ITERATOR = re.compile(r"(enumerate\(Data(?:Loader|Pipe)\))#\w*(?:\.__next__)?")
_LATEST = np.iinfo(np.int64).max
# Codes of paths below 0: no range, a launch that is not in the trace, and the range on the CPU.
_NO_RANGE, _NO_LAUNCH, _ON_CPU = -1, -2, -3


class _Layer(NamedTuple):
    """Intervals of one kind that do not overlap, sorted by start, with a code for each."""

    kind: int
    start_ns: Ints
    end_ns: Ints
    code: Ints

    def at(self, time_ns: Ints) -> Ints:
        """The interval around each time; -1 for none. An interval does not contain its end."""
        found = np.searchsorted(self.start_ns, time_ns, "right") - 1
        return np.where((found >= 0) & (time_ns < np.append(self.end_ns, 0)[found]), found, -1)


def step_parts(capture: Views, span: Measured) -> dict[tuple[str, str], int]:
    """Return the time of some steps in ns, by the path of the range and one of `KINDS`.

    The arguments, the cost and the sum are those of `split_parts`.
    """
    parts: dict[tuple[str, str], int] = {}
    for (path, kind), ns in split_parts(capture, span).items():
        place = path, KINDS[OTHER_CPU] if kind in SPLIT_KINDS[OTHER_CPU:_SPLIT_IDLE] else kind
        parts[place] = parts.get(place, 0) + ns
    return parts


def split_parts(capture: Views, span: Measured) -> dict[tuple[str, str], int]:
    """Return the time of some steps in ns, by the path of the range and one of `SPLIT_KINDS`.

    Other CPU time is split: "CPU operators" is time in operators and calls of the runtime, and
    "Python" is time in ranges, but in no operator.

    The times sum to the duration of the steps exactly. See the module for the kinds.

    Args:
        capture: the capture.
        span: the steps, which must not overlap.

    Cost: a sort of the starts and ends of all work, and of the CPU's events on the threads of the
    steps; about 1 µs for each.
    """
    links = capture.links
    layers = _device_layers(capture) if len(capture.work.event) else [_cpu_communication(links)]
    waits, loaders = _waits(capture)
    layers += [waits, *_launches(capture, span)]
    engine = _engine(links)
    path_of_node, kind_of_node = _on_cpu(links)
    code = path_of_node * len(SPLIT_KINDS) + kind_of_node
    differs = code[:-1] != code[links.call_tree.parent]
    begin, lasts_ns = _segments(links, span, [*layers, engine], differs)
    at = engine.at(begin)
    thread = np.where(at >= 0, np.append(engine.code, 0)[at], _thread(links))
    node = _node_at(links.call_tree, thread.astype(np.int32), begin)
    on_cpu = path_of_node[node]
    path, kind = on_cpu.copy(), kind_of_node[node]
    for layer in reversed(layers):
        at = layer.at(begin)
        found = at >= 0
        code = layer.code[at[found]]
        path[found] = np.where(code == _ON_CPU, on_cpu[found], code)
        kind[found] = layer.kind
    keys, groups = groupby((path - _NO_LAUNCH) * len(SPLIT_KINDS) + kind)
    texts = [NO_LAUNCH, NO_RANGE, *links.scopes.paths.texts, *loaders]
    parts: dict[tuple[str, str], int] = {}
    for key, total in zip(keys.tolist(), groups.sum(lasts_ns).tolist()):
        place = plain_path(texts[key // len(SPLIT_KINDS)]), SPLIT_KINDS[key % len(SPLIT_KINDS)]
        parts[place] = parts.get(place, 0) + total
    return parts


def compared_steps(capture: Views) -> Measured:
    """The steps to compare: all finished steps but the first, or the recording if it has no steps.

    If a step begins before the one before it ends, the earlier one counts until then.
    """
    span = measured(capture)
    return replace(span, end_ns=np.minimum(span.end_ns, np.append(span.start_ns[1:], _LATEST)))


def plain_path(path: str) -> str:
    """The path of a range without the class of the loader's iterator.

    torch writes the class into the name, so a loader has another name with worker processes.
    """
    return _ITERATOR.sub(r"\1", path)


def _segments(
    links: Links, span: Measured, layers: Sequence[_Layer], differs: Flags
) -> tuple[Ints, Ints]:
    """The start and the duration of each segment of the steps, in which nothing starts or ends.

    `differs` is a mask of the nodes at which the range or the kind of time is not that of the
    parent. The other nodes start and end inside segments.
    """
    tree = links.call_tree
    threads = np.append(np.unique(layers[-1].code), _thread(links))
    nodes = np.flatnonzero(differs & np.isin(tree.thread, threads))
    start_ns = tree.start_ns[nodes]
    times = [span.start_ns, span.end_ns, start_ns, start_ns + links.spent_ns[nodes]]
    times += [side for layer in layers for side in (layer.start_ns, layer.end_ns)]
    cuts = distinct(np.concatenate(times))
    begin, lasts_ns = cuts[:-1], np.diff(cuts)
    inside = span.holds(begin) >= 0
    return begin[inside], lasts_ns[inside]


def _device_layers(capture: Views) -> list[_Layer]:
    """The work of the devices, with the path of the range that launched it."""
    work, (_, launcher) = capture.work, capture.links.launched
    path = np.where(launcher >= 0, range_codes(capture, work.event), _NO_LAUNCH)
    layers = []
    for kind, kinds in (
        (COMPUTE, (KERNEL, MEMSET)),
        (EXPOSED_COMMUNICATION, (COMMUNICATION,)),
        (EXPOSED_COPY, (COPY,)),
    ):
        chosen = np.isin(work.kind, kinds)
        layers.append(_disjoint(kind, work.start_ns[chosen], work.end_ns[chosen], path[chosen]))
    return layers


def _cpu_communication(links: Links) -> _Layer:
    """Communication on the CPU, for the range in which the CPU is meanwhile."""
    start_ns, end_ns = exposed_on_cpu(links)
    return _Layer(EXPOSED_COMMUNICATION, start_ns, end_ns, np.full(len(start_ns), _ON_CPU))


def _waits(capture: Views) -> tuple[_Layer, list[str]]:
    """The waits for data, and the names of loaders outside of all ranges.

    These names stand for ranges: their codes follow the codes of the paths.
    """
    events, wait = capture.events, waits_for_data(capture)
    names, code = np.unique(events.name[wait], return_inverse=True)
    path = range_codes(capture, wait)
    path = np.where(path >= 0, path, len(capture.links.scopes.paths.texts) + code)
    layer = _disjoint(WAITING, events.start_ns[wait], events.end_ns[wait], path)
    return layer, [events.names[k] for k in names.tolist()]


def _launches(capture: Views, span: Measured) -> list[_Layer]:
    """The calls that launch work, and the delays until the work begins on an idle device."""
    events, links, work = capture.events, capture.links, capture.work
    if not len(work.event):
        return []
    call = distinct(work.call[work.call >= 0])
    scope = np.append(links.scopes.innermost, -1)[links.call_tree.nodes_of(call)]
    is_ours = (events.thread[call] == _thread(links)) | np.append(links.scopes.backward, False)[
        scope
    ]
    call = call[is_ours]
    gap = gaps(events, work, span.start_ns, span.end_ns)
    queued = gap.call >= 0
    delayed = gap.call[queued]
    return [
        _disjoint(LAUNCH, events.start_ns[call], events.end_ns[call], range_codes(capture, call)),
        _disjoint(LAUNCH, gap.queued_ns[queued], gap.end_ns[queued], range_codes(capture, delayed)),
    ]


def _engine(links: Links) -> _Layer:
    """The backward nodes, with the thread of each."""
    nodes, backward = links.scopes.nodes, links.scopes.backward
    thread = nodes.thread[backward].astype(np.int64)
    return _disjoint(OTHER_CPU, nodes.start_ns[backward], nodes.end_ns[backward], thread)


def _disjoint(kind: int, start_ns: Ints, end_ns: Ints, code: Ints) -> _Layer:
    """A layer of intervals that may overlap: each moment counts for the one that began first."""
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns, code = start_ns[order], end_ns[order], code[order]
    until = np.maximum.accumulate(end_ns)
    start_ns = np.maximum(start_ns, np.append(start_ns[:1], until[:-1])[: len(start_ns)])
    left = start_ns < end_ns
    return _Layer(kind, start_ns[left], end_ns[left], code[left])


def _thread(links: Links) -> int:
    """The thread of the steps; without steps, the thread with the most events on the CPU."""
    thread = links.events.thread[links.steps]
    if not len(thread):
        thread = links.call_tree.thread
    return int(np.bincount(thread).argmax()) if len(thread) else -1


def _on_cpu(links: Links) -> tuple[Ints, Ints]:
    """The path of the range of each node, and the kind of its time; the last is for no node.

    A thread that waits for a device, or is in no operator, range or call, is idle.
    """
    events, tree, scopes = links.events, links.call_tree, links.scopes
    waits = events.among(is_runtime) & events.named(is_wait)
    is_range = np.zeros(len(events), np.bool_)
    is_range[scopes.ranges.index] = True
    kind = np.where(is_range, _PYTHON, _OPERATORS)
    kind[waits | events.named(is_step)] = _SPLIT_IDLE
    path = np.append(scopes.attributed, _NO_RANGE)[np.append(scopes.innermost, -1)]
    return path, np.append(kind[tree.index], _SPLIT_IDLE)


def _node_at(tree: CallTree, thread: Codes, time_ns: Ints) -> Ints:
    """The innermost node of each thread at a time; -1 for none. A node does not contain its end."""
    node = tree.node_at(thread, time_ns)
    while (ended := (node >= 0) & (np.append(tree.end_ns, 0)[node] <= time_ns)).any():
        node[ended] = tree.parent[node[ended]]
    return node
