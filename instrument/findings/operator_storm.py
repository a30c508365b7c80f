"""`operator-storm`: loops that call tiny operators, or ranges of tiny operators, again and again.

A loop repeats: in one range (or outside of all), 32 operators or inner ranges of the same name
follow each other, and their operators take 50 µs or less (median). All tiny operators from the
first to the last of them count together, with their backward, so the rounds of a loop may be of any
length, and may differ. Layers of a model are no loop. In training, there are about as many
operators with weights as parameters, so operators that make autograd nodes count only if those with
weights are more than twice as many as the parameters; a model that runs without gradients on a
device does not count. In the simulation, one round does the work of all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.analysis.coverage_rows import CPU_IN_STEPS
from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.base.units import duration, percent
from instrument.findings.autograd_nodes import makers
from instrument.findings.check import Check, Edit, Problem
from instrument.findings.evidence import evidence, evidence_row
from instrument.findings.undisturbed import undisturbed_ns
from instrument.links.attribution import OPTIMIZER_STEP
from instrument.links.autograd import ACCUMULATION, is_backward
from instrument.links.groupby import Groups, distinct, group_rows, isin
from instrument.links.intervals import Intervals, concatenated, merged
from instrument.trace.events import Flags, Ints, called_operators

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_REPEATS = 32
_TINY_NS = 50_000
# The own time of a recorded operator that does almost nothing is 0.3 to 3 µs (torch 2.13, CPU),
# and up to 20 µs on a slow machine: the estimate, the least and the most overhead of a call.
_CALLS_NS = 3_000, 1_000, 20_000
# Operators that use weights, or multiply matrices as those do.
_LAYER = re.compile(r"[\w.]+::\w*(linear|conv|_norm|embedding|lstm|gru|rnn|matmul|mm|einsum)")
# In a model, operators of `_LAYER` with parameters have at least one, and at least half have some.
_CALLS_OF_PARAMETER = 2
# Ranges inside each other that are tried as the body of a loop.
_DEEPEST = 16
# Optimizers of torch that have a fused implementation for CPU and CUDA.
_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_OPTIMIZER = re.compile(rf"{OPTIMIZER_STEP}(\w+)\.step")


class Storm(NamedTuple):
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


class _Loop(NamedTuple):
    """One loop: nodes of the call tree.

    Attributes:
        bodies: the operators and ranges directly in the loop.
        calls: the outermost operators.
        parts_ns: a column for each call; see `_parts`.
        rounds: how often the loop repeats, at least.
    """

    bodies: Ints
    calls: Ints
    parts_ns: Ints
    rounds: int


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each range with loops over tiny operators, the longest first."""
    events, steps = capture.events, capture.links.counted_steps
    for storm in storms(capture):
        share = steps.share(storm.elapsed_ns)
        if share < CHECK.least_share:
            return
        place = common_place(capture, storm.calls)
        lasts = events.duration_ns[storm.calls]
        tiny = (
            f"{len(storm.calls) / steps.count:,.0f} calls of {duration(int(np.median(lasts)))} "
            "(median), and the gaps between them"
        )
        what, name, count = "a loop over tiny operators", "rounds of the loop", storm.rounds
        if storm.is_range:
            name, count = storm.name, storm.bodies
            what = f"a loop that calls range {name!r} {count / steps.count:,.0f} times"
        row = evidence_row(
            capture,
            name,
            count,
            storm.elapsed_ns,
            int(storm.calls[np.argmax(lasts)]),
            f"{count / steps.count:,.0f} in each {steps.what}, with all operators and their gaps",
        )
        yield Problem(
            f"{percent(share)} of the {steps.what} goes to {what}: {tiny}",
            storm.calls,
            share,
            edit=_edit(storm),
            place=place,
            evidence=(row, *evidence(capture, storm.calls)),
            change=_change(place[0], storm),
            verify="--ops --by range" if place[0] else "",
        )


CHECK = Check(
    "operator-storm",
    find,
    verify="--ops",
    least_share=0.05,
    least_saving=0.02,
    coverage=(CPU_IN_STEPS,),
)


def storms(capture: Views) -> list[Storm]:
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
    others = np.flatnonzero(operators & (around < 0) & np.isin(parent, parent[body]))
    of_parent = np.append(parent[body], parent[others])
    counts = ~_of_layers(capture, np.append(calls, others), of_parent)[: len(calls)]
    calls, body = calls[counts], body[counts]
    parts = _parts(capture, calls)
    of_path = defaultdict(list)
    for rows in group_rows(parent[body]).rows() if len(calls) else []:
        inside = np.unique(body[rows])
        names = events.name[tree.index[inside[repeated[inside]]]]
        sizes = np.unique(names, return_counts=True)[1]
        if sizes.max(initial=0) >= _LEAST_REPEATS:
            rounds = int(sizes[sizes >= _LEAST_REPEATS].min())
            above = int(tree.parent[inside[0]])
            path = int(capture.links.scopes.path_of_node[above])
            of_path[path].append(_Loop(inside, calls[rows], parts[:, rows], rounds))
    found = [_storm(capture, loops) for loops in of_path.values()]
    return sorted(found, key=lambda storm: -storm.elapsed_ns)


def _bodies(capture: Views) -> tuple[Flags, Flags]:
    """Masks of the nodes that are outermost operators, and of those that are ranges around them.

    Only those in the steps, without backward nodes and what is inside of them.
    """
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    called = called_operators(events)[tree.index]
    excluded = tree.inside(called) | np.append(scopes.backward, False)[scopes.innermost]
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


