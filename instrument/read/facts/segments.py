"""Split the time of steps: each nanosecond counts for one range and one kind of time.

docs/compare.md defines the kinds, and says for which range a moment counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from instrument.read.facts.collective_records import exposed_on_cpu
from instrument.read.facts.device_work import COMMUNICATION, COPY, KERNEL, MEMSET
from instrument.read.facts.groupby import distinct, groupby, intern
from instrument.read.facts.idle import gaps, is_loading
from instrument.read.facts.links import Links
from instrument.read.facts.paths import NO_LAUNCH, NO_RANGE
from instrument.read.facts.places import range_codes
from instrument.read.facts.step_index import CountedSteps
from instrument.read.facts.traced import Traced
from instrument.read.trace.events import (
    ANNOTATION,
    Flags,
    Ints,
    is_compiled_code,
    is_runtime,
    is_step,
    is_wait,
)

#: The kinds of time in a step, the first that applies at a moment first.
KINDS = (
    "compute", "exposed communication", "copy", "waiting for data", "launch", "CPU operators",
    "Python", "idle",
)  # fmt: skip
(
    COMPUTE, EXPOSED_COMMUNICATION, EXPOSED_COPY, WAITING, LAUNCH, OPERATORS, PYTHON, IDLE,
) = range(len(KINDS))  # fmt: skip
_ITERATOR = re.compile(r"(enumerate\(Data(?:Loader|Pipe)\))#\w*(?:\.__next__)?")
_DATA = "data"  # the range around the wait for a batch that a session opens
_KIND_OF_NODE = -1  # instead of an index into `KINDS`
# Negative codes instead of the index of a path. `_NO_LAUNCH`: the launch is not in the trace.
# `_ON_CPU`: the range in which the CPU is at that time. As in `Scopes`, -1 is no range.
_NO_LAUNCH, _ON_CPU = -2, -3


class _Layer(NamedTuple):
    """Intervals of one kind of time, sorted by start, without overlaps.

    `code` says for which range an interval counts: an index into the paths of all ranges and after
    them the names of the loaders; -1 for no range; `_NO_LAUNCH`; or `_ON_CPU`, where the ranges
    that run on the CPU share the interval. For backward nodes, it is the thread instead.
    """

    kind: int
    start_ns: Ints
    end_ns: Ints
    code: Ints

    def inside(self, time_ns: Ints) -> tuple[Ints, Ints]:
        """The indices of the times inside intervals, and of these intervals; sorted times."""
        first, after = (np.searchsorted(time_ns, side) for side in (self.start_ns, self.end_ns))
        counts = after - first
        place = np.arange(int(counts.sum()))
        time = place + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return time, np.repeat(np.arange(len(first)), counts)


class _Segments(NamedTuple):
    """Segments of the steps with one kind of time and one range each.

    `place` is an index into `paths`, and `kind` an index into `KINDS`.
    """

    begin_ns: Ints
    lasts_ns: Ints
    place: Ints
    kind: Ints
    paths: list[str]


def step_parts(capture: Traced, span: CountedSteps) -> dict[tuple[str, str], int]:
    """Return the time of the steps in ns by path of the range and kind, one of `KINDS`.

    The times sum exactly to the duration of the steps, which must not overlap. "CPU operators" is
    time in operators, compiled code and runtime calls, "Python" is time in ranges, but in no
    operator.

    Cost: about 1 µs for each device event and for each CPU event on the threads of the steps, to
    sort their starts and ends.
    """
    segments = _segments(capture, span)
    keys, groups = groupby(segments.place * len(KINDS) + segments.kind)
    totals = zip(keys.tolist(), groups.sum(segments.lasts_ns).tolist())
    parts = ((*divmod(key, len(KINDS)), total) for key, total in totals)
    return {(segments.paths[path], KINDS[kind]): total for path, kind, total in parts}


def ranges_of_steps(capture: Traced, span: CountedSteps) -> list[dict[str, int]]:
    """Return the time of each step in ns by path of the range; see `step_parts`."""
    segments = _segments(capture, span)
    step, places = span.holds(segments.begin_ns), len(segments.paths)
    keys, groups = groupby(step * places + segments.place)
    found: list[dict[str, int]] = [{} for _ in range(span.count)]
    for key, total in zip(keys.tolist(), groups.sum(segments.lasts_ns).tolist()):
        k, place = divmod(key, places)
        found[k][segments.paths[place]] = total
    return found


class PythonTime(NamedTuple):
    """The time of the steps in no operator and in no wait, cut at the borders of ranges.

    `path` is the range of each piece, as an index into `paths`; its text is `NO_RANGE` outside of
    all ranges.
    """

    start_ns: Ints
    end_ns: Ints
    path: Ints
    paths: list[str]


def python_time(capture: Traced, span: CountedSteps) -> PythonTime:
    """Find the time of the steps that Python takes, or code that torch does not record.

    It is the kind "Python" of `step_parts`, and the kind "idle" in no range.
    """
    segments = _segments(capture, span)
    chosen = np.isin(segments.kind, (PYTHON, IDLE)) & (segments.lasts_ns > 0)
    begin, place = segments.begin_ns[chosen], segments.place[chosen]
    return PythonTime(begin, begin + segments.lasts_ns[chosen], place, segments.paths)


def thread_of_steps(links: Links) -> int:
    """The thread on which most steps run; without steps, the thread with the most CPU events."""
    thread = links.events.thread[links.steps]
    if not len(thread):
        thread = links.call_tree.thread
    return int(np.bincount(thread).argmax()) if len(thread) else -1


def _segments(capture: Traced, span: CountedSteps) -> _Segments:
    links = capture.links
    nodes, backward = links.scopes.nodes, links.scopes.backward
    waits, loaders = _waits(capture)
    if len(capture.work.event):
        layers = [*_device_layers(capture), waits, *_launches(capture, span)]
    else:
        exposed = exposed_on_cpu(links)
        of_cpu = np.full(len(exposed[0]), _ON_CPU)
        layers = [_Layer(EXPOSED_COMMUNICATION, *exposed, of_cpu), waits]
    engines = nodes.thread[backward].astype(np.int64)
    engine = _disjoint(OPERATORS, nodes.start_ns[backward], nodes.end_ns[backward], engines)
    path_of_node, kind_of_node = _on_cpu(links)
    code = path_of_node * len(KINDS) + kind_of_node
    differs = code[:-1] != code[links.call_tree.parent]
    begin, lasts_ns = _cuts(links, span, [*layers, engine], differs)
    path, kind = np.full(len(begin), _ON_CPU), np.full(len(begin), _KIND_OF_NODE)
    for layer in reversed(layers):
        segment, interval = layer.inside(begin)
        path[segment], kind[segment] = layer.code[interval], layer.kind
    thread = np.full(len(begin), thread_of_steps(links), np.int32)
    segment, interval = engine.inside(begin)
    thread[segment] = engine.code[interval]
    on_cpu = np.flatnonzero(path == _ON_CPU)
    node = links.call_tree.node_at(thread[on_cpu], begin[on_cpu], with_end=False)
    path[on_cpu] = path_of_node[node]
    kind[on_cpu] = np.where(kind[on_cpu] == _KIND_OF_NODE, kind_of_node[node], kind[on_cpu])
    texts = [NO_LAUNCH, NO_RANGE, *links.scopes.paths.texts, *loaders]
    codes, paths = intern(map(plain_path, texts))
    return _Segments(begin, lasts_ns, codes[path - _NO_LAUNCH], kind, paths)


def waits_for_data(capture: Traced) -> Ints:
    """The positions of the outermost calls that wait for a batch, on the threads of the steps."""
    events, tree = capture.links.events, capture.links.call_tree
    chosen = is_loading(events)
    if capture.is_ours:  # in a trace of another program, "data" may be anything
        chosen |= events.among(ANNOTATION) & events.named(_DATA.__eq__)
    steps = capture.links.steps
    if len(steps):
        chosen &= np.isin(events.thread, events.thread[steps])
    is_wait = chosen[tree.index]
    return np.sort(tree.index[tree.outermost(is_wait)])


def plain_path(path: str) -> str:
    """Remove the class of the loader's iterator, which depends on its workers, from a path."""
    return _ITERATOR.sub(r"\1", path)


