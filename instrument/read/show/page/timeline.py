"""The section *Timeline*: what ran at which time, on each thread and each device stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from instrument.base.prose import shortened
from instrument.base.range_names import RESUMED
from instrument.read.advise.diagnosis import Diagnosis
from instrument.read.facts.call_tree import CallTree, nest
from instrument.read.facts.groupby import differences, groupby, intern
from instrument.read.facts.idle import idle_stretches
from instrument.read.facts.places import range_codes
from instrument.read.facts.step_index import step_bounds
from instrument.read.trace.events import Events, Flags, Ints, Thread, is_runtime
from instrument.read.views.stacks import is_own_frame
from instrument.read.views.views import Views

#: The most slices on a page. Each slice takes about 8 bytes in the HTML file.
MOST_SLICES = 120_000
#: The kinds of slices. The number of a kind is its index.
KINDS = ("range", "operator", "call", "frame", "device", "idle", "finding")
_RANGE, _OPERATOR, _CALL, _FRAME, _DEVICE, _IDLE, _FINDING = range(len(KINDS))
# The maximum number of rows of a track. Deeper rows, such as those of a recursion, are left out.
_MOST_ROWS = 256
# This many tracks of a layer are open at first: those with the most time.
_MOST_OPEN = 12
_LONGEST_NAME = 400
_CAUSES = {
    "launch_wait_ns": "the CPU had not launched the next work",
    "gap_wait_ns": "the next work was launched but had not started",
    "loader_wait_ns": "the CPU waited for data",
    "sync_wait_ns": "the CPU waited for the device before it launched the next work",
    "unknown_wait_ns": "the launch of the next work is not in the trace",
}


@dataclass(frozen=True)
class _Layer:
    """All slices from one source, such as all CPU calls; the page draws a track for each thread.

    Attributes:
        title: the format string of a track's name; its arguments are the process and the thread.
        tree: the slices; `index` is -1 for a slice that is no event of the trace.
        names: the names of slices.
        name, kind: for each slice, an index into `names`, and an index into `KINDS`.
        inner_ns: the part of each slice's duration that its direct children take.
        is_open: whether the page at first shows all rows of a track, or only the first row.
    """

    title: str
    tree: CallTree
    names: Sequence[str]
    name: Ints
    kind: Ints
    inner_ns: Ints
    is_open: bool = True

    def only(self, chosen: Flags) -> _Layer:
        """The layer with only the chosen slices; `inner_ns` still counts all children."""
        return replace(
            self,
            tree=self.tree.only(chosen),
            name=self.name[chosen],
            kind=self.kind[chosen],
            inner_ns=self.inner_ns[chosen],
        )


@dataclass(frozen=True)
class _Track:
    """The slices of one thread of a layer: their positions in its tree, sorted by row and start."""

    name: str
    is_open: bool
    layer: _Layer
    nodes: Ints
    row_sizes: list[int]


def timeline(capture: Views, diagnosis: Diagnosis | None = None) -> dict[str, Any] | None:
    """Return the slices of a trace for the page; None if it would show none.

    The result has the slices of all findings, and at most `MOST_SLICES` other slices. If a trace
    has more, slices of the step that the page shows first are kept before slices of other steps,
    and long slices before short slices. Times are in nanoseconds since the first event.

    Each item of a finding's evidence stands for events of one name. The page first shows the step
    in which the longest event of the first item begins. If this event begins outside of all steps,
    the next item is tried. If no item gives a step, the page first shows the step with the median
    duration; if there are several steps, the median leaves out the first step.

    The keys (of those with *, a list holds each value minus the value before it):

    - `steps`: the number, start and duration of each finished step; `end_ns`: the end of the last
      slice.
    - `first_step`, `first_code`: the position of the step that the page shows first, and the code
      of the finding whose evidence is in it; None if there is none.
    - `names`, `kinds`, `ranges`, `causes`: the distinct names of slices, the kind of each, the
      paths of ranges, the names of idle slices.
    - `tracks`: for each track its `name`, whether it `is_open` at first, and the number of slices
      in each of its `rows`.
    - `start`*, `duration`, `inner`, `name`, `range`: the slices, sorted by track, row and start.
      `inner` is the part of the duration that the slice's direct children take. `name` and `range`
      are indices; a `range` of -1 means no range.
    - `launched`*, `launches`*: the indices of the slices of device work, and for each of them the
      index of the call that launched it.
    - `left_out`: how many slices are left out.

    Cost: about 3 µs an event.
    """
    events = capture.events
    steps = capture.links.steps
    first_ns, (begin_ns, end_ns) = events.begin_ns, step_bounds(events, steps)
    spans = _evidence(capture, diagnosis)
    first, code = _first_in_step(spans, begin_ns, end_ns) or (_median(end_ns - begin_ns), None)
    findings, others = _findings(spans), [*_device(capture), *_threads(capture)]
    span = None if first is None else (int(begin_ns[first]), int(end_ns[first]))
    shown = [*findings, *_longest(others, span)]
    tracks = [track for layer in shown for track in _tracks(layer, events)]
    if not tracks:
        return None
    columns = _columns(capture, tracks)
    return {
        "steps": [
            [number, start - first_ns, end - start]
            for number, start, end in zip(
                capture.links.step_numbers, begin_ns.tolist(), end_ns.tolist()
            )
        ],
        "first_step": first,
        "first_code": code,
        "causes": [*_CAUSES.values()],
        **columns,
        "left_out": sum(len(each.tree) for each in [*findings, *others]) - len(columns["start"]),
    }


def _median(duration_ns: Ints) -> int | None:
    """The position of the median step, or the shorter of the two; without the first of several."""
    first = int(len(duration_ns) > 1)
    counted = duration_ns[first:]
    middle = (len(counted) - 1) // 2
    return first + int(np.argsort(counted, kind="stable")[middle]) if len(counted) else None


def _layer(title: str, events: Events, tree: CallTree, kind: Ints, **more: Any) -> _Layer:
    spent_ns = tree.ends_before_overlap - tree.start_ns
    return _Layer(
        title=title,
        tree=tree,
        names=events.names,
        name=events.name[tree.index].astype(np.int64),
        kind=kind,
        inner_ns=tree.total_ns - tree.own(spent_ns),
        **more,
    )


def _flat(
    title: str, names: Sequence[str], kind: int, start: Ints, end: Ints, name: Ints
) -> _Layer:
    """A layer with one track, for slices that are no events of the trace."""
    order = np.lexsort((-end, start))
    none = np.full(len(order), -1)
    until = np.arange(1, len(order) + 1, dtype=np.int32)
    thread = np.zeros(len(order), np.int32)
    tree = CallTree(none, thread, start[order], end[order], none, thread, until)
    return _Layer(title, tree, names, name[order], none + 1 + kind, none + 1)


def _threads(capture: Views) -> list[_Layer]:
    """Two layers: first the CPU's ranges, operators and runtime calls, then the Python frames."""
    events, links = capture.events, capture.links
    tree, frames = links.call_tree, links.frames
    frames = frames.only(~events.named(is_own_frame)[frames.index])
    is_range = np.zeros(len(events), np.bool_)
    is_range[links.scopes.ranges.index] = True
    kind = np.where(events.among(is_runtime), _CALL, np.where(is_range, _RANGE, _OPERATOR))
    return [
        _layer("thread {1} of process {0}", events, tree, kind[tree.index]),
        _layer(
            "Python on thread {1} of process {0}",
            events,
            frames,
            np.full(len(frames), _FRAME),
            is_open=not len(tree),
        ),
    ]


