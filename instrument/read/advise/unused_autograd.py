"""`unused-autograd`: calls of a range build an autograd graph that no backward uses.

Such calls are a validation, or those of a model in a validation. If a thread's sequence number
grows from operator to operator, these operators make graph nodes. A range is a finding if calls of
it take `least_share` of the step and no backward of the window runs any of their nodes; without any
backward, the whole program is one if making nodes takes 1 %. The last of several steps shows no
such call by itself, because its backward may follow.

The simulation subtracts 1.5 µs for each node. With torch 2.13, a node of small layers costs 1.1 to
1.7 µs on an idle machine, and up to 3 µs beside other programs. A graph also keeps results, so that
new ones get other memory: with results of 1 MiB, a node costs 30 to 50 µs. A trace does not show
this part, so the finding says that it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.autograd_nodes import (
    NODE_BOUNDS_NS,
    NODE_NS,
    makers,
    ran,
    shortened,
)
from instrument.read.advise.check import Check, NotRecorded, Problem
from instrument.read.advise.evidence import share_with_device
from instrument.read.facts.autograd import is_backward
from instrument.read.facts.groupby import Groups, isin
from instrument.read.facts.places import common_place
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import Flags, Ints
from instrument.read.views.coverage_rows import CPU_IN_RANGES, JOINED
from instrument.read.views.views import Views

_LEAST_COST = 0.01
_LEAST_JOINED = 0.5
_MOST_TRIED = 32


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each range with outermost calls that build unused graphs; at most 32."""
    events, links = capture.events, capture.links
    made = makers(capture)
    if not is_backward(events).any():
        yield from _of_program(capture, made)
        return
    numbers = ran(capture)
    if isin(numbers, events.sequence[made]).sum() < _LEAST_JOINED * len(numbers):
        raise NotRecorded(
            "the window contains the backward of an earlier forward, so the backward of the "
            "window's own forward may come later",
            "record more steps, with a larger profiler.active",
        )
    scopes, steps = links.scopes, links.counted_steps
    ranges, opened, call = scopes.ranges, scopes.opened, ranges_around(capture, made)
    wasteful = wasteful_ranges(capture, call, isin(events.sequence[made], numbers))
    outermost = ranges.outermost(wasteful)
    most_ns = _most_ns(capture, outermost)
    # Only the largest ranges are tried, because `share_with_device` reads the whole call tree.
    largest = np.flatnonzero(most_ns)
    largest = largest[np.argsort(-most_ns[largest], kind="stable")[:_MOST_TRIED]]
    for k in np.sort(largest).tolist():
        if steps.share(int(most_ns[k])) < CHECK.least_share:
            continue
        calls = outermost & (opened == k)
        share = share_with_device(capture, ranges.index[calls])
        if share >= CHECK.least_share:
            inside = ranges.at_or_inside(calls)
            name = scopes.paths.names[k]
            every = calls[opened == k].all()
            title = (
                f"{'Range' if every else 'Some calls of range'} {name!r}, {percent(share)} of the "
                f"{steps.what}, build{'s' if every else ''} a graph that no backward uses"
            )
            chosen = made[np.append(inside, False)[call]]
            yield _problem(capture, chosen, title, scopes.paths.texts[k], share)


CHECK = Check(
    "unused-autograd",
    find,
    change="Use torch.inference_mode() around this code, or torch.no_grad() if its results are "
    "used for training. The saving is that of the graph nodes; the memory that the graph keeps "
    "costs time too, the more the larger the results.",
    verify="Record again: this finding must be gone, and profiler.profile_memory=true must "
    "show that less memory is in use.",
    least_share=0.03,
    assumes="without the graph nodes alone",
    coverage=(JOINED, CPU_IN_RANGES),
)


def ranges_around(capture: Views, events: Ints) -> Ints:
    """The innermost range around each operator, as an index into `scopes.ranges`; -1 for none."""
    links, scopes = capture.links, capture.links.scopes
    range_of = scopes.nodes.nearest_of(np.flatnonzero(~scopes.backward))
    scope = scopes.innermost[links.call_tree.nodes_of(events)]
    found: Ints = np.append(range_of, -1)[scope]
    return found


def wasteful_ranges(capture: Views, call: Ints, has_run: Flags) -> Flags:
    """A mask of the ranges that made nodes, of which no backward ran any.

    `call` is the range around each operator that made a node, `has_run` whether its node ran.
    A range in the last of several steps counts if there is one with the same path in a step before.
    """
    events, steps, scopes = capture.events, capture.links.steps, capture.links.scopes
    ranges, opened = scopes.ranges, scopes.opened
    number = np.bincount(call[call >= 0], minlength=len(ranges))
    ran_in = np.bincount(call[(call >= 0) & has_run], minlength=len(ranges))
    found: Flags = (ranges.with_descendants(number) > 0) & (ranges.with_descendants(ran_in) == 0)
    if len(steps) < 2:
        return found
    at = step_at(events, steps, ranges.start_ns)
    is_known = np.zeros(len(scopes.paths.names), np.bool_)
    is_known[opened[found & (at >= 0) & (at < len(steps) - 1)]] = True
    return found & is_known[opened] & (at >= 0)


def _most_ns(capture: Views, chosen: Flags) -> Ints:
    """For each path, an upper bound of the time of its chosen ranges in the steps.

    Overlaps count twice. No chosen range may lie inside another one.
    """
    events, tree, scopes = capture.events, capture.links.call_tree, capture.links.scopes
    steps, paths = capture.links.counted_steps, len(scopes.paths.names)
    calls, opened = scopes.ranges.index[chosen], scopes.opened[chosen]
    on_cpu_ns = steps.within(events.start_ns[calls], events.end_ns[calls])
    path = np.full(len(tree) + 1, -1)  # the last entry is for work without a node
    path[tree.nodes_of(calls)] = opened
    path[-1] = -1
    device, node = capture.links.launched
    launched = path[tree.nearest(path[:-1] >= 0, node)]
    on_device_ns = steps.within(events.start_ns[device], events.end_ns[device])
    return np.maximum(
        Groups(opened, paths).sum(on_cpu_ns),
        Groups(launched, paths).sum(on_device_ns, launched >= 0),
    )


def _of_program(capture: Views, made: Ints) -> Iterator[Problem]:
    """Yield one problem for all autograd nodes of a window without a backward."""
    steps = capture.links.counted_steps
    inside = made[steps.holds(capture.events.start_ns[made]) >= 0]
    if len(inside) and steps.share(len(inside) * NODE_NS) >= _LEAST_COST:
        title = "The program builds a graph for gradients, but runs no backward"
        yield _problem(capture, inside, title, common_place(capture, inside)[0])


def _problem(
    capture: Views, made: Ints, title: str, path: str | None, share: float | None = None
) -> Problem:
    events, steps = capture.events, capture.links.counted_steps
    count = int((steps.holds(events.start_ns[made]) >= 0).sum())
    per_step = f": {count / steps.count:.0f} graph nodes a {steps.what}" if count else ""
    return Problem(
        f"{title}{per_step}",
        made,
        share,
        edit=lambda whatif: shortened(capture, whatif, made, NODE_NS, NODE_BOUNDS_NS),
        place=(path, common_place(capture, made)[1]),
    )
