"""What a step consists of: the chain of work and waits that decides how long it takes.

The critical path of HTA (Holistic Trace Analysis) is the same longest path; here it goes through
the threads' own time, so that CPU time belongs to ranges.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from instrument.analysis.breakdown import KINDS as WORK_KINDS
from instrument.analysis.table import Schema, Table, schema
from instrument.links.groupby import Groups
from instrument.links.intervals import Intervals
from instrument.trace.events import Ints
from instrument.whatif.cpu_time import joined
from instrument.whatif.model import CPU, DEVICE, KINDS, LAUNCH, ORIGIN, STREAM, Costs, Model
from instrument.whatif.program import Path

CRITICAL_PATH: Schema = schema(
    kind="CPU; kernel, communication, copy or memset (work of the device); launch (from the call "
    "until the device begins), stream (between two kernels), other stream, wait (until a call "
    "returns after the work has ended), full queue, hand-over (between threads), loader (a batch of "
    "worker processes), other ranks; or unexplained: a device event began late without a known cause",
    name="for CPU time, the path of the range; for device work, its name; for a wait, the call; "
    "None if there is none",
    total_ns="time on the critical path of all finished steps but the first one",
    step_ns="the same for one step, on average",
    share="the same as a share of these steps",
)
SLACK: Schema = schema(
    name="the path of the range",
    slack_ns="how much longer one of its calls could take, or its device work, before a step takes "
    "longer: the least of all its calls; None if no step depends on it",
)
_UNEXPLAINED = "unexplained"
# Beyond the end of the axis.
_FAR = 2**62


def critical_path(model: Model, costs: Costs) -> Table:
    """Return what the steps consist of, the longest first; see `CRITICAL_PATH`.

    The rows sum to the duration of the steps. Without finished steps, the whole window counts.
    """
    weights = model.weights(costs)
    times = model.program.run(weights)
    ends = _step_ends(model, times)
    path = model.program.critical(weights, int(ends[-1]))
    counted = ends[0] if len(ends) > 1 else model.moments.step_start[0]
    begin = int(times[counted])
    end = int(times[ends[-1]])
    found = _Found(model, costs, path, begin, end)
    steps = max(len(ends) - 1, 1)
    rows = sorted(found.total_ns.items(), key=lambda row: -row[1])
    columns: dict[str, list[Any]] = {
        "kind": [kind for (kind, _), _ in rows],
        "name": [name for (_, name), _ in rows],
        "total_ns": [total for _, total in rows],
        "step_ns": [total // steps for _, total in rows],
        "share": [total / (end - begin) if end > begin else None for _, total in rows],
    }
    return Table.of(CRITICAL_PATH, columns)


def _step_ends(model: Model, times: Ints) -> Ints:
    """For each step, the moment at which it ends; see `Model.steps_ns`."""
    moments, found = model.moments, model.moments.step_end.copy()
    rows = np.flatnonzero(model.step_of >= 0)
    order = rows[np.lexsort((times[moments.end_of[rows]], model.step_of[rows]))]
    last = np.full(len(found), -1)
    last[model.step_of[order]] = moments.end_of[order]
    later = (last >= 0) & (np.append(times, 0)[last] > times[found])
    found[later] = last[later]
    for k in range(1, len(found)):
        if times[found[k]] < times[found[k - 1]]:
            found[k] = found[k - 1]
    return found


class _Found:
    """The time on a path between two points in time, by kind and name."""

    def __init__(self, model: Model, costs: Costs, path: Path, begin: int, end: int) -> None:
        self.total_ns: dict[tuple[str, str | None], int] = {}
        self._model, self._costs = model, costs
        arcs, events = model.arcs, model.links.events
        inside = (path.end_ns > begin) & (path.begin_ns < end)
        arc = path.arc[inside]
        first = np.maximum(path.begin_ns[inside], begin)
        last = np.minimum(path.end_ns[inside], end)
        on_cpu = arcs.kind[arc] == CPU
        self._add_cpu(arc[on_cpu], int((last - first)[on_cpu].sum()))
        for k in np.flatnonzero(~on_cpu).tolist():
            total, each = int(last[k] - first[k]), int(arc[k])
            kind, row, event = int(arcs.kind[each]), int(arcs.row[each]), int(arcs.event[each])
            if row >= 0:
                name = events.names[events.name[model.work.event[row]]]
                lasts = int(costs.device_ns[row]) if model.lasting[each] >= 0 else 0
                lasts = min(lasts, total)
                self._add(WORK_KINDS[model.work.kind[row]], name, lasts)
                total -= lasts
            if kind in (LAUNCH, STREAM, ORIGIN) and row >= 0:
                usual = max(int(model.typical.fixed_ns[each]), 0) if kind != ORIGIN else 0
                late = max(total - usual, 0)
                self._add(_UNEXPLAINED, None, late)
                total -= late
            if kind != DEVICE:
                named = event >= 0 and row < 0
                self._add(KINDS[kind], events.names[events.name[event]] if named else None, total)

    def _add(self, kind: str, name: str | None, total_ns: int) -> None:
        if total_ns:
            self.total_ns[kind, name] = self.total_ns.get((kind, name), 0) + total_ns

    def _add_cpu(self, arc: Ints, total_ns: int) -> None:
        """The CPU time of some arcs by the range that it belongs to."""
        model, scopes = self._model, self._model.links.scopes
        target, source = model.arcs.target[arc], model.arcs.source[arc]
        places, axis = model.places, model.axis
        end = places[target]
        begin = np.where(
            source >= 0, np.append(places, 0)[source], end // axis.span_ns * axis.span_ns
        )
        chosen = joined(begin, end)
        # On this axis, all time outside of the path is a wait.
        own = replace(axis, waits=joined(*_with(axis.waits, _outside(chosen))))
        nodes = scopes.nodes
        bounds = (axis.place(nodes.thread, each) for each in (nodes.start_ns, nodes.end_ns))
        start_ns, end_ns = (own.spent(each) + own.changed(each, self._costs.cpu) for each in bounds)
        of_scopes = nodes.own(end_ns - start_ns)
        paths = Groups(scopes.attributed, len(scopes.paths.names))
        of_paths = paths.sum(of_scopes, scopes.attributed >= 0)
        for path in np.flatnonzero(of_paths > 0).tolist():
            self._add(KINDS[CPU], scopes.paths.texts[path], int(of_paths[path]))
        self._add(KINDS[CPU], None, max(total_ns - int(of_paths.sum()), 0))


def _outside(chosen: Intervals) -> Intervals:
    """The time between intervals, from the start of the axis to its end."""
    starts, ends = chosen
    return np.concatenate([[0], ends]), np.append(starts, _FAR)


def _with(one: Intervals, other: Intervals) -> Intervals:
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])


def slack(model: Model, costs: Costs) -> Table:
    """Return how much longer each range could take, the least first; see `SLACK`."""
    weights = model.weights(costs)
    times = model.program.run(weights)
    late = model.program.slack(weights, _step_ends(model, times))
    scopes, places = model.links.scopes, model.places
    order = np.argsort(places, kind="stable")
    nodes = scopes.nodes
    axis = model.axis
    first = np.searchsorted(places[order], axis.place(nodes.thread, nodes.start_ns), "right")
    last = np.searchsorted(places[order], axis.place(nodes.thread, nodes.end_ns))
    least = np.full(len(scopes.paths.names), 2**61)
    ordered = np.append(late[order], 2**61)
    bounds = np.stack([first, np.maximum(last + 1, first + 1)]).T.reshape(-1)
    if len(nodes):
        found = np.minimum.reduceat(
            np.append(ordered, [2**61, 2**61]), np.minimum(bounds, len(ordered))
        )[::2]
        same = nodes.thread == model.moments.thread[order[np.minimum(first, len(order) - 1)]]
        known = (scopes.attributed >= 0) & same
        np.minimum.at(least, scopes.attributed[known], found[known])
    _, launcher = model.links.launched
    path = np.append(scopes.attributed, -1)[np.append(scopes.innermost, -1)[launcher]]
    rows = np.flatnonzero(path >= 0)
    np.minimum.at(least, path[rows], late[model.moments.end_of[rows]])
    # A range contains its inner ranges.
    for k in range(len(least) - 1, -1, -1):
        above = int(scopes.paths.above[k])
        if above >= 0:
            least[above] = min(least[above], least[k])
    sort = np.argsort(least, kind="stable")
    return Table.of(
        SLACK,
        {
            "name": [scopes.paths.texts[k] for k in sort.tolist()],
            "slack_ns": [int(x) if x < 2**60 else None for x in least[sort].tolist()],
        },
    )
