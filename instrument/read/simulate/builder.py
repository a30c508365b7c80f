"""`build_model`: find the moments of a recorded window, and which moments each of them waits for.

docs/explanation/simulation.md lists the arcs. A device row is the row of a device event in the
table `Work`; a device event has a moment at its end, and one at its start if another moment waits
for this start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from instrument.read.facts.autograd import is_backward
from instrument.read.facts.device_work import COMMUNICATION, Work, queued_launches
from instrument.read.facts.groupby import Groups, distinct, groupby, intern, isin
from instrument.read.facts.idle import (
    LONGEST_DELAY_NS,
    is_loading,
    late_work,
    launching_step,
)
from instrument.read.facts.intervals import concatenated, merged, within
from instrument.read.facts.layers import Layers
from instrument.read.facts.links import Links, thread_of_steps
from instrument.read.facts.step_index import step_bounds
from instrument.read.facts.synchronisation import DEVICE as DEVICE_WAIT
from instrument.read.facts.synchronisation import STREAM_WAIT
from instrument.read.simulate.cpu_time import axis_of, joined
from instrument.read.simulate.loader_queue import LoaderQueue, loader_queue
from instrument.read.simulate.model import (
    CPU,
    CROSS,
    DEVICE,
    HANDOVER,
    LAUNCH,
    LOADER,
    ORIGIN,
    QUEUE,
    RANKS,
    STREAM,
    WAIT,
    Arcs,
    Model,
    Moments,
)
from instrument.read.simulate.program import NEVER, Program, in_order
from instrument.read.trace.capture_json import Loader
from instrument.read.trace.events import Codes, Events, Flags, Ints, is_step, loader_iterator
from instrument.read.views.launch_queue import FULL_QUEUE

# Moments at the same time have this order: starts of device events, ends of device events, ends of
# waits on the CPU, starts on the CPU, other ends on the CPU. But of two device events, the one that
# started first comes first; see `_finish`.
_STARTS, _ENDS, _RETURNS, _BEGINS, _LEAVES = range(5)
# A launch waits only if the launch queue is full. With a faster CPU, the queue can be full more
# often. So a launch gets an arc even if only a tenth of the queue was in use in the recording.
_FILLED = FULL_QUEUE // 10
# A waiting thread goes on within this time after the other thread has ended its work, or within
# this fraction of the wait if that is longer. On a loaded machine, threads wake up late.
_WAKES_NS, _WAKES_SHARE = 200_000, 0.1
# A thread without events waits for another thread only if the other thread works for at least this
# fraction of the time without events.
_WORKS_SHARE = 0.8
_SHORTEST_SILENCE_NS = 50_000
# A thread that polls the host's memory until a kernel writes to it goes on within this time, plus
# this fraction of the wait, around the end of the kernel. Shorter waits are not looked for.
_POLLS_NS, _POLLS_SHARE, _SHORTEST_POLL_NS = 30_000, 0.005, 1_000_000
# The device is busy for at least this fraction of such a wait.
_BUSY_SHARE = 0.95
# The largest number of pairs of a synchronisation and a stream, for each event of the trace.
_MOST_PAIRS = 8
# With fewer values than this, one exceptional value can decide the median.
_FEW = 8
_WORKERS, _IN_PROCESS = "_MultiProcessing", "_SingleProcess"


class _Builder:
    """Collects the moments and arcs of the simulated graph, and the waits of its threads."""

    def __init__(self, links: Links, work: Work, layers: Callable[[], Layers]) -> None:
        self.links, self.work, self.events, self.layers = links, work, links.events, layers
        # The device row of each event; -1 for a CPU event. The last entry is for the position -1.
        self.row_of = np.full(len(links.events) + 1, -1)
        self.row_of[work.event] = np.arange(len(work.event))
        self.axis = axis_of(self.events)  # the waits come later
        self.begin_ns = self.axis.begin_ns
        # For a node, its thread in the call tree, which can differ from that in the trace.
        self.thread_of = self.events.thread.astype(np.int64)
        self.thread_of[links.call_tree.index] = links.call_tree.thread
        self.count = 0
        self.moments: list[tuple[Ints, ...]] = []  # phase, thread, time, call
        self.arcs: list[tuple[Ints, ...]] = []
        self.typical: list[Ints] = []
        self.waits: list[tuple[Ints, Ints, Ints]] = []

    def add(
        self, phase: int | Ints, thread: Ints | Codes, time_ns: Ints, call: Ints | int = -1
    ) -> Ints:
        """Add CPU moments, and return their indices."""
        columns = np.broadcast_arrays(phase, thread.astype(np.int64), time_ns, call)
        self.moments.append(tuple(columns))
        self.count += len(thread)
        return np.arange(self.count - len(thread), self.count)

    def connect(
        self,
        kind: int,
        target: Ints,
        source: Ints | int,
        fixed_ns: Ints | int = 0,
        row: Ints | int = -1,
        event: Ints | int = -1,
        typical_ns: Ints | int | None = None,
    ) -> None:
        """Add arcs; `typical_ns`, if given, replaces `fixed_ns` in `Model.typical`."""
        typical = fixed_ns if typical_ns is None else typical_ns
        columns = np.broadcast_arrays(target, source, kind, fixed_ns, row, event, typical)
        *arcs, typical = (np.asarray(each, np.int64) for each in columns)
        self.arcs.append(tuple(arcs))
        self.typical.append(typical)

    def columns(self) -> Arcs:
        return Arcs(*(np.concatenate(side) for side in zip(*self.arcs)))

    def wait(self, thread: Ints | Codes, start_ns: Ints, end_ns: Ints) -> None:
        """Add intervals in which threads only wait: they are no CPU time."""
        self.waits.append((thread.astype(np.int64), start_ns, end_ns))


def build_model(
    links: Links,
    work: Work,
    loader: Loader | None,
    layers: Callable[[], Layers],
) -> Model:
    """Build the model of a capture; `loader` has the settings of its data loader, if known.

    `layers` is `Model.layers`.

    Cost: a few hundred array operations on launches, waits, device events and the call tree.

    Raises:
        CaptureError: the trace is too long to simulate.
    """
    made = _Builder(links, work, layers)
    step_thread, step_start, step_end, step_of = _steps(made)
    starts = made.add(_BEGINS, step_thread, step_start)
    _hand_overs(made)
    launch_of, launch_ns = _launches(made)
    loaders = _loader_waits(made, loader)
    queued = _queue_moments(made)
    blocked = _wait_moments(made)
    polls, ends_early = _polling(made)
    ends = made.add(_LEAVES, step_thread, step_end)
    end_of = made.count + np.arange(len(work.event))
    late = late_work(links, work)
    needed = distinct(np.concatenate([queued.row, polls.row[ends_early], late]))
    start_of = np.full(len(work.event), -1)
    start_of[needed] = made.count + len(end_of) + np.arange(len(needed))
    ready_ns = _ready_arcs(made, loaders, made.count + len(end_of) + len(needed))
    _device_arcs(made, launch_of, launch_ns, end_of, start_of)
    polled = np.where(ends_early, start_of[polls.row], end_of[polls.row])
    made.connect(WAIT, polls.moment, polled, polls.lag_ns, event=polls.call)
    for kind, waits, awaited in ((QUEUE, queued, start_of), (WAIT, blocked, end_of)):
        source, usual_ns = awaited[waits.row], waits.usual_ns
        made.connect(
            kind, waits.moment, source, waits.lag_ns, event=waits.call, typical_ns=usual_ns
        )
    phase, thread, time_ns, call = (np.concatenate(side) for side in zip(*made.moments))
    device_phases = np.repeat((_ENDS, _STARTS, _ENDS), (len(end_of), len(needed), len(ready_ns)))
    times = np.concatenate([time_ns, work.end_ns, work.start_ns[needed], ready_ns])
    moments = Moments(
        time_ns=times - made.begin_ns,
        phase=np.append(phase, device_phases),
        thread=thread,
        call=call,
        end_of=end_of,
        start_of=start_of,
        step_start=np.append(start_of[late], starts)[: len(starts)],
        step_end=ends,
    )
    _cpu_arcs(made, moments)
    _ = links.launched  # computed here once, because every edit needs it
    return _finish(made, moments, step_of)


def _launches(made: _Builder) -> tuple[Ints, Ints]:
    """Add a moment for each call that launched work; return that of each device row, and its time.

    The moment is the start of the call. But the work of a call that loads code first can only begin
    after the call.
    """
    events, work = made.events, made.work
    called = np.flatnonzero(work.call >= 0)
    calls, of_call = groupby(work.call[called])
    begins_ns, ends_ns = events.start_ns[calls], events.end_ns[calls]
    loads_code = ends_ns - begins_ns > LONGEST_DELAY_NS
    loads_code &= of_call.min(work.start_ns[called]) >= ends_ns
    times_ns = np.where(loads_code, ends_ns, begins_ns)
    moments = made.add(_BEGINS, made.thread_of[calls], times_ns, calls)
    launch_of, launch_ns = np.full(len(work.event), -1), np.zeros(len(work.event), np.int64)
    launch_of[called], launch_ns[called] = moments[of_call.of], times_ns[of_call.of]
    return launch_of, launch_ns


def _finish(made: _Builder, moments: Moments, step_of: Ints) -> Model:
    thread, start, end = (np.concatenate(side) for side in zip(*made.waits))
    place = made.axis.place
    # Among device events at the same time, the one that started first comes first.
    started = np.zeros(len(moments.time_ns), np.int64)
    started[moments.end_of] = made.work.start_ns
    has_start = moments.start_of >= 0
    started[moments.start_of[has_start]] = made.work.start_ns[has_start]
    on_cpu = moments.phase >= _RETURNS
    order = np.lexsort((moments.phase, started, on_cpu, moments.time_ns))
    program, arcs = _program(made, moments, order)
    arcs.fixed_ns[~program.kept] = NEVER
    typical = np.concatenate(made.typical)
    typical[~program.kept] = NEVER
    return Model(
        links=made.links,
        work=made.work,
        axis=replace(made.axis, waits=joined(place(thread, start), place(thread, end))),
        moments=moments,
        arcs=arcs,
        program=program,
        residue_ns=_residues(made, moments, arcs),
        has_steps=len(made.links.steps) > 0,
        step_of=step_of,
        unknown_wait_ns=_unknown_wait_ns(made),
        layers=made.layers,
        _typical_ns=typical,
    )


def _program(made: _Builder, moments: Moments, order: Ints) -> tuple[Program, Arcs]:
    """Make the `Program` of a model, and its arcs.

    If the clocks of CPU and device differ, some arcs contradict the recorded times, and are left
    out. A moment without any other arc happens at the recorded time.
    """
    arcs = made.columns()
    kept = in_order(order, arcs.target, arcs.source)
    alone = np.ones(len(moments.time_ns), np.bool_)
    alone[arcs.target[kept]] = False
    if alone.any():
        target = np.flatnonzero(alone)
        row = moments.ended_row[target]
        lasts = np.append(made.work.duration_ns, 0)[row]
        made.connect(ORIGIN, target, -1, moments.time_ns[target] - lasts, row)
        arcs, kept = made.columns(), np.append(kept, alone[target])
    return Program(order, arcs.target, arcs.source, kept), arcs


def _residues(made: _Builder, moments: Moments, arcs: Arcs) -> Ints:
    """For each device event: its start minus the earliest start that its arcs allow, in ns."""
    into = np.flatnonzero(
        np.isin(arcs.kind, (LAUNCH, STREAM, CROSS, ORIGIN))
        & (arcs.row >= 0)
        & (arcs.fixed_ns != NEVER)
    )
    row, source = arcs.row[into], arcs.source[into]
    begun = np.where(source >= 0, np.append(moments.time_ns, 0)[source], 0) + arcs.fixed_ns[into]
    expected = np.full(len(made.work.event), NEVER)
    np.maximum.at(expected, row, begun)
    return np.where(expected == NEVER, 0, made.work.start_ns - made.begin_ns - expected)


def _steps(made: _Builder) -> tuple[Ints, Ints, Ints, Ints]:
    """Find the steps; if no step finished, the whole time of the main thread is one step.

    Returns:
        The thread, the start and the end of each step; for each device row, the step that launched
            it, or -1.
    """
    events, index, tree = made.events, made.links.steps, made.links.call_tree
    if len(index):
        step_of = launching_step(events, made.work, index)
        thread = events.thread[index].astype(np.int64)
        return thread, *step_bounds(events, index), step_of
    rows, none = len(made.work.event), np.zeros(0, np.int64)
    if not len(tree):
        return none, none, none, np.full(rows, -1)
    main = thread_of_steps(made.links)
    own = tree.thread == main
    begin, end = np.array([tree.start_ns[own].min()]), np.array([tree.end_ns[own].max()])
    return np.array([main]), begin, end, np.zeros(rows, np.int64)


def _cpu_arcs(made: _Builder, moments: Moments) -> None:
    count = len(moments.thread)
    order = np.lexsort((moments.phase[:count], moments.time_ns[:count], moments.thread))
    before = np.append(-1, order[:-1])[:count]
    is_first = np.append(True, np.diff(moments.thread[order]) != 0)[:count]
    made.connect(CPU, order, np.where(is_first, -1, before))


# ---- hand-over between threads


def _hand_overs(made: _Builder) -> None:
    """Add moments and arcs where the main thread and another thread wait for each other.

    The bounds are the times at which events of the main thread start or end. The main thread waits
    between two bounds if another thread ends an interval of work there and does not work at the
    second bound. If it is not the autograd engine's thread, it must also work for most of this
    time, which must be at least 50 µs, and the second bound must come just after the end of its
    work.
    """
    links, tree, axis = made.links, made.links.call_tree, made.axis
    if not len(tree):
        return
    main = thread_of_steps(links)
    is_engine = np.zeros(len(made.events.threads), np.bool_)
    is_engine[tree.thread[is_backward(made.events)[tree.index]]] = True
    own = np.flatnonzero(tree.thread == main)
    bounds = distinct(np.concatenate([tree.start_ns[own], tree.end_ns[own]]))
    # The intervals in which the other threads work, sorted by thread and time.
    roots = np.flatnonzero((tree.parent < 0) & (tree.thread != main))
    busy = merged(*(axis.place(tree.thread[roots], t[roots]) for t in (tree.start_ns, tree.end_ns)))
    if not len(busy[0]):
        return
    other = busy[0] // axis.span_ns
    start, end = (side - other * axis.span_ns + axis.begin_ns for side in busy)
    is_last = np.append(np.diff(other) != 0, True)  # of its thread
    gap = np.searchsorted(bounds, end)
    chosen = is_last | (np.append(np.diff(gap), 0) != 0)
    at = np.flatnonzero(chosen & (gap > 0) & (gap < len(bounds)))
    silent_from, silent_until, finish = bounds[gap[at] - 1], bounds[gap[at]], end[at]
    thread = other[at]
    # The other thread must not be at work again when the main thread goes on.
    chosen = is_last[at] | (np.append(start, 0)[at + 1] >= silent_until)
    first = np.searchsorted(busy[1], axis.place(thread, silent_from), "right")
    begin = np.maximum(start[first], silent_from)
    silence = silent_until - silent_from
    wakes = np.maximum(_WAKES_NS, (silence * _WAKES_SHARE).astype(np.int64))
    works = within(busy, axis.place(thread, silent_from), axis.place(thread, finish))
    chosen &= is_engine[thread] | (
        (silence >= _SHORTEST_SILENCE_NS)
        & (silent_until - finish <= wakes)
        & (works >= _WORKS_SHARE * (finish - silent_from))
    )
    thread, begin, finish = thread[chosen], begin[chosen], finish[chosen]
    mains = np.full(len(thread), main)
    ends = made.add(_LEAVES, thread, finish)
    resumes = made.add(_LEAVES, mains, finish)
    made.connect(HANDOVER, resumes, ends)
    made.wait(mains, begin, finish)
    # If the other thread begins after a pause, the main thread has given it the work.
    pause_from = np.where(np.append(True, is_last[:-1]), made.begin_ns, np.append(0, end[:-1]))
    least_ns = np.where(is_engine[other], 1, _SHORTEST_SILENCE_NS)
    pauses = isin(other, thread) & (start - pause_from >= least_ns)
    pauses &= ~is_engine[other] | isin(busy[0], axis.place(thread, begin))
    others, begins = other[pauses], start[pauses]
    asks = made.add(_BEGINS, np.full(len(begins), main), begins)
    works_from = made.add(_BEGINS, others, begins)
    made.connect(HANDOVER, works_from, asks)
    made.wait(others, pause_from[pauses], begins)


# ---- waits for the data loader


# The calls of a loader with workers, the moments at their ends, and its queue.
_Loaded = tuple[Ints, Ints, LoaderQueue]


def loads_here(events: Events) -> Flags:
    """A mask of the events in which a data loader loads in the training process."""
    return events.named(lambda name: _IN_PROCESS in (loader_iterator(name) or ""))


def _loader_waits(made: _Builder, loader: Loader | None) -> list[_Loaded]:
    """Add moments at which the program takes batches; `_ready_arcs` adds those from workers.

    Where the training process loads, an arc leads from each batch to the next; it has no effect
    until `edits.workers` gives it a time.
    """
    events, found = made.events, list[_Loaded]()
    loads = is_loading(events) & events.finished
    for calls in _by_name(events, np.flatnonzero(loads & loads_here(events)), events.start_ns):
        moments = made.add(_RETURNS, events.thread[calls], events.end_ns[calls], calls)
        made.connect(LOADER, moments[1:], moments[:-1], NEVER, event=calls[1:])
    loads &= events.named(lambda name: _WORKERS in (loader_iterator(name) or ""))
    for calls in _by_name(events, np.flatnonzero(loads), events.end_ns):
        start, end, thread = events.start_ns[calls], events.end_ns[calls], events.thread[calls]
        queue = loader_queue(made.begin_ns, start, end, loader)
        if queue is not None:
            late = queue.is_awaited
            found.append((calls, made.add(_RETURNS, thread, end, calls), queue))
            made.wait(thread[late], (start + queue.own_ns)[late], end[late])
    return found


def _by_name(events: Events, calls: Ints, time_ns: Ints) -> list[Ints]:
    calls = calls[np.argsort(time_ns[calls], kind="stable")]
    return [calls[rows] for rows in groupby(events.name[calls])[1].rows()]


def _ready_arcs(made: _Builder, loaders: list[_Loaded], first: int) -> Ints:
    """Add the arcs of the batches from workers; see `LoaderQueue`.

    Returns the times at which the batches are ready: the moments from `first` on.
    """
    times = [np.zeros(0, np.int64)]
    for calls, taken, queue in loaders:
        ready = first + np.arange(len(calls))
        begun = ready[: queue.workers]
        made.connect(LOADER, begun, -1, queue.ready_ns[: queue.workers] - made.begin_ns)
        is_free = (ready < first + queue.workers) & ~queue.is_awaited
        free = np.where(is_free, taken, ready)
        for ahead, before in ((queue.workers, free), (queue.ahead, taken)):
            made.connect(LOADER, ready[ahead:], before[:-ahead], queue.load_ns[ahead:])
        made.connect(LOADER, taken, ready, event=calls)
        times.append(queue.ready_ns)
        first += len(calls)
    return np.concatenate(times)


# ---- waits for the device


class _Waits(NamedTuple):
    """Calls that wait for device work; a call that waits for n device rows has n entries.

    `moment` is at the end of the call. `lag_ns` is the time to it from the end of the device row,
    or, for a full launch queue, from its start; `usual_ns` is the usual value of it.
    """

    moment: Ints
    call: Ints
    row: Ints
    lag_ns: Ints
    usual_ns: Ints


def _queue_moments(made: _Builder) -> _Waits:
    """Add a moment at the end of each launch that may find a full launch queue."""
    events, work = made.events, made.work
    queued = queued_launches(events, work).filter("is_cuda")
    known, stream = queued["row"].to_numpy(), queued["stream"].to_numpy()
    later, earlier = known[FULL_QUEUE:], known[:-FULL_QUEUE]
    called, returned = events.start_ns[work.call[later]], events.end_ns[work.call[later]]
    started = work.start_ns[earlier]
    # The queue holds at least _FILLED launches when a call begins if the launch that came _FILLED
    # launches earlier has not started its work.
    nearer = known[FULL_QUEUE - _FILLED : len(known) - _FILLED]
    near = (stream[FULL_QUEUE:] == stream[:-FULL_QUEUE]) & (work.start_ns[nearer] > called)
    near &= started <= returned
    later, earlier = later[near], earlier[near]
    called, returned, started = called[near], returned[near], started[near]
    call = work.call[later]
    blocked = started > called
    free = np.setdiff1d(work.call[known], call[blocked])
    usual = int(np.median(events.duration_ns[free])) if len(free) else 0
    own = np.minimum(usual, returned - called)
    blocked &= returned > called + own
    moments = made.add(_returns(called, returned), made.thread_of[call], returned, call)
    # A call that did not wait in the recording may wait in a scenario. The lag of such a call is at
    # most the recorded time, so that it does not wait in a scenario without edits.
    after = returned - started
    lag = int(np.median(after[blocked])) if blocked.any() else 0
    typical = np.minimum(after, lag)
    made.wait(made.thread_of[call[blocked]], (called + own)[blocked], returned[blocked])
    return _Waits(moments, call, earlier, np.where(blocked, after, typical), typical)


def _returns(start_ns: Ints, end_ns: Ints) -> Ints:
    """The phase of each call's end (`Moments.phase`); without a duration, it follows its start."""
    return np.where(end_ns > start_ns, _RETURNS, _LEAVES)


