"""Split the time of steps into parts: each nanosecond counts for one range and one kind of time.

If several kinds apply at a moment, the first one in this list counts:

- compute: a memset, or a kernel that is not communication, runs on a device.
- exposed communication: communication runs on a device. In a trace without device work: process
  groups communicate on the CPU, and no thread runs another operator.
- copy: a copy runs on a device.
- waiting for data: the thread of the step waits for a batch.
- launch: the thread of the step or of the autograd engine is in a call that launches device work,
  or the device has not yet begun work that is already launched.
- other CPU: the thread of the step or of the autograd engine is in an operator or a range. A
  runtime call that does not wait for the device counts too.
- idle: everything else. For example, the CPU waits for the device although no device is busy, or
  the trace shows nothing.

The kind decides for which range the moment counts:

- Device work, and the delay between its launch and its start, count for the range that launched it.
  If several devices or streams work, the work that began first counts.
- A wait for data, and a call that launches work, count for the range around them. If a wait for
  data is outside of all ranges, the name of the data loader is used as a range.
- All other time counts for the innermost range on the CPU. While the autograd engine runs a
  backward node, this is the range of the node's forward operator. Otherwise, it is a range on the
  thread of the step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from instrument.analysis.breakdown import COMMUNICATION, COPY, KERNEL, MEMSET
from instrument.analysis.collectives import exposed_on_cpu
from instrument.analysis.places import range_codes
from instrument.analysis.ranges import NO_LAUNCH, NO_RANGE
from instrument.analysis.steps import gaps, is_loading
from instrument.analysis.views import Views
from instrument.links.groupby import distinct, groupby
from instrument.links.links import Links
from instrument.links.step_index import CountedSteps
from instrument.trace.events import ANNOTATION, Flags, Ints, is_runtime, is_step, is_wait

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
#: The kinds of `split_parts`: `KINDS`, with "CPU operators" and "Python" instead of "other CPU".
SPLIT_KINDS = (*KINDS[:OTHER_CPU], "CPU operators", "Python", *KINDS[IDLE:])
_OPERATORS, _PYTHON, _SPLIT_IDLE = OTHER_CPU, OTHER_CPU + 1, OTHER_CPU + 2
_ITERATOR = re.compile(r"(enumerate\(Data(?:Loader|Pipe)\))#\w*(?:\.__next__)?")
_DATA = "data"  # the range around the wait for a batch that a session opens
_KIND_OF_NODE = -1  # instead of an index into `SPLIT_KINDS`
# Negative codes instead of the index of a path. `_NO_LAUNCH`: the launch is not in the trace.
# `_ON_CPU`: the range in which the CPU is at that time. As in `Scopes`, -1 is no range.
_NO_LAUNCH, _ON_CPU = -2, -3


class _Layer(NamedTuple):
    """Intervals of one kind of time. The intervals do not overlap, and are sorted by start.

    `code` holds a number for each interval, which says for which range the interval counts:

    - 0 or more: an index into a list that holds the paths of all ranges, and after them the names
      of the loaders.
    - -1: no range.
    - `_NO_LAUNCH`: the range is not known, because the launch is not in the trace.
    - `_ON_CPU`: the interval is divided between the ranges that run on the CPU in this time.

    In the result of `_engine`, `code` holds the thread of each interval instead.
    """

    kind: int
    start_ns: Ints
    end_ns: Ints
    code: Ints

    def inside(self, time_ns: Ints) -> tuple[Ints, Ints]:
        """Find the times that are inside intervals; `time_ns` is sorted.

        Returns two arrays with one entry for each time found: the time's index in `time_ns`, and
        the index of its interval. The end of an interval is not inside the interval.
        """
        first, after = (np.searchsorted(time_ns, side) for side in (self.start_ns, self.end_ns))
        counts = after - first
        place = np.arange(int(counts.sum()))
        time = place + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return time, np.repeat(np.arange(len(first)), counts)


class _Segments(NamedTuple):
    """The segments of the steps. Each segment has one kind of time and counts for one range.

    Attributes:
        begin_ns, lasts_ns: the start and the duration of each segment.
        place: the range of each segment, as an index into `paths`.
        kind: the kind of each segment, as an index into `SPLIT_KINDS`.
        paths: the paths of the ranges; a path can occur more than once.
    """

    begin_ns: Ints
    lasts_ns: Ints
    place: Ints
    kind: Ints
    paths: list[str]


def step_parts(capture: Views, span: CountedSteps) -> dict[tuple[str, str], int]:
    """Split the time of the steps by range and by kind of time; return times in ns.

    A key is the path of a range and one of `KINDS`.

    The arguments, and the cost of the call, are those of `split_parts`. The times sum exactly to
    the duration of the steps.
    """
    parts: dict[tuple[str, str], int] = {}
    for (path, kind), ns in split_parts(capture, span).items():
        place = path, KINDS[OTHER_CPU] if kind in SPLIT_KINDS[OTHER_CPU:_SPLIT_IDLE] else kind
        parts[place] = parts.get(place, 0) + ns
    return parts


def split_parts(capture: Views, span: CountedSteps) -> dict[tuple[str, str], int]:
    """Split the time of the steps by range and by kind of time; return times in ns.

    A key is the path of a range and one of `SPLIT_KINDS`. The kind "other CPU" is split: "CPU
    operators" is time in operators and runtime calls, and "Python" is time in ranges, but in no
    operator. The other kinds are those of the module's docstring. The times sum exactly to the
    duration of the steps.

    Args:
        capture: the capture.
        span: the steps, which must not overlap.

    Cost: about 1 µs for each device event and for each CPU event on the threads of the steps, to
    sort their starts and ends.
    """
    segments = _segments(capture, span)
    keys, groups = groupby(segments.place * len(SPLIT_KINDS) + segments.kind)
    parts: dict[tuple[str, str], int] = {}
    for key, total in zip(keys.tolist(), groups.sum(segments.lasts_ns).tolist()):
        path, kind = divmod(key, len(SPLIT_KINDS))
        place = segments.paths[path], SPLIT_KINDS[kind]
        parts[place] = parts.get(place, 0) + total
    return parts


def ranges_of_steps(capture: Views, span: CountedSteps) -> list[dict[str, int]]:
    """Split the time of each step by range; return times in ns, by the path of the range.

    The arguments, and the cost of the call, are those of `split_parts`. The times of a step sum
    exactly to its duration.
    """
    segments = _segments(capture, span)
    step, places = span.holds(segments.begin_ns), len(segments.paths)
    keys, groups = groupby(step * places + segments.place)
    found: list[dict[str, int]] = [{} for _ in range(span.count)]
    for key, total in zip(keys.tolist(), groups.sum(segments.lasts_ns).tolist()):
        k, place = divmod(key, places)
        path = segments.paths[place]
        found[k][path] = found[k].get(path, 0) + total
    return found


def _segments(capture: Views, span: CountedSteps) -> _Segments:
    """Cut the steps into segments in which the range and the kind of time do not change."""
    links = capture.links
    layers = _device_layers(capture) if len(capture.work.event) else [_cpu_communication(links)]
    waits, loaders = _waits(capture)
    layers += [waits, *_launches(capture, span)]
    engine = _engine(links)
    path_of_node, kind_of_node = _on_cpu(links)
    code = path_of_node * len(SPLIT_KINDS) + kind_of_node
    differs = code[:-1] != code[links.call_tree.parent]
    begin, lasts_ns = _cuts(links, span, [*layers, engine], differs)
    path, kind = np.full(len(begin), _ON_CPU), np.full(len(begin), _KIND_OF_NODE)
    for layer in reversed(layers):
        segment, interval = layer.inside(begin)
        path[segment], kind[segment] = layer.code[interval], layer.kind
    thread = np.full(len(begin), _thread(links), np.int32)
    segment, interval = engine.inside(begin)
    thread[segment] = engine.code[interval]
    on_cpu = np.flatnonzero(path == _ON_CPU)
    node = links.call_tree.node_at(thread[on_cpu], begin[on_cpu], with_end=False)
    path[on_cpu] = path_of_node[node]
    kind[on_cpu] = np.where(kind[on_cpu] == _KIND_OF_NODE, kind_of_node[node], kind[on_cpu])
    texts = [NO_LAUNCH, NO_RANGE, *links.scopes.paths.texts, *loaders]
    return _Segments(begin, lasts_ns, path - _NO_LAUNCH, kind, [*map(plain_path, texts)])


def waits_for_data(capture: Views) -> Ints:
    """The positions of the calls that wait for a batch, on the threads of the steps.

    A call inside another such call is left out.
    """
    events, tree = capture.events, capture.links.call_tree
    chosen = is_loading(events)
    if capture.folder is not None:  # in a trace of another program, "data" may be anything
        chosen |= events.among(ANNOTATION) & events.named(_DATA.__eq__)
    steps = capture.links.steps
    if len(steps):
        chosen &= np.isin(events.thread, events.thread[steps])
    is_wait = chosen[tree.index]
    return np.sort(tree.index[tree.outermost(is_wait)])


def plain_path(path: str) -> str:
    """Remove the class of the loader's iterator from the path of a range; return the path.

    torch adds this class to the name of a loader. The class depends on whether the loader has
    worker processes, so the full names would not match.
    """
    return _ITERATOR.sub(r"\1", path)


def _cuts(
    links: Links, span: CountedSteps, layers: Sequence[_Layer], differs: Flags
) -> tuple[Ints, Ints]:
    """Cut the steps into segments with one range and one kind of time each.

    `differs` marks the nodes whose range or kind of time differs from that of the parent. Other
    nodes need no cut. Returns the starts and the durations of the segments in ns.
    """
    tree = links.call_tree
    threads = np.append(distinct(layers[-1].code), _thread(links))
    nodes = np.flatnonzero(differs & np.isin(tree.thread, threads))
    start_ns = tree.start_ns[nodes]
    times = [span.start_ns, span.end_ns, start_ns, start_ns + links.spent_ns[nodes]]
    times += [side for layer in layers for side in (layer.start_ns, layer.end_ns)]
    cuts = distinct(np.concatenate(times))
    begin, lasts_ns = cuts[:-1], np.diff(cuts)
    inside = span.holds(begin) >= 0
    return begin[inside], lasts_ns[inside]


def _device_layers(capture: Views) -> list[_Layer]:
    """Return one layer (the intervals of one kind of time) for each kind of device work.

    The range of an interval is the range that launched the device work.
    """
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
    """Return the intervals of exposed communication on the CPU.

    The `code` of all intervals is `_ON_CPU`: an interval is divided between the ranges that run on
    the CPU in this time. `_segments` finds these ranges.
    """
    start_ns, end_ns = exposed_on_cpu(links)
    return _Layer(EXPOSED_COMMUNICATION, start_ns, end_ns, np.full(len(start_ns), _ON_CPU))


def _waits(capture: Views) -> tuple[_Layer, list[str]]:
    """Return the layer (the intervals) of the waits for data, and the names of the loaders.

    For a wait outside of all ranges, the name of the loader stands for the range. The layer's
    `code` numbers these names after the paths: with n paths, the first name has the number n.
    """
    events, wait = capture.events, waits_for_data(capture)
    names, code = np.unique(events.name[wait], return_inverse=True)
    path = range_codes(capture, wait)
    path = np.where(path >= 0, path, len(capture.links.scopes.paths.texts) + code)
    layer = _disjoint(WAITING, events.start_ns[wait], events.end_ns[wait], path)
    return layer, [events.names[k] for k in names.tolist()]


def _launches(capture: Views, span: CountedSteps) -> list[_Layer]:
    """Return two layers of intervals: calls that launch work, and gaps in the device's work.

    The second layer holds, of each gap in which all devices are idle, the time in which the next
    work is already launched. The result is empty if the trace has no device work.
    """
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
    """Return the layer (the intervals) of the backward nodes, with the thread of each node."""
    nodes, backward = links.scopes.nodes, links.scopes.backward
    thread = nodes.thread[backward].astype(np.int64)
    return _disjoint(OTHER_CPU, nodes.start_ns[backward], nodes.end_ns[backward], thread)


def _disjoint(kind: int, start_ns: Ints, end_ns: Ints, code: Ints) -> _Layer:
    """Make a layer of intervals. Where several overlap, only the one that began first counts."""
    order = np.argsort(start_ns, kind="stable")
    start_ns, end_ns, code = start_ns[order], end_ns[order], code[order]
    until = np.maximum.accumulate(end_ns)
    start_ns = np.maximum(start_ns, np.append(start_ns[:1], until[:-1])[: len(start_ns)])
    left = start_ns < end_ns
    return _Layer(kind, start_ns[left], end_ns[left], code[left])


def _thread(links: Links) -> int:
    """The thread on which most steps run; without steps, the thread with the most CPU events."""
    thread = links.events.thread[links.steps]
    if not len(thread):
        thread = links.call_tree.thread
    return int(np.bincount(thread).argmax()) if len(thread) else -1


def _on_cpu(links: Links) -> tuple[Ints, Ints]:
    """For each node of the call tree: the code of its range's path, and the kind of its time.

    A kind is an index into `SPLIT_KINDS`. Both arrays have one more entry, for the time outside of
    all nodes. A thread that waits for a device, or that is in no operator, range or call, is idle.
    """
    events, tree, scopes = links.events, links.call_tree, links.scopes
    waits = events.among(is_runtime) & events.named(is_wait)
    is_range = np.zeros(len(events), np.bool_)
    is_range[scopes.ranges.index] = True
    kind = np.where(is_range, _PYTHON, _OPERATORS)
    kind[waits | events.named(is_step)] = _SPLIT_IDLE
    return scopes.path_of_node, np.append(kind[tree.index], _SPLIT_IDLE)
