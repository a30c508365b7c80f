"""Find ranges, such as a validation, that build an unused autograd graph.

In grad mode, the event of each operator holds the number of the thread's next backward node. If
this number grows from operator to operator, these operators make backward nodes. The check finds
ranges whose operators make nodes, if no backward of the window runs any of these nodes. An operator
on tensors that need no gradients makes no node, even if gradients are enabled.

To make and free a node takes about 2.5 µs of CPU time (torch 2.13; 100 linear layers with and
without gradients). The simulation subtracts this time from the operators that make nodes. If the
device is the bottleneck, the saving is 0. The graph also keeps activations in memory, but the trace
does not show how much.

There is a finding for each such range that takes at least 3 % of the time of the steps. If such
ranges lie inside each other, only the outermost has a finding. In a trace without any backward,
there is one finding for the whole program. Making the nodes must then take at least 1 % of the time
of the steps.

A backward can run after the end of the window. So operators in the last finished step do not count
if there are other steps. The check cannot run if most backward nodes of the window belong to a
forward before the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.places import common_place, range_codes
from instrument.analysis.views import Views
from instrument.findings.autograd_nodes import makers, ran
from instrument.findings.event_time import share_of, shortened
from instrument.findings.evidence import evidence
from instrument.findings.finding import Check, Finding, NotRecorded
from instrument.links.autograd import is_backward
from instrument.links.groupby import Groups, isin
from instrument.links.step_index import step_at
from instrument.trace.events import Flags, Ints
from instrument.units import percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.03
_LEAST_COST = 0.01
_NODE_NS = 2500
_LEAST_JOINED = 0.5
_MOST_TRIED = 32


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield a finding for each outermost range that builds an unused graph; at most 32."""
    events, links = capture.events, capture.links
    made = makers(capture)
    if not is_backward(events).any():
        yield from _of_program(capture, whatif, made)
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
    time, most_ns = capture.links.counted_steps, _most_ns(capture, outermost)
    # Only the largest ranges are tried, because `share_of` reads the whole call tree.
    largest = np.flatnonzero(outermost)
    largest = largest[np.argsort(-most_ns[largest], kind="stable")[:_MOST_TRIED]]
    for k in np.sort(largest).tolist():
        if time.share(int(most_ns[k])) < _LEAST_SHARE:
            continue
        calls = links.scopes.ranges.index[links.scopes.opened == k]
        share = share_of(capture, calls)
        if share >= _LEAST_SHARE:
            below = (path >= k) & (path < paths.after[k])
            title = (
                f"Range {paths.names[k]!r}, {percent(share)} of the {time.what}, "
                "builds a graph that no backward uses"
            )
            yield _finding(capture, whatif, made[below], title, paths.texts[k], share)


def _most_ns(capture: Views, chosen: Flags) -> Ints:
    """For each chosen path, an upper bound of its time in the steps.

    The bound is too high if several threads or streams work at the same time. `share_of` computes
    the exact time, but takes longer. No chosen path may lie inside another one.
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


def _of_program(capture: Views, whatif: Scenario, made: Ints) -> Iterator[Finding]:
    """Yield one finding if making autograd nodes takes at least 1 % of the time of the steps.

    Call this only if the window has no backward.
    """
    steps = capture.links.counted_steps
    inside = made[steps.holds(capture.events.start_ns[made]) >= 0]
    if len(inside) and steps.share(len(inside) * _NODE_NS) >= _LEAST_COST:
        title = "The program builds a graph for gradients, but runs no backward"
        yield _finding(capture, whatif, inside, title, common_place(capture, inside)[0])


def _finding(
    capture: Views,
    whatif: Scenario,
    made: Ints,
    title: str,
    path: str | None,
    share: float | None = None,
) -> Finding:
    events, steps = capture.events, capture.links.counted_steps
    count = int((steps.holds(events.start_ns[made]) >= 0).sum())
    per_step = f": {count / steps.count:.0f} graph nodes a {steps.what}" if count else ""
    return Finding(
        code=CHECK.code,
        title=f"{title}{per_step}",
        change="Use torch.inference_mode() around this code, or torch.no_grad() if its results are "
        "used for training.",
        verify="Record again: this finding must be gone, and profiler.profile_memory=true must "
        "show that less memory is in use.",
        share=share,
        saving=shortened(capture, whatif, made, _NODE_NS),
        range=path,
        source=common_place(capture, made)[1],
        evidence=evidence(capture, made),
        coverage=("backward time joined to its forward", "CPU time within a range"),
    )


def _decided(capture: Views, made: Ints) -> Flags:
    """A mask of the operators in `made` that lie in a finished step, but not in the last one.

    Operators in the last finished step are left out, because their backward may run after the
    window. If fewer than two steps finished, the mask holds all operators.
    """
    events, steps = capture.events, capture.links.steps
    if len(steps) < 2:
        return np.ones(len(made), np.bool_)
    at = step_at(events, steps, events.start_ns[made])
    return (at >= 0) & (at < len(steps) - 1)


CHECK = Check("unused-autograd", find)
