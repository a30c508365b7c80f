"""The causal profile: how much shorter a step is if a range, an operator or a kernel is faster.

Each takes 10, 25, 50 and 100 % less time in the simulation. Coz (Curtsinger and Berger, SOSP 2015)
measures such savings in a running program, by slowing down the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from instrument.read.facts.groupby import Groups, groupby, intern
from instrument.read.facts.intervals import Intervals
from instrument.read.facts.kernel_names import kernel_label
from instrument.read.facts.schema import Schema, schema
from instrument.read.simulate.cpu_time import joined
from instrument.read.simulate.model import Costs, Model
from instrument.read.simulate.selection import of_paths
from instrument.read.trace.events import Flags, Ints, called_operators, split_overload
from instrument.read.views.table import Table

_FASTER = (0.1, 0.25, 0.5, 1.0)
_LEAST_SHARE = 0.002

CAUSAL_PROFILE: Schema = schema(
    kind="range (with all that runs inside it, its backward and its device work), operator (with "
    "all that runs inside it and its device work), or kernel (device work with this label)",
    name="for a range, its path; for an operator, its name; for a kernel, its label, such as "
    "`add<bf16>`",
    cpu_ns="CPU time of the row in one step, after the edits of the scenario; waits do not count. "
    "It is the row's share of the steps that count, multiplied by the step",
    device_ns="time of the row's device work in one step, counted like `cpu_ns`; None if the trace "
    "has no device work",
    saving_10_ns="how much shorter a step would be if the row took 10 % less time; see "
    "`Scenario.saving_ns`",
    saving_25_ns="how much shorter a step would be if the row took 25 % less time",
    saving_50_ns="how much shorter a step would be if the row took 50 % less time",
    saving_100_ns="how much shorter a step would be if the row took no time",
    saving_50_share="`saving_50_ns` as a share of the step",
)


class _Part(NamedTuple):
    """A range, operator or kernel: its CPU time on `Model.axis` and its device rows."""

    kind: str
    name: str
    cpu: Intervals
    rows: Flags


def causal_profile(model: Model, costs: Costs, step_ns: int, rows: int = 12) -> Table:
    """Return how much shorter a step is if a range, an operator or a kernel is faster.

    Args:
        model: the simulated graph of the window.
        costs: the costs after the edits of the scenario.
        step_ns: how long a step takes with these costs; see `Scenario.step_ns`.
        rows: the number of ranges, of operators and of kernels to simulate: those with the most
            time.

    Cost: for each row, some array operations on all arcs, and a simulation of four scenarios.
    """
    base, kept = model.weights(costs), model.counted
    whole_ns = int(model.steps_ns(model.program.run(base))[kept].sum())
    to_step = step_ns / max(whole_ns, 1)
    cells = []
    for part in [*_ranges(model, rows), *_operators(model, rows), *_kernels(model, rows)]:
        change = model.change(costs, part.cpu, part.rows)
        times = model.program.run_shares(base, change, np.array(_FASTER))
        left = np.sum(model.steps_ns(times)[..., kept], axis=-1) / max(whole_ns, 1)
        saved = (1 - left).tolist()
        savings = [round(share * step_ns) for share in saved]
        share = saved[_FASTER.index(0.5)] if step_ns else None
        cells.append((*part[:2], *_spent(model, costs, part, to_step), *savings, share))
    # The largest `saving_50_ns` first, then the most CPU time and device time.
    cells.sort(key=lambda row: (-row[6], -(row[2] + (row[3] or 0))))
    return Table.of_rows(CAUSAL_PROFILE, cells)


def _spent(model: Model, costs: Costs, part: _Part, to_step: float) -> tuple[int, int | None]:
    """The mean CPU time and device time of one step; None for the latter without device work."""
    moments, kept = model.moments, model.counted
    begin, end = moments.time_ns[moments.step_start], moments.time_ns[moments.step_end]
    if not model.has_steps:  # of the CPU, all counts, although the device may have begun late
        begin = np.zeros(1, np.int64)
    cpu_ns = model.axis.spent_within(begin[kept], end[kept], costs.cpu, part.cpu)
    counts = np.isin(model.step_of, range(len(begin))[kept])
    device_ns = int(costs.device_ns[part.rows & counts].sum())
    has_device = len(model.work.event) > 0
    return round(cpu_ns * to_step), round(device_ns * to_step) if has_device else None


def _ranges(model: Model, rows: int) -> Iterator[_Part]:
    scopes, links = model.links.scopes, model.links
    if not len(scopes.paths.names):
        return
    own = scopes.nodes.own(links.spent_ns[links.call_tree.nodes_of(scopes.nodes.index)])
    count = len(scopes.paths.names)
    spent = Groups(scopes.attributed, count).sum(own, scopes.attributed >= 0)
    path = scopes.path_of_node[links.launched[1]]
    spent += Groups(path, count).sum(links.events.duration_ns[model.work.event], path >= 0)
    bound = scopes.paths.with_descendants(spent)
    for k in _largest(bound, rows):
        chosen = of_paths(model, np.arange(count) == k)
        yield _Part("range", scopes.paths.texts[k], chosen.cpu, chosen.rows)


def _operators(model: Model, rows: int) -> Iterator[_Part]:
    """The operator names with the most time. Only calls outside all other operators count."""
    tree, events, links = model.links.call_tree, model.links.events, model.links
    top = np.flatnonzero(tree.outermost(called_operators(events)[tree.index]))
    if not len(top):
        return
    numbers, names = intern([split_overload(name)[0] for name in events.names])
    distinct, groups = groupby(numbers[events.name[tree.index[top]]])
    launched = np.append(groups.of, -1)[tree.nearest_of(top, links.launched[1])]
    bound = groups.sum(links.spent_ns[top])
    bound += Groups(launched, len(distinct)).sum(
        events.duration_ns[model.work.event], launched >= 0
    )
    for k in _largest(bound, rows):
        nodes = top[groups.of == k]
        starts, ends = model.node_spans
        cpu = joined(starts[nodes], ends[nodes])
        yield _Part("operator", names[distinct[k]], cpu, launched == k)


def _kernels(model: Model, rows: int) -> Iterator[_Part]:
    events, work = model.links.events, model.work
    if not len(work.event):
        return
    present, groups = groupby(events.name[work.event])
    numbers, names = intern([kernel_label(events.names[k]) for k in present.tolist()])
    distinct, groups = groupby(numbers[groups.of])
    bound = groups.sum(work.end_ns - work.start_ns)
    none = np.zeros(0, np.int64)
    for k in _largest(bound, rows):
        yield _Part("kernel", names[distinct[k]], (none, none), groups.of == k)


def _largest(bound: Ints, rows: int) -> list[int]:
    """The indices of the largest times: at most `rows`, all above `_LEAST_SHARE` of the maximum."""
    order = np.argsort(-bound, kind="stable")[:rows]
    found: list[int] = order[bound[order] > bound.max(initial=0) * _LEAST_SHARE].tolist()
    return found
