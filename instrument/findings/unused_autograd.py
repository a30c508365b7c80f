"""`unused-autograd`: a range, such as a validation, builds an autograd graph that no backward uses.

If a thread's sequence number grows from operator to operator, these operators make graph nodes. A
range is a finding if it takes `least_share` of the step and no backward of the window runs any of
its nodes; without any backward, the whole program is one if making nodes takes 1 %. The simulation
subtracts 2.5 µs for each node (torch 2.13, 100 linear layers with and without gradients). The last
of several steps does not count: its backward may follow. Memory of the graph is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.analysis.coverage_rows import CPU_IN_RANGES, JOINED
from instrument.analysis.places import common_place, range_codes
from instrument.analysis.views import Views
from instrument.base.units import percent
from instrument.findings.autograd_nodes import makers, ran, shortened
from instrument.findings.check import Check, NotRecorded, Problem
from instrument.findings.evidence import share_with_device
from instrument.links.autograd import is_backward
from instrument.links.groupby import Groups, isin
from instrument.links.step_index import step_at
from instrument.trace.events import Flags, Ints

_LEAST_COST = 0.01
_NODE_NS = 2500
_LEAST_JOINED = 0.5
_MOST_TRIED = 32


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each outermost range that builds an unused graph; at most 32."""
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
    has_run, counts = isin(events.sequence[made], numbers), _decided(capture, made)
    paths, path = links.scopes.paths, range_codes(capture, made)
    of_path, in_range = Groups(path, len(paths.names)), path >= 0
    one = np.ones(len(made), np.int64)
    unused = paths.with_descendants(of_path.sum(one, in_range & counts & ~has_run))
    used = paths.with_descendants(of_path.sum(one, in_range & has_run))
    wasteful = (unused > 0) & (used == 0)
    outermost = wasteful & ~np.append(wasteful, False)[paths.above]
    steps, most_ns = links.counted_steps, _most_ns(capture, outermost)
    # Only the largest ranges are tried, because `share_with_device` reads the whole call tree.
    largest = np.flatnonzero(outermost)
    largest = largest[np.argsort(-most_ns[largest], kind="stable")[:_MOST_TRIED]]
    for k in np.sort(largest).tolist():
        if steps.share(int(most_ns[k])) < CHECK.least_share:
            continue
        share = share_with_device(capture, links.scopes.ranges.index[links.scopes.opened == k])
        if share >= CHECK.least_share:
            below = (path >= k) & (path < paths.after[k])
            title = (
                f"Range {paths.names[k]!r}, {percent(share)} of the {steps.what}, "
                "builds a graph that no backward uses"
            )
            yield _problem(capture, made[below], title, paths.texts[k], share)


CHECK = Check(
    "unused-autograd",
    find,
    change="Use torch.inference_mode() around this code, or torch.no_grad() if its results are "
    "used for training.",
    verify="Record again: this finding must be gone, and profiler.profile_memory=true must "
    "show that less memory is in use.",
    least_share=0.03,
    coverage=(JOINED, CPU_IN_RANGES),
)


def _most_ns(capture: Views, chosen: Flags) -> Ints:
    """For each chosen path, an upper bound of its time in the steps: overlaps count twice.

    No chosen path may lie inside another one.
    """
    events, tree, scopes = capture.events, capture.links.call_tree, capture.links.scopes
    steps, inside = capture.links.counted_steps, chosen[scopes.opened]
    calls, opened = scopes.ranges.index[inside], scopes.opened[inside]
    on_cpu_ns = steps.within(events.start_ns[calls], events.end_ns[calls])
    path = np.full(len(tree) + 1, -1)  # the last entry is for work without a node
    path[tree.nodes_of(calls)] = opened
    path[-1] = -1
    device, node = capture.links.launched
    launched = path[tree.nearest(path[:-1] >= 0, node)]
    on_device_ns = steps.within(events.start_ns[device], events.end_ns[device])
    return np.maximum(
        Groups(opened, len(chosen)).sum(on_cpu_ns),
        Groups(launched, len(chosen)).sum(on_device_ns, launched >= 0),
    )


def _of_program(capture: Views, made: Ints) -> Iterator[Problem]:
    """Yield one problem for all autograd nodes of a window without a backward."""
    steps = capture.links.counted_steps
    inside = made[steps.holds(capture.events.start_ns[made]) >= 0]
    if len(inside) and steps.share(len(inside) * _NODE_NS) >= _LEAST_COST:
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
        edit=lambda whatif: shortened(capture, whatif, made, _NODE_NS),
        place=(path, common_place(capture, made)[1]),
    )


def _decided(capture: Views, made: Ints) -> Flags:
    """A mask of the operators in `made` whose backward ran in the window, if they have one.

    That is not known of those in the last of several steps.
    """
    events, steps = capture.events, capture.links.steps
    if len(steps) < 2:
        return np.ones(len(made), np.bool_)
    at = step_at(events, steps, events.start_ns[made])
    return (at >= 0) & (at < len(steps) - 1)
