"""Find the launches that were captured into CUDA graphs, and the graph node made by each launch.

In this module, a capture is a stream capture of CUDA or HIP, not the folder of a recorded window.

A program captures a graph once, between `cudaStreamBeginCapture` and `cudaStreamEndCapture`. In
this time, the CPU runs the calls that launch work, inside their operators and ranges. The work
becomes nodes of the graph, and the device does not run the work. Each later launch of the graph
replays all nodes. HIP works in the same way.

If the captured calls use one stream, each node depends on the node before it. So the nodes start in
the order of the calls, even if the device runs them on several streams. If a call makes a stream
wait for another stream, the graph has branches, and the order of the nodes is not known.

No id in a trace joins a captured call to its node, so calls and nodes are joined by their order. If
the order is not known, they are joined by the names of the kernels. A capture fits a graph only if
the capture has as many launches as the graph has nodes (for an exception, see `CapturedNames.of`).
Each launch must be of the same kind (kernel, copy or memset) as its node. If the trace names the
kernel of a launch, the node must have the same kernel. Kineto writes the name of the kernel on
launches of ROCm, but not on launches of CUDA.

Without names of kernels, a capture can also fit a graph from another capture, such as a graph that
was captured before the recording. In some cases, this is visible, because all graphs from one
capture run the same kernels. For example, one capture fits two graphs that run different kernels.
Then at least one of the two graphs is from another capture, but it is not known which. So the nodes
of both graphs get no operators and ranges. The same holds for more captures: two captures cannot
have made graphs with three different sequences of kernels.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from instrument.links.launches import have_work
from instrument.links.links import Links
from instrument.trace.events import (
    Events,
    Flags,
    Ints,
    called_operators,
    is_runtime,
)

# What a captured launch does on the device. OTHER stands for a graph inside the graph, and for
# nodes that were added without a launch; what these do is not known.
KERNEL, COPY, MEMSET, OTHER = range(4)
_NOTHING = -1
# The kind of a call comes from the first expression that matches its name. A host function does
# nothing on the device.
_KINDS = (
    (re.compile("GraphLaunch|GraphAdd|UpdateCaptureDependencies"), OTHER),
    (re.compile("LaunchHostFunc"), _NOTHING),
    (re.compile("Launch"), KERNEL),
    (re.compile("Memcpy"), COPY),
    (re.compile("Memset"), MEMSET),
)
CAPTURE_BEGINS, CAPTURE_ENDS = "StreamBeginCapture", "StreamEndCapture"
_FORK = "StreamWaitEvent"

NO_CAPTURE = "no capture"
OTHER_LAUNCHES = "other launches"
OTHER_KERNELS = "other kernels"
NO_ORDER = "unknown order"
SEVERAL = "several captures"
SEVERAL_GRAPHS = "several graphs"
BY_KERNELS, BY_ORDER = "kernel names", "order"
_MOST_PATTERNS = 64

_Name = TypeVar("_Name", str, str | None)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The launches between the start and the end of one stream capture, in the order of the calls.

    Attributes:
        kind: the kind of each launch: KERNEL, COPY, MEMSET or OTHER.
        kernel: for each launch, the name of the kernel; None if the trace does not have it.
        operator: for each launch, the innermost operator around it; None if there is no operator.
        range: for each launch, the path of the range that it belongs to; None if there is no range.
        is_named: whether the stream capture has kernels and all their names are in the trace.
        forks: whether a stream waited for another stream during the stream capture.
        end_ns: the end of the stream capture.
    """

    kind: Ints
    kernel: list[str | None]
    operator: list[str | None]
    range: list[str | None]
    is_named: bool
    forks: bool
    end_ns: int


class NodeNames(NamedTuple):
    """The operator and the range that launched each node of a graph, found in stream captures.

    Attributes:
        operator, range: the names of the operator and the range of each node. A name is None if it
            is not known, or if the node was launched outside all operators or ranges.
        source: how the nodes were matched: BY_KERNELS by the names of kernels, BY_ORDER by the
            order of the launches; None if no stream capture was used.
        reason: why some names are not known; None if all are known.
    """

    operator: list[str | None]
    range: list[str | None]
    source: str | None
    reason: str | None


