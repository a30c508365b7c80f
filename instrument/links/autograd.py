"""The ranges, and whose backward pass a node of the autograd engine is: a join on (forward thread, sequence number).

While gradients are recorded, every operator notes the sequence number that the next node of the graph will bear on its
thread; the engine notes the same number, and the forward thread, on the node that it runs. No hook is needed. The last
operator with a number is the one that made the node: those before it made none.

The forward thread is a number of torch's own, which no forward operator bears. The thread it stands for is that whose
operators agree best with the nodes: by name (`AddmmBackward0`, `aten::addmm`), then by how many are found.

Gradient accumulation bears no sequence number. The engine runs it as soon as its input is there, before any other node
(sequence_nr in torch/csrc/autograd/node.h): it goes where the node just before it on the same thread went. That is a
guess, and told apart.

A backward node in which operators record gradients again does what the forward did before: activation checkpointing.
Ranges in there, of names that are opened elsewhere too, bear the label " (recomputed)".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from instrument.links.call_tree import CallTree
from instrument.links.paths import Paths, paths_of
from instrument.range_names import RECOMPUTED, RESUMED
from instrument.trace.events import (
    ANNOTATION,
    OPERATOR,
    Events,
    Flags,
    Ints,
    flags,
    is_moment,
    is_step,
)

_ENGINE = "autograd::engine::evaluate_function: "
_ACCUMULATION = "torch::autograd::AccumulateGrad"
_BACKWARD = re.compile(r"Backward\d*$")


@dataclass(frozen=True, slots=True)
class Scopes:
    """The ranges and the backward nodes of the CPU's nesting, nested in each other as `nodes`, and where each belongs.

    `innermost` is the innermost mark at or above each node of the nesting; `backward` tells the backward nodes from the
    ranges. `ranges` are the ranges alone, `opened` is the path of each.

    `enclosing` is the path of the innermost range at or above each mark, `attributed` the one that its own time belongs to: of
    a range its own path, of a backward node that of the innermost range around its forward operator. -1: there is none.
    `unattributed` are the backward nodes of which it is not known, `recomputed` the ranges that run the forward once more.
    `recording` are the nodes of the nesting that are operators called while gradients were recorded.
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
    recording: Flags


def scopes(events: Events, call_tree: CallTree) -> Scopes:
    """The ranges and backward nodes of a CPU's nesting, and to which range each belongs."""
    is_range = events.among(ANNOTATION) & ~events.named(
        lambda name: is_step(name) or is_moment(name)
    )
    nodes, innermost = call_tree.only((is_range | is_backward(events))[call_tree.index])
    backward = ~is_range[nodes.index]
    ranges, range_of = nodes.only(~backward)
    codes, names = _plain_names(events)
    name = codes[events.name[nodes.index]]
    recording = events.records_gradients[call_tree.index]
    recomputed = _recomputed(events, call_tree, recording, nodes, innermost, backward, name)
    labelled = np.where(recomputed, name + len(names), name)[~backward]
    paths, opened = paths_of(ranges, labelled, [*names, *(each + RECOMPUTED for each in names)])
    enclosing = np.append(opened, -1)[range_of]
    home, unattributed = _homes(events, call_tree, recording, nodes, innermost, backward)
    attributed = np.where(home >= 0, enclosing[home], -1)
    return Scopes(
        nodes,
        innermost,
        backward,
        ranges,
        opened,
        paths,
        enclosing,
        attributed,
        unattributed,
        recomputed,
        recording,
    )


def _plain_names(events: Events) -> tuple[Ints, list[str]]:
    """For each name of an event the number of its range's name, and those names."""
    plain = [name.removesuffix(RESUMED) for name in events.names]
    index = {name: position for position, name in enumerate(dict.fromkeys(plain))}
    return np.array([index[name] for name in plain], np.int64), list(index)


def is_backward(events: Events) -> Flags:
    """The nodes that the autograd engine ran: by name, or, before torch 1.10, by their forward thread alone."""
    named = events.named(lambda name: name.startswith(_ENGINE) or name == _ACCUMULATION)
    found: Flags = events.among(OPERATOR) & (named | (events.forward_thread != 0))
    return found


def is_accumulation(events: Events, nodes: Ints) -> Flags:
    """Which of some nodes, as positions among the events, add to a leaf's gradient."""
    return flags(lambda name: name.endswith(_ACCUMULATION), events.names)[events.name[nodes]]


def _recomputed(
    events: Events,
    call_tree: CallTree,
    recording: Flags,
    scopes: CallTree,
    innermost: Ints,
    backward: Flags,
    name: Ints,
) -> Flags:
    """Which marks are ranges of the forward that a backward node runs once more; `name` is a number for each name.

    Operators record gradients in a backward node also where `create_graph` is set: then the node's own do so too, and
    nothing there is taken for a forward. Nor is a range whose name is opened nowhere else, as by a hook.
    """
    holder = np.append(scopes.nearest(backward), -1)
    is_operator = (
        events.among(OPERATOR)[call_tree.index] & (events.forward_thread == 0)[call_tree.index]
    )
    again, differentiates = np.zeros(len(scopes) + 1, np.bool_), np.zeros(len(scopes) + 1, np.bool_)
    again[holder[innermost[recording]]] = True
    enclosing = call_tree.parent >= 0
    own = np.zeros(len(call_tree), np.bool_)  # the operators that a mark calls itself
    own[enclosing] = (
        call_tree.index[call_tree.parent[enclosing]]
        == np.append(scopes.index, -1)[innermost[enclosing]]
    )
    differentiates[holder[innermost[is_operator & own & ~recording]]] = True
    again[-1] = False  # of no backward node
    in_forward = np.unique(name[(holder[:-1] < 0) & ~backward])
    found: Flags = (again & differentiates)[holder[:-1]] & ~backward & np.isin(name, in_forward)
    return found


