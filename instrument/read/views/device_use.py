"""What the device does in a step, and the kernels that take most of its time, as sentences."""

from __future__ import annotations

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.facts.device_work import COMMUNICATION, KERNEL, MEMSET
from instrument.read.facts.groupby import groupby, intern
from instrument.read.facts.idle import device_spans, device_time
from instrument.read.facts.intervals import merged, merged_in_groups, sweep, within
from instrument.read.facts.kernel_names import kernel_label
from instrument.read.views.views import Views

_USES = {
    "compute_ns": "computes for",
    "exposed_communication_ns": "only communicates for",
    "exposed_copy_ns": "only copies for",
    "idle_ns": "is idle for",
}
_ALWAYS = frozenset({"compute_ns", "idle_ns"})
_LEAST, _LEAST_KERNEL = 0.01, 0.05
_SHOWN = 3


def device_use(capture: Views) -> str:
    """Return a sentence on how long the device computes, communicates, copies and is idle.

    "Of it" is of a step; without finished steps, the sentence names the time from the first device
    work to the last. Without device work, it is "".
    """
    spent = device_time(capture)
    share = {name: ns / (spent["total_ns"] or 1) for name, ns in spent.items()}
    if not spent["total_ns"]:
        return ""
    of, when = " of it", "The device"
    if capture.links.counted_steps.what == "recording":
        of, when = "", f"From its first to its last work, {duration(spent['total_ns'])}, the device"
    uses = [
        f"{use} {percent(share[name])}"
        for name, use in _USES.items()
        if name in _ALWAYS or share[name] >= _LEAST
    ]
    uses[0] += of
    if share["overlap_ns"] >= _LEAST:
        uses[0] += f" ({percent(share['overlap_ns'])} while it communicates)"
    *most, last = uses
    return f"{when} {', '.join(most)} and {last}."


def is_busy(capture: Views) -> bool:
    """Whether a device works in at least half of the steps' time."""
    spent = device_time(capture)
    return spent["total_ns"] > 0 and 2 * spent["idle_ns"] <= spent["total_ns"]


def busiest_kernels(capture: Views) -> str:
    """Return a sentence with at most three kernels or copies, and their shares of `device_spans`.

    Kernels with the same label count as one. Of communication, only the
    time without compute counts.
    """
    events, work = capture.events, capture.work
    if not work.duration_ns.any():
        return ""
    spans = device_spans(capture.links, work)
    whole_ns = int((spans[1] - spans[0]).sum())
    labels, names = intern(map(kernel_label, events.names))
    own = labels[events.name[work.event]]
    label, start_ns, end_ns = merged_in_groups(own, work.start_ns, work.end_ns)
    timeline = sweep([merged(*work.of(KERNEL, MEMSET)), spans])
    computing = timeline.merged(timeline.active[0] & timeline.active[1])
    spent_ns = within(spans, start_ns, end_ns)
    communicates = np.isin(label, own[work.kind == COMMUNICATION])
    spent_ns -= np.where(communicates, within(computing, start_ns, end_ns), 0)
    keys, groups = groupby(label)
    total_ns = groups.sum(spent_ns)
    most = sorted(zip(total_ns.tolist(), keys.tolist()), reverse=True)[:_SHOWN]
    texts = [
        f"{percent(ns / whole_ns)} {names[key]}"
        for ns, key in most
        if ns >= _LEAST_KERNEL * whole_ns
    ]
    return f"The kernels with the most time: {', '.join(texts)}." if texts else ""
