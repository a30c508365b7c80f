"""The causal profile: how much shorter a step is if a range, an operator or a kernel is faster.

Each takes 10, 25, 50 and 100 % less time in the simulation. Coz (Curtsinger and Berger, SOSP 2015)
measures such savings in a running program, by slowing down the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from instrument.read.facts.groupby import Groups, groupby, intern
from instrument.read.facts.intervals import Intervals
from instrument.read.facts.schema import Schema, schema
from instrument.read.simulate.cpu_time import joined
from instrument.read.simulate.model import Costs, Model
from instrument.read.simulate.selection import of_paths, short_name
from instrument.read.simulate.window import Window
from instrument.read.trace.events import Flags, Ints, called_operators, split_overload
from instrument.read.views.table import Table

_FASTER = (0.1, 0.25, 0.5, 1.0)
_LEAST_SHARE = 0.002

CAUSAL_PROFILE: Schema = schema(
    kind="range (with all that runs inside it, its backward and its device work), operator (with "
    "all that runs inside it and its device work), or kernel (device work with this name, without "
    "template arguments)",
    name="for a range, its path; for an operator or a kernel, its name",
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
    """The CPU time (on `Model.axis`) and device rows of a range, operator or kernel."""

    cpu: Intervals
    rows: Flags


def causal_profile(window: Window, costs: Sequence[Costs], step_ns: int, rows: int = 12) -> Table:
    """Return how much shorter a step is if a range, an operator or a kernel is faster.

    Args:
        window: the window.
        costs: the costs of each rank, after the edits of the scenario.
        step_ns: how long a step takes with these costs; see `Scenario.step_ns`.
        rows: the number of ranges, of operators and of kernels to simulate for each rank: those
            with the most time.

    Cost: for each row, some array operations on all arcs, and a simulation of four scenarios.
    """
    tried = _tried(window, rows)
    base = window.weights(costs)
    steps = window.steps_ns(window.program.run(base))
    kept = window.counted
    whole_ns = np.sum(steps[kept])
    shares: list[list[float]] = []
    for chosen in tried.values():
        change = window.change(costs, chosen)
        times = window.program.run_shares(base, change, np.array(_FASTER))
        left = np.sum(window.steps_ns(times)[..., kept], axis=-1) / max(whole_ns, 1)
        shares.append((1 - left).tolist())
    to_step = step_ns / max(whole_ns, 1)
    spent = [_spent(window, costs, chosen, kept, to_step) for chosen in tried.values()]
    names = list(tried)
    order = sorted(
        range(len(names)),
        key=lambda k: (-round(shares[k][2] * step_ns), -sum(filter(None, spent[k]))),
    )
    cells: dict[str, list[Any]] = {
        "kind": [names[k][0] for k in order],
        "name": [names[k][1] for k in order],
        "cpu_ns": [spent[k][0] for k in order],
        "device_ns": [spent[k][1] for k in order],
        **{
            f"saving_{round(faster * 100)}_ns": [round(shares[k][n] * step_ns) for k in order]
            for n, faster in enumerate(_FASTER)
        },
        "saving_50_share": [shares[k][2] if step_ns else None for k in order],
    }
    return Table.of(CAUSAL_PROFILE, cells)


# The parts of a range, operator or kernel on some ranks; the key is the index of the rank's model.
_Chosen = dict[int, _Part]


def _tried(window: Window, rows: int) -> dict[tuple[str, str], _Chosen]:
    """The ranges, operators and kernels that take the most time on each rank, by kind and name."""
    found: dict[tuple[str, str], _Chosen] = {}
    for rank, model in enumerate(window.models):
        for kind, find in (("range", _ranges), ("operator", _operators), ("kernel", _kernels)):
            for name, part in find(model, rows):
                found.setdefault((kind, name), {})[rank] = part
    return found


def _spent(
    window: Window, costs: Sequence[Costs], chosen: _Chosen, kept: slice, to_step: float
) -> tuple[int, int | None]:
    """The mean CPU time and device time of the ranks in one step, after edits.

    The times in the steps `kept`, multiplied by `to_step`, are those of one step. The device time
    is None if no rank has device work.
    """
    cpu = device = 0
    for rank, own in chosen.items():
        model, edited = window.models[rank], costs[rank]
        moments = model.moments
        begin, end = moments.time_ns[moments.step_start], moments.time_ns[moments.step_end]
        cpu += model.axis.spent_within(begin[kept], end[kept], edited.cpu, own.cpu)
        counts = np.isin(model.step_of, range(len(begin))[kept])
        device += int(edited.device_ns[own.rows & counts].sum())
    has_device = any(len(model.work.event) for model in window.models)
    in_step = to_step / len(chosen)
    return round(cpu * in_step), round(device * in_step) if has_device else None


def _ranges(model: Model, rows: int) -> Iterator[tuple[str, _Part]]:
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
        yield scopes.paths.texts[k], _Part(chosen.cpu, chosen.rows)


def _operators(model: Model, rows: int) -> Iterator[tuple[str, _Part]]:
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
        yield names[distinct[k]], _Part(joined(starts[nodes], ends[nodes]), launched == k)


def _kernels(model: Model, rows: int) -> Iterator[tuple[str, _Part]]:
    events, work = model.links.events, model.work
    if not len(work.event):
        return
    present, groups = groupby(events.name[work.event])
    numbers, names = intern([short_name(events.names[k]) for k in present.tolist()])
    distinct, groups = groupby(numbers[groups.of])
    bound = groups.sum(work.end_ns - work.start_ns)
    none = np.zeros(0, np.int64)
    for k in _largest(bound, rows):
        yield names[distinct[k]], _Part((none, none), groups.of == k)


def _largest(bound: Ints, rows: int) -> list[int]:
    """The indices of the largest times: at most `rows`, all above `_LEAST_SHARE` of the maximum."""
    order = np.argsort(-bound, kind="stable")[:rows]
    found: list[int] = order[bound[order] > bound.max(initial=0) * _LEAST_SHARE].tolist()
    return found
