"""Loops over tiny operators: one operator, or a module, is called again and again."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from instrument.base.range_names import OPTIMIZER_STEP
from instrument.base.units import duration
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import undisturbed_ns
from instrument.read.advise.regions import backward_of, bodies, region
from instrument.read.facts.autograd import ACCUMULATION
from instrument.read.facts.graph_nodes import makers
from instrument.read.facts.groupby import Groups, distinct, group_rows, groupby, isin
from instrument.read.facts.places import common_place
from instrument.read.trace.events import ANNOTATION, Flags, Ints, called_operators
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.views import Views

_LEAST_ROUNDS, _NEVER, _TINY_NS = 32, 2**62, 50_000
# The own time of a recorded operator that does almost nothing is 0.3 to 3 µs (torch 2.13, CPU),
# and up to 20 µs on a slow machine. So these are the estimate, the least and the most that one call
# saves.
_CALLS_NS = 3_000, 1_000, 20_000
# Operators that use weights, or multiply matrices as those do. In a model, at least a third of them
# have a parameter of their own.
_LAYER = re.compile(r"[\w.]+::\w*(linear|conv|_norm|embedding|lstm|gru|rnn|matmul|mm|einsum)")
_CALLS_OF_PARAMETER = 3


def loop(capture: Views) -> Iterator[Problem]:
    """Find the ranges with loops over tiny operators, the longest first.

    A loop repeats: in one range (or outside of all), 32 operators or inner ranges of the same name
    follow each other, and most of their operators take 50 µs or less. All tiny operators from the
    first to the last of them count together, with their backward, so the rounds of a loop may be of
    any length, and may differ. In the simulation, one round does the work of all.

    Layers of a model are no loop; see `_of_models`. Nor is an optimizer, which has its own check.
    """
    events, tree, steps = capture.events, capture.links.call_tree, capture.links.counted_steps
    calls, body, times_of, backward, call = _loops(capture)
    path = capture.links.scopes.path_of_node[tree.parent[body]]
    of = group_rows(tree.thread[body], path)
    nodes_of = Groups(of.of[call], of.count).rows()
    found = []
    for rows, nodes in zip(of.rows(), nodes_of):
        around = region(capture, calls[rows], tree.parent[body[rows]], backward[nodes])
        found.append((around, body[rows], times_of[rows]))
    for around, inside, times in sorted(found, key=lambda each: -each[0].elapsed_ns):
        share, inner = steps.share(around.elapsed_ns), distinct(inside)
        if share < LOOP.lowest:
            return
        names, of = groupby(events.name[tree.index[inner]])
        # What else stands between the rounds may be long, such as a call of a model.
        total_ns = np.where(of.size >= _LEAST_ROUNDS, of.sum(tree.total_ns[inner]), 0)
        largest = int(total_ns.argmax())
        is_range = events.categories[events.category[tree.index[inner[of.of == largest][0]]]]
        is_range = is_range if total_ns[largest] else ""
        repeats = events.names[names[largest]] if is_range in ANNOTATION else None
        rounds = int(
            of.size[largest] if repeats else group_rows(tree.parent[inside]).min(times).sum()
        )
        what = f"that calls range {repeats!r}" if repeats else "over tiny operators"
        index, one = tree.index[around.calls], float((1 / times).mean())
        # Other work can make any call long, so for the place each call counts once.
        place = common_place(capture, index, np.ones_like(index))
        work = [one + (1 - one) * left for left in _left(capture, around.calls)]
        yield Problem(
            f"a loop {what}, {rounds / steps.count:,.0f} rounds a {steps.what}: "
            f"{len(index) / steps.count:,.0f} calls of "
            f"{duration(int(np.median(events.duration_ns[index])))} (median), and the gaps between "
            "them",
            index,
            share,
            edit=around.scaled(capture, work[0], (work[1], work[2]), gaps=one),
            place=place,
            change=_change(place[0], repeats),
            verify="--ops --by range" if place[0] else "",
        )


LOOP = Check(
    "loop",
    loop,
    title="{share} of the {step} goes to {what}",
    verify="--ops",
    least_share=0.15,
    least_saving=0.05,
    coverage=(CPU_IN_STEPS,),
)


def _loops(capture: Views) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The operators in loops, what the loop calls for each, its rounds, and the backward of them.

    The last two arrays are backward nodes, and for each the index of its operator.
    """
    events, tree = capture.events, capture.links.call_tree
    operators, ranges = bodies(capture)
    of_optimizer = tree.at_or_inside(
        events.named(lambda name: name.startswith(OPTIMIZER_STEP))[tree.index] & ranges
    )
    operators, ranges = operators & ~of_optimizer, ranges & ~of_optimizer
    parent = np.where(tree.parent >= 0, tree.parent, -1 - tree.thread)  # -1 - thread for roots
    is_long = called_operators(events)[tree.index] & (capture.links.own_ns > _TINY_NS)
    tiny = operators & (tree.with_descendants(is_long.astype(np.int64)) == 0)
    nodes = np.flatnonzero(operators | ranges)
    same = group_rows(parent[nodes], events.name[tree.index[nodes]])
    held, of_tiny = (
        same.sum(tree.with_descendants(each.astype(np.int64))[nodes]) for each in (operators, tiny)
    )
    is_loop = (same.size >= _LEAST_ROUNDS) & (held > 0) & (2 * of_tiny >= held)
    repeated = np.zeros(len(tree), np.bool_)
    repeated[nodes[is_loop[same.of]]] = True
    repeated = tree.outermost(repeated)
    # All from the first to the last repeated one of a parent count, if their operators are tiny.
    # What holds layers beside them shows what is a model.
    layers = operators & _layers(capture)
    is_beside = (tree.with_descendants(layers.astype(np.int64)) > 0) & isin(
        parent, parent[repeated]
    )
    is_beside &= (tree.with_descendants(repeated.astype(np.int64)) == 0) & (operators | ranges)
    is_part = (repeated | tiny) & ~tree.inside(repeated | is_beside)
    nodes = np.flatnonzero(is_part | is_beside)
    nodes = nodes[tree.outermost(is_part | is_beside)[nodes]]
    of = group_rows(parent[nodes])
    nodes = nodes[_between(of, repeated[nodes]) | is_beside[nodes]]
    around = tree.nearest_of(nodes)
    calls = np.flatnonzero(operators & (around >= 0))
    body = nodes[around[calls]]
    backward, call = backward_of(capture, calls)
    of = group_rows(parent[body])
    kept = is_part[body] & ~_of_models(
        capture, calls, of, (ranges & repeated)[body], backward, call
    )
    # The names that repeat are counted again, without the layers.
    again = distinct(body[kept & repeated[body]])
    same = group_rows(parent[again], events.name[tree.index[again]])
    times = np.full(len(tree), _NEVER)
    times[again] = np.where(same.size < _LEAST_ROUNDS, _NEVER, same.size)[same.of]
    rounds = of.min(np.where(kept, times[body], _NEVER))[of.of]
    kept &= rounds < _NEVER
    at = np.cumsum(kept) - 1
    ran = kept[call]
    return calls[kept], body[kept], rounds[kept], backward[ran], at[call[ran]]


