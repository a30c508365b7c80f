"""The operators that make a node of the autograd graph, and the nodes that a backward runs.

While gradients are recorded, torch writes a sequence number into the event of every operator: the
number that the thread's next node will get. Operators that make no node get a number too. So
several operators in a row can have the same number. The last of them made the node if the thread's
next operator has a higher number. The event in which the backward runs this node has the same
number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instrument.read.facts.autograd import is_backward
from instrument.read.facts.groupby import distinct, groupby, isin
from instrument.read.trace.events import Ints
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

#: What it costs to make a node, and the bounds of this cost; see `unused_autograd`.
NODE_NS, NODE_BOUNDS_NS = 1500, (1000, 3000)
_MOST_NAMES = 10


def makers(capture: Views) -> Ints:
    """The forward operators that made an autograd node, sorted by thread, then by start."""
    events, numbered = capture.events, _numbered(capture)
    thread, number = events.thread[numbered], events.sequence[numbered]
    is_last = np.append((thread[1:] != thread[:-1]) | (number[1:] > number[:-1]), True)
    # The last operator of a thread has no next operator: it counts if a backward ran its node.
    next_is_same_thread = np.append(thread[1:] == thread[:-1], False)
    has_run = isin(number, ran(capture))
    found: Ints = numbered[is_last[: len(numbered)] & (next_is_same_thread | has_run)]
    return found


def ran(capture: Views) -> Ints:
    """The sequence numbers of the autograd nodes that ran in a backward of the window, sorted."""
    events = capture.events
    chosen = is_backward(events) & (events.sequence >= 0) & (events.forward_thread != 0)
    return distinct(events.sequence[chosen])


def shortened(
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
    for row in sorted(groups.rows(), key=len, reverse=True)[:_MOST_NAMES]:
        mean_ns = max(float(np.mean(table.duration_ns[events[row]])), 1.0)
        by, *bounds = (max(1 - each / mean_ns, 0.0) for each in (each_ns, *(bounds_ns or ())))
        whatif = whatif.scale_events(
            events[row], by, bounds=(bounds[0], bounds[1]) if bounds else None, device=False
        )
    return whatif


def _numbered(capture: Views) -> Ints:
    links = capture.links
    tree, scopes = links.call_tree, links.scopes
    node_above = scopes.nodes.nearest(scopes.backward, scopes.innermost)
    found: Ints = tree.index[scopes.recording & (node_above < 0)]
    return found
