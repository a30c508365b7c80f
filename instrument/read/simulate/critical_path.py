"""The critical path: the chain of work and waits that decides how long a step takes.

HTA (Holistic Trace Analysis) computes the same longest path. Here, it also has the CPU time of each
thread, which belongs to ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from instrument.read.facts.device_work import COMMUNICATION
from instrument.read.facts.device_work import KINDS as WORK_KINDS
from instrument.read.facts.groupby import Groups
from instrument.read.facts.intervals import Intervals, concatenated
from instrument.read.facts.schema import Schema, schema
from instrument.read.simulate.cpu_time import joined
from instrument.read.simulate.model import CPU, DEVICE, KINDS, LAUNCH, ORIGIN, STREAM, Costs
from instrument.read.simulate.program import Path
from instrument.read.simulate.window import Window
from instrument.read.trace.events import Ints
from instrument.read.views.table import Table

CRITICAL_PATH: Schema = schema(
    kind="what takes the time. CPU: CPU time; kernel, communication, copy or memset: device work; "
    "launch: the usual delay from the launching call until the device work begins; stream: the "
    "usual gap between two device events of a stream; other stream: from the end of work on "
    "another stream until the waiting work begins; wait: from the end of device work until the "
    "waiting call returns; full queue: a launching call waits until the launch queue has a free "
    "place; waiting for data: until worker processes deliver a batch; unexplained: a device event "
    "begins later than usual, or the trace does not show what it waits for; origin: from the start "
    "of the trace until a device event begins, if the recorded times contradict all its known "
    "causes",
    name="for CPU time, the path of the range; for device work, its name; for a wait, the name of "
    "the waiting call; None if there is none",
    rank="the rank, if the scenario has several ranks; None for the transfer of a collective",
    total_ns="time on the critical path from the end of the step before the steps that count to "
    "the end of the last of them; if only one step finished, the time within this step",
    step_ns="`total_ns` for one step, on average",
    share="`total_ns` as a share of the whole critical path",
)
_UNEXPLAINED = "unexplained"
# A position after the end of the axis.
_FAR = 2**62


def critical_path(window: Window, costs: Sequence[Costs]) -> Table:
    """Return the parts of the critical path, the longest first; see `CRITICAL_PATH`.

    Their sum is the time of the steps that count.
    """
    weights = window.weights(costs)
    times = window.program.run(weights)
    ends, kept = _step_ends(window, times), window.counted
    last, first = ends[kept][-1], kept.start or 0
    path = window.program.critical(weights, times, int(last))
    starts = [m.moments.step_start[0] + k for m, k in zip(window.models, window.first_moment)]
    begin = int(times[ends[first - 1]] if first else times[starts].min())
    end = int(times[last])
    found = _Found(window, costs, path, begin, end)
    steps = len(ends[kept])
    rows = sorted(found.total_ns.items(), key=lambda row: -row[1])
    cells = [
        (kind, name, rank, total, total // steps, total / (end - begin) if end > begin else None)
        for (rank, kind, name), total in rows
    ]
    return Table.of_rows(CRITICAL_PATH, cells)


def _step_ends(window: Window, times: Ints) -> Ints:
    """For each step, the moment at which the last rank ends the step; see `Model.ends_ns`."""
    found: list[Ints] = []
    for model, first in zip(window.models, window.first_moment):
        moments, own = model.moments, times[first : first + len(model.moments.time_ns)]
        ends = moments.step_end.copy()
        rows = np.flatnonzero(model.step_of >= 0)
        order = rows[np.lexsort((own[moments.end_of[rows]], model.step_of[rows]))]
        last = np.full(len(ends), -1)
        last[model.step_of[order]] = moments.end_of[order]
        later = (last >= 0) & (np.append(own, 0)[last] > own[ends])
        ends[later] = last[later]
        for k in range(1, len(ends)):
            if own[ends[k]] < own[ends[k - 1]]:
                ends[k] = ends[k - 1]
        found.append(ends + first)
    steps = min(len(each) for each in found)
    every = np.stack([each[:steps] for each in found])
    chosen: Ints = every[np.argmax(times[every], axis=0), np.arange(steps)]
    return chosen


class _Found:
    """The time on the critical path between `begin` and `end`, summed by rank, kind and name."""

    def __init__(
        self, window: Window, costs: Sequence[Costs], path: Path, begin: int, end: int
    ) -> None:
        self.total_ns: dict[tuple[int | None, str, str | None], int] = {}
        inside = (path.end_ns > begin) & (path.begin_ns < end)
        arc = path.arc[inside]
        lasts = np.minimum(path.end_ns[inside], end) - np.maximum(path.begin_ns[inside], begin)
        owner = np.searchsorted(window.first_arc, arc, "right") - 1
        for k, model in enumerate(window.models):
            mine = owner == k
            self._rank = window.ranks[k] if len(window.models) > 1 else None
            self._model, self._costs = model, costs[k]
            own, total = arc[mine] - window.first_arc[k], lasts[mine]
            on_cpu = model.arcs.kind[own] == CPU
            self._add_cpu(own[on_cpu], int(total[on_cpu].sum()))
            for each, ns in zip(own[~on_cpu].tolist(), total[~on_cpu].tolist()):
                self._add_arc(each, ns)
        self._rank = None
        joining = owner == len(window.models)
        self._add(WORK_KINDS[COMMUNICATION], None, int(lasts[joining].sum()))

    def _add_arc(self, arc: int, total_ns: int) -> None:
        """Add the time of one arc, split into device work, unexplained time and a wait."""
        model, arcs, events = self._model, self._model.arcs, self._model.links.events
        kind, row, event = int(arcs.kind[arc]), int(arcs.row[arc]), int(arcs.event[arc])
        if row >= 0:
            lasts = int(self._costs.device_ns[row]) if model.lasting[arc] >= 0 else 0
            lasts = min(lasts, total_ns)
            name = events.names[events.name[model.work.event[row]]]
            self._add(WORK_KINDS[model.work.kind[row]], name, lasts)
            usual = max(int(model.typical.fixed_ns[arc]), 0) if kind in (LAUNCH, STREAM) else 0
            late = max(total_ns - lasts - usual, 0) if kind in (LAUNCH, STREAM, ORIGIN) else 0
            self._add(_UNEXPLAINED, None, late)
            total_ns -= lasts + late
        if kind != DEVICE:
            named = event >= 0 and row < 0
            name_of = events.names[events.name[event]] if named else None
            self._add(KINDS[kind], name_of, total_ns)

    def _add(self, kind: str, name: str | None, total_ns: int) -> None:
        key = (self._rank, kind, name)
        if total_ns:
            self.total_ns[key] = self.total_ns.get(key, 0) + total_ns

    def _add_cpu(self, arc: Ints, total_ns: int) -> None:
        """Add the CPU time of some arcs to the ranges in which it was spent."""
        model, scopes = self._model, self._model.links.scopes
        target, source = model.arcs.target[arc], model.arcs.source[arc]
        places, axis = model.places, model.axis
        end = places[target]
        begin = np.where(
            source >= 0, np.append(places, 0)[source], end // axis.span_ns * axis.span_ns
        )
        chosen = joined(begin, end)
        # The axis `own` counts all time outside the critical path as a wait, so that only the CPU
        # time on the critical path is left.
        own = replace(axis, waits=joined(*concatenated([axis.waits, _outside(chosen)])))
        nodes = scopes.nodes
        bounds = (axis.place(nodes.thread, each) for each in (nodes.start_ns, nodes.end_ns))
        start_ns, end_ns = (own.spent(each, self._costs.cpu) for each in bounds)
        of_scopes = nodes.own(end_ns - start_ns)
        paths = Groups(scopes.attributed, len(scopes.paths.names))
        of_paths = paths.sum(of_scopes, scopes.attributed >= 0)
        for path in np.flatnonzero(of_paths > 0).tolist():
            self._add(KINDS[CPU], scopes.paths.texts[path], int(of_paths[path]))
        self._add(KINDS[CPU], None, max(total_ns - int(of_paths.sum()), 0))


def _outside(chosen: Intervals) -> Intervals:
    starts, ends = chosen
    return np.concatenate([[0], ends]), np.append(starts, _FAR)