def _layers(capture: Views) -> Flags:
    is_layer = capture.events.named(lambda name: _LAYER.match(name) is not None)
    found: Flags = is_layer[capture.links.call_tree.index]
    return found


def _between(of: Groups, chosen: Flags) -> Flags:
    """A mask of the rows from the first to the last chosen one of each group."""
    row = np.arange(len(of.of))
    found: Flags = (row >= of.min(np.where(chosen, row, len(row)))[of.of]) & (
        row <= -of.min(np.where(chosen, -row, 1))[of.of]
    )
    return found


def _of_models(
    capture: Views, calls: Ints, of: Groups, in_range: Flags, backward: Ints, call: Ints
) -> Flags:
    """A mask of the calls from the first to the last layer of a model.

    Operators that may use weights are layers, unless they use the same weights again and again:
    there are three times as many as gradients of parameters, and the backward adds the gradients of
    later calls to those of earlier ones; or, without gradients, a range around them repeats.
    """
    events, tree, steps = capture.events, capture.links.call_tree, capture.links.counted_steps
    made = np.zeros(len(tree), np.int64)
    made[tree.nodes_of(makers(capture.links))] = 1
    makes = tree.with_descendants(made)[calls] > 0
    accumulated = events.start_ns[events.named(ACCUMULATION.__eq__)]
    parameters = int((steps.holds(accumulated) >= 0).sum()) / steps.count
    # The engine adds to a gradient in the node that computes the later one.
    is_sum = events.named({"aten::add", "aten::add_"}.__contains__)[tree.index]
    added = Groups(tree.parent, len(tree)).sum(is_sum.astype(np.int64))
    used_again = np.bincount(call, added[backward], len(calls)) + (in_range & ~makes)
    layer = _layers(capture)[calls]
    of_kind = Groups(2 * of.of + makes, 2 * of.count)
    number, again = of_kind.number(layer), of_kind.sum(used_again, layer)
    is_model = (number < _CALLS_OF_PARAMETER * parameters) | (again < number - parameters)
    layer &= (is_model & (number >= _LEAST_ROUNDS))[of_kind.of]
    return _between(of, layer & makes) | _between(of, layer & ~makes)


def _left(capture: Views, calls: Ints) -> list[float]:
    """The part of the calls' time that is work, for each of `_CALLS_NS`."""
    tree = capture.links.call_tree
    nodes = np.flatnonzero(tree.nearest_of(calls) >= 0)
    nodes = nodes[called_operators(capture.events)[tree.index[nodes]]]
    own_ns = undisturbed_ns(capture, nodes, capture.links.own_ns[nodes])
    return [
        float(np.maximum(own_ns - overhead_ns, 0).sum()) / max(int(own_ns.sum()), 1)
        for overhead_ns in _CALLS_NS
    ]


def _change(path: str | None, repeats: str | None) -> str:
    if "zero_grad" in (path or ""):
        return "optimizer.zero_grad(set_to_none=True) needs no operator for the parameters."
    if repeats:
        return (
            f"Call {repeats} once with a batch: torch.stack inputs that do not need each other's "
            "results, such as samples, or the observations of several environments. nn.LSTM or "
            "nn.GRU replaces a loop over time."
        )
    return (
        "Do all rounds of the loop in one call: stack the rows and use a batched operator or "
        "torch.vmap, and call a model once with a batch; over parameters, use torch._foreach_* "
        "operators or foreach=True."
    )