def _of_layers(capture: Views, calls: Ints, parent: Ints) -> Flags:
    """A mask of the calls from the first to the last layer of a model that runs once.

    `calls` are all operators of some parents, and of the loops in them. Calls with and without
    gradients are of different models.
    """
    events, tree = capture.events, capture.links.call_tree
    made = np.zeros(len(tree), np.int64)
    made[tree.nodes_of(makers(capture))] = 1
    makes = tree.with_descendants(made)[calls] > 0
    accumulated = events.start_ns[events.named(ACCUMULATION.__eq__)]
    steps = capture.links.counted_steps
    parameters = int((steps.holds(accumulated) >= 0).sum()) / steps.count
    of = group_rows(parent, makes)
    is_layer = events.named(lambda name: _LAYER.match(name) is not None)[tree.index[calls]]
    layers = of.number(is_layer)
    is_model = layers >= _LEAST_REPEATS
    if parameters or not len(capture.work.event):
        is_model &= layers < _CALLS_OF_PARAMETER * parameters
    is_layer &= is_model[of.of]
    loop = group_rows(parent)
    first = loop.min(np.where(is_layer, calls, len(tree)))[loop.of]
    last = -loop.min(np.where(is_layer, -calls, 1))[loop.of]
    found: Flags = (calls >= first) & (calls <= last)
    return found


def _storm(capture: Views, loops: list[_Loop]) -> Storm:
    events, tree = capture.events, capture.links.call_tree
    bodies, calls = (np.concatenate(each) for each in list(zip(*loops))[:2])
    undisturbed, *work = np.concatenate([each.parts_ns for each in loops], axis=1).sum(axis=1)
    backward = _backward(capture, calls)
    step = capture.links.counted_steps.holds(tree.start_ns[backward])
    in_order = [each.calls for each in loops] + group_rows(tree.thread[backward], step).rows()
    gaps = _gaps(capture, in_order)
    gaps_ns = np.concatenate([end - start for start, end in gaps.values()])
    wait = capture.about.cpu_wait
    slowdown = 1.0 if wait is None else wait.slowdown
    counted_ns = min(int(slowdown * np.minimum(gaps_ns, _TINY_NS).sum()), int(gaps_ns.sum()))
    one_round = sum(len(each.calls) / each.rounds for each in loops) / len(calls)
    left, most, least = (
        one_round + (1 - one_round) * float(ns / max(undisturbed, 1)) for ns in work
    )
    calls_ns = int(tree.total_ns[calls].sum())
    names, of = np.unique(events.name[tree.index[bodies]], return_inverse=True)
    largest = np.bincount(of, tree.total_ns[bodies]).argmax()
    main = bodies[of == largest]
    return Storm(
        name=events.names[names[largest]],
        is_range=not called_operators(events)[tree.index[main[0]]],
        bodies=len(main),
        calls=tree.index[calls],
        backward=tree.index[backward],
        gaps=gaps,
        rounds=sum(each.rounds for each in loops),
        elapsed_ns=calls_ns + counted_ns + int(tree.total_ns[backward].sum()),
        left=left,
        bounds=(most, least),
        left_of_gaps=1 - (1 - one_round) * counted_ns / max(int(gaps_ns.sum()), 1),
    )


def _gaps(capture: Views, in_order: list[Ints]) -> dict[int, Intervals]:
    """For each thread, the gaps between nodes that follow each other there.

    Each array holds nodes of one thread, sorted by start.
    """
    tree, found = capture.links.call_tree, defaultdict(list)
    for nodes in in_order:
        start, end = np.maximum.accumulate(tree.end_ns[nodes])[:-1], tree.start_ns[nodes][1:]
        lasting = end > start
        found[int(tree.thread[nodes[0]])].append((start[lasting], end[lasting]))
    return {thread: merged(*concatenated(spans)) for thread, spans in found.items()}


def _backward(capture: Views, calls: Ints) -> Ints:
    """The backward nodes that run what some operators made, as nodes of the call tree."""
    events, tree = capture.events, capture.links.call_tree
    chosen = np.zeros(len(tree), np.bool_)
    chosen[calls] = True
    made = makers(capture)
    made = made[tree.at_or_inside(chosen)[tree.nodes_of(made)]]
    nodes = np.flatnonzero(is_backward(events)[tree.index] & (events.sequence[tree.index] >= 0))
    ran = np.zeros(len(tree), np.bool_)
    ran[nodes[isin(events.sequence[tree.index[nodes]], distinct(events.sequence[made]))]] = True
    ran &= capture.links.counted_steps.holds(tree.start_ns) >= 0
    return np.flatnonzero(tree.outermost(ran))


def _edit(storm: Storm) -> Edit:
    events = np.concatenate([storm.calls, storm.backward])

    def edit(whatif: Scenario) -> Scenario:
        whatif = whatif.scale_events(events, by=storm.left, bounds=storm.bounds)
        for thread, spans in storm.gaps.items():
            whatif = whatif.scale_spans(thread, spans, by=storm.left_of_gaps)
        return whatif

    return edit


def _change(path: str | None, storm: Storm) -> str:
    optimizer = _OPTIMIZER.search(path or "")
    if optimizer:
        option = "fused=True" if optimizer[1] in _FUSED else "foreach=True"
        return f"torch.optim.{optimizer[1]}(params, ..., {option}) updates all parameters together."
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
