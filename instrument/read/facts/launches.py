"""Find the CPU call that launched each device event: each kernel, copy and memset.

Kineto links a device event to the runtime call by `correlation`, and to an operator by `External
id`. A launch belongs to the innermost operator or annotation around its runtime call; the external
id decides only if there is none, or if the trace does not have the call. See
docs/explanation/joins.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instrument.read.facts.call_tree import nest
from instrument.read.facts.groupby import Groups
from instrument.read.trace.events import (
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
    """Device events and the CPU events that launched them, as positions among the events.

    The position -1 stands for a CPU event that is not in the trace.

    Attributes:
        device: the device events.
        operator: the operator or annotation that the external id names.
        call: the runtime or driver call with the same correlation.
    """

    device: Ints
    operator: Ints
    call: Ints

    @property
    def launch(self) -> Ints:
        """The CPU event of each launch: `call`, else `operator`; -1 if neither is known."""
        return np.where(self.call >= 0, self.call, self.operator)


def launches(events: Events, operators: Ints) -> Launches:
    """Join device events to runtime calls by correlation, and to operators by external id.

    `operators` is the result of `named_operators`.
    """
    device = np.flatnonzero(works_on_device(events))
    call = find(events.correlation, events.among(is_runtime), events.correlation[device])
    operator = operators[device]
    return Launches(device, np.where(operator >= 0, operator, operators[call]), call)


def named_operators(events: Events) -> Ints:
    """For each event, such as a call, the operator or annotation that its external id names.

    The value is -1 if the id names none, or if the event itself is an operator or annotation. One
    more entry with the value -1 is for the position -1.
    """
    is_linked, found = events.among(_LINKED), np.full(len(events) + 1, -1)
    # Some versions of torch write the correlation as the external id. Such an id names no operator.
    chosen = np.flatnonzero(
        ~is_linked & (events.external_id != 0) & (events.external_id != events.correlation)
    )
    found[chosen] = find(events.external_id, is_linked, events.external_id[chosen])
    return found


def find(key: Ints, among: Flags, wanted: Ints) -> Ints:
    """For each wanted key, the first event in `among` with this key; -1 for none or the key 0.

    An id of 0 means that the event has no id.

    Cost: linear time if no key is negative or very large, as is usual; otherwise a sort.
    """
    if not wanted.any() or not among.any():
        return np.full(len(wanted), -1)
    positions = np.flatnonzero(among)
    keys = key[positions]
    most = int(keys.max())
    if keys.min() >= 0 and most <= 4 * len(key):
        first = np.full(most + 2, -1)
        first[keys[::-1]] = positions[::-1]  # of equal keys, the last assigned position counts
        first[0] = -1
        return first[np.where((wanted >= 0) & (wanted <= most), wanted, most + 1)]
    order = np.argsort(keys, kind="stable")
    positions, keys = positions[order], keys[order]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((keys[at] == wanted) & (wanted != 0), positions[at], -1)


def launches_kernel(name: str) -> bool:
    """Whether a runtime call of this name launches one kernel, such as `cudaLaunchKernel`.

    On MTIA, the call is named `runFunction`.
    """
    plain = name.lower()
    return ("launch" in plain and "kernel" in plain) or plain.startswith("runfunction")


def have_work(events: Events, device: Ints, calls: Ints) -> Flags:
    """A mask of the calls with the same correlation as a device event; False for correlation 0.

    A driver call inside a runtime call has the same correlation, so the mask has both.
    """
    wanted = events.correlation[calls]
    on_device = np.zeros(len(events), np.bool_)
    on_device[device] = True
    return find(events.correlation, on_device, wanted) >= 0


def ran_first(events: Events, device: Ints, is_known: Flags) -> Flags:
    """A mask of the device events that were probably launched before the recording began.

    Such an event has no known launch, and starts before all events of its stream that have one: a
    stream runs its work in the order of the launches. The mask is False if no launch of a stream is
    known.
    """
    stream, start_ns = events.thread[device].astype(np.int64), events.start_ns[device]
    known = Groups(stream[is_known], len(events.threads))
    has_known = known.size[stream] > 0
    found: Flags = has_known & (start_ns < known.min(start_ns[is_known])[stream])
    return found


def threads_of_calls(events: Events, others: Flags, operators: Ints) -> Codes:
    """The thread of each event; some runtime calls get the thread of their operator.

    A call gets it if no operator or annotation (`others`) lies around the call on its own thread,
    as in torch's `_parse_kineto_results`. `operators` is the result of `named_operators`.
    """
    calls = np.flatnonzero(events.among(is_runtime))
    operator = operators[calls]
    elsewhere = (operator >= 0) & (events.thread[operator] != events.thread[calls])
    if not elsewhere.any():
        return events.thread
    thread, calls, operator = events.thread.copy(), calls[elsewhere], operator[elsewhere]
    tree = nest(events, others & np.isin(events.thread, events.thread[calls]))
    alone = tree.node_at(events.thread[calls], events.start_ns[calls]) < 0
    thread[calls[alone]] = events.thread[operator[alone]]
    return thread