def _homes(
    events: Events,
    call_tree: CallTree,
    recording: Flags,
    scopes: CallTree,
    innermost: Ints,
    backward: Flags,
) -> tuple[Ints, Flags]:
    """For each mark the mark that its own time belongs to, -1 for none; and which of the backward ones have no place.

    `scopes` are the ranges and the backward nodes of the CPU's nesting `call_tree`, `innermost` the innermost mark at or above
    each of its nodes. A range is its own home; that of a backward node is the innermost range around its forward
    operator. An operator that itself ran in a backward node (for a second derivative) has that node's home. A node
    without a forward operator of its own has the home of the node around it; without that either, it has no place.
    """
    count = len(scopes)
    nowhere, unknown = count, count + 1
    to = np.arange(count + 2)
    nodes = np.flatnonzero(backward)
    operator = _forward_operators(events, call_tree.index[recording], scopes.index[nodes])
    position = np.full(len(events) + 1, -1)
    position[call_tree.index] = np.arange(len(call_tree))
    node = position[operator]
    found = node >= 0
    held = (scopes.parent[nodes] >= 0) & backward[scopes.parent[nodes]]
    to[nodes] = np.where(held, scopes.parent[nodes], unknown)
    at = innermost[node[found]]
    to[nodes[found]] = np.where(at >= 0, at, nowhere)
    _place_accumulations(events, scopes, backward, to, unknown)
    for _ in range(count.bit_length() + 1):
        to = to[to]
    home = to[:count]
    unattributed = backward & ((home == unknown) | np.append(backward, [False, False])[home])
    return np.where(unattributed | (home >= count), -1, home), unattributed


def _place_accumulations(
    events: Events, scopes: CallTree, backward: Flags, to: Ints, unknown: int
) -> None:
    """Point each accumulation at the node just before it on its thread."""
    is_sum = is_accumulation(events, scopes.index)
    nodes = np.arange(len(scopes))
    before = np.maximum.accumulate(np.where(backward & ~is_sum, nodes, -1))
    sums = np.flatnonzero(is_sum & ~((scopes.parent >= 0) & is_sum[scopes.parent]))
    last = before[sums]
    to[sums] = np.where((last >= 0) & (scopes.thread[last] == scopes.thread[sums]), last, unknown)


def _forward_operators(events: Events, numbered: Ints, nodes: Ints) -> Ints:
    """The operator that made each backward node, as a position among the events, or -1.

    `numbered` are the operators that record gradients, by thread and start, those around others first.
    """
    found = np.full(len(nodes), -1)
    asking = (events.sequence[nodes] >= 0) & (events.forward_thread[nodes] != 0)
    threads, first = np.unique(events.thread[numbered], return_index=True)
    made = {}
    for thread in threads[np.argsort(events.start_ns[numbered[first]])]:
        own = numbered[events.thread[numbered] == thread]
        made[thread] = own[np.argsort(events.sequence[own], kind="stable")]
    candidates = {}
    for number in np.unique(events.forward_thread[nodes[asking]]):
        here = np.flatnonzero(asking & (events.forward_thread[nodes] == number))
        for thread, own in made.items():
            candidates[number, thread] = here, _last_with(events, own, nodes[here])
    for here, operators in _agreeing(events, nodes, candidates):
        found[here] = operators
    return found


def _last_with(events: Events, made: Ints, nodes: Ints) -> Ints:
    """The last of some operators, sorted by sequence number and start, with each node's number, or -1."""
    wanted = events.sequence[nodes]
    at = np.searchsorted(events.sequence[made], wanted, "right") - 1
    return np.where((at >= 0) & (events.sequence[made[at]] == wanted), made[at], -1)


def _agreeing(
    events: Events, nodes: Ints, candidates: dict[tuple[int, int], tuple[Ints, Ints]]
) -> list[tuple[Ints, Ints]]:
    """One thread for each forward number, best agreement first; among equals in the order in which they began.

    Torch numbers its threads in the order in which they first recorded something.
    """
    stem = _stems(events) if len(candidates) > 1 else np.zeros(len(events.names), np.int64)

    def score(pair: tuple[int, int]) -> tuple[int, int]:
        here, made = candidates[pair]
        known = made >= 0
        same = stem[events.name[nodes[here[known]]]] == stem[events.name[made[known]]]
        return int(same.sum()), int(known.sum())

    chosen: list[tuple[int, int]] = []
    for number, thread in sorted(candidates, key=score, reverse=True):
        if all(number != other and thread != taken for other, taken in chosen):
            chosen.append((number, thread))
    return [candidates[pair] for pair in chosen]


def _stems(events: Events) -> Ints:
    """For each name a number that `AddmmBackward0` and `aten::addmm` share."""
    bare = [
        _BACKWARD.sub("", name).rpartition(":")[2].strip().lower().replace("_", "")
        for name in events.names
    ]
    index = {name: position for position, name in enumerate(dict.fromkeys(bare))}
    return np.array([index[name] for name in bare], np.int64)