def _wait_moments(made: _Builder) -> _Waits:
    events, found, work = made.events, made.links.synchronisations, made.work
    earlier = made.row_of[found.earlier]
    edge = np.flatnonzero((found.kind[found.wait] != STREAM_WAIT) & (earlier >= 0))
    wait, row = _with_repeated(made, found.wait[edge], earlier[edge])
    waits, of_wait = np.unique(wait, return_inverse=True)
    call, kind = found.call[waits], found.kind[waits]
    start, end = events.start_ns[call], events.end_ns[call]
    work_end = np.full(len(waits), np.iinfo(np.int64).min)
    np.maximum.at(work_end, of_wait, work.end_ns[row])
    waited = work_end > start
    duration = end - start
    # For each call, two usual times: its duration without a wait, and its lag. The lag is the time
    # from the end of the awaited work to the end of the call.
    own, lag = np.zeros(len(waits), np.int64), np.zeros(len(waits), np.int64)
    for each in np.unique(kind).tolist():
        same = kind == each
        ready = same & ~waited
        after = duration - np.clip(work_end - start, 0, duration)
        free = int(np.median(duration[ready])) if ready.any() else int(after[same].min())
        own[same] = np.minimum(duration[same], free)
        # The lag comes only from calls that took longer than a call without a wait.
        held = same & waited & (duration > own)
        lag[same] = int(np.median(np.maximum((end - work_end)[held], 0))) if held.any() else 0
    waited &= duration > own
    moments = made.add(_returns(start, end), made.thread_of[call], end, call)
    made.wait(made.thread_of[call[waited]], (start + own)[waited], end[waited])
    left = end[of_wait] - work.end_ns[row]
    decides = waited[of_wait] & (work.end_ns[row] == work_end[of_wait])
    own_lag = np.where(decides, left, np.minimum(lag[of_wait], left))
    usual = np.where(decides, lag[of_wait], own_lag)
    return _Waits(moments[of_wait], call[of_wait], row, own_lag, usual)


