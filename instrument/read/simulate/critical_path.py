"""The critical path: the chain of work and waits that decides how long a step takes.

HTA (Holistic Trace Analysis) computes the same longest path. Here, it also has the CPU time of each
thread, which belongs to ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from instrument.read.facts.device_work import KINDS as WORK_KINDS
from instrument.read.facts.groupby import Groups
from instrument.read.facts.intervals import concatenated
from instrument.read.facts.schema import Schema, schema
from instrument.read.simulate.cpu_time import joined
from instrument.read.simulate.model import CPU, DEVICE, KINDS, LAUNCH, ORIGIN, STREAM, Costs, Model
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
    total_ns="time on the critical path from the end of the step before the steps that count to "
    "the end of the last of them; if only one step finished, the time within this step",
    step_ns="`total_ns` for one step, on average",
    share="`total_ns` as a share of the whole critical path",
)
# A position after the end of the axis.
_FAR = 2**62
# The kind and the name of a row, and some of its time.
_Time = tuple[str, str | None, int]


def critical_path(model: Model, costs: Costs) -> Table:
    """Return the parts of the critical path, the longest first; see `CRITICAL_PATH`.

    Their sum is the time of the steps that count.
    """
    weights = model.weights(costs)
    times = model.program.run(weights)
    ends, kept = _step_ends(model, times), model.counted
    first = kept.start or 0
    begin = int(times[ends[first - 1] if first else model.moments.step_start[0]])
    end = int(times[ends[kept][-1]])
    path = model.program.critical(weights, times, ends[kept][-1])
    inside = (path.end_ns > begin) & (path.begin_ns < end)
    arcs = path.arc[inside]
    lasts = np.minimum(path.end_ns[inside], end) - np.maximum(path.begin_ns[inside], begin)
    on_cpu = model.arcs.kind[arcs] == CPU
    total_ns: Counter[tuple[str, str | None]] = Counter()
    found = [*_cpu_time(model, costs, arcs[on_cpu], int(lasts[on_cpu].sum()))]
    for arc, lasts_ns in zip(arcs[~on_cpu].tolist(), lasts[~on_cpu].tolist()):
        found += _time_of_arc(model, costs, arc, lasts_ns)
    for kind, name, ns in found:
        if ns:
            total_ns[kind, name] += ns
    steps = len(ends[kept])
    cells = [
        (kind, name, total, total // steps, total / (end - begin) if end > begin else None)
        for (kind, name), total in total_ns.most_common()
    ]
    return Table.of_rows(CRITICAL_PATH, cells)


def _step_ends(model: Model, times: Ints) -> list[int]:
    moments, first = model.step_ends
    ends = list[int]()
    for of_step in np.split(moments, first[1:]):
        end = int(of_step[np.argmax(times[of_step])])
        ends.append(ends[-1] if ends and times[end] < times[ends[-1]] else end)
    return ends


def _time_of_arc(model: Model, costs: Costs, arc: int, total_ns: int) -> Iterator[_Time]:
    """Split the time of an arc into device work, unexplained time and a wait."""
    arcs, events = model.arcs, model.links.events
    kind, row, event = int(arcs.kind[arc]), int(arcs.row[arc]), int(arcs.event[arc])
    name = events.names[events.name[event]] if event >= 0 and row < 0 else None
    if row >= 0:
        lasts = int(costs.device_ns[row]) if model.lasting[arc] >= 0 else 0
        lasts = min(lasts, total_ns)
        usual = max(int(model.typical.fixed_ns[arc]), 0) if kind in (LAUNCH, STREAM) else 0
        late = max(total_ns - lasts - usual, 0) if kind in (LAUNCH, STREAM, ORIGIN) else 0
        work = events.names[events.name[model.work.event[row]]]
        yield WORK_KINDS[model.work.kind[row]], work, lasts
        yield "unexplained", None, late
        total_ns -= lasts + late
    if kind != DEVICE:
        yield KINDS[kind], name, total_ns


def _cpu_time(model: Model, costs: Costs, arc: Ints, total_ns: int) -> Iterator[_Time]:
    """Split the CPU time of some arcs by the ranges in which it was spent."""
    scopes, places, axis = model.links.scopes, model.places, model.axis
    source, end = model.arcs.source[arc], places[model.arcs.target[arc]]
    of_thread = end // axis.span_ns * axis.span_ns
    starts, ends = joined(np.where(source >= 0, np.append(places, 0)[source], of_thread), end)
    # All time outside the critical path counts as a wait here, so that only its CPU time is left.
    outside = np.append(0, ends), np.append(starts, _FAR)
    on_path = replace(axis, waits=joined(*concatenated([axis.waits, outside])))
    nodes = scopes.nodes
    bounds = (axis.place(nodes.thread, each) for each in (nodes.start_ns, nodes.end_ns))
    start_ns, end_ns = (on_path.spent(each, costs.cpu) for each in bounds)
    paths = Groups(scopes.attributed, len(scopes.paths.names))
    of_paths = paths.sum(nodes.own(end_ns - start_ns), scopes.attributed >= 0)
    for path in np.flatnonzero(of_paths > 0).tolist():
        yield KINDS[CPU], scopes.paths.texts[path], int(of_paths[path])
    yield KINDS[CPU], None, max(total_ns - int(of_paths.sum()), 0)
