"""Gradients that nothing uses: those of no optimizer, and those cleared before a step of theirs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from instrument.base.range_names import OPTIMIZER_STEP
from instrument.read.facts.autograd import is_accumulation
from instrument.read.facts.graph_nodes import makers
from instrument.read.facts.groupby import isin
from instrument.read.facts.intervals import interval_at, merged
from instrument.read.facts.step_index import step_at
from instrument.read.trace.capture_json import Owner
from instrument.read.trace.events import Flags, Ints, called_operators
from instrument.read.views.views import Views

_OPTIMIZER, _LOADER = "Optimizer.", "enumerate(DataLoader)"
_ADDS = frozenset({"aten::add", "aten::add_"})
# What clipping does with gradients; after other operators, they may have another use.
_CLIPS = frozenset({"aten::linalg_vector_norm", "aten::_foreach_norm", "aten::norm", "aten::mul_"})
_CLIPS |= {"aten::_foreach_mul_", "aten::clamp_", "aten::_foreach_clamp_min_", "aten::detach"}
_LISTS = ("aten::_foreach_", "aten::cat", "aten::stack")
_PRODUCTS = re.compile(r"^(Addmm|Mm)Backward\d*$")
_TRANSPOSE = "autograd::engine::evaluate_function: TBackward0"
_NONE = np.zeros(0, np.int64)


class UnusedGradients(NamedTuple):
    """Work of the backward for gradients that nothing uses.

    Attributes:
        names: the submodules of these gradients.
        whole: the backward nodes and operators that are for these gradients alone.
        half: operators that compute the gradients of their input too, in half of their time.
        is_cleared: whether an optimizer has the parameters, but the gradients are cleared before.
    """

    names: list[str]
    whole: Ints
    half: Ints
    is_cleared: bool


class _Run(NamedTuple):
    """A backward: its outermost nodes, of which submodule each is (-1: none), which add a gradient.

    `is_first` is, for each node, whether its gradient is the first one since it was cleared.
    """

    event: Ints
    of: Ints
    is_sum: Flags
    is_first: Flags

    def gradients(self, module: int) -> Flags:
        """A mask of the nodes that add a gradient of a submodule."""
        found: Flags = self.is_sum & (self.of == module)
        return found

    def begins(self, module: int) -> bool:
        """Whether all gradients of a submodule are the first ones since they were cleared."""
        return bool(self.is_first[self.gradients(module)].all())


def unused_gradients(capture: Views, owners: dict[str, Owner]) -> Iterator[UnusedGradients]:
    """Find the gradients that nothing uses, first those of no optimizer.

    Of modules whose inputs need no gradient, the whole backward is for the gradients of their
    parameters; so is the end of a backward. Of others, it is a part of each layer's backward.
    """
    names = [name for name, each in owners.items() if each.gradients]
    runs = _runs(capture, names)
    for is_cleared in (False, True):
        unused = set[tuple[int, int]]()
        for k, name in enumerate(names):
            if is_cleared != (owners[name].optimizer is not None):
                continue
            of_module = [r for r, run in enumerate(runs) if run.gradients(k).any()]
            if is_cleared:
                of_module = _cleared(capture, runs, of_module, k, owners[name])
            elif owners[name].changed and any(runs[r].begins(k) for r in of_module):
                continue  # the program itself may train it
            unused |= {(r, k) for r in of_module}
        parts = [
            _saved(capture, run, {k for at, k in unused if at == r}, [owners[n] for n in names])
            for r, run in enumerate(runs)
        ]
        whole, half = (np.concatenate([_NONE, *each]) for each in zip((_NONE, _NONE), *parts))
        found = sorted({k for r, k in unused if len(parts[r][0])})
        yield UnusedGradients([names[k] for k in found], whole, half, is_cleared)


def _runs(capture: Views, names: list[str]) -> list[_Run]:
    """The backwards of a window. One ends where a forward or an optimizer begins."""
    events, links = capture.events, capture.links
    scopes, tree, index = links.scopes, links.call_tree, {name: k for k, name in enumerate(names)}
    module: list[int] = []  # the submodule of each path, -1 for none; parents come first
    for name, above in zip(scopes.paths.names, scopes.paths.above.tolist()):
        module.append(index.get(name, module[above] if above >= 0 else -1))
    node = np.flatnonzero(scopes.nodes.outermost(scopes.backward))
    node = node[np.argsort(scopes.nodes.start_ns[node], kind="stable")]
    event, of = scopes.nodes.index[node], np.append(module, -1)[scopes.attributed[node]]
    adds = np.zeros(len(tree), np.int64)
    adds[events.named(_ADDS.__contains__)[tree.index]] = 1
    is_first = tree.with_descendants(adds)[tree.nodes_of(event)] == 0
    named = np.array([each.startswith(_OPTIMIZER) for each in scopes.paths.names], np.bool_)
    ends = np.concatenate([makers(links), scopes.ranges.index[named[scopes.opened]]])
    begun = np.searchsorted(np.sort(events.start_ns[ends]), events.start_ns[event])
    is_sum = is_accumulation(events, event)
    rows = np.split(np.arange(len(event)), np.flatnonzero(np.diff(begun)) + 1)
    return [_Run(event[row], of[row], is_sum[row], is_first[row]) for row in rows if len(row)]


def _cleared(
    capture: Views, runs: list[_Run], which: list[int], module: int, own: Owner
) -> list[int]:
    """Those of some backwards whose gradients are cleared before the optimizer of a module steps.

    A backward counts if this is so for all at its place in a step of which it is known.
    """
    events, scopes, number = capture.events, capture.links.scopes, capture.about.optimizer_steps
    is_step = np.array([each.startswith(OPTIMIZER_STEP) for each in scopes.paths.names], np.bool_)
    steps = scopes.ranges.index[is_step[scopes.opened]]
    steps = steps[np.argsort(events.start_ns[steps], kind="stable")]
    if number is None or len(number) != len(steps):
        return []
    begins = np.array([events.start_ns[runs[r].event[0]] for r in which], np.int64)
    is_closure = interval_at(merged(events.start_ns[steps], events.end_ns[steps]), begins) >= 0
    its_steps = events.start_ns[steps[np.array(number, np.int64) == own.optimizer]]
    at = step_at(events, capture.links.steps, begins)
    is_first = np.array([runs[r].begins(module) for r in which], np.bool_)
    place, known = dict[int, int](), defaultdict[int, list[bool]](list)
    for k, r in enumerate(which):
        place[r] = k - int(np.flatnonzero(at == at[k])[0])
        cleared_ns = begins[k + 1 :][is_first[k + 1 :]][:1]
        step_ns = its_steps[its_steps > begins[k]][:1]
        if is_closure[k] or (len(step_ns) and not (cleared_ns < step_ns).any()):
            known[place[r]].append(False)
        elif len(step_ns):
            end_ns = int(events.end_ns[runs[r].event[-1]])
            is_read = _is_read(capture, end_ns, int(step_ns[0]), own.gradients)
            known[place[r]].append(not is_read)
    return [r for r in which if all(known.get(place[r], [False]))]


def _is_read(capture: Views, start_ns: int, end_ns: int, gradients: int) -> bool:
    """Whether operators outside of models may read this many gradients in a span of time.

    Some programs keep the gradients of each of several losses, and put them together.
    """
    events, links, owners = capture.events, capture.links, capture.about.owners or {}
    tree, scopes = links.call_tree, links.scopes
    chosen = tree.outermost(called_operators(events)[tree.index])
    node = np.flatnonzero(chosen & (tree.start_ns >= start_ns) & (tree.start_ns < end_ns))
    names = scopes.paths.names
    known = np.array([n in owners or n.startswith((_OPTIMIZER, _LOADER)) for n in names], np.bool_)
    known = np.append(scopes.paths.at_or_below(known), False)[scopes.path_of_node[node]]
    known |= scopes.nodes.nearest(scopes.backward, scopes.innermost[node]) >= 0
    event = tree.index[node[~known]]
    calls = np.bincount(events.name[event[~isin(event, makers(links))]])
    return any(
        calls[k] >= gradients or events.names[k].startswith(_LISTS)
        for k in np.flatnonzero(calls)
        if events.names[k] not in _CLIPS
    )


def _saved(capture: Views, run: _Run, unused: set[int], owners: list[Owner]) -> tuple[Ints, Ints]:
    """What of a backward is for the gradients of some submodules alone; see `UnusedGradients`."""
    count = {k: int(run.gradients(k).sum()) for k in unused}
    unused = {k for k in unused if count[k] <= owners[k].gradients}  # else inputs get some too
    if not unused:
        return _NONE, _NONE
    is_unused = isin(run.of, np.array(sorted(unused)))
    last = np.flatnonzero(run.is_sum & ~is_unused).max(initial=-1)
    place = np.arange(len(run.of))
    end = (place > last) & (place <= np.flatnonzero(run.is_sum & is_unused).max())
    whole = np.zeros(len(run.of), np.bool_)
    for k in unused:
        whole |= (run.of == k) & (not owners[k].differentiates)
    ending = {int(k) for k in run.of[end & run.is_sum]}
    if all(
        not owners[k].differentiates or (run.gradients(k) & end).sum() == owners[k].gradients
        for k in ending
    ):
        whole |= end
    sums, transposes = run.is_sum & is_unused, capture.events.named(_TRANSPOSE.__eq__)[run.event]
    sums[:-1] |= sums[1:] & is_unused[:-1] & transposes[:-1]  # the transposed gradient of a weight
    parts, half = _of_weights(capture, run.event[is_unused & ~whole & ~sums])
    return np.concatenate([run.event[whole | sums], parts]), half


def _of_weights(capture: Views, nodes: Ints) -> tuple[Ints, Ints]:
    """The operators in backward nodes for gradients of weights, and those for both gradients."""
    events, tree = capture.events, capture.links.call_tree
    node = np.zeros(len(tree), np.bool_)
    node[tree.nodes_of(nodes)] = True
    holder = tree.nearest(node)
    products = events.named(lambda name: _PRODUCTS.search(name) is not None)[tree.index]
    inside = (holder >= 0) & np.append(products, False)[tree.parent]
    mm = np.flatnonzero(inside & events.named("aten::mm".__eq__)[tree.index])
    # the first of two is the gradient of the input
    second = mm[1:][holder[mm[1:]] == holder[mm[:-1]]]
    sums = np.flatnonzero(inside & events.named("aten::sum".__eq__)[tree.index])
    both = tree.outermost((holder >= 0) & events.named(_is_convolution)[tree.index])
    return tree.index[np.concatenate([second, sums])], tree.index[both]


def _is_convolution(name: str) -> bool:
    return name.startswith("aten::") and "convolution" in name and "backward" in name