def _polling(made: _Builder) -> tuple[_Waits, Flags]:
    """Add a moment where a thread ends a wait for device work without a call that waits.

    A library such as DeepEP polls the host's memory until its kernel writes to it. In the trace,
    nothing follows the launch of this kernel inside an operator or range until about the end of the
    kernel, and the device is busy. The second value masks the waits that end before the kernel:
    their `lag_ns` counts from its start.
    """
    events, tree, work = made.events, made.links.call_tree, made.work
    order = np.lexsort((tree.start_ns, tree.thread))
    node, after = order[:-1], order[1:]
    # The device row of each call that ends last.
    by_end = np.argsort(work.end_ns, kind="stable")
    row_of = np.full(len(events) + 1, -1)
    row_of[work.call[by_end]] = by_end
    row_of[-1] = -1
    row = row_of[tree.index[node]]
    begin, end, around = tree.end_ns[node], tree.start_ns[after], tree.parent[after]
    is_step_node = np.append(events.named(is_step)[tree.index], True)
    chosen = (tree.thread[node] == tree.thread[after]) & (end - begin >= _SHORTEST_POLL_NS)
    chosen &= (row >= 0) & ~is_step_node[around]
    chosen &= np.append(tree.start_ns, 0)[around] <= tree.start_ns[node]
    node, row, begin, end = (each[chosen] for each in (node, row, begin, end))
    lasts, left = end - begin, end - work.end_ns[row]
    busy = within(work.busy, begin, end)
    chosen = np.abs(left) <= _POLLS_NS + _POLLS_SHARE * lasts
    chosen &= (work.start_ns[row] < end) & (busy >= _BUSY_SHARE * lasts)
    node, row, begin, end, left = (each[chosen] for each in (node, row, begin, end, left))
    thread, call = tree.thread[node].astype(np.int64), tree.index[node]
    made.wait(thread, begin, end)
    lag = np.where(left < 0, end - work.start_ns[row], left)
    return _Waits(made.add(_RETURNS, thread, end), call, row, lag, lag), left < 0


