"""Loops over tiny operators: one operator, or a module, is called again and again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.base.range_names import OPTIMIZER_STEP
from instrument.base.units import duration
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import device_kind, evidence, evidence_row, undisturbed_ns
from instrument.read.facts.autograd import ACCUMULATION, is_backward
from instrument.read.facts.graph_nodes import makers
from instrument.read.facts.groupby import Groups, distinct, group_rows, groupby, isin
from instrument.read.facts.intervals import Intervals, concatenated, merged
from instrument.read.facts.places import common_place
from instrument.read.facts.segments import waits_for_data
from instrument.read.trace.events import ANNOTATION, Flags, Ints, called_operators
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit, Scenario

_LEAST_REPEATS, _NEVER = 32, 2**62
_TINY_NS = 50_000
# The own time of a recorded operator that does almost nothing is 0.3 to 3 µs (torch 2.13, CPU),
# and up to 20 µs on a slow machine; none of it is saved if the data of all rounds fits no cache.
# So these are the estimate, the least and the most that one call saves.
_CALLS_NS = 3_000, 0, 20_000
# Operators that use weights, or multiply matrices as those do.
_LAYER = re.compile(r"[\w.]+::\w*(linear|conv|_norm|embedding|lstm|gru|rnn|matmul|mm|einsum)")
# In a model, at least a third of the operators of `_LAYER` have a parameter of their own.
_CALLS_OF_PARAMETER = 3
# Ranges inside each other that are tried as the body of a loop.
_DEEPEST = 16
# Options of torch's optimizers (2.13) that update all parameters together: `fused` is one kernel on
# CPUs and devices, and `foreach` one for each operator, on devices. On a CPU, foreach runs the same
# operators from C++, and saves about half as much (measured: ASGD -20 %, the others 12 to 45 %, of
# 87 % that one round for all would save).
_OPTIONS = {
    **dict.fromkeys(("Adam", "AdamW", "SGD", "Adagrad"), "fused"),
    **dict.fromkeys(
        ("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"), "foreach"
    ),
}
_SLOWER_ON_CPU, _FOREACH_ON_CPU = frozenset({"ASGD"}), 0.5
_OPTIMIZER = re.compile(rf"{OPTIMIZER_STEP}(\w+)\.step")


class _Storm(NamedTuple):
    """The loops in one range.

    Attributes:
        name: what takes most of the time among what repeats: a range, or an operator.
        is_range: whether it is a range.
        bodies: how often it is called.
        calls: the positions of the outermost operators of the loops.
        backward: the positions of their backward nodes.
        gaps: for each thread, the gaps between the calls, and between the nodes.
        rounds: how often the loops repeat, at least.
        elapsed_ns: the time of all these events, and of each gap at most 50 µs, because in a longer
            gap the program does something else; and the time in which this waits for a CPU.
        left, left_of_gaps: the parts of the time of the events, and of the gaps, that are left if
            one round of each loop does the work of all.
        bounds: the bounds of `left`, the larger one first.
    """

    name: str
    is_range: bool
    bodies: int
    calls: Ints
    backward: Ints
    gaps: dict[int, Intervals]
    rounds: int
    elapsed_ns: int
    left: float
    bounds: tuple[float, float]
    left_of_gaps: float


def operator_storm(capture: Views) -> Iterator[Problem]:
    """Find the ranges with loops over tiny operators, the longest first.

    A loop repeats: in one range (or outside of all), 32 operators or inner ranges of the same name
    follow each other, and their operators take 50 µs or less (median). All tiny operators from the
    first to the last of them count together, with their backward, so the rounds of a loop may be of
    any length, and may differ. In the simulation, one round does the work of all.

    Layers of a model are no loop. So 32 operators that may use weights must use the same ones again
    and again: there are three times as many as gradients of parameters, and the backward adds the
    gradients of later calls to those of earlier ones; or, without gradients, a range around them
    repeats.
    """
    events, steps = capture.events, capture.links.counted_steps
    on_cpu = device_kind(capture) == "cpu"
    for storm in _storms(capture):
        share = steps.share(storm.elapsed_ns)
        if share < OPERATOR_STORM.lowest:
            return
        place = common_place(capture, storm.calls)
        optimizer = _optimizer(place[0], storm)
        if on_cpu and optimizer in _SLOWER_ON_CPU:
            continue
        is_partial = on_cpu and bool(optimizer) and _OPTIONS.get(optimizer) != "fused"
        lasts = events.duration_ns[storm.calls]
        what, name, count = "a loop over tiny operators", "rounds of the loop", storm.rounds
        if storm.is_range:
            name, count = storm.name, storm.bodies
            what = f"a loop that calls range {name!r} {count / steps.count:,.0f} times"
        longest = int(storm.calls[np.argmax(lasts)])
        each = f"{count / steps.count:,.0f} in each {steps.what}, with all operators and their gaps"
        row = evidence_row(capture, name, count, storm.elapsed_ns, longest, each)
        yield Problem(
            f"{what}: {len(storm.calls) / steps.count:,.0f} calls of "
            f"{duration(int(np.median(lasts)))} (median), and the gaps between them",
            storm.calls,
            share,
            edit=_edit(storm, saved=_FOREACH_ON_CPU if is_partial else 1),
            place=place,
            evidence=(row, *evidence(capture, storm.calls)),
            change=_change(place[0], optimizer, storm),
            verify="--ops --by range" if place[0] else "",
        )


OPERATOR_STORM = Check(
    "operator-storm",
    operator_storm,
    title="{share} of the {step} goes to {what}",
    verify="--ops",
    least_share=0.05,
    least_saving=0.02,
    coverage=(CPU_IN_STEPS,),
)


def _storms(capture: Views) -> list[_Storm]:
    """Find the loops over tiny operators in the steps, the longest first."""
    events, tree = capture.events, capture.links.call_tree
    operators, ranges = _bodies(capture)
    parent = np.where(tree.parent >= 0, tree.parent, -1 - tree.thread)  # -1 - thread for roots
    is_long = called_operators(events)[tree.index] & (capture.links.own_ns > _TINY_NS)
    tiny = operators & (tree.with_descendants(is_long.astype(np.int64)) == 0)
    repeated = _repeated(capture, operators | ranges, parent, operators, tiny)
    # All from the first to the last repeated one of a parent count, if their operators are tiny.
    nodes = np.flatnonzero(repeated | tiny)
    nodes = nodes[~tree.inside(repeated)[nodes]]
    loop, place = group_rows(parent[nodes]), np.arange(len(nodes))
    first = loop.min(np.where(repeated[nodes], place, len(nodes)))[loop.of]
    last = -loop.min(np.where(repeated[nodes], -place, 1))[loop.of]
    nodes = nodes[(place >= first) & (place <= last)]
    around = tree.nearest_of(nodes)
    calls = np.flatnonzero(operators & (around >= 0))
    body = nodes[around[calls]]
    # The other operators in the parents, also those in ranges there, show what is a model.
    is_parent = np.zeros(len(tree) + 1, np.bool_)
    is_parent[np.maximum(parent[body], -1)] = True
    others = np.flatnonzero(operators & (around < 0))
    above = tree.nearest(is_parent[:-1], tree.parent[others])
    of_parent = np.append(parent[body], np.where(above < 0, -1 - tree.thread[others], above))
    in_range = np.append(ranges[body], np.zeros_like(others, np.bool_))
    counts = ~_of_layers(capture, np.append(calls, others), of_parent, in_range)[: len(calls)]
    calls, body = calls[counts], body[counts]
    # The names that repeat are counted again, without the layers.
    (parents, loop), again = groupby(parent[body]), distinct(body[repeated[body]])
    same = group_rows(parent[again], events.name[tree.index[again]])
    times = np.where(same.size < _LEAST_REPEATS, _NEVER, same.size)[same.of]
    of_loop = Groups(np.searchsorted(parents, parent[again]), loop.count)
    rounds = of_loop.min(times)[loop.of]
    calls, body, rounds = (each[rounds < _NEVER] for each in (calls, body, rounds))
    path = capture.links.scopes.path_of_node[tree.parent[body]]
    storm, parts = group_rows(tree.thread[body], path), _parts(capture, calls)
    backward, call = _backward(capture, calls)
    inside = capture.links.counted_steps.holds(tree.start_ns[backward]) >= 0
    backward, call = backward[inside], call[inside]
    of_storm = Groups(storm.of[call], storm.count).rows()
    found = [
        _storm(capture, calls[rows], body[rows], rounds[rows], parts[:, rows], backward[nodes])
        for rows, nodes in zip(storm.rows(), of_storm)
    ]
    return sorted(found, key=lambda storm: -storm.elapsed_ns)


def _bodies(capture: Views) -> tuple[Flags, Flags]:
    """Masks of the nodes that are outermost operators, and of those that are ranges around them.

    Only those in the steps, without backward nodes, waits for data, and what is inside of them.
    """
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    called = called_operators(events)[tree.index]
    excluded = tree.inside(called) | np.append(scopes.backward, False)[scopes.innermost]
    excluded |= tree.at_or_inside(np.isin(tree.index, waits_for_data(capture)))
    excluded |= links.counted_steps.holds(tree.start_ns) < 0
    if not len(links.steps):
        excluded |= tree.parent < 0  # the iterations of a recording without steps are no loop
    is_range = np.zeros(len(tree), np.bool_)
    is_range[tree.nodes_of(scopes.ranges.index)] = True
    return called & ~is_range & ~excluded, is_range & ~excluded


def _repeated(capture: Views, bodies: Flags, parent: Ints, operators: Flags, tiny: Flags) -> Flags:
    """A mask of the bodies that repeat in their parent, and are or hold mostly tiny operators."""
    tree, calls = capture.links.call_tree, np.flatnonzero(operators)
    name, found, left = capture.events.name[tree.index], np.zeros(len(tree), np.bool_), bodies
    for _ in range(_DEEPEST):
        nodes = np.flatnonzero(left)
        same = group_rows(parent[nodes], name[nodes])
        left[nodes[same.size[same.of] < _LEAST_REPEATS]] = False
        nodes = np.flatnonzero(tree.outermost(left))
        if not len(nodes):
            break
        same, around = group_rows(parent[nodes], name[nodes]), tree.nearest_of(nodes, calls)
        held = Groups(same.of[around[around >= 0]], same.count)
        of_tiny = held.number(tiny[calls[around >= 0]])
        found[nodes[((held.size > 0) & (2 * of_tiny >= held.size))[same.of]]] = True
        left[nodes] = False
        left &= ~tree.inside(found)
    return found


def _parts(capture: Views, calls: Ints) -> Ints:
    """The undisturbed time of each call, then the part that is work, for each of `_CALLS_NS`.

    The own time of each operator in a call is overhead up to this time, and work beyond it.
    """
    tree = capture.links.call_tree
    chosen = np.zeros(len(tree), np.bool_)
    chosen[calls] = True
    nodes = np.flatnonzero(called_operators(capture.events)[tree.index] & tree.at_or_inside(chosen))
    own_ns = np.zeros(len(tree), np.int64)
    own_ns[nodes] = undisturbed_ns(capture, nodes, capture.links.own_ns[nodes])
    parts = [own_ns, *(np.maximum(own_ns - each, 0) for each in _CALLS_NS)]
    return np.stack([tree.with_descendants(each)[calls] for each in parts])


def _of_layers(capture: Views, calls: Ints, parent: Ints, in_range: Flags) -> Flags:
    """A mask of the calls from the first to the last layer of a model, of all calls in loops.

    `in_range` tells which are in a range that repeats. Gradients tell different models apart.
    """
    events, tree = capture.events, capture.links.call_tree
    made = np.zeros(len(tree), np.int64)
    made[tree.nodes_of(makers(capture.links))] = 1
    makes = tree.with_descendants(made)[calls] > 0
    accumulated = events.start_ns[events.named(ACCUMULATION.__eq__)]
    steps = capture.links.counted_steps
    parameters = int((steps.holds(accumulated) >= 0).sum()) / steps.count
    # The engine adds to a gradient in the node that computes the later one.
    backward, call = _backward(capture, calls)
    call_of_node = np.full(len(tree) + 1, -1)
    call_of_node[backward] = call
    is_sum = events.named({"aten::add", "aten::add_"}.__contains__)
    sums = call_of_node[tree.parent[is_sum[tree.index]]]
    used_again = np.bincount(sums[sums >= 0], minlength=len(calls)) + (in_range & ~makes)
    of = group_rows(parent, makes)
    is_layer = events.named(lambda name: _LAYER.match(name) is not None)[tree.index[calls]]
    number, again = of.number(is_layer), of.sum(used_again, is_layer)
    is_model = (number < _CALLS_OF_PARAMETER * parameters) | (again < number - parameters)
    is_layer &= (is_model & (number >= _LEAST_REPEATS))[of.of]
    loop = group_rows(parent)
    found = np.zeros_like(calls, np.bool_)
    for layers in (is_layer & makes, is_layer & ~makes):
        first = loop.min(np.where(layers, calls, len(tree)))[loop.of]
        found |= (first <= calls) & (calls <= -loop.min(np.where(layers, -calls, 1))[loop.of])
    return found


def _storm(
    capture: Views, calls: Ints, body: Ints, rounds: Ints, parts_ns: Ints, backward: Ints
) -> _Storm:
    """The loops of one range and thread.

    For each of the calls, `body` is what the loop calls, and `rounds` how often the loop repeats.
    """
    events, tree = capture.events, capture.links.call_tree
    loop, bodies = group_rows(tree.parent[body]), distinct(body)
    undisturbed, *work = parts_ns.sum(axis=1).tolist()
    step = capture.links.counted_steps.holds(tree.start_ns[backward])
    in_order = [calls[each] for each in loop.rows()]
    in_order += [backward[each] for each in group_rows(tree.thread[backward], step).rows()]
    gaps = _gaps(capture, in_order)
    gaps_ns = np.concatenate([end - start for start, end in gaps.values()])
    wait = capture.about.cpu_wait
    slowdown = 1.0 if wait is None else wait.slowdown
    counted_ns = min(int(slowdown * np.minimum(gaps_ns, _TINY_NS).sum()), int(gaps_ns.sum()))
    one_round = float((1 / rounds).mean())
    left, most, least = (one_round + (1 - one_round) * ns / max(undisturbed, 1) for ns in work)
    events_ns = int(tree.total_ns[np.append(calls, backward)].sum())
    names, of = np.unique(events.name[tree.index[bodies]], return_inverse=True)
    largest = np.bincount(of, tree.total_ns[bodies]).argmax()
    main = bodies[of == largest]
    return _Storm(
        name=events.names[names[largest]],
        is_range=events.categories[events.category[tree.index[main[0]]]] in ANNOTATION,
        bodies=len(main),
        calls=tree.index[calls],
        backward=tree.index[backward],
        gaps=gaps,
        rounds=int(loop.min(rounds).sum()),
        elapsed_ns=events_ns + counted_ns,
        left=left,
        bounds=(most, least),
        left_of_gaps=1 - (1 - one_round) * counted_ns / max(int(gaps_ns.sum()), 1),
    )


def _gaps(capture: Views, in_order: list[Ints]) -> dict[int, Intervals]:
    """For each thread, the gaps in arrays of its nodes, which are sorted by start."""
    tree, found = capture.links.call_tree, defaultdict(list)
    for nodes in in_order:
        start, end = np.maximum.accumulate(tree.end_ns[nodes])[:-1], tree.start_ns[nodes][1:]
        lasting = end > start
        found[int(tree.thread[nodes[0]])].append((start[lasting], end[lasting]))
    return {thread: merged(*concatenated(spans)) for thread, spans in found.items()}


def _backward(capture: Views, calls: Ints) -> tuple[Ints, Ints]:
    """The backward nodes that run what some operators made, and the index in `calls` of each."""
    events, tree = capture.events, capture.links.call_tree
    made = makers(capture.links)
    call = tree.nearest_of(calls, tree.nodes_of(made))
    made, call = made[call >= 0], call[call >= 0]
    number, last = np.unique(events.sequence[made][::-1], return_index=True)
    ran = is_backward(events)[tree.index] & isin(events.sequence[tree.index], number)
    nodes = np.flatnonzero(tree.outermost(ran))
    at = np.searchsorted(number, events.sequence[tree.index[nodes]])
    return nodes, call[::-1][last[at]]


def _edit(storm: _Storm, saved: float) -> Edit:
    """Do the work of all rounds in one; `saved` is the part of the saving that is expected."""
    events = np.concatenate([storm.calls, storm.backward])
    left, left_of_gaps = (1 - saved * (1 - each) for each in (storm.left, storm.left_of_gaps))
    bounds = storm.bounds if saved == 1 else (1.0, storm.left)

    def edit(whatif: Scenario) -> Scenario:
        whatif = whatif.scale_events(events, by=left, bounds=bounds)
        for thread, spans in storm.gaps.items():
            of_gaps = None if saved == 1 else (1.0, storm.left_of_gaps)
            whatif = whatif.scale_spans(thread, spans, by=left_of_gaps, bounds=of_gaps)
        return whatif

    return edit


def _optimizer(path: str | None, storm: _Storm) -> str:
    """The class of the optimizer that itself runs the loop; "" for other loops."""
    found = _OPTIMIZER.fullmatch((path or "").rpartition("/")[2])
    return "" if found is None or len(storm.backward) else found[1]


def _change(path: str | None, optimizer: str, storm: _Storm) -> str:
    if option := _OPTIONS.get(optimizer):
        return (
            f"torch.optim.{optimizer}(params, ..., {option}=True) updates all parameters together."
        )
    if optimizer:
        return (
            f"Use torch._foreach_* operators in {optimizer}.step, or an optimizer of torch with "
            "fused=True."
        )
    if "zero_grad" in (path or ""):
        return "optimizer.zero_grad(set_to_none=True) needs no operator for the parameters."
    if storm.is_range:
        return (
            f"Call {storm.name} once with a batch: torch.stack inputs that do not need each "
            "other's results, such as samples, or the observations of several environments. "
            "nn.LSTM or nn.GRU replaces a loop over time."
        )
    return (
        "Do all rounds of the loop in one call: stack the rows and use a batched operator or "
        "torch.vmap, and call a model once with a batch; over parameters, use torch._foreach_* "
        "operators or foreach=True."
    )