def _device(capture: Views) -> list[_Layer]:
    """Two layers: the times in which all devices are idle, and the work of each stream."""
    events, device = capture.events, capture.links.launches.device
    if not len(device):
        return []
    is_work = np.zeros(len(events), np.bool_)
    is_work[device] = True
    tree = nest(events, is_work)
    begin, end = events.begin_ns, int(events.end_ns.max())
    stretches = idle_stretches(events, capture.work, begin, end)
    start, until = (np.concatenate([each[side] for each in stretches.values()]) for side in (0, 1))
    cause = np.repeat(np.arange(len(stretches)), [len(each) for each, _ in stretches.values()])
    causes = [_CAUSES[name] for name in stretches]
    return [
        _flat("all devices idle", causes, _IDLE, start, until, cause),
        _layer("stream {1} of device {0}", events, tree, np.full(len(tree), _DEVICE)),
    ]


def _evidence(capture: Views, diagnosis: Diagnosis | None) -> list[tuple[int, int, str]]:
    """The start, the end and the finding's code of each event of evidence in this capture."""
    return [
        (*span, finding.code)
        for finding in (diagnosis.findings if diagnosis else ())
        for span in finding.spans_in(capture.name)
        if span is not None
    ]


def _first_in_step(
    spans: Sequence[tuple[int, int, str]], begin_ns: Ints, end_ns: Ints
) -> tuple[int, str] | None:
    """The position of the first step in which a span begins, and the code of this span."""
    for start, _, code in spans:
        steps = np.flatnonzero((begin_ns <= start) & (start < end_ns))
        if len(steps):
            return int(steps[0]), code
    return None


