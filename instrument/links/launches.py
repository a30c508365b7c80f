"""Which CPU call launched which device event.

A launch belongs to the innermost operator or annotation around its runtime call, on the call's own thread. The external
id that torch writes on both names the innermost *operator* alone, not a range in it; some traces write ids there that
name nothing around the call. So it is asked only where nothing is around, or where no call was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.links.call_tree import CallTree, nest
from instrument.trace.events import (
    ANNOTATION,
    OPERATOR,
    Codes,
    Events,
    Flags,
    Ints,
    is_runtime,
    works_on_device,
)

_LINKED = ANNOTATION | OPERATOR


@dataclass(frozen=True, slots=True)
class Launches:
    """Device events and the CPU events they came from, as positions among the events, -1 where unknown.

    `operator` is the operator or annotation that the trace itself names; `call` is the runtime or driver call
    with the same correlation. Either may be missing: a trace can begin after a launch.
    """

    device: Ints
    operator: Ints
    call: Ints


def launches(events: Events) -> Launches:
    """Join device events to the CPU: by external id to an operator, by correlation to a runtime call.

    Some versions of torch write the correlation as the external id too; that names no operator.
    """
    device = np.flatnonzero(works_on_device(events))
    call = _find(events.correlation, events.among(is_runtime), events.correlation[device])
    operator = launching_operator(events, device)
    through_call = np.where(call >= 0, launching_operator(events, call), -1)
    return Launches(device, np.where(operator >= 0, operator, through_call), call)


def launching_operator(events: Events, chosen: Ints) -> Ints:
    """For some events, by position, the operator that the external id of each names, or -1."""
    wanted = np.where(
        events.external_id[chosen] == events.correlation[chosen], 0, events.external_id[chosen]
    )
    return _find(events.external_id, events.among(_LINKED), wanted)


def _find(key: Ints, among: Flags, wanted: Ints) -> Ints:
    """The first event of a mask whose key is wanted, or -1; a wanted 0 is never found."""
    positions = np.flatnonzero(among)
    if not positions.size or not wanted.size:
        return np.full(len(wanted), -1)
    order = np.argsort(key[positions], kind="stable")
    positions, keys = positions[order], key[positions][order]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((keys[at] == wanted) & (wanted != 0), positions[at], -1)


def threads_of_calls(events: Events, others: Flags) -> Codes:
    """The thread of each event; a runtime call with none of `others` around it has that of the operator it names.

    `others` are the operators and annotations that calls may lie in.
    """
    calls = np.flatnonzero(events.among(is_runtime))
    operator = launching_operator(events, calls)
    thread = events.thread.copy()
    elsewhere = (operator >= 0) & (events.thread[operator] != events.thread[calls])
    if elsewhere.any():
        calls, operator = calls[elsewhere], operator[elsewhere]
        enclosing = nest(events, others & np.isin(events.thread, events.thread[calls]))
        bare = enclosing.node_at(events.thread[calls], events.start_ns[calls]) < 0
        thread[calls[bare]] = events.thread[operator[bare]]
    return thread


def launching_nodes(events: Events, call_tree: CallTree, found: Launches) -> Ints:
    """The node that launched each device event, -1 where none is known."""
    if not len(found.device):
        return found.device
    position = np.full(len(events) + 1, -1)
    position[call_tree.index] = np.arange(len(call_tree))
    nearest = np.append(call_tree.nearest(~events.among(is_runtime)[call_tree.index]), -1)
    around = nearest[position[found.call]]
    return np.where(around >= 0, around, position[found.operator])
