"""The table of segments: each nanosecond of a step counts for one range and one kind of time.

A lane is a clock on which steps are split. In each lane, the segments of a step do not overlap and
sum exactly to the step. docs/tables.md lists the columns, docs/compare.md defines the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from instrument.read.facts.collective_records import exposed_on_cpu
from instrument.read.facts.device_work import COMMUNICATION, COPY, KERNEL, MEMSET
from instrument.read.facts.groupby import distinct
from instrument.read.facts.idle import (
    WAITS,
    device_steps,
    device_stretches,
    gaps,
    is_loading,
    lasting_steps,
)
from instrument.read.facts.links import Links, thread_of_steps
from instrument.read.facts.paths import NO_LAUNCH, NO_RANGE
from instrument.read.facts.places import cut_by_source, range_codes
from instrument.read.facts.schema import Schema, schema
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

Lane = Literal["step", "cpu", "device"]
LANES: tuple[Lane, ...] = ("step", "cpu", "device")
#: The kinds of time in a step, the first that applies at a moment first.
KINDS = (
    "compute", "exposed communication", "copy", "waiting for data", "launch", "CPU operators",
    "Python", "idle",
)  # fmt: skip
(
    COMPUTE, EXPOSED_COMMUNICATION, EXPOSED_COPY, WAITING, LAUNCH, OPERATORS, PYTHON, IDLE,
) = range(len(KINDS))  # fmt: skip
# More kinds, of the lanes "cpu" and "device".
_ON_DEVICE = (
    "compute and communication",
    *(name.removesuffix("_ns").replace("_", " ") for name in WAITS),
)
_EVERY_KIND = (*KINDS, "waiting for the device", *_ON_DEVICE)
_WAITING_FOR_DEVICE, _OVERLAP = len(KINDS), len(KINDS) + 1

SEGMENTS: Schema = schema(
    lane="step (the device's work first, then what the CPU does: the split that comparisons, the "
    "page and the sentences name), cpu (the thread of the steps, in whose waits the threads of the "
    "backward engine count), or device (all devices together)",
    start_ns="the start, on the trace's own clock",
    end_ns="the end, on the same clock",
    duration_ns="`end_ns` minus `start_ns`",
    step="(integer) the number of the step; null if no step finished: then the recording is split. "
    "In the lanes `step` and `device`, a step begins where the CPU and the device have ended the "
    "steps before, and lasts until the device has ended what the step launched; all work in this "
    "time counts, also of unknown launch. In the lane `cpu`, it lasts as recorded on the CPU",
    counted="(true or false) whether the step counts; see `counted` of the events",
    path="the range for which the time counts; `(no range)` outside of all ranges, `(no launch)` "
    "for device work whose launch is not in the trace; the name of a loader is without the class "
    "of its iterator",
    kind="in the lane `step`: compute, exposed communication, copy, waiting for data, launch, CPU "
    "operators (with compiled code and runtime calls), Python (in a range, but in no operator), or "
    "idle; in `cpu`: the same without work of devices, and waiting for the device; in `device`: "
    "compute, compute and communication (at the same time), exposed communication, copy, and idle "
    "time by its cause: launch wait, gap wait, loader wait, sync wait, unknown wait",
)
_ITERATOR = re.compile(r"(enumerate\(Data(?:Loader|Pipe)\))#\w*(?:\.__next__)?")
_DATA = "data"  # the range around the wait for a batch that a session opens
_KIND_OF_NODE = -1  # instead of an index into `_EVERY_KIND`
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


class _Painted(NamedTuple):
    """The segments of a lane: `path` and `kind` are codes; see `_segments`."""

    begin_ns: Ints
    lasts_ns: Ints
    path: Ints
    kind: Ints
    loaders: Sequence[str] = ()


def segments(capture: Traced, lane: Lane) -> pl.DataFrame:
    """Return the segments of one lane, in order of time; see `SEGMENTS`. Computed once.

    Cost: about 1 µs for each device event and for each CPU event on the threads of the steps, to
    sort their starts and ends.
    """
    return capture.once(f"segments of {lane}", lambda: _segments(capture, lane))


def step_parts(capture: Traced) -> dict[tuple[str, str], int]:
    """Return the time of the counted steps in ns by path of the range and kind, one of `KINDS`.

    The times sum exactly to the duration of the steps.
    """
    rows = segments(capture, "step").filter("counted")
    sums = rows.group_by("path", "kind", maintain_order=True).agg(pl.sum("duration_ns"))
    return {(path, kind): ns for path, kind, ns in sums.iter_rows()}


def time_of_kind(capture: Traced, kind: str) -> tuple[int, float]:
    """Return the time in ns of one of `KINDS` in the counted steps, and its share of them."""
    parts = step_parts(capture)
    found = sum(ns for (_, each), ns in parts.items() if each == kind)
    return found, found / max(sum(parts.values()), 1)


def ranges_of_steps(capture: Traced) -> list[dict[str, int]]:
    """Return the time of each counted step in ns by path of the range."""
    chosen = segments(capture, "step").filter("counted")
    rows = chosen.group_by("step", "path", maintain_order=True).agg(pl.sum("duration_ns"))
    found: dict[int | None, dict[str, int]] = {}
    for step, path, ns in rows.iter_rows():
        found.setdefault(step, {})[path] = ns
    return [*found.values()]


def no_operator(capture: Traced) -> pl.DataFrame:
    """Return the counted time of the thread of the steps in no operator and in no wait.

    It is Python, or code that torch does not record: the rows of the lane `cpu` of the kinds Python
    and idle, cut where the user's function changes, with it as `source`, such as "train.py:31 in
    main"; null in no function of the user, or without Python frames and samples. Computed once.
    """

    def compute() -> pl.DataFrame:
        chosen = pl.col("counted") & pl.col("kind").is_in([KINDS[PYTHON], KINDS[IDLE]])
        rows = segments(capture, "cpu").filter(chosen)
        row, begin, source = cut_by_source(
            capture, thread_of_steps(capture.links), rows["start_ns"].to_numpy(),
            rows["end_ns"].to_numpy(),
        )  # fmt: skip
        cut = rows[row].with_columns(start_ns=begin, source=source)
        until = pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1, fill_value=2**62))
        cut = cut.with_columns(end_ns=until)
        return cut.with_columns(duration_ns=pl.col("end_ns") - pl.col("start_ns"))

    return capture.once("time in no operator", compute)


def _segments(capture: Traced, lane: Lane) -> pl.DataFrame:
    links, work, span = capture.links, capture.work, capture.links.finished_steps
    if lane == "cpu":
        painted = _on_host(capture, span, lane)
    elif lane == "step":
        span = lasting_steps(links, work)
        painted = _on_host(capture, span, lane)
    elif len(work.event):
        span = device_steps(links, work)
        painted = _on_device(capture, span)
    else:
        painted = _Painted(*np.zeros((4, 0), np.int64))
    begin, of = painted.begin_ns, span.holds(painted.begin_ns)
    counted = np.zeros(span.count, np.bool_)
    counted[links.counted_steps.kept] = True
    texts = (NO_LAUNCH, NO_RANGE, *links.scopes.paths.texts, *painted.loaders)
    return pl.DataFrame(
        {
            "lane": pl.Series([lane]).new_from_index(0, len(begin)),
            "start_ns": begin,
            "end_ns": begin + painted.lasts_ns,
            "duration_ns": painted.lasts_ns,
            "step": pl.Series(links.step_numbers or [None], dtype=pl.Int64).gather(of),
            "counted": counted[of],
            "path": pl.Series([*map(plain_path, texts)]).gather(painted.path - _NO_LAUNCH),
            "kind": pl.Series(_EVERY_KIND).gather(painted.kind),
        }
    )


def _on_host(capture: Traced, span: CountedSteps, lane: Lane) -> _Painted:
    links = capture.links
    nodes, backward = links.scopes.nodes, links.scopes.backward
    waits, loaders = _waits(capture)
    if lane == "step" and len(capture.work.event):
        layers = [*_device_layers(capture), waits, *_launches(capture, span)]
    else:
        exposed = exposed_on_cpu(links)
        of_cpu = np.full(len(exposed[0]), _ON_CPU)
        layers = [_Layer(EXPOSED_COMMUNICATION, *exposed, of_cpu), waits]
    engines = nodes.thread[backward].astype(np.int64)
    engine = _disjoint(OPERATORS, nodes.start_ns[backward], nodes.end_ns[backward], engines)
    path_of_node, kind_of_node = _of_nodes(capture, lane)
    code = path_of_node * len(_EVERY_KIND) + kind_of_node
    differs = code[:-1] != code[links.call_tree.parent]
    begin, lasts_ns = _cuts(links, span, [*layers, engine], differs)
    path, kind = _painted(begin, layers)
    thread = np.full(len(begin), thread_of_steps(links), np.int32)
    segment, interval = engine.inside(begin)
    thread[segment] = engine.code[interval]
    on_cpu = np.flatnonzero(path == _ON_CPU)
    node = links.call_tree.node_at(thread[on_cpu], begin[on_cpu], with_end=False)
    path[on_cpu] = path_of_node[node]
    kind[on_cpu] = np.where(kind[on_cpu] == _KIND_OF_NODE, kind_of_node[node], kind[on_cpu])
    return _Painted(begin, lasts_ns, path, kind, loaders)


def _on_device(capture: Traced, span: CountedSteps) -> _Painted:
    stretches = device_stretches(capture.links.events, capture.work, span.start_ns, span.end_ns)
    idle = [
        _Layer(_OVERLAP + k, *each, np.full(len(each[0]), _NO_LAUNCH + 1))
        for k, each in enumerate(stretches.values())
    ]
    work = _device_layers(capture)
    begin, lasts_ns = _cut(span, [side for each in (*work, *idle) for side in each[1:3]])
    path, kind = _painted(begin, [*work, *idle[1:]])
    kind[idle[0].inside(begin)[0]] = _OVERLAP
    return _Painted(begin, lasts_ns, path, kind)


def _painted(begin: Ints, layers: Sequence[_Layer]) -> tuple[Ints, Ints]:
    """The path and kind of each segment: those of the first layer that covers it."""
    path, kind = np.full(len(begin), _ON_CPU), np.full(len(begin), _KIND_OF_NODE)
    for layer in reversed(layers):
        segment, interval = layer.inside(begin)
        path[segment], kind[segment] = layer.code[interval], layer.kind
    return path, kind


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
    times = [start_ns, start_ns + links.spent_ns[nodes]]
    return _cut(span, [*times, *(side for layer in layers for side in layer[1:3])])


def _cut(span: CountedSteps, times: Sequence[Ints]) -> tuple[Ints, Ints]:
    """The starts and durations of the pieces of the steps between the times."""
    cuts = distinct(np.concatenate([span.start_ns, span.end_ns, *times]))
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


def _of_nodes(capture: Traced, lane: Lane) -> tuple[Ints, Ints]:
    """For each node, and for the time outside of all nodes, the code of its range and its kind."""
    tree, scopes, events = capture.links.call_tree, capture.links.scopes, capture.links.events
    waits = events.among(is_runtime) & events.named(is_wait)
    is_python = capture.links.events_that_are_ranges & ~is_compiled_code(events)
    kind = np.where(is_python, PYTHON, OPERATORS)
    if lane == "cpu":
        kind[capture.work.call[capture.work.call >= 0]] = LAUNCH
    kind[waits] = IDLE if lane == "step" else _WAITING_FOR_DEVICE
    kind[events.named(is_step)] = IDLE
    return scopes.path_of_node, np.append(kind[tree.index], IDLE)
