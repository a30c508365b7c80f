"""The autograd graph: built for nothing, gradients that nothing uses, anomaly detection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import LEAST_SAVING, RECORD_AGAIN, Check, NotRecorded, Problem
from instrument.read.advise.evidence import in_steps, share_with_device
from instrument.read.facts.autograd import is_backward
from instrument.read.facts.graph_nodes import (
    makers,
    ran,
    ranges_around,
    training_ranges,
    wasteful_ranges,
)
from instrument.read.facts.groupby import distinct, groupby, isin
from instrument.read.facts.places import common_place
from instrument.read.trace.capture_json import Owner
from instrument.read.trace.events import OPERATOR, Flags, Ints
from instrument.read.views.coverage_rows import JOINED
from instrument.read.views.gradients import UnusedGradients
from instrument.read.views.gradients import unused_gradients as unused_gradients_of
from instrument.read.views.views import TRAIN, Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

# What it costs to make a node, and the bounds of this cost. With torch 2.13, a node of small layers
# costs 1.1 to 1.7 µs on an idle machine, and up to 3 µs beside other programs. A graph also keeps
# results, so that new ones get other memory: with results of 1 MiB, a node costs 30 to 50 µs. A
# trace does not show this part.
_NODE_NS, _NODE_BOUNDS_NS = 1500, (1000, 3000)
_MOST_SCALED = 10  # names of operators
# A program without any backward is a finding if making nodes takes this share of the steps.
_LEAST_COST = 0.01
# The backward must run this part of the nodes that the window made.
_LEAST_JOINED = 0.5
_MOST_NAMES = 3
_RECORD_AGAIN = "Record again: this finding must be gone"
_SEARCH = frozenset({"aten::isnan", "aten::_is_any_true", "aten::any", "aten::item"})
_FIRST = "aten::isnan"
# If a larger share of the backward nodes searches for NaN, anomaly mode is on. A smaller share may
# come from hooks of the user.
_LEAST_SEARCHED = 0.5
# An operator at this percentile of the own times computes almost nothing, such as a view.
_CHEAP = 25


def unused_autograd(capture: Views) -> Iterator[Problem]:
    """Find the ranges with outermost calls that build graphs that no backward uses.

    Such calls are a validation, or those of a model in a validation. The last of several steps
    shows no such call by itself, because its backward may follow.
    """
    events, links = capture.events, capture.links
    made, numbers = makers(links), ran(links)
    if not is_backward(events).any():
        inside = in_steps(capture, made)
        if links.counted_steps.share(len(inside) * _NODE_NS) >= _LEAST_COST:
            title = "The program builds a graph for gradients, but runs no backward"
            yield _unused_nodes(capture, inside, title, common_place(capture, inside)[0])
        return
    if isin(numbers, events.sequence[made]).sum() < _LEAST_JOINED * len(numbers):
        raise NotRecorded(
            "the window contains the backward of an earlier forward, so the backward of the "
            "window's own forward may come later",
            "record more steps, with a larger profiler.active",
        )
    scopes, steps = links.scopes, links.counted_steps
    ranges, opened, call = scopes.ranges, scopes.opened, ranges_around(links, made)
    outermost = ranges.outermost(wasteful_ranges(links, made))
    inside = ranges.nearest(outermost, call)
    nodes = np.bincount(opened[inside[inside >= 0]], minlength=len(scopes.paths.names))
    # the others save less
    is_large = nodes * _NODE_BOUNDS_NS[1] >= LEAST_SAVING * steps.total_ns
    for k in np.flatnonzero(is_large).tolist():
        calls = outermost & (opened == k)
        share = share_with_device(capture, ranges.index[calls])
        every = calls[opened == k].all()
        title = (
            f"{'Range' if every else 'Some calls of range'} {scopes.paths.names[k]!r}, "
            f"{percent(share)} of the {steps.what}, build{'s' if every else ''} a graph that no "
            "backward uses"
        )
        chosen = made[np.append(ranges.at_or_inside(calls), False)[call]]
        yield _unused_nodes(capture, chosen, title, scopes.paths.texts[k], share)


UNUSED_AUTOGRAD = Check(
    "unused-autograd",
    unused_autograd,
    change="Use torch.inference_mode() around this code, or torch.no_grad() if its results are "
    "used for training; if they are only logged, compute them in fewer steps. The saving is that "
    "of the graph nodes; the memory that the graph keeps costs time too, the more the larger the "
    "results.",
    verify=f"{_RECORD_AGAIN}, and profiler.profile_memory=true must show that less memory is in "
    "use.",
    least_share=0.03,
    assumes="without the graph nodes alone",
    coverage=(JOINED,),
)


def unused_gradients(capture: Views) -> Iterator[Problem]:
    """Find modules whose gradients nothing uses, such as a backbone that is not frozen.

    A session knows which optimizer trains which modules.
    """
    events = capture.events
    if not is_backward(events).any():
        return
    owners, made = _owners(capture), makers(capture.links)
    for found in unused_gradients_of(capture, owners):
        what = ", ".join(map(repr, found.names[:_MOST_NAMES]))
        if len(found.names) > _MOST_NAMES:
            what += f" and {len(found.names) - _MOST_NAMES} more"
        number = distinct(events.sequence[found.whole])
        saved = made[isin(events.sequence[made], number[number >= 0])]
        use = (
            "are cleared before a step of its optimizer"
            if found.is_cleared
            else "no optimizer uses"
        )
        yield Problem(
            f"{what} that {use}",
            np.concatenate([found.whole, found.half]),
            share_with_device(capture, found.whole) + share_with_device(capture, found.half) / 2,
            edit=partial(_without_gradients, capture, found, saved),
            change=(_CLEARED if found.is_cleared else _FREEZE).format(what),
            variant="cleared" * found.is_cleared,
        )


_FREEZE = (
    "Freeze {0}: call module.requires_grad_(False), or call the module within torch.no_grad(). If "
    "an optimizer should train it, add its parameters."
)
_CLEARED = (
    "If this backward has no other use, leave it out; else call requires_grad_(False) on {0} "
    "before it, and requires_grad_(True) after it. If the gradients should count, step before "
    "zero_grad()."
)
UNUSED_GRADIENTS = Check(
    "unused-gradients",
    unused_gradients,
    title="{share} of the {step} computes gradients of {what}",
    verify=f"{_RECORD_AGAIN}.",
    least_share=0.03,
    least_saving=0.02,
    assumes="without these gradients and their graph nodes",
    coverage=(JOINED,),
)


def frozen_modules(capture: Views) -> Iterator[Problem]:
    """Find modules that nothing trains, and whose inputs and results need no gradient.

    A copy of a trained module is left out: the program may replace its parameters now and then.
    """
    if capture.phase != TRAIN or not len(ran(capture.links)):
        return
    scopes, owners = capture.links.scopes, _owners(capture)
    for name, each in owners.items():
        if each.optimizer is not None or each.changed or each.is_copy or each.differentiates:
            continue
        of_name = np.array([name == other for other in scopes.paths.names], np.bool_)
        calls = scopes.ranges.outermost(of_name[scopes.opened]) & ~training_ranges(capture.links)
        events = scopes.ranges.index[calls]

        def without(whatif: Scenario, events: Ints = events) -> Scenario:
            return whatif.scale_events(events, by=0, bounds=(1, 0))  # inputs may never repeat

        yield Problem(repr(name), events, edit=without)


FROZEN_MODULES = Check(
    "frozen-modules",
    frozen_modules,
    title="{share} of the {step} goes to {what}, which nothing trains",
    change="If its inputs repeat, such as the samples of a data set without random augmentation, "
    "compute its results once, and read them in each step.",
    verify=f"{_RECORD_AGAIN}.",
    least_share=0.3,
    assumes="if its inputs repeat",
    coverage=(JOINED,),
)


def debug_modes(capture: Views) -> Iterator[Problem]:
    """Find anomaly detection, by `capture.json` or by most backward nodes; it is never small.

    In the forward, each operator that makes a node also stores the Python stack, for which the
    trace has no event: the simulation subtracts an estimate of its time.
    """
    environment = capture.about.environment
    recorded = None if environment is None else environment.anomaly_mode
    search, is_searched = _search(capture)
    if not is_searched and not recorded:
        if recorded is None and not is_backward(capture.events).any():
            raise NotRecorded(
                "the trace has no backward, so it does not show whether anomaly detection was on",
                RECORD_AGAIN,
            )
        return
    if not len(search):
        yield Problem()
        return
    stored, stack_ns = _stacks(capture)
    share, step = share_with_device(capture, search), capture.links.counted_steps.what
    yield Problem(
        f"; the search for NaN in the gradients takes {percent(share)} of the {step}",
        search,
        share,
        edit=lambda whatif: _shortened(
            capture, whatif.scale_events(search, by=0), stored, stack_ns
        ),
        place=(None, None),
    )


DEBUG_MODES = Check(
    "debug-modes",
    debug_modes,
    title="Anomaly detection is on{what}",
    change="Call torch.autograd.set_detect_anomaly(False), and remove "
    "torch.autograd.detect_anomaly().",
    verify="--ops  # aten::isnan is gone",
    coverage=(JOINED,),
)


def _unused_nodes(
    capture: Views, made: Ints, title: str, path: str | None, share: float | None = None
) -> Problem:
    count, steps = len(in_steps(capture, made)), capture.links.counted_steps
    per_step = f": {count / steps.count:.0f} graph nodes a {steps.what}" if count else ""
    return Problem(
        f"{title}{per_step}",
        made,
        share,
        edit=lambda whatif: _shortened(capture, whatif, made, _NODE_NS, _NODE_BOUNDS_NS),
        place=(path, common_place(capture, made)[1]),
        is_large=share is None,
    )


def _shortened(
    capture: Views,
    whatif: Scenario,
    events: Ints,
    each_ns: float,
    bounds_ns: tuple[float, float] | None = None,
) -> Scenario:
    """Return the simulation in which the CPU takes about `each_ns` less time for each operator.

    All operators of a name are scaled by one factor, with which they take `each_ns` less on
    average. Only the ten names with the most operators are scaled. `bounds_ns` are the values of
    `each_ns` for the bounds of the saving, the smaller first.
    """
    table = capture.events
    _, groups = groupby(table.name[events].astype(np.int64))
    for row in sorted(groups.rows(), key=len, reverse=True)[:_MOST_SCALED]:
        mean_ns = max(float(np.mean(table.duration_ns[events[row]])), 1.0)
        by, *bounds = (max(1 - each / mean_ns, 0.0) for each in (each_ns, *(bounds_ns or ())))
        whatif = whatif.scale_events(
            events[row], by, bounds=(bounds[0], bounds[1]) if bounds else None, device=False
        )
    return whatif


def _owners(capture: Views) -> dict[str, Owner]:
    if capture.about.owners is None:
        raise NotRecorded(
            "the capture does not say which parameters are in an optimizer",
            "give the session all models that an optimizer of torch trains",
        )
    return capture.about.owners


def _without_gradients(
    capture: Views, found: UnusedGradients, saved: Ints, whatif: Scenario
) -> Scenario:
    whatif = whatif.scale_events(found.whole, by=0)
    if len(found.half):
        whatif = whatif.scale_events(found.half, by=0.5, bounds=(0.7, 0.3))
    return _shortened(capture, whatif, saved, _NODE_NS, _NODE_BOUNDS_NS)


def _search(capture: Views) -> tuple[Ints, bool]:
    """The calls that search gradients for NaN, and whether most backward nodes have such calls."""
    events, tree = capture.events, capture.links.call_tree
    node = is_backward(events)[tree.index] & (events.sequence >= 0)[tree.index]
    outer = node & ~np.append(node, False)[tree.parent]
    in_outer = np.append(outer, False)[tree.parent]
    chosen = in_outer & events.named(_SEARCH.__contains__)[tree.index]
    searched = np.unique(tree.parent[chosen & events.named(_FIRST.__eq__)[tree.index]])
    found: Ints = tree.index[chosen & isin(tree.parent, searched)]
    return found, len(searched) > _LEAST_SEARCHED * max(int(outer.sum()), 1)


def _stacks(capture: Views) -> tuple[Ints, float]:
    """The operators that store a Python stack, and the estimated time to store one stack."""
    events, tree = capture.events, capture.links.call_tree
    made = makers(capture.links)
    own_ns = capture.links.own_ns
    is_other: Flags = events.among(OPERATOR)[tree.index] & (events.sequence < 0)[tree.index]
    if not len(made) or not is_other.any():
        return made, 0.0
    cheap_ns = np.percentile(own_ns[tree.nodes_of(made)], _CHEAP)
    return made, max(float(cheap_ns - np.median(own_ns[is_other])), 0.0)
