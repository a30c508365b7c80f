"""Find the scopes of a trace, and the range that each scope belongs to.

A scope is a range or a backward node. The user marks ranges; a backward node is a function that the
autograd engine runs. The time of an operator belongs to the innermost scope around it. The time of
a range belongs to that range. The time of a backward node belongs to the range around its forward
operator, so that a layer has its backward time too.

The forward operator of a backward node is found without a hook (NOTE [ Sequence Number] in
torch/csrc/autograd/node.h):

- In grad mode (while autograd records operations), torch writes a sequence number on every
  operator. The next backward node that this thread makes gets the same number. Several operators
  can have the same number. The last of these operators made the node.
- When the engine runs the node, torch writes this sequence number and the forward thread on the
  event of the node (`Node::operator()` in the same file). torch's own arrows from forward to
  backward use the same two values (`generateForwardBackwardLink` in
  torch/csrc/profiler/collection.cpp).
- torch writes the forward thread as torch's own thread number
  (`RecordFunction::currentThreadId`), but operators have the thread ids of the operating system. So
  for each thread number, the thread id that fits best is chosen. An operator with this thread id
  fits a node with this thread number if both have the same sequence number. It fits better if their
  names agree too, such as `aten::addmm` and `AddmmBackward0`. The thread id with the most agreeing
  names is chosen. If several thread ids have equally many agreeing names, the one whose operators
  fit the most nodes is chosen.

Three more rules:

- A node that accumulates the gradient of a leaf tensor has no sequence number. The engine runs such
  nodes before all other nodes that are ready. So the node usually runs directly after the backward
  node that computed the gradient. The node gets the range of the backward node just before it on
  the same thread. Because this is a guess, tables show such time as a separate kind of work.
- If a backward node has no forward operator and lies inside another backward node, it gets the
  range of the outer node.
- With activation checkpointing, a backward node repeats a forward pass. `_recomputed` finds the
  ranges of such a pass. They get the suffix " (recomputed)".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from instrument.links.call_tree import CallTree
from instrument.links.groupby import groupby_rows, intern
from instrument.links.paths import Paths, paths_of
from instrument.range_names import RECOMPUTED, RESUMED
from instrument.trace.events import (
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
        innermost: for each node of the whole call tree, the innermost scope at or above the node;
            -1 if there is none.
        backward: a mask of the scopes that are backward nodes; all other scopes are ranges.
        ranges: the call tree of the ranges alone.
        opened: the path of each range.
        paths: all paths of ranges, as a tree.
        enclosing: for each scope, the path of the innermost range at or above it.
        attributed: for each scope, the path that its own time belongs to. A range has its own path.
            A backward node has the path of the innermost range around its forward operator. The
            module's docstring has the rules for nodes without a forward operator.
        unattributed: a mask of the backward nodes whose range is not known. A node whose forward
            operator ran outside all ranges is not in the mask.
        recomputed: a mask of the ranges that are part of a forward pass which a backward node
            repeats.
        too_deep: the number of ranges that are left out, because they lie inside `DEEPEST_RANGE`
            other ranges. Their time belongs to the scope around them.
        recording: a mask of the nodes of the whole call tree that are operators and ran in grad
            mode.
        path_of_node: for each node of the whole call tree, the path that its time belongs to. At
            the end is one more entry with the value -1. So an unknown node, whose index is -1,
            gets the path -1.
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
    recomputed: Flags
    too_deep: int
    recording: Flags
    path_of_node: Ints


def find_scopes(events: Events, call_tree: CallTree) -> Scopes:
    """Find the scopes (ranges and backward nodes) of a call tree.

    Also find the range that each scope belongs to. A range belongs to itself, and a backward node
    to the range around its forward operator, if this operator is known.
    """
    is_range = events.among(ANNOTATION) & ~events.named(
        lambda name: is_step(name) or is_moment(name) or is_compiler_note(name)
    )
    too_deep = np.zeros(0, np.int64)
    if call_tree.depth.max(initial=0) >= DEEPEST_RANGE:
        every = call_tree.only(is_range[call_tree.index])
        too_deep = every.index[every.depth >= DEEPEST_RANGE]
        is_range[too_deep] = False
    is_scope = (is_range | is_backward(events))[call_tree.index]
    nodes, innermost = call_tree.only(is_scope), call_tree.nearest_of(np.flatnonzero(is_scope))
    backward = ~is_range[nodes.index]
    ranges, range_of = nodes.only(~backward), nodes.nearest_of(np.flatnonzero(~backward))
    codes, names = _plain_names(events)
    name = codes[events.name[nodes.index]]
    recording = events.records_gradients[call_tree.index]
    recomputed = _recomputed(events, call_tree, recording, nodes, innermost, backward, name)
    labelled = np.where(recomputed, name + len(names), name)[~backward]
    paths, opened = paths_of(ranges, labelled, [*names, *(each + RECOMPUTED for each in names)])
    enclosing = np.append(opened, -1)[range_of]
    owner, unattributed = _owners(events, call_tree, recording, nodes, innermost, backward)
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
        recomputed=recomputed,
        too_deep=len(too_deep),
        recording=recording,
        path_of_node=np.append(np.append(attributed, -1)[innermost], -1),
    )


def _plain_names(events: Events) -> tuple[Ints, list[str]]:
    """The names of events; the suffix of resumed ranges is removed.

    A range that was suspended and resumed has several events in the trace. The names of the later
    events have a suffix. Without the suffix, all these events have one name.

    Returns:
        Two values: for each of `events.names`, an index into the names without suffix; and the
            names without suffix.
    """
    return intern(name.removesuffix(RESUMED) for name in events.names)


def is_backward(events: Events) -> Flags:
    """A mask of the backward nodes.

    Backward nodes are recognised by name. In traces of torch before 1.10, they are recognised by
    their forward thread.
    """
    named = events.named(lambda name: name.startswith(_ENGINE) or name == ACCUMULATION)
    found: Flags = events.among(OPERATOR) & (named | (events.forward_thread != 0))
    return found


def is_accumulation(events: Events, nodes: Ints) -> Flags:
    """For each position in `nodes`, whether this event accumulates the gradient of a leaf."""
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

    A range inside a backward node is in the mask if three conditions hold:

    - At least one operator inside the node ran in grad mode.
    - At least one operator that the node called directly, not through another operator, did not run
      in grad mode. This excludes `create_graph`: with it, all operators of a node run in grad mode,
      although nothing is repeated.
    - The name of the range also occurs outside backward nodes. This excludes the range of a hook,
      which occurs only in backward nodes.

    Args:
        events: the events of the trace.
        call_tree: the whole call tree.
        recording: a mask of the nodes that are operators and ran in grad mode.
        scopes: the call tree of the scopes (ranges and backward nodes) alone.
        innermost: the innermost scope at or above each node of `call_tree`.
        backward: a mask of the scopes that are backward nodes.
        name: for each scope, a number that stands for its name.
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
) -> tuple[Ints, Flags]:
    """For each scope (a range or a backward node), its owner: the range that its time belongs to.

    A range is its own owner. The owner of a backward node is the innermost range around its forward
    operator. If that operator itself ran inside another backward node, as for a second derivative,
    the two backward nodes have the same owner. A backward node without a forward operator has the
    owner of the backward node around it. For a node that accumulates a gradient, see
    `_target_accumulations`.

    Args:
        events: the events of the trace.
        call_tree: the whole call tree.
        recording: a mask of the nodes that are operators and ran in grad mode.
        scopes: the call tree of the scopes alone.
        innermost: the innermost scope at or above each node of `call_tree`.
        backward: a mask of the scopes that are backward nodes.

    Returns:
        Two arrays: for each scope, its owner as an index into `scopes`, or -1 if it has no owner;
            and a mask of the backward nodes whose owner is not known.
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
    for _ in range(count.bit_length() + 1):  # after k rounds, targets are 2**k hops away
        target = target[target]
    owner = target[:count]
    # In a damaged trace, backward nodes can be targets of each other. Their owner is then a
    # backward node.
    unattributed = backward & ((owner == unknown) | np.append(backward, [False, False])[owner])
    return np.where(unattributed | (owner >= count), -1, owner), unattributed


