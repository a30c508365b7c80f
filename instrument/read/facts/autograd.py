"""Find the scopes of a trace (ranges and backward nodes), and the range that backward belongs to.

A scope is a range or a backward node: a function that the autograd engine runs. The time of a range
belongs to this range, and the time of a backward node to the range around its forward operator.
docs/explanation/joins.md says how this operator is found without a hook.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from instrument.base.range_names import OPTIMIZER_STEP, RECOMPUTED, RESUMED
from instrument.read.facts.call_tree import CallTree
from instrument.read.facts.grammars import range_label
from instrument.read.facts.groupby import groupby_rows, intern
from instrument.read.facts.paths import Paths, paths_of
from instrument.read.trace.events import (
    ANNOTATION,
    OPERATOR,
    Events,
    Flags,
    Ints,
    flags,
    is_compiler_note,
    is_moment,
    is_step,
)

#: The kinds of work of a scope.
KINDS = ("forward", "backward", "accumulate", "optimizer", "unattributed", "recompute")
FORWARD, BACKWARD, ACCUMULATE, OPTIMIZER, UNATTRIBUTED, RECOMPUTE = range(6)
_ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATION = "torch::autograd::AccumulateGrad"
_BACKWARD = re.compile(r"Backward\d*$")
# A backward node is compared with the operators of at most this many threads.
_MOST_THREADS = 64
#: A range inside this many other ranges is no scope. Otherwise, the cost of the range tree would
#: grow with the square of the depth. By default, Python allows only 1000 nested calls.
DEEPEST_RANGE = 1000


@dataclass(frozen=True, slots=True)
class Scopes:
    """The scopes of a call tree (ranges and backward nodes), and the range that each belongs to.

    A path is an index into `paths`; -1 stands for no path.

    Attributes:
        nodes: the call tree of the scopes alone.
        innermost: for each node of the whole call tree, the innermost scope at or above it; -1 for
            none.
        backward: a mask of the scopes that are backward nodes.
        ranges: the call tree of the ranges alone.
        opened: the path of each range.
        paths: all paths of ranges, as a tree.
        enclosing: for each scope, the path of the innermost range at or above it.
        attributed: for each scope, the path that its own time belongs to.
        unattributed: a mask of the backward nodes whose range is not known. A node whose forward
            operator ran outside all ranges is not in the mask.
        forward: for each backward node, the node of its forward operator in the whole call tree; of
            a node that accumulates a gradient, that of the node before it. -1 if not known, and for
            ranges.
        recomputed: a mask of the ranges of a forward pass that a backward node repeats.
        recording: a mask of the nodes of the whole call tree that are operators and ran in grad
            mode.
        path_of_node: for each node of the whole call tree, the path that its time belongs to. One
            more entry with the value -1 is for the node -1.
    """

    nodes: CallTree
    innermost: Ints
    backward: Flags
    ranges: CallTree
    opened: Ints
    paths: Paths
    enclosing: Ints
    attributed: Ints
    unattributed: Flags
    forward: Ints
    recomputed: Flags
    recording: Flags
    path_of_node: Ints


def find_scopes(events: Events, call_tree: CallTree) -> Scopes:
    """Find the scopes (ranges and backward nodes) of a call tree, and the range of each."""
    is_range = events.among(ANNOTATION) & ~events.named(
        lambda name: is_step(name) or is_moment(name) or is_compiler_note(name)
    )
    if call_tree.depth.max(initial=0) >= DEEPEST_RANGE:
        every = call_tree.only(is_range[call_tree.index])
        is_range[every.index[every.depth >= DEEPEST_RANGE]] = False
    is_scope = (is_range | is_backward(events))[call_tree.index]
    nodes, innermost = call_tree.only(is_scope), call_tree.nearest_of(np.flatnonzero(is_scope))
    backward = ~is_range[nodes.index]
    ranges, range_of = nodes.only(~backward), nodes.nearest_of(np.flatnonzero(~backward))
    # A range that was suspended and resumed has several events, the later ones with a suffix.
    codes, names = intern(range_label(each.removesuffix(RESUMED)) for each in events.names)
    name = codes[events.name[nodes.index]]
    recording = events.records_gradients[call_tree.index]
    recomputed = _recomputed(events, call_tree, recording, nodes, innermost, backward, name)
    labelled = np.where(recomputed, name + len(names), name)[~backward]
    paths, opened = paths_of(ranges, labelled, [*names, *(each + RECOMPUTED for each in names)])
    enclosing = np.append(opened, -1)[range_of]
    owner, unattributed, forward = _owners(events, call_tree, recording, nodes, innermost, backward)
    attributed = np.where(owner >= 0, enclosing[owner], -1)
    return Scopes(
        nodes=nodes,
        innermost=innermost,
        backward=backward,
        ranges=ranges,
        opened=opened,
        paths=paths,
        enclosing=enclosing,
        attributed=attributed,
        unattributed=unattributed,
        forward=forward,
        recomputed=recomputed,
        recording=recording,
        path_of_node=np.append(np.append(attributed, -1)[innermost], -1),
    )


def kinds_of_scopes(events: Events, scopes: Scopes) -> Ints:
    """The kind of work of each scope, as an index into `KINDS`."""
    under_step = np.append(_under_step(scopes), False)
    of_range = np.where(
        scopes.recomputed, RECOMPUTE, np.where(under_step[scopes.enclosing], OPTIMIZER, FORWARD)
    )
    of_node = np.where(is_accumulation(events, scopes.nodes.index), ACCUMULATE, BACKWARD)
    return np.where(scopes.backward, np.where(scopes.unattributed, UNATTRIBUTED, of_node), of_range)


def _under_step(scopes: Scopes) -> Flags:
    """A mask of the paths that are work of an optimizer: `Optimizer.step` and the ranges in it.

    A range in whose operators gradients are recorded belongs to the closure that `step` called.
    """
    paths = scopes.paths
    is_step = np.array([name.startswith(OPTIMIZER_STEP) for name in paths.names], np.bool_)
    under = paths.at_or_below(is_step)
    # The operators of an optimizer itself do not run in grad mode.
    scope = scopes.innermost[scopes.recording]
    scope = scope[scope >= 0]
    enclosing = scopes.enclosing[scope[~scopes.backward[scope]]]
    recording = np.bincount(enclosing[enclosing >= 0], minlength=len(paths.names))
    holds_closure = paths.with_descendants(recording) > 0
    return under & ~paths.at_or_below(holds_closure & under & ~is_step)


def is_backward(events: Events) -> Flags:
    """A mask of the backward nodes, by name; before torch 1.10, by their forward thread."""
    named = events.named(lambda name: name.startswith(_ENGINE) or name == ACCUMULATION)
    found: Flags = events.among(OPERATOR) & (named | (events.forward_thread != 0))
    return found


def is_accumulation(events: Events, nodes: Ints) -> Flags:
    """For each of `nodes`, whether this event accumulates the gradient of a leaf."""
    return flags(lambda name: name.endswith(ACCUMULATION), events.names)[events.name[nodes]]


def _recomputed(
    events: Events,
    call_tree: CallTree,
    recording: Flags,
    scopes: CallTree,
    innermost: Ints,
    backward: Flags,
    name: Ints,
) -> Flags:
    """A mask of the ranges that run again because a backward node repeats a forward pass.

    `scopes` is the call tree of the scopes alone, and `name` has a number for each scope's name;
    the other arguments are attributes of `Scopes`.
    """
    holder = np.append(scopes.nearest(backward), -1)  # the backward node at or above each scope
    if not ((holder[:-1] >= 0) & ~backward).any():
        return np.zeros(len(scopes), np.bool_)
    is_operator = (
        events.among(OPERATOR)[call_tree.index] & (events.forward_thread == 0)[call_tree.index]
    )
    records, differentiates = np.zeros((2, len(scopes) + 1), np.bool_)
    records[holder[innermost[recording]]] = True
    enclosing = call_tree.parent >= 0
    own = np.zeros(len(call_tree), np.bool_)  # the operators that a scope calls directly
    own[enclosing] = (
        call_tree.index[call_tree.parent[enclosing]]
        == np.append(scopes.index, -1)[innermost[enclosing]]
    )
    differentiates[holder[innermost[is_operator & own & ~recording]]] = True
    records[-1] = False  # this element stands for scopes outside all backward nodes
    in_forward = np.unique(name[(holder[:-1] < 0) & ~backward])
    found: Flags = (records & differentiates)[holder[:-1]] & ~backward & np.isin(name, in_forward)
    return found


def _owners(
    events: Events,
    call_tree: CallTree,
    recording: Flags,
    scopes: CallTree,
    innermost: Ints,
    backward: Flags,
) -> tuple[Ints, Flags, Ints]:
    """For each scope, the range that its time belongs to, as an index into `scopes`; -1 for none.

    The second result is a mask of the backward nodes whose range is not known, the third the
    forward operator of each; see `Scopes`. For the arguments, see `_recomputed`. If a node's
    forward operator ran inside another backward node, as for a second derivative, both nodes have
    the same range and forward operator.
    """
    count = len(scopes)
    # Two more targets stand for a missing owner. Each of them is its own target.
    no_range, unknown = count, count + 1
    target = np.arange(count + 2)
    nodes = np.flatnonzero(backward)
    operator = _forward_operators(events, call_tree.index[recording], scopes.index[nodes])
    node = call_tree.nodes_of(operator)
    found = node >= 0
    in_backward = (scopes.parent[nodes] >= 0) & backward[scopes.parent[nodes]]
    target[nodes] = np.where(in_backward, scopes.parent[nodes], unknown)
    scope = innermost[node[found]]
    target[nodes[found]] = np.where(scope >= 0, scope, no_range)
    _target_accumulations(events, scopes, backward, target, unknown)
    is_backward = np.append(backward, [False, False])
    last = np.where(is_backward[target], target, np.arange(count + 2))
    for _ in range(count.bit_length() + 1):  # after k rounds, targets are 2**k hops away
        target, last = target[target], last[last]
    owner = target[:count]
    # In a damaged trace, backward nodes can be targets of each other. Their owner is then a
    # backward node.
    unattributed = backward & ((owner == unknown) | is_backward[owner])
    forward = np.full(count + 2, -1)
    forward[nodes] = node
    return np.where(unattributed | (owner >= count), -1, owner), unattributed, forward[last[:count]]


def _target_accumulations(
    events: Events, scopes: CallTree, backward: Flags, target: Ints, unknown: int
) -> None:
    """Set `target` for the backward nodes that accumulate a gradient.

    It becomes the last backward node that began before on the same thread and accumulates no
    gradient, or `unknown`. A node directly inside another one that accumulates keeps its target.
    """
    is_sum = is_accumulation(events, scopes.index)
    nodes = np.arange(len(scopes))
    before = np.maximum.accumulate(np.where(backward & ~is_sum, nodes, -1))
    sums = np.flatnonzero(is_sum & ~((scopes.parent >= 0) & is_sum[scopes.parent]))
    last = before[sums]
    same_thread = scopes.thread[last] == scopes.thread[sums]
    target[sums] = np.where((last >= 0) & same_thread, last, unknown)


def _forward_operators(events: Events, numbered: Ints, nodes: Ints) -> Ints:
    """The operator that made each backward node, as a position among the events; -1 if not known.

    `numbered` holds the operators that ran in grad mode, in the order of the call tree. A node fits
    the last operator with its sequence number on each thread. Pairs of torch's thread number and a
    thread are chosen so that each number and each thread is in one pair: first those in which most
    names agree (`_stems`), then those with the most fits, then the lowest number and the thread
    that began first.
    """
    found = np.full(len(nodes), -1)
    keyed = np.flatnonzero((events.sequence[nodes] >= 0) & (events.forward_thread[nodes] != 0))
    if not len(keyed) or not len(numbered):
        return found
    rank = np.full(len(events.threads), len(events.threads))  # the threads in order of their starts
    threads, first = np.unique(events.thread[numbered], return_index=True)
    rank[threads[np.argsort(events.start_ns[numbered[first]], kind="stable")]] = np.arange(
        len(threads)
    )
    # The last operator of each thread with each sequence number.
    sequence, thread = events.sequence[numbered], rank[events.thread[numbered]]
    order = np.lexsort((thread, sequence))
    sequence, thread = sequence[order], thread[order]
    last = np.append((np.diff(sequence) != 0) | (np.diff(thread) != 0), True)
    operators, sequence, thread = numbered[order[last]], sequence[last], thread[last]
    # All fits of a node and an operator.
    wanted = events.sequence[nodes[keyed]]
    begin, after = (np.searchsorted(sequence, wanted, side) for side in ("left", "right"))
    counts = np.minimum(after - begin, _MOST_THREADS)
    node = np.repeat(keyed, counts)
    at = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    stem = _stems(events)
    agrees = stem[events.name[nodes[node]]] == stem[events.name[operators[at]]]
    pairs, groups = groupby_rows(events.forward_thread[nodes[node]], thread[at])
    score = np.lexsort((*pairs[::-1], -groups.size, -groups.number(agrees)))
    is_chosen, numbers, ids = np.zeros(groups.count, np.bool_), set(), set()
    for pair, (number, id) in zip(score.tolist(), pairs[:, score].T.tolist()):
        if number not in numbers and id not in ids:
            is_chosen[pair] = True
            numbers.add(number)
            ids.add(id)
    chosen = is_chosen[groups.of]
    found[node[chosen]] = operators[at[chosen]]
    return found


def _stems(events: Events) -> Ints:
    """A number for each name; `aten::addmm` and `AddmmBackward0` have the same number."""
    stems, _ = intern(
        _BACKWARD.sub("", name).rpartition(":")[2].strip().lower().replace("_", "")
        for name in events.names
    )
    return stems
