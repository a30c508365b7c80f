"""The launches that were captured into CUDA graphs, and which launch became which node.

A program captures a graph once: between `cudaStreamBeginCapture` and `cudaStreamEndCapture`, the
calls that launch work run on the CPU, inside their operators and ranges, and their work becomes
nodes of the graph. The device runs nothing. Each launch of the graph then replays all nodes. HIP
works in the same way.

If the captured calls use one stream, each node depends on the node before it. So the nodes start in
the order of the calls, on whatever streams they run. If a call makes a stream wait for another
stream, the graph has branches, and the order of the nodes is not known.

No id in a trace joins a captured call to its node. The two are joined by their order, and a capture
is refused if the number, the kinds or the kernels of its launches differ from those of the nodes.
Kineto writes the name of the kernel on the launches of ROCm, and on none of CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from instrument.links.links import Links
from instrument.trace.events import (
    OPERATOR,
    Events,
    Flags,
    Ints,
    is_runtime,
    is_step,
    works_on_device,
)

# What a captured launch does on the device. OTHER stands for a graph inside the graph, and for nodes
# that were added without a launch: their work is not known.
KERNEL, COPY, MEMSET, OTHER = range(4)
_NOTHING = -1
# The first of these expressions that matches the name of a call decides. A host function does
# nothing on the device.
_KINDS = (
    (re.compile("GraphLaunch|GraphAdd|UpdateCaptureDependencies"), OTHER),
    (re.compile("LaunchHostFunc"), _NOTHING),
    (re.compile("Launch"), KERNEL),
    (re.compile("Memcpy"), COPY),
    (re.compile("Memset"), MEMSET),
)
_BEGIN, _END, _FORK = "StreamBeginCapture", "StreamEndCapture", "StreamWaitEvent"

NO_CAPTURE = "no capture"
OTHER_LAUNCHES = "other launches"
OTHER_KERNELS = "other kernels"
NO_ORDER = "unknown order"
SEVERAL = "several captures"
BY_KERNELS, BY_ORDER = "kernel names", "order"


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The launches between the begin and the end of one capture, in the order of the calls.

    Attributes:
        kind: KERNEL, COPY, MEMSET or OTHER.
        kernel: the name of the kernel; None if the trace does not have it.
        operator: the innermost operator around the launch; None for none.
        range: the path of the range that the launch belongs to; None for none.
        is_named: whether it launches kernels, and the trace has the names of all of them.
        forks: whether a stream waited for another one.
        end_ns: the end of the capture.
    """

    kind: Ints
    kernel: list[str | None]
    operator: list[str | None]
    range: list[str | None]
    is_named: bool
    forks: bool
    end_ns: int


class NodeNames(NamedTuple):
    """The names of the nodes of a graph from captures; None for a name that is not known.

    Attributes:
        operator, range: the names of each node.
        source: BY_KERNELS if the names of all kernels were compared, else BY_ORDER; None if no
            capture fits.
        reason: why some names are not known; None if no name is missing.
    """

    operator: list[str | None]
    range: list[str | None]
    source: str | None
    reason: str | None


class GraphNodes(NamedTuple):
    """The nodes of a graph as the device ran them.

    Attributes:
        kind: KERNEL, COPY or MEMSET.
        kernel: the name on the device.
        in_order: whether the nodes are in the order in which each replay started them.
        launched_ns: when the graph was first launched.
    """

    kind: Ints
    kernel: list[str]
    in_order: bool
    launched_ns: int


def captured_graphs(links: Links) -> list[CapturedGraph]:
    """Return the captures that began and ended in a trace, in order of time.

    The launches of all threads count, because other threads launch the backward pass. A launch that
    has work on the device was not captured, and is left out. If the captures of several threads
    overlap in time, their launches cannot be told apart, and these captures are left out.
    """
    events = links.events
    is_call = events.among(is_runtime)
    begin, end = _windows(events, is_call)
    if not len(begin):
        return []
    kinds = np.array([_kind(name) for name in events.names])
    kind = np.where(is_call, kinds[events.name], _NOTHING)
    calls = _by_start(events, (kind != _NOTHING) & ~_has_work(events))
    forks = _by_start(events, is_call & events.named(lambda name: _FORK in name))
    operator, path = surroundings(links, _nodes_of(links, calls))
    operators, paths = [*events.names, None], [*links.scopes.paths.texts, None]
    found = []
    from_call, from_fork = (np.searchsorted(events.start_ns[k], begin) for k in (calls, forks))
    to_call, to_fork = (np.searchsorted(events.start_ns[k], end, "right") for k in (calls, forks))
    for k, end_ns in enumerate(end.tolist()):
        own = np.arange(from_call[k], to_call[k])
        own = own[_first_of_each(events.correlation[calls[own]])]
        kernel = _kernels(events, calls[own])
        named = [kernel[at] for at in np.flatnonzero(kind[calls[own]] == KERNEL)]
        found.append(
            CapturedGraph(
                kind=kind[calls[own]],
                kernel=kernel,
                operator=[operators[name] for name in operator[own].tolist()],
                range=[paths[text] for text in path[own].tolist()],
                is_named=bool(named) and None not in named,
                forks=bool(from_fork[k] < to_fork[k]),
                end_ns=end_ns,
            )
        )
    return found


