"""The edits: each function takes the costs of a scenario, and returns the costs after the edit."""

from __future__ import annotations

import numpy as np

from instrument.read.facts.cuda_graphs import is_graph_launch
from instrument.read.facts.intervals import concatenated, interval_at
from instrument.read.simulate.cpu_time import joined
from instrument.read.simulate.model import LAUNCH, STREAM, WAIT, Costs, Model
from instrument.read.simulate.program import NEVER
from instrument.read.simulate.selection import Selection
from instrument.read.trace.events import Ints

# The time to launch a CUDA graph if the trace has no such launch. NVIDIA measured 2.5 µs for the
# launch itself plus about 1 ns for each node. A call from Python commonly takes 10 µs.
_GRAPH_LAUNCH_NS = 10_000


def scale(model: Model, costs: Costs, chosen: Selection, by: float) -> Costs:
    """Multiply the CPU time and the device time of a selection by the factor `by`."""
    device_ns = costs.device_ns.copy()
    device_ns[chosen.rows] = np.rint(device_ns[chosen.rows] * by)
    cpu = (*costs.cpu, (chosen.cpu, by)) if len(chosen.cpu[0]) else costs.cpu
    return _with_durations(model, costs._replace(cpu=cpu), device_ns)


def _with_durations(model: Model, costs: Costs, device_ns: Ints) -> Costs:
    """Replace the durations of device work.

    If the other ranks do not change, the earliest end of a collective moves by the change of its
    duration.
    """
    meets, row = model.ranks_arcs
    fixed_ns, binds = costs.fixed_ns.copy(), costs.fixed_ns[meets] != NEVER
    fixed_ns[meets[binds]] += (device_ns - costs.device_ns)[row[binds]]
    return costs._replace(device_ns=device_ns, fixed_ns=fixed_ns)


def remove(model: Model, costs: Costs, chosen: Selection) -> Costs:
    """Remove CPU time with its waits, and device work with its gaps and the calls for it alone."""
    launches = chosen.calls[model.links.call_tree.index]
    start, end = model.node_spans
    cpu = joined(*concatenated([chosen.cpu, (start[launches], end[launches])]))
    scaled = scale(model, costs, chosen._replace(cpu=cpu), 0.0)
    arcs, fixed_ns = model.arcs, scaled.fixed_ns.copy()
    of_rows = np.append(chosen.rows, False)[arcs.row] & np.isin(arcs.kind, (LAUNCH, STREAM))
    fixed_ns[of_rows & (fixed_ns != NEVER)] = 0
    waits = (arcs.kind == WAIT) & np.append(chosen.calls, False)[arcs.event]
    batches = model.batches[1]
    events, event = model.links.events, arcs.event[batches]
    asked = model.axis.place(events.thread[event], events.start_ns[event])
    waits[batches] = interval_at(chosen.cpu, asked) >= 0
    fixed_ns[waits] = NEVER
    return scaled._replace(fixed_ns=fixed_ns)


def asynchronous(model: Model, costs: Costs, calls: Ints) -> Costs:
    """Let waiting calls return without waiting for the device; their own CPU time stays."""
    fixed_ns = costs.fixed_ns.copy()
    fixed_ns[(model.arcs.kind == WAIT) & np.isin(model.arcs.event, calls)] = NEVER
    return costs._replace(fixed_ns=fixed_ns)


def overlap(model: Model, costs: Costs, chosen: Selection, modest: bool = False) -> Costs:
    """Let copies run entirely beside the computation.

    In the modest form, the calls that launch the copies still wait for the copies.
    """
    arcs, rows = model.arcs, chosen.rows
    device_ns, fixed_ns = costs.device_ns.copy(), costs.fixed_ns.copy()
    device_ns[rows] = 0
    inside = np.append(rows, False)[arcs.row] & np.isin(arcs.kind, (LAUNCH, STREAM))
    fixed_ns[inside & (fixed_ns != NEVER)] = 0
    if not modest:
        calls = model.work.call[rows]
        fixed_ns[(arcs.kind == WAIT) & np.isin(arcs.event, calls[calls >= 0])] = NEVER
    return costs._replace(device_ns=device_ns, fixed_ns=fixed_ns)


def graph_launch(model: Model, costs: Costs, chosen: Selection, modest: bool = False) -> Costs:
    """Replace each call of the selected ranges by one launch of a CUDA graph.

    The CPU time of the ranges and the waits in it are removed, and so are the gaps between the
    kernels; the modest form keeps these gaps.
    """
    arcs, fixed_ns, added = model.arcs, costs.fixed_ns.copy(), costs.added_ns.copy()
    if not modest:
        inside = np.append(chosen.rows, False)[arcs.row] & (fixed_ns != NEVER)
        fixed_ns[inside & (arcs.kind == STREAM)] = 0
        # The first device row still has to be launched, so launches keep their usual delay.
        launches = inside & (arcs.kind == LAUNCH)
        usual_ns = model.typical.fixed_ns[launches]
        fixed_ns[launches] = np.minimum(fixed_ns[launches], usual_ns)
    fixed_ns[(arcs.kind == WAIT) & np.append(chosen.calls, False)[arcs.event]] = NEVER
    # In each interval, the time of the graph launch is added before the first moment of a call.
    places, is_call = model.places, model.moments.call >= 0
    order = np.flatnonzero(is_call)[np.argsort(places[is_call], kind="stable")]
    first = np.searchsorted(places[order], chosen.cpu[0])
    has_call = first < len(order)
    has_call &= np.append(places[order], 0)[np.minimum(first, len(order))] <= chosen.cpu[1]
    added[np.unique(order[first[has_call]])] += _graph_launch_ns(model)
    cpu = (*costs.cpu, (chosen.cpu, 0.0))
    return costs._replace(cpu=cpu, fixed_ns=fixed_ns, added_ns=added)


def _graph_launch_ns(model: Model) -> int:
    events = model.links.events
    found = np.flatnonzero(model.calls & events.named(is_graph_launch))
    return int(np.median(events.duration_ns[found])) if len(found) else _GRAPH_LAUNCH_NS


def bandwidth(model: Model, costs: Costs, chosen: Selection, factor: float) -> Costs:
    """Multiply the bandwidth of the selected communication; waits for other ranks do not change.

    The transfer time of a collective is the shortest time of a kernel with the same name and size.
    """
    device_ns, rows = costs.device_ns.copy(), chosen.rows
    transfer = np.minimum(model.transfer_ns[rows], device_ns[rows])
    device_ns[rows] -= transfer - np.rint(transfer / factor).astype(np.int64)
    return _with_durations(model, costs, device_ns)


def no_late_ranks(model: Model, costs: Costs, chosen: Selection) -> Costs:
    """Let the selected communication take only its transfer time: no wait for other ranks."""
    device_ns, rows = costs.device_ns.copy(), chosen.rows
    device_ns[rows] = np.minimum(model.transfer_ns[rows], device_ns[rows])
    return _with_durations(model, costs, device_ns)


def workers(model: Model, costs: Costs, chosen: Selection, count: float) -> Costs:
    """Load batches in worker processes instead of the training process.

    The time between two batches is at least the loading time of a batch divided by the number of
    workers.
    """
    fixed_ns = costs.fixed_ns.copy()
    batches = model.batches[0]
    lasts = model.links.events.duration_ns[model.arcs.event[batches]]
    fixed_ns[batches] = np.rint(lasts / count)
    return costs._replace(cpu=(*costs.cpu, (chosen.cpu, 0.0)), fixed_ns=fixed_ns)