class GraphNodes(NamedTuple):
    """The nodes of a graph as the device ran them.

    Attributes:
        kind: for each node, KERNEL, COPY or MEMSET.
        kernel: for each node, the name of the kernel, copy or memset that the device ran.
        in_order: whether every replay started the nodes in this order.
        launched_ns: when the graph was first launched.
    """

    kind: Ints
    kernel: list[str]
    in_order: bool
    launched_ns: int


def captured_graphs(links: Links) -> list[CapturedGraph]:
    """Return the stream captures that began and ended in a trace, in order of time.

    A stream capture gets the launches of all threads, because other threads launch the backward
    pass. A launch with work on the device was not captured, and is left out. If stream captures of
    several threads overlap in time, they are left out, because it is not known which launch belongs
    to which of them.
    """
    events = links.events
    is_call = events.among(is_runtime)
    begin, end = _windows(events, is_call)
    if not len(begin):
        return []
    kinds = np.array([_kind(name) for name in events.names])
    kind = np.where(is_call, kinds[events.name], _NOTHING)
    launch = np.flatnonzero(kind != _NOTHING)
    calls = _by_start(events, launch[~have_work(events, links.launches.device, launch)])
    forks = _by_start(events, np.flatnonzero(is_call & events.named(lambda name: _FORK in name)))
    operator, path = surroundings(links, links.call_tree.nodes_of(calls))
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
    """For each given node: the operator around the node, and the range that the node belongs to.

    `node` holds nodes of the call tree, and -1 where the node is not known.

    Returns:
        Two arrays: the name of the innermost operator, as an index into `Events.names`; and the
            path of the range, as an index into `Links.scopes.paths`. An index is -1 if there is no
            operator or range, or if the node is not known.
    """
    events, call_tree, scopes = links.events, links.call_tree, links.scopes
    is_operator = called_operators(events)
    around = call_tree.nearest(is_operator[call_tree.index], node)
    name = np.append(events.name[call_tree.index], -1)[around]
    return name, scopes.path_of_node[node]


def _kind(name: str) -> int:
    return next((kind for part, kind in _KINDS if part.search(name)), _NOTHING)


def _windows(events: Events, is_call: Flags) -> tuple[Ints, Ints]:
    """When each stream capture began and ended; those that overlap in time are left out.

    A stream capture begins when its `BeginCapture` call returns, and ends when its `EndCapture`
    call starts.
    """
    begins = is_call & events.named(lambda name: CAPTURE_BEGINS in name)
    marks = np.flatnonzero(begins | (is_call & events.named(lambda name: CAPTURE_ENDS in name)))
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


def _by_start(events: Events, index: Ints) -> Ints:
    found: Ints = index[np.argsort(events.start_ns[index], kind="stable")]
    return found


def _first_of_each(correlation: Ints) -> Ints:
    """The indices of all calls except those with the same correlation as an earlier call.

    A driver call inside a runtime call has the same correlation as the runtime call, so only the
    runtime call is kept. All calls with correlation 0 are kept, because 0 means that the
    correlation is not known.
    """
    _, first = np.unique(correlation, return_index=True)
    return np.flatnonzero(np.isin(np.arange(len(correlation)), first) | (correlation == 0))


def _kernels(events: Events, calls: Ints) -> list[str | None]:
    return [
        events.details[code].launched_kernel if code >= 0 else None
        for code in events.detail[calls].tolist()
    ]


# The kinds of the nodes of a graph, and the names of its kernels, in order.
_Sequence = tuple[bytes, tuple[str, ...]]
# The key of a node or launch: its kind and, for a kernel, the name of the kernel. If the order of
# the nodes is not known, nodes are found by their keys.
_Key = tuple[int, str]
# Stands for the name of a node if several captures, or several launches of its kernel, give
# different names.
_OPEN = object()