def _unknown_wait_ns(made: _Builder) -> int:
    found = made.links.synchronisations
    unknown = np.setdiff1d(np.flatnonzero(found.kind != STREAM_WAIT), found.wait)
    return int(made.events.duration_ns[found.call[unknown]].sum())


def _with_repeated(made: _Builder, wait: Ints, row: Ints) -> tuple[Ints, Ints]:
    """Add the waits of repeated device synchronisations; `wait[k]` is for the row `row[k]`.

    If no work comes between two device synchronisations, the trace has the stream's last work only
    for the first. The added wait of the second has no effect until an edit lets the first return at
    once. In a trace with very many synchronisations and streams, nothing is added.
    """
    events, found, work = made.events, made.links.synchronisations, made.work
    rows = row[found.kind[wait] == DEVICE_WAIT]
    waits, nth = np.unique(wait[found.kind[wait] == DEVICE_WAIT], return_inverse=True)
    order = np.argsort(events.start_ns[found.call[waits]], kind="stable")
    stream = events.thread[work.event[rows]]
    streams = np.unique(stream).tolist()
    if len(waits) * len(streams) > _MOST_PAIRS * len(events):
        return wait, row
    device, _ = intern(events.threads[k][0] for k in streams)
    of_wait = np.zeros(len(waits), np.int64)
    of_wait[nth] = device[np.searchsorted(streams, stream)]
    more = [(wait, row)]
    for k, own_device in zip(streams, device.tolist()):
        # The last row of the stream for each wait; without one, that of the nearest earlier wait.
        mine = np.flatnonzero(stream == k)
        mine = mine[np.argsort(work.end_ns[rows[mine]], kind="stable")]
        own = np.full(len(waits), -1)
        own[nth[mine]] = rows[mine]
        own = own[order]
        filled = own[np.maximum.accumulate(np.where(own >= 0, np.arange(len(own)), 0))]
        repeated = (own < 0) & (filled >= 0) & (of_wait[order] == own_device)
        more.append((waits[order][repeated], filled[repeated]))
    return concatenated(more)