def _findings(spans: Sequence[tuple[int, int, str]]) -> list[_Layer]:
    """One layer, with a slice for each span; its name is the code of the finding."""
    if not spans:
        return []
    start, end, codes = zip(*spans)
    names = [*dict.fromkeys(codes)]
    name = np.array([names.index(code) for code in codes])
    return [_flat("findings", names, _FINDING, np.array(start), np.array(end), name)]


def _longest(layers: Sequence[_Layer], step: tuple[int, int] | None) -> list[_Layer]:
    """Keep at most `MOST_SLICES` slices in all layers together.

    Slices of `step` are kept before slices of other steps, and long slices before short slices.
    """
    sizes = [len(layer.tree) for layer in layers]
    if sum(sizes) <= MOST_SLICES:
        return [*layers]
    start, end = (
        np.concatenate([getattr(layer.tree, side) for layer in layers])
        for side in ("start_ns", "end_ns")
    )
    begin, until = step or (0, 0)
    rank = end - start
    rank[(start < until) & (end > begin)] += rank.max() + 1
    least = np.partition(rank, -MOST_SLICES)[-MOST_SLICES]
    kept = rank > least
    kept[np.flatnonzero(rank == least)[: MOST_SLICES - np.count_nonzero(kept)]] = True
    return [layer.only(part) for layer, part in zip(layers, np.split(kept, np.cumsum(sizes)[:-1]))]


def _tracks(layer: _Layer, events: Events) -> Iterator[_Track]:
    """Yield the tracks of a layer; the track with the most time comes first."""
    tree = layer.tree
    threads, groups = groupby(tree.thread)
    spent_ns, members = groups.sum(tree.total_ns - layer.inner_ns), groups.rows()
    for rank, k in enumerate(np.argsort(-spent_ns, kind="stable").tolist()):
        nodes, rows = members[k], _rows(tree, members[k])
        order = np.lexsort((nodes, rows))
        yield _Track(
            name=_title(layer, events.threads[threads[k]]),
            is_open=layer.is_open and rank < _MOST_OPEN,
            layer=layer,
            nodes=nodes[order[rows[order] < _MOST_ROWS]],
            row_sizes=np.bincount(rows)[:_MOST_ROWS].tolist(),
        )


def _title(layer: _Layer, thread: Thread) -> str:
    process, number = thread
    return layer.title.format(process, str(number).removeprefix("stream "))