class _Alike:
    """Stream captures that fit the same CUDA graphs.

    Any one of these stream captures may have made such a graph. The stream captures must be added
    in the order of their `since_ns`; see `add`.

    Attributes:
        keys: how launches and nodes are matched. If `keys` is None, they are matched by their
            order. Then `add` takes one operator and one range for each launch. If `keys` is a list
            (the sorted distinct keys, see `_Key`), they are matched by their keys. Then `add` takes
            one operator and one range for each key.
    """

    def __init__(self, keys: list[_Key] | None = None) -> None:
        self.keys = keys
        self._since_ns: list[float] = []
        self._agreed: list[list[Any]] = []

    def add(self, since_ns: float, names: list[Any]) -> None:
        """Add a stream capture.

        This stream capture cannot have made a graph that was first launched before `since_ns`.
        `names` holds the operators of the stream capture, followed by its ranges.
        """
        self._since_ns.append(since_ns)
        self._agreed.append(_common(self._agreed[-1], names) if self._agreed else names)

    def until(self, launched_ns: int) -> int:
        """The number of stream captures with a `since_ns` of at most `launched_ns`.

        If `launched_ns` is the time of a graph's first launch, only these stream captures can be
        the origin of the graph.
        """
        return bisect_right(self._since_ns, launched_ns)

    def agreed(self, count: int, nodes: GraphNodes) -> list[Any]:
        """The operators of all nodes, then the ranges of all nodes, in one list.

        Only the first `count` stream captures are used. If they give different names for a node,
        `_OPEN` replaces the name.
        """
        names = self._agreed[count - 1]
        if self.keys is None:
            return names
        row = {key: k for k, key in enumerate(self.keys)}
        of_node = [row[key] for key in _keys(nodes.kind, nodes.kernel)]
        return [names[start + k] for start in (0, len(self.keys)) for k in of_node]


# The captures that fit a graph, grouped by the way in which they fit (BY_KERNELS or BY_ORDER); the
# best way comes first.
_Levels = list[tuple[str, list[_Alike]]]