def _cuts(
    links: Links, span: CountedSteps, layers: Sequence[_Layer], differs: Flags
) -> tuple[Ints, Ints]:
    """The starts and durations of the segments; `differs` marks nodes that need a cut."""
    tree = links.call_tree
    threads = np.append(distinct(layers[-1].code), thread_of_steps(links))
    nodes = np.flatnonzero(differs & np.isin(tree.thread, threads))
    start_ns = tree.start_ns[nodes]
    times = [span.start_ns, span.end_ns, start_ns, start_ns + links.spent_ns[nodes]]
    times += [side for layer in layers for side in (layer.start_ns, layer.end_ns)]
    cuts = distinct(np.concatenate(times))
    begin, lasts_ns = cuts[:-1], np.diff(cuts)
    inside = span.holds(begin) >= 0
    return begin[inside], lasts_ns[inside]


def _device_layers(capture: Traced) -> list[_Layer]:
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


def _waits(capture: Traced) -> tuple[_Layer, list[str]]:
    """The waits for data, and the names of the loaders, which stand for missing ranges."""
    events, wait = capture.links.events, waits_for_data(capture)
    names, code = np.unique(events.name[wait], return_inverse=True)
    path = range_codes(capture, wait)
    path = np.where(path >= 0, path, len(capture.links.scopes.paths.texts) + code)
    layer = _disjoint(WAITING, events.start_ns[wait], events.end_ns[wait], path)
    return layer, [events.names[k] for k in names.tolist()]