def _target_accumulations(
    events: Events, scopes: CallTree, backward: Flags, target: Ints, unknown: int
) -> None:
    """Set `target` for the backward nodes that accumulate a gradient.

    Such a node gets the owner of an earlier backward node: the last backward node that began before
    on the same thread and accumulates no gradient. The function writes the index of this earlier
    node into `target`, or `unknown` if there is no earlier node. If a node that accumulates a
    gradient is directly inside another one, its target does not change.

    Args:
        events: the events of the trace.
        scopes: the call tree of the scopes (ranges and backward nodes) alone.
        backward: a mask of the scopes that are backward nodes.
        target: for each scope, another scope with the same owner; for a range, the range itself.
            Two numbers above all scopes stand for a missing owner; see `_owners`.
        unknown: the target for nodes whose owner is not known.
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
    the last operator with its sequence number on each thread. So each pair of torch's forward
    thread number and a thread id of the operating system has nodes and operators that fit. Each
    number and each id is in at most one chosen pair. Pairs are chosen in this order:

    1. The pairs with the most nodes whose name agrees with the name of their operator (`_stems`).
    2. Of these, the pairs with the most nodes that have an operator.
    3. Of these, the pair with the lowest number, and then with the thread that began first. torch
       numbers threads in the same order: a thread gets its number when it first records something.

    If more than `_MOST_THREADS` threads have a node's sequence number, only those that began first
    count.
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