def surroundings(links: Links, node: Ints) -> tuple[Ints, Ints]:
    """For each node of the call tree, the operator around it and the range that it belongs to.

    Returns:
        Two arrays: the name of the innermost operator, as an index into `Events.names`; and the
            range, as a path of `Links.scopes`. -1 stands for none, also for node -1.
    """
    events, call_tree, scopes = links.events, links.call_tree, links.scopes
    is_operator = events.among(OPERATOR) & ~events.named(is_step)
    around = np.append(call_tree.nearest(is_operator[call_tree.index]), -1)[node]
    name = np.append(events.name[call_tree.index], -1)[around]
    return name, np.append(scopes.attributed, -1)[np.append(scopes.innermost, -1)[node]]


def _nodes_of(links: Links, index: Ints) -> Ints:
    """The node of the call tree of each event; -1 for none."""
    position = np.full(len(links.events), -1)
    position[links.call_tree.index] = np.arange(len(links.call_tree))
    return position[index]


def _kind(name: str) -> int:
    return next((kind for part, kind in _KINDS if part.search(name)), _NOTHING)


def _windows(events: Events, is_call: Flags) -> tuple[Ints, Ints]:
    """When captures began and ended: the end of the first call, the start of the last one."""
    begins = is_call & events.named(lambda name: _BEGIN in name)
    marks = np.flatnonzero(begins | (is_call & events.named(lambda name: _END in name)))
    marks = marks[np.lexsort((events.start_ns[marks], events.thread[marks]))]
    one, other = marks[:-1], marks[1:]
    pairs = begins[one] & ~begins[other] & (events.thread[one] == events.thread[other])
    begin, end = events.end_ns[one[pairs]], events.start_ns[other[pairs]]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    overlaps = begin[1:] < np.maximum.accumulate(end)[:-1]
    alone = np.ones(len(begin), np.bool_)
    alone[1:] &= ~overlaps
    alone[:-1] &= ~overlaps
    return begin[alone], end[alone]


def _has_work(events: Events) -> Flags:
    """A mask of the events whose correlation some device event has."""
    ids = np.unique(events.correlation[works_on_device(events)])
    found: Flags = np.isin(events.correlation, ids[ids != 0])
    return found


def _by_start(events: Events, chosen: Flags) -> Ints:
    index = np.flatnonzero(chosen)
    found: Ints = index[np.argsort(events.start_ns[index], kind="stable")]
    return found


def _first_of_each(correlation: Ints) -> Ints:
    """The first call of each correlation; a driver call inside a runtime call has the same one."""
    _, first = np.unique(correlation, return_index=True)
    return np.flatnonzero(np.isin(np.arange(len(correlation)), first) | (correlation == 0))


def _kernels(events: Events, calls: Ints) -> list[str | None]:
    return [
        events.details[code].launched_kernel if code >= 0 else None
        for code in events.detail[calls].tolist()
    ]


class CapturedNames:
    """Finds the names of the nodes of graphs in the captures of one or several traces."""

    def __init__(self, own: Iterable[CapturedGraph], others: Iterable[CapturedGraph] = ()) -> None:
        """Keep the captures of the trace that has the graphs, and those of other traces."""
        self._by_counts: dict[bytes, list[tuple[CapturedGraph, float]]] = {}
        for each, since_ns in [*((k, k.end_ns) for k in own), *((k, -np.inf) for k in others)]:
            self._by_counts.setdefault(_counts(each.kind), []).append((each, since_ns))
        usable = [since_ns for alike in self._by_counts.values() for _, since_ns in alike]
        self._since_ns = min(usable, default=np.inf)

    def of(self, nodes: GraphNodes) -> NodeNames:
        """Return the names of the nodes of a graph; if several captures fit, what they agree on.

        The tracer of ROCm can lose the last kernel of every replay. So a capture with one more
        launch at its end fits too, if the names of all its kernels are known.
        """
        counts = np.bincount(nodes.kind, minlength=OTHER + 1)
        fits: dict[str, list[CapturedGraph]] = {BY_KERNELS: [], BY_ORDER: []}
        reasons = {OTHER_LAUNCHES if self._since_ns <= nodes.launched_ns else NO_CAPTURE}
        for each in self._before(counts, nodes.launched_ns):
            source, reason = _fit(each, nodes)
            if source:
                fits[source].append(each)
            else:
                reasons.add(reason)
        counts[KERNEL] += 1
        chosen = fits[BY_KERNELS] or fits[BY_ORDER]
        if not chosen:
            longer = self._before(counts, nodes.launched_ns)
            chosen = [each for each in longer if _is_one_longer(each, nodes)]
        if not chosen:
            unknown: list[str | None] = [None] * len(nodes.kind)
            return NodeNames(unknown, unknown, None, max(reasons, key=_REASONS.index))
        return _agreed(chosen, nodes, BY_ORDER if chosen is fits[BY_ORDER] else BY_KERNELS)

    def _before(self, counts: Ints, launched_ns: int) -> list[CapturedGraph]:
        """The captures with so many launches of each kind that can be of a graph.

        A capture in the same trace must have ended before the graph was launched.
        """
        alike = self._by_counts.get(counts.tobytes(), [])
        return [each for each, since_ns in alike if since_ns <= launched_ns]


