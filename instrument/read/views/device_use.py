"""What the device does in a step, what it waits for, and which kernels it runs, as sentences.

All shares are of `device_spans`: the counted steps, or else the time from the first device work to
the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import polars as pl

from instrument.base.units import duration, percent
from instrument.read.facts.device_work import COMMUNICATION, KERNEL, MEMSET
from instrument.read.facts.groupby import Groups, intern
from instrument.read.facts.idle import WAITS, device_spans, device_time
from instrument.read.facts.intervals import merged, merged_in_groups, sweep, within
from instrument.read.views.phases import stages_in_words
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
# The classes of the table of events and memory copies, as sentences name them.
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
    stages = stages_in_words(capture)
    if stages and share["idle_ns"] < _LEAST_IDLE:
        uses[-1] += ": the device is the limit"
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
    sentences = stages, f"{text}.", classes and f"The kernels with the most time: {classes}."
    return " ".join(filter(None, sentences))


def is_busy(capture: Views) -> bool:
    """Whether a device works in at least half of the steps' time."""
    spent = device_time(capture)
    return spent["total_ns"] > 0 and 2 * spent["idle_ns"] <= spent["total_ns"]


def _largest_classes(capture: Views) -> Iterator[str]:
    """Yield at most three classes of work with their shares, and the largest kernels of each.

    Of communication, only the time without compute counts, and of copies, only the time with
    neither of them.
    """
    work, spans = capture.work, device_spans(capture.links, capture.work)
    columns = ("kind", "class", "label", "start_ns", "end_ns", "counted")
    rows = capture.facts.events(*columns)[work.event]
    is_copy = pl.col("kind") == "copy"
    rows = rows.with_columns(of=pl.when(is_copy).then(pl.lit("memory copy")).otherwise("class"))
    parts = {part["of"][0]: part for part in rows.partition_by("of")}
    timeline = sweep([merged(*work.of(KERNEL, MEMSET)), merged(*work.of(COMMUNICATION)), spans])
    compute, communication, counts = timeline.active
    hidden = {
        "communication": timeline.merged(compute & counts),
        "memory copy": timeline.merged((compute | communication) & counts),
    }

    def spent(name: str, by: str) -> list[tuple[int, str]]:
        """The time of each class or label in a class of work, the longest first."""
        codes, values = intern(parts[name][by])
        sides = (parts[name][side].to_numpy() for side in ("start_ns", "end_ns"))
        group, start_ns, end_ns = merged_in_groups(codes, *sides)
        own_ns = within(spans, start_ns, end_ns)
        if name in hidden:
            own_ns -= within(hidden[name], start_ns, end_ns)
        return sorted(zip(Groups(group, len(values)).sum(own_ns).tolist(), values), reverse=True)

    time, steps = device_time(capture), capture.links.counted_steps
    for own_ns, name in sorted((spent(name, "of")[0] for name in parts), reverse=True)[:_SHOWN]:
        if own_ns < max(_LEAST_CLASS * (time["total_ns"] - time["idle_ns"]), 1):
            return
        share = own_ns / time["total_ns"]
        kernels = [(ns / time["total_ns"], label) for ns, label in spent(name, "label")[:_KERNELS]]
        named = [each for each in kernels if each[0] >= _LEAST_KERNEL] or kernels[:1]
        text = ", ".join(
            label if percent(part) == percent(share) else f"{percent(part)} {label}"
            for part, label in named
        )
        if name == "communication" and steps.what != "recording":
            text += f"; {parts[name]['counted'].sum() / steps.count:,.0f} kernels a step"
        yield f"{percent(share)} {_CLASSES.get(name, name)} ({text})"