# ---- the device


def _device_arcs(
    made: _Builder, launch_of: Ints, launch_ns: Ints, end_of: Ints, start_of: Ints
) -> None:
    events, work = made.events, made.work
    count = len(work.event)
    if not count:
        return
    stream = events.thread[work.event].astype(np.int64)
    order = np.lexsort((work.end_ns, work.start_ns, stream))
    before = np.full(count, -1)
    same = np.diff(stream[order]) == 0
    before[order[1:][same]] = order[:-1][same]
    # With programmatic dependent launch, work can begin before the work before it has ended.
    free_ns = np.append(work.end_ns, 0)[before]
    follows = (before >= 0) & (free_ns <= np.where(start_of >= 0, work.start_ns, work.end_ns))
    launched = launch_of >= 0
    earlier, later = _stream_waits(made)
    waits = np.zeros(count, np.bool_)
    waits[later] = True
    delay, gap = _usual_delays(made, before, follows, waits, launch_ns)
    target = np.where(start_of >= 0, start_of, end_of)
    # An arc to the end of a device event also adds the duration of the event.
    row = np.flatnonzero(launched)
    made.connect(LAUNCH, target[row], launch_of[row], delay[row], row)
    row = np.flatnonzero(follows)
    made.connect(STREAM, target[row], end_of[before[row]], gap[row], row)
    row = np.flatnonzero(~launched & ~follows)
    made.connect(ORIGIN, target[row], -1, work.start_ns[row] - made.begin_ns, row)
    lag = np.maximum(work.start_ns[later] - work.end_ns[earlier], 0)
    # The lag is measured only where neither the launch nor the own stream explains the start.
    free_ns = np.where(follows, free_ns, NEVER)
    ready_ns = np.maximum(np.where(launched, launch_ns, NEVER), free_ns)
    explained = np.maximum(np.where(launched, launch_ns + delay, NEVER), free_ns + gap)
    decides = (work.end_ns[earlier] > ready_ns[later]) & (work.start_ns[later] > explained[later])
    usual = int(np.median(lag[decides])) if decides.any() else 0
    made.connect(CROSS, target[later], end_of[earlier], np.minimum(usual, lag), later)
    row = np.flatnonzero(start_of >= 0)
    made.connect(DEVICE, end_of[row], start_of[row], 0, row)
    # These arcs have no effect until `Model.assumptions` gives them a time.
    made.connect(RANKS, end_of[work.kind == COMMUNICATION], -1, NEVER)


