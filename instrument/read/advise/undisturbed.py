"""The time of operators without what disturbs single calls: other programs, waiting threads."""

from __future__ import annotations

import numpy as np

from instrument.read.facts.groupby import group_rows
from instrument.read.trace.events import Ints
from instrument.read.views.views import Views

# Of the calls of an operator with the same shapes, nothing disturbed the one at this percentile.
_UNDISTURBED = 10


def undisturbed_ns(capture: Views, nodes: Ints, time_ns: Ints) -> Ints:
    """The time of each operator in the steps as if nothing had disturbed it, from equal calls.

    Equal are the calls of an operator with the same input shapes. Without shapes, they are the
    calls of a range that have the same place among those of each step, or all if their number
    changes from step to step: then half of them are taken as slow for another reason.

    `nodes` are nodes of the call tree, and `time_ns` is the recorded time of each.
    """
    events, links = capture.events, capture.links
    index = links.call_tree.index[nodes]
    if (events.shapes[index] >= 0).any():
        same = group_rows(events.name[index], events.shapes[index])
        least: Ints = time_ns[same.sorted_by(time_ns).row(_UNDISTURBED)][same.of]
        return np.minimum(least, time_ns)
    start_ns = links.call_tree.start_ns[nodes]
    same = group_rows(events.name[index], links.scopes.path_of_node[nodes])
    in_step = group_rows(same.of, links.counted_steps.holds(start_ns))
    at_place = group_rows(same.of, in_step.sorted_by(start_ns).ordinals())
    is_regular = same.min(at_place.size[at_place.of]) == links.counted_steps.count
    median = time_ns[same.sorted_by(time_ns).row(50)]
    least = np.where(is_regular[same.of], at_place.min(time_ns)[at_place.of], median[same.of])
    return np.minimum(least, time_ns)