class CapturedNames:
    """Finds the operators and ranges of graph nodes, using stream captures of one or more traces.

    Cost: linear in the number of launches in the stream captures plus the number of nodes in the
    graphs. This holds if each trace has the names of all captured kernels, or of none of them.
    """

    def __init__(self, own: Iterable[CapturedGraph], others: Iterable[CapturedGraph] = ()) -> None:
        """Keep the stream captures.

        `own` holds the stream captures of the trace that has the graphs. Such a stream capture fits
        a graph only if it ended before the graph was first launched. `others` holds the stream
        captures of other traces.
        """
        # The keys of the outer dict are the kinds of the launches, then come the positions of the
        # kernels whose names are known, then these names.
        self._ordered: dict[bytes, dict[tuple[int, ...], dict[tuple[str, ...], _Alike]]] = {}
        # A key has two items: whether the graph has an order, and the sorted keys of its nodes.
        self._unordered: dict[tuple[bool, tuple[_Key, ...]], _Alike] = {}
        # A key holds the launches of a capture without the last launch, which is a kernel.
        self._longer: dict[_Sequence, _Alike] = {}
        # The time from which a reason holds. A key has the reason, and whether the graph has an
        # order. Then follow the kinds of its nodes in order, or the number of nodes of each kind.
        self._since_ns: dict[tuple[str, bool, str, bytes], float] = {}
        every = [*((-np.inf, each) for each in others), *((each.end_ns, each) for each in own)]
        every.sort(key=lambda each: each[0])
        self._first_ns = every[0][0] if every else np.inf
        for since_ns, each in every:
            self._add(since_ns, each)

    def _add(self, since_ns: float, each: CapturedGraph) -> None:
        kinds, counts = each.kind.tobytes(), _counts(each.kind)
        names = [*each.operator, *each.range]
        for in_order in (True, False):
            if in_order and not each.forks:
                self._since_ns.setdefault((OTHER_KERNELS, True, "kinds", kinds), since_ns)
                continue
            reason = OTHER_KERNELS if each.is_named else NO_ORDER
            self._since_ns.setdefault((reason, in_order, "counts", counts), since_ns)
            if each.is_named:
                keys = _keys(each.kind, each.kernel)
                distinct = sorted(set(keys))
                alike = self._unordered.setdefault(
                    (in_order, tuple(sorted(keys))), _Alike(distinct)
                )
                columns = (_names_of_keys(keys, column) for column in (each.operator, each.range))
                alike.add(since_ns, [by_key[key] for by_key in columns for key in distinct])
        if each.forks:
            return
        kernels = _of_kernels(each.kind, each.kernel)
        known = tuple(k for k, name in enumerate(kernels) if name is not None)
        texts = tuple(name for name in kernels if name is not None)
        by_names = self._ordered.setdefault(kinds, {}).setdefault(known, {})
        by_names.setdefault(texts, _Alike()).add(since_ns, names)
        # If the last two launches are of the same kernel, it is not known which of them was lost.
        if each.is_named and each.kind[-1] == KERNEL and each.kernel[-1] not in each.kernel[-2:-1]:
            alike = self._longer.setdefault((each.kind[:-1].tobytes(), texts[:-1]), _Alike())
            alike.add(since_ns, [*each.operator[:-1], *each.range[:-1]])

    def of(self, graphs: Sequence[GraphNodes]) -> list[NodeNames]:
        """Return the operators and ranges that launched the nodes of each CUDA graph.

        The operators and ranges come from stream captures. A stream capture fits a graph if it has
        one launch for each node of the graph: a launch of the same kind and, where the kernel is
        known, of the same kernel. If several stream captures fit, only names that are the same in
        all of them are returned.

        Pass all graphs of the trace in one call. A stream capture without kernel names can fit a
        graph that it did not make. Only a comparison of all graphs shows this.

        The tracer of ROCm can lose the last kernel of every replay. So a stream capture also fits
        if it fits without its last launch. This launch must be a kernel, and the names of all
        kernels of the stream capture must be known.
        """
        sequences = [_sequence(nodes) for nodes in graphs]
        levels: dict[tuple[_Sequence, bool], _Levels] = {}
        chosen = []
        for nodes, sequence in zip(graphs, sequences):
            key = (sequence, nodes.in_order)
            if key not in levels:
                levels[key] = self._levels(nodes, sequence)
            chosen.append(_first_level(levels[key], nodes.launched_ns))
        refused = _contradicted(chosen, sequences)
        done: dict[Any, NodeNames] = {}
        found = []
        for nodes, sequence, (source, fits) in zip(graphs, sequences, chosen):
            reason = None
            if source is None:
                reason = self._reason(nodes)
            elif source == BY_ORDER and any(count <= refused[each] for each, count in fits):
                reason = SEVERAL_GRAPHS
            same = (sequence, nodes.in_order, source, reason, *fits)
            if same not in done:
                done[same] = unnamed(nodes, reason) if reason else _agreed(fits, nodes, source)
            found.append(done[same])
        return found

    def _levels(self, nodes: GraphNodes, sequence: _Sequence) -> _Levels:
        """The stream captures that fit a graph, grouped by how they fit (see `_Levels`).

        Stream captures that ended after the graph was launched are included.
        """
        levels: dict[str, list[_Alike]] = {BY_KERNELS: [], BY_ORDER: []}
        kinds, kernels = sequence
        patterns = self._ordered.get(kinds, {}) if nodes.in_order else {}
        # So many patterns of known kernels occur only in damaged traces.
        for known, by_names in patterns.items() if len(patterns) <= _MOST_PATTERNS else ():
            alike = by_names.get(tuple(kernels[k] for k in known))
            if alike:
                is_named = len(known) == len(kernels) > 0
                levels[BY_KERNELS if is_named else BY_ORDER].append(alike)
        keys = tuple(sorted(_keys(nodes.kind, nodes.kernel)))
        if alike := self._unordered.get((nodes.in_order, keys)):
            levels[BY_KERNELS].append(alike)
        longer = self._longer.get(sequence) if nodes.in_order else None
        return [*levels.items(), (BY_KERNELS, [longer] if longer else [])]

    def _reason(self, nodes: GraphNodes) -> str:
        """The most specific reason why no stream capture fits a graph."""
        shapes = (("counts", _counts(nodes.kind)), ("kinds", nodes.kind.tobytes()))
        for reason in (NO_ORDER, OTHER_KERNELS):
            for shape in shapes:
                since_ns = self._since_ns.get((reason, nodes.in_order, *shape), np.inf)
                if since_ns <= nodes.launched_ns:
                    return reason
        return OTHER_LAUNCHES if self._first_ns <= nodes.launched_ns else NO_CAPTURE