def _stream_waits(made: _Builder) -> tuple[Ints, Ints]:
    """Pairs of device rows on two streams: the earlier row, and the row that waits for it."""
    found, work = made.links.synchronisations, made.work
    across = np.flatnonzero(found.kind[found.wait] == STREAM_WAIT)
    earlier, later = (made.row_of[side[across]] for side in (found.earlier, found.later))
    known = (earlier >= 0) & (later >= 0) & (work.end_ns[earlier] <= work.start_ns[later])
    return earlier[known], later[known]


def _usual_delays(
    made: _Builder, before: Ints, follows: Flags, waits: Flags, launch_ns: Ints
) -> tuple[Ints, Ints]:
    """The usual delay from launch to start, and the usual gap after the work before, in ns.

    The delay is the median over the events of the same launching call that started at most 1 ms
    after the launch, on a stream that was free. The gap has two medians for each stream: over the
    events that the call of the event before launched, as in a CUDA graph, and over those launched
    at least the usual delay before that event ended. Events that wait for another stream count for
    neither. The gap of an event that began before the previous one ended is negative, and stays as
    recorded.
    """
    events, work = made.events, made.work
    launched = work.call >= 0
    free_ns = np.where(follows, np.append(work.end_ns, 0)[before], np.iinfo(np.int64).min)
    name = np.append(events.name, -1)[work.call].astype(np.int64) + 1
    late_ns = work.start_ns - launch_ns
    idle = launched & ~waits & (free_ns <= launch_ns)
    idle &= (late_ns >= 0) & (late_ns <= LONGEST_DELAY_NS)
    delay = _medians(name, late_ns, idle)
    same_call = follows & launched & (np.append(work.call, -1)[before] == work.call)
    leads = follows & (work.start_ns < free_ns)
    queued = follows & ~leads & ~waits & (~launched | same_call | (launch_ns + delay <= free_ns))
    stream = events.thread[work.event].astype(np.int64) * 2 + same_call
    gap = _medians(stream, work.start_ns - free_ns, queued)
    return delay, np.where(leads, work.start_ns - free_ns, gap)


def _medians(group: Ints, values: Ints, chosen: Flags) -> Ints:
    """For each row: the median of the chosen values in the group of the row.

    Of fewer than `_FEW` values, the smallest counts, because one exceptional value could decide the
    median; without any, the median of all groups.
    """
    rows = np.flatnonzero(chosen)
    if not len(rows):
        return np.zeros(len(group), np.int64)
    overall = int(np.median(values[rows]))
    _, groups = groupby(group)
    own = Groups(groups.of[rows], groups.count)
    ordered = own.sorted_by(values[rows])
    usual = np.where(own.size < _FEW, ordered.row(0), ordered.row(50))
    return np.where(usual >= 0, values[rows][usual], overall)[groups.of]