def _rows(tree: CallTree, nodes: Ints) -> Ints:
    """The row of each slice of a thread; `_MOST_ROWS` for slices that are too deep to show.

    A slice lies in the first free row below its parent, so the slices of a row do not overlap. If
    no slices of the same depth overlap, the row of a slice is its depth.
    """
    depth = np.minimum(tree.depth[nodes], _MOST_ROWS)
    by_depth = nodes[np.argsort(depth, kind="stable")]
    start, end = tree.start_ns[by_depth], tree.end_ns[by_depth]
    overlaps = (np.diff(tree.depth[by_depth]) == 0) & (start[1:] < end[:-1])
    if not overlaps.any():
        return depth
    parents = np.maximum(tree.parent[nodes] - nodes[0], -1)
    columns = (tree.start_ns[nodes], tree.end_ns[nodes], parents)
    rows: list[int] = []
    ends: list[int] = []  # the end of the last slice in each row
    for start, end, parent in zip(*(column.tolist() for column in columns)):
        row = rows[parent] + 1 if parent >= 0 else 0
        while row < len(ends) and ends[row] > start:
            row += 1
        rows.append(min(row, _MOST_ROWS))
        if row < _MOST_ROWS:
            ends[row : row + 1] = [end]
    return np.array(rows)


def _columns(capture: Views, tracks: Sequence[_Track]) -> dict[str, Any]:
    events = capture.events

    def column(name: str) -> Ints:
        return np.concatenate([getattr(each.layer.tree, name)[each.nodes] for each in tracks])

    event, start, end = (column(name) for name in ("index", "start_ns", "end_ns"))
    inner = np.concatenate([each.layer.inner_ns[each.nodes] for each in tracks])
    name, names = _names(tracks)
    path = np.full(len(event), -1)
    path[event >= 0] = range_codes(capture, event[event >= 0])
    used, groups = groupby(np.append(path, -1) + 1)  # used[0] is 0, for no range
    paths = capture.links.scopes.paths
    return {
        "end_ns": int(end.max()) - events.begin_ns,
        "names": [text for text, _ in names],
        "kinds": [kind for _, kind in names],
        "ranges": [paths.texts[k - 1] for k in used[1:].tolist()],
        "tracks": [
            {"name": each.name, "open": each.is_open, "rows": each.row_sizes} for each in tracks
        ],
        "start": differences(start - events.begin_ns),
        "duration": (end - start).tolist(),
        "inner": inner.tolist(),
        "name": name.tolist(),
        "range": (groups.of[:-1] - 1).tolist(),
        **_launches(capture, event),
    }


def _names(tracks: Sequence[_Track]) -> tuple[Ints, list[tuple[str, int]]]:
    """The distinct pairs of a name and a kind, and for each slice the index of its pair."""
    names: list[tuple[str, int]] = []
    codes: list[Ints] = []
    for each in tracks:
        layer, of_layer = each.layer, each.layer.names
        pairs, groups = groupby(layer.kind[each.nodes] * len(of_layer) + layer.name[each.nodes])
        codes.append(groups.of + len(names))
        for kind, name in (divmod(pair, len(of_layer)) for pair in pairs.tolist()):
            names.append((shortened(of_layer[name].removesuffix(RESUMED), _LONGEST_NAME), kind))
    code, distinct = intern(names)
    return code[np.concatenate(codes)], distinct


def _launches(capture: Views, event: Ints) -> dict[str, list[int]]:
    """The keys `launched` and `launches` of the section."""
    found = capture.links.launches
    number = np.full(len(capture.events) + 1, -1)
    number[event] = np.arange(len(event))
    number[-1] = -1  # for slices that are not events
    work, call = number[found.device], number[found.launch]
    known = np.flatnonzero((work >= 0) & (call >= 0))
    known = known[np.argsort(work[known])]
    return {"launched": differences(work[known]), "launches": differences(call[known])}
