"""Regions: operators of the program with their backward, and with the Python time between them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.read.facts.autograd import is_backward
from instrument.read.facts.graph_nodes import makers
from instrument.read.facts.groupby import group_rows, isin
from instrument.read.facts.intervals import Intervals, concatenated, merged
from instrument.read.facts.segments import waits_for_data
from instrument.read.trace.events import Flags, Ints, called_operators
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit, Scenario

#: In a longer gap between two operators, the program does something else.
LONGEST_GAP_NS = 50_000


class Region(NamedTuple):
    """Operators, their backward nodes, and the gaps between them.

    Attributes:
        calls, backward: nodes of the call tree.
        gaps: for each thread, the gaps between the calls, and between the backward nodes.
        elapsed_ns: the time of all these; of a gap at most `LONGEST_GAP_NS`, and the time in which
            this waits for a CPU.
        of_gaps: the part of the time of the gaps that counts.
    """

    calls: Ints
    backward: Ints
    gaps: dict[int, Intervals]
    elapsed_ns: int
    of_gaps: float

    def scaled(
        self, capture: Views, left: float, bounds: tuple[float, float], gaps: float | None = None
    ) -> Edit:
        """Multiply the time by `left`, that of the gaps by `gaps`; the larger bound is first."""
        events = capture.links.call_tree.index[np.append(self.calls, self.backward)]

        def edit(whatif: Scenario) -> Scenario:
            whatif = whatif.scale_events(events, by=left, bounds=bounds)
            least, most = (left, bounds) if gaps is None else (gaps, (gaps, gaps))
            by, worst, best = (1 - (1 - each) * self.of_gaps for each in (least, *most))
            for thread, spans in self.gaps.items():
                whatif = whatif.scale_spans(thread, spans, by=by, bounds=(worst, best))
            return whatif

        return edit


def region(capture: Views, calls: Ints, group: Ints, backward: Ints) -> Region:
    """The region of calls, which are nodes, and of their backward nodes in the steps.

    There are gaps between successive calls of a group.
    """
    tree = capture.links.call_tree
    step = capture.links.counted_steps.holds(tree.start_ns[backward])
    backward, step = backward[step >= 0], step[step >= 0]
    in_order = [calls[each] for each in group_rows(group).rows()]
    in_order += [backward[each] for each in group_rows(tree.thread[backward], step).rows()]
    found = defaultdict(list)
    for nodes in in_order:
        start, end = np.maximum.accumulate(tree.end_ns[nodes])[:-1], tree.start_ns[nodes][1:]
        lasting = end > start
        found[int(tree.thread[nodes[0]])].append((start[lasting], end[lasting]))
    gaps = {thread: merged(*concatenated(spans)) for thread, spans in found.items()}
    gaps_ns = np.concatenate([end - start for start, end in gaps.values()])
    wait, whole_ns = capture.about.cpu_wait, int(gaps_ns.sum())
    slowdown = 1.0 if wait is None else wait.slowdown
    counted_ns = min(int(slowdown * np.minimum(gaps_ns, LONGEST_GAP_NS).sum()), whole_ns)
    events_ns = int(tree.total_ns[np.append(calls, backward)].sum())
    return Region(calls, backward, gaps, events_ns + counted_ns, counted_ns / max(whole_ns, 1))


def backward_of(capture: Views, calls: Ints) -> tuple[Ints, Ints]:
    """The backward nodes of what calls made, and the index in `calls` of each."""
    events, tree = capture.events, capture.links.call_tree
    made = makers(capture.links)
    call = tree.nearest_of(calls, tree.nodes_of(made))
    made, call = made[call >= 0], call[call >= 0]
    number, last = np.unique(events.sequence[made][::-1], return_index=True)
    ran = is_backward(events)[tree.index] & isin(events.sequence[tree.index], number)
    nodes = np.flatnonzero(tree.outermost(ran))
    at = np.searchsorted(number, events.sequence[tree.index[nodes]])
    return nodes, call[::-1][last[at]]


def bodies(capture: Views) -> tuple[Flags, Flags]:
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
