"""What the device does in a step, what it waits for, and which kernels it runs, as sentences.

All shares are of `device_spans`: the counted steps, or else the time from the first device work to
the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.facts.device_work import COMMUNICATION, COPY, KERNEL, MEMSET, launched_ns
from instrument.read.facts.groupby import groupby, intern
from instrument.read.facts.idle import WAITS, device_spans, device_time
from instrument.read.facts.intervals import merged, merged_in_groups, sweep, within
from instrument.read.facts.kernel_names import kernel_class, kernel_label
from instrument.read.trace.events import Ints
from instrument.read.views.views import Views

_USES = {
    "compute_ns": "computes for",
    "exposed_communication_ns": "only communicates for",
    "exposed_copy_ns": "only copies for",
    "idle_ns": "is idle for",
}
_ALWAYS = frozenset({"compute_ns", "idle_ns"})
# What the device waits for, by the columns of `device_time`.
_CAUSES = {
    "launch_wait_ns": "for launches",
    "gap_wait_ns": "for launched work to start",
    "loader_wait_ns": "for data",
    "sync_wait_ns": "for launches after the CPU waited for it",
    "unknown_wait_ns": "for work whose launch is not in the trace",
}
# The classes of `kernel_class` and memory copies, as sentences name them.
_CLASSES = {
    "matrix product": "matrix products",
    "convolution": "convolutions",
    "copy": "copying",
    "reduction": "reductions",
    "communication": "exposed communication",
    "memory copy": "exposed copies",
    "other": "others",
}
# The least share that is named, and of idle time that has a cause; of the busy time that a class
# of kernels takes, and of the step that the second kernel of a class takes.
_LEAST, _LEAST_IDLE, _LEAST_CLASS, _LEAST_KERNEL = 0.01, 0.05, 0.05, 0.1
_SHOWN, _KERNELS = 3, 2


def device_use(capture: Views, is_cpu_the_limit: Callable[[], bool] = lambda: False) -> str:
    """Return how long the device computes, communicates, copies, is idle and why, and its kernels.

    "Of it" is of a step; without finished steps, the first sentence names the time from the first
    device work to the last. Without device work, the text is "". `is_cpu_the_limit` says whether
    most of what decides the length of a step is on the CPU; it is asked only if the device waits
    for launches.
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
    text = f"{when} {', '.join(most)} and {last}"
    if share["idle_ns"] >= _LEAST_IDLE:
        by_time = sorted(WAITS, key=lambda name: -spent[name])
        is_main = 2 * spent[by_time[0]] >= spent["idle_ns"]
        causes = [_CAUSES[name] for name in by_time[: 1 if is_main else 2]]
        text += f", {'mostly ' * is_main}waiting {' and '.join(causes)}"
        if by_time[0] == "launch_wait_ns" and is_cpu_the_limit():
            text += ": the CPU is the limit"
    classes = ", ".join(_largest_classes(capture)) if share["idle_ns"] <= 1 - _LEAST else ""
    return f"{text}. The kernels with the most time: {classes}." if classes else f"{text}."


def is_busy(capture: Views) -> bool:
    """Whether a device works in at least half of the steps' time."""
    spent = device_time(capture)
    return spent["total_ns"] > 0 and 2 * spent["idle_ns"] <= spent["total_ns"]


def _largest_classes(capture: Views) -> Iterator[str]:
    """Yield at most three classes of work with their shares, and the largest kernels of each.

    Of communication, only the time without compute counts, and of copies, only the time with
    neither of them.
    """
    events, work, spans = capture.events, capture.work, device_spans(capture.links, capture.work)
    codes, of_name = groupby(events.name[work.event])
    names = [events.names[code] for code in codes.tolist()]
    labels, label_names = intern(map(kernel_label, names))
    number, classes = intern([*_CLASSES, *map(kernel_class, names)])
    kind = number[len(_CLASSES) :][of_name.of]
    for name, code in ("other", KERNEL), ("communication", COMMUNICATION), ("memory copy", COPY):
        is_of = (work.kind == code) & ((kind == classes.index("communication")) | (code != KERNEL))
        kind = np.where(is_of, classes.index(name), kind)
    timeline = sweep([merged(*work.of(KERNEL, MEMSET)), merged(*work.of(COMMUNICATION)), spans])
    compute, communication, counts = timeline.active
    hidden = {
        "communication": timeline.merged(compute & counts),
        "memory copy": timeline.merged((compute | communication) & counts),
    }

    def spent(group: Ints, name: str) -> list[tuple[int, int]]:
        """The time of each group of work of a class, the longest first."""
        chosen = kind == classes.index(name)
        found, start_ns, end_ns = merged_in_groups(
            group[chosen], work.start_ns[chosen], work.end_ns[chosen]
        )
        own_ns = within(spans, start_ns, end_ns)
        if name in hidden:
            own_ns -= within(hidden[name], start_ns, end_ns)
        keys, groups = groupby(found)
        return sorted(zip(groups.sum(own_ns).tolist(), keys.tolist()), reverse=True)

    time = device_time(capture)
    of_class = sorted(((spent(kind, name) or [(0, 0)])[0][0], name) for name in classes)
    for own_ns, name in of_class[: -_SHOWN - 1 : -1]:
        if own_ns < max(_LEAST_CLASS * (time["total_ns"] - time["idle_ns"]), 1):
            return
        share = own_ns / time["total_ns"]
        parts = [
            (part_ns / time["total_ns"], label_names[key])
            for part_ns, key in spent(labels[of_name.of], name)[:_KERNELS]
        ]
        named = [each for each in parts if each[0] >= _LEAST_KERNEL] or parts[:1]
        kernels = ", ".join(
            label if percent(part) == percent(share) else f"{percent(part)} {label}"
            for part, label in named
        )
        if name == "communication" and capture.links.counted_steps.what != "recording":
            at = capture.links.counted_steps.holds(launched_ns(events, work))
            calls = ((kind == classes.index(name)) & (at >= 0)).sum()
            kernels += f"; {calls / capture.links.counted_steps.count:,.0f} kernels a step"
        yield f"{percent(share)} {_CLASSES.get(name, name)} ({kernels})"