# The captures that fit a graph. The first value is the way in which they fit, BY_KERNELS or
# BY_ORDER; None if no capture fits. The list has an item for each `_Alike` of such captures, with
# the number of its captures that ended before the graph was first launched.
_Chosen = tuple[str | None, list[tuple[_Alike, int]]]


def _first_level(levels: _Levels, launched_ns: int) -> _Chosen:
    for source, alike in levels:
        fits = [(each, count) for each in alike if (count := each.until(launched_ns))]
        if fits:
            return source, fits
    return None, []


def _contradicted(chosen: list[_Chosen], sequences: list[_Sequence]) -> dict[_Alike, int]:
    """Find stream captures that fit more graphs than they can have made.

    All graphs from one stream capture run the same sequence of kernels. So two stream captures
    cannot have made graphs with three different sequences. If two stream captures fit such graphs,
    at least one of the graphs is from another stream capture, but it is not known which.

    Only graphs that are matched `BY_ORDER` are compared. The stream captures of an `_Alike` that
    fit a graph are always its first ones, up to a number (see `_Chosen`).

    Returns:
        For each `_Alike` with such graphs, a number of stream captures, counted from the first. If
            a graph fits at most this number of stream captures, its origin is not known. For
            example, the number is 2 if the graphs that fit at most two stream captures have three
            different sequences. If several numbers are possible, the result is the largest. If none
            is possible, the result is 0.
    """
    fitted: dict[_Alike, dict[_Sequence, int]] = {}
    for (source, fits), sequence in zip(chosen, sequences):
        for each, count in fits if source == BY_ORDER else ():
            counts = fitted.setdefault(each, {})
            counts[sequence] = min(count, counts.get(sequence, count))
    return {
        each: max((n for k, n in enumerate(sorted(counts.values()), 1) if k > n), default=0)
        for each, counts in fitted.items()
    }


def unnamed(nodes: GraphNodes, reason: str) -> NodeNames:
    """The result for a graph whose operators and ranges are not known, with the reason."""
    unknown: list[str | None] = [None] * len(nodes.kind)
    return NodeNames(unknown, unknown, None, reason)


def _agreed(fits: list[tuple[_Alike, int]], nodes: GraphNodes, source: str | None) -> NodeNames:
    names: list[Any] | None = None
    for each, until in fits:
        more = each.agreed(until, nodes)
        names = more if names is None else _common(names, more)
    assert names is not None
    in_order = all(each.keys is None for each, _ in fits)
    known = [None if name is _OPEN else name for name in names]
    count = len(nodes.kind)
    reason = SEVERAL if in_order else NO_ORDER
    return NodeNames(known[:count], known[count:], source, reason if _OPEN in names else None)


def _common(names: list[Any], others: list[Any]) -> list[Any]:
    """The names that are the same in both lists, and `_OPEN` in the other places."""
    found = [name if name == other else _OPEN for name, other in zip(names, others)]
    # If the lists are equal, the first list itself is returned, to save memory.
    return names if found == names else found


def _counts(kind: Ints) -> bytes:
    return np.bincount(kind, minlength=OTHER + 1).tobytes()


def _sequence(nodes: GraphNodes) -> _Sequence:
    return nodes.kind.tobytes(), tuple(_of_kernels(nodes.kind, nodes.kernel))


def _of_kernels(kind: Ints, names: Sequence[_Name]) -> list[_Name]:
    return [names[k] for k in np.flatnonzero(kind == KERNEL).tolist()]


def _keys(kind: Ints, kernel: Iterable[str | None]) -> list[_Key]:
    return [
        (kind, name if kind == KERNEL and name else "") for kind, name in zip(kind.tolist(), kernel)
    ]


def _names_of_keys(keys: list[_Key], names: list[str | None]) -> dict[_Key, Any]:
    """For each key, the name that all launches with this key have; `_OPEN` if the names differ."""
    found: dict[_Key, Any] = {}
    for key, name in zip(keys, names):
        found[key] = name if found.setdefault(key, name) == name else _OPEN
    return found
