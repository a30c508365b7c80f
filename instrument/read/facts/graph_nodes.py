"""The operators that make a node of the autograd graph, and the nodes that a backward runs.

While gradients are recorded, torch writes a sequence number into the event of every operator: the
number that the thread's next node will get. Operators that make no node get a number too. So
several operators in a row can have the same number. The last of them made the node if the thread's
next operator has a higher number. The event in which the backward runs this node has the same
number.
"""

from __future__ import annotations

import numpy as np

from instrument.read.facts.autograd import is_backward
from instrument.read.facts.groupby import distinct, isin
from instrument.read.facts.links import Links
from instrument.read.facts.step_index import step_at
from instrument.read.trace.events import Flags, Ints


def makers(links: Links) -> Ints:
    """The forward operators that made an autograd node, sorted by thread, then by start."""
    events, scopes = links.events, links.scopes
    in_backward = scopes.nodes.nearest(scopes.backward, scopes.innermost) >= 0
    numbered: Ints = links.call_tree.index[scopes.recording & ~in_backward]
    thread, number = events.thread[numbered], events.sequence[numbered]
    is_last = np.append((thread[1:] != thread[:-1]) | (number[1:] > number[:-1]), True)
    # The last operator of a thread has no next operator: it counts if a backward ran its node.
    next_is_same_thread = np.append(thread[1:] == thread[:-1], False)
    found: Ints = numbered[
        is_last[: len(numbered)] & (next_is_same_thread | has_run(links, numbered))
    ]
    return found


def ran(links: Links) -> Ints:
    """The sequence numbers of the autograd nodes that ran in a backward of the window, sorted."""
    events = links.events
    chosen = is_backward(events) & (events.sequence >= 0) & (events.forward_thread != 0)
    return distinct(events.sequence[chosen])


def has_run(links: Links, made: Ints) -> Flags:
    """Whether a backward ran the node of each operator that made one."""
    return isin(links.events.sequence[made], ran(links))


def ranges_around(links: Links, events: Ints) -> Ints:
    """The innermost range around each operator, as an index into `scopes.ranges`; -1 for none."""
    scopes = links.scopes
    range_of = scopes.nodes.nearest_of(np.flatnonzero(~scopes.backward))
    found: Ints = np.append(range_of, -1)[scopes.innermost[links.call_tree.nodes_of(events)]]
    return found


def wasteful_ranges(links: Links, made: Ints) -> Flags:
    """A mask of the ranges in which the operators `made` nodes, of which no backward ran any.

    A range in the last of several steps counts if there is one with the same path in a step before.
    """
    scopes, ranges, call = links.scopes, links.scopes.ranges, ranges_around(links, made)
    number, ran_in = (
        np.bincount(call[(call >= 0) & chosen], minlength=len(ranges))
        for chosen in (np.ones(len(call), np.bool_), has_run(links, made))
    )
    found: Flags = (ranges.with_descendants(number) > 0) & (ranges.with_descendants(ran_in) == 0)
    if len(links.steps) < 2:
        return found
    at = step_at(links.events, links.steps, ranges.start_ns)
    is_known = np.zeros(len(scopes.paths.names), np.bool_)
    is_known[scopes.opened[found & (at >= 0) & (at < len(links.steps) - 1)]] = True
    return found & is_known[scopes.opened] & (at >= 0)


def training_ranges(links: Links) -> Flags:
    """A mask of the ranges in which an operator made a node that a backward of the window ran."""
    made, ranges = makers(links), links.scopes.ranges
    around = ranges_around(links, made[has_run(links, made)])
    found: Flags = (
        ranges.with_descendants(np.bincount(around[around >= 0], minlength=len(ranges))) > 0
    )
    return found
