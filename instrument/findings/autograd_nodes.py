"""The operators that make a node of the autograd graph, and the nodes that a backward runs.

While gradients are recorded, torch writes a sequence number into the event of every operator: the
number that the thread's next node will get. Operators that make no node get a number too. So
several operators in a row can have the same number. The last of them made the node if the thread's
next operator has a higher number. The event in which the backward runs this node has the same
number.
"""

from __future__ import annotations

import numpy as np

from instrument.analysis.views import Views
from instrument.links.autograd import is_backward
from instrument.links.groupby import distinct, isin
from instrument.trace.events import Ints


def makers(capture: Views) -> Ints:
    """The forward operators that made an autograd node, sorted by thread, then by start.

    An operator that made several nodes occurs once. The sequence number of the thread's next
    operator shows whether an operator made a node. The last operator of a thread has no next
    operator, so it counts only if a backward ran its node.
    """
    events, numbered = capture.events, _numbered(capture)
    thread, number = events.thread[numbered], events.sequence[numbered]
    is_last = np.append((thread[1:] != thread[:-1]) | (number[1:] > number[:-1]), True)
    # An operator made a node if the next operator of the thread has a higher number. The last
    # operator of a thread has no next operator.
    next_is_same_thread = np.append(thread[1:] == thread[:-1], False)
    has_run = isin(number, ran(capture))
    found: Ints = numbered[is_last[: len(numbered)] & (next_is_same_thread | has_run)]
    return found


def ran(capture: Views) -> Ints:
    """The sequence numbers of the autograd nodes that ran in a backward of the window, sorted."""
    events = capture.events
    chosen = is_backward(events) & (events.sequence >= 0) & (events.forward_thread != 0)
    return distinct(events.sequence[chosen])


def _numbered(capture: Views) -> Ints:
    """The operators in grad mode, outside of backward nodes; sorted by thread, then by start."""
    links = capture.links
    tree, scopes = links.call_tree, links.scopes
    node_above = scopes.nodes.nearest(scopes.backward, scopes.innermost)
    found: Ints = tree.index[scopes.recording & (node_above < 0)]
    return found