# From the least to the most specific one.
_REASONS = (NO_CAPTURE, OTHER_LAUNCHES, OTHER_KERNELS, NO_ORDER)


def _counts(kind: Ints) -> bytes:
    return np.bincount(kind, minlength=OTHER + 1).tobytes()


def _is_ordered(capture: CapturedGraph, nodes: GraphNodes) -> bool:
    return nodes.in_order and not capture.forks


def _fit(capture: CapturedGraph, nodes: GraphNodes) -> tuple[str | None, str]:
    """How a capture with as many launches of each kind fits a graph, or else why it does not."""
    if not _is_ordered(capture, nodes):
        if not capture.is_named:
            return None, NO_ORDER
        same = sorted(_keys(capture.kind, capture.kernel)) == sorted(
            _keys(nodes.kind, nodes.kernel)
        )
        return (BY_KERNELS, "") if same else (None, OTHER_KERNELS)
    if not np.array_equal(capture.kind, nodes.kind):
        return None, OTHER_LAUNCHES
    if not _same_kernels(capture, nodes):
        return None, OTHER_KERNELS
    return BY_KERNELS if capture.is_named else BY_ORDER, ""


def _same_kernels(capture: CapturedGraph, nodes: GraphNodes) -> bool:
    """Whether the kernels whose names are known are those of the nodes, in the same order."""
    return all(
        name is None or name == ran
        for name, ran, kind in zip(capture.kernel, nodes.kernel, nodes.kind.tolist())
        if kind == KERNEL
    )


def _is_one_longer(capture: CapturedGraph, nodes: GraphNodes) -> bool:
    """Whether the launches of a capture but the last one, a kernel, are the nodes.

    If the last two launches are of one kernel, it is not known which of the two was lost.
    """
    return (
        _is_ordered(capture, nodes)
        and capture.is_named
        and np.array_equal(capture.kind[:-1], nodes.kind)
        and _same_kernels(capture, nodes)
        and capture.kernel[-1] not in (None, *capture.kernel[-2:-1])
    )


def _keys(kind: Ints, kernel: Iterable[str | None]) -> list[tuple[int, str]]:
    """What tells nodes apart if their order is not known: the kind, and the name of a kernel."""
    return [
        (kind, name if kind == KERNEL and name else "") for kind, name in zip(kind.tolist(), kernel)
    ]


def _agreed(fits: list[CapturedGraph], nodes: GraphNodes, source: str) -> NodeNames:
    operator = _agreed_names(fits, nodes, [each.operator for each in fits])
    path = _agreed_names(fits, nodes, [each.range for each in fits])
    is_open = _OPEN in operator or _OPEN in path
    in_order = all(_is_ordered(each, nodes) for each in fits)
    return NodeNames(
        [None if name is _OPEN else name for name in operator],
        [None if name is _OPEN else name for name in path],
        source,
        (SEVERAL if in_order else NO_ORDER) if is_open else None,
    )


# Stands for the name of a node for which the captures, or the launches of its kernel, have several.
_OPEN = object()


def _agreed_names(
    fits: list[CapturedGraph], nodes: GraphNodes, names: list[list[str | None]]
) -> list[Any]:
    """The name of each node, or `_OPEN`."""
    count, found = len(nodes.kind), list[list[Any]]()
    keys = _keys(nodes.kind, nodes.kernel)
    for each, of_launches in zip(fits, names):
        if _is_ordered(each, nodes):
            found.append(of_launches[:count])
            continue
        by_key: dict[tuple[int, str], set[str | None]] = {}
        for key, name in zip(_keys(each.kind, each.kernel), of_launches):
            by_key.setdefault(key, set()).add(name)
        single = {key: _OPEN if len(few) > 1 else few.pop() for key, few in by_key.items()}
        found.append([single[key] for key in keys])
    return [few.pop() if len(few := set(of_node)) == 1 else _OPEN for of_node in zip(*found)]