def _launches(capture: Traced, span: CountedSteps) -> list[_Layer]:
    """Calls that launch work, and parts of gaps in which the next work is launched."""
    events, links, work = capture.links.events, capture.links, capture.work
    call = distinct(work.call[work.call >= 0])
    scope = np.append(links.scopes.innermost, -1)[links.call_tree.nodes_of(call)]
    is_backward = np.append(links.scopes.backward, False)[scope]
    call = call[(events.thread[call] == thread_of_steps(links)) | is_backward]
    gap = gaps(events, work, span.start_ns, span.end_ns)
    queued = gap.call >= 0
    delayed = gap.call[queued]
    return [
        _disjoint(LAUNCH, events.start_ns[call], events.end_ns[call], range_codes(capture, call)),
        _disjoint(LAUNCH, gap.queued_ns[queued], gap.end_ns[queued], range_codes(capture, delayed)),
    ]


def _disjoint(kind: int, start_ns: Ints, end_ns: Ints, code: Ints) -> _Layer:
    """Make a layer of intervals; where several overlap, the one that began first counts."""
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns, code = start_ns[order], end_ns[order], code[order]
    until = np.maximum.accumulate(end_ns)
    start_ns = np.maximum(start_ns, np.append(start_ns[:1], until[:-1])[: len(start_ns)])
    left = start_ns < end_ns
    return _Layer(kind, start_ns[left], end_ns[left], code[left])


def _on_cpu(links: Links) -> tuple[Ints, Ints]:
    """For each node, and for the time outside of all nodes, the code of its range and its kind."""
    events, tree, scopes = links.events, links.call_tree, links.scopes
    waits = events.among(is_runtime) & events.named(is_wait)
    is_python = np.zeros(len(events), np.bool_)
    is_python[scopes.ranges.index] = True
    is_python &= ~is_compiled_code(events)
    kind = np.where(is_python, PYTHON, OPERATORS)
    kind[waits | events.named(is_step)] = IDLE
    return scopes.path_of_node, np.append(kind[tree.index], IDLE)
