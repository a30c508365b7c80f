"""`launch-bound`: kernels are so short that the device waits for the CPU to launch the next one.

Counted are the gaps of under 1 ms in which all devices are idle, until the call that launches the
next work has returned (`launch_gaps`); longer gaps are `device-idle`. In published traces, healthy
programs spend up to 3 % of the step in such gaps, programs with too many small kernels 9 to 73 %.
The simulation takes the CPU time out of the gaps, so that work is launched as early as the launch
queue allows; the lower bound takes out half of it. The check cannot see which
kernels could be replaced by larger ones. A gap on one device or stream does not count while another
one works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import device_kind, evidence_by_operator
from instrument.read.advise.one_time_costs import one_time_calls
from instrument.read.facts.attribution import OPTIMIZER_STEP
from instrument.read.facts.idle import gaps
from instrument.read.facts.intervals import Intervals, sweep
from instrument.read.facts.places import common_place
from instrument.read.trace.events import Flags, Ints, is_compiled_code
from instrument.read.views import interruptions
from instrument.read.views.coverage_rows import ORDERED
from instrument.read.views.interruptions import kinds_of
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

#: A gap of this length or more is `device-idle`, a shorter one is `launch-bound`.
LONG_NS = 1_000_000
# Interruptions that have findings of their own, or that show no problem of the program.
_EXPLAINED = (
    interruptions.LOADER,
    interruptions.GARBAGE_COLLECTION,
    interruptions.COMPILATION,
    interruptions.MODULE_LOADING,
    interruptions.ALLOCATION,
    interruptions.PROFILER,
)
_LEAST_GAPS = 20
# Devices for which torch has CUDA graphs, and torch.compile(mode='reduce-overhead') uses them.
_HAS_GRAPHS = frozenset({"cuda", "hip"})
# The model is compiled if compiled code launches at least this part of the work.
_IS_COMPILED = 0.2


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all short gaps."""
    found, steps = launch_gaps(capture), capture.links.counted_steps
    short = found.only((found.wait_ns < LONG_NS) & (found.call >= 0))
    waited_ns = int(short.wait_ns.sum())
    share = steps.share(waited_ns)
    if share < CHECK.least_share or len(short.call) < _LEAST_GAPS:
        return
    path, source = common_place(capture, short.call, short.wait_ns)
    work_ns = capture.work.end_ns - capture.work.start_ns
    mean_ns = waited_ns // len(short.call)
    trains = any(name.startswith(OPTIMIZER_STEP) for name in capture.events.names)
    yield Problem(
        f"The device waits {percent(share)} of the {steps.what} for launches: "
        f"{len(short.call) / steps.count:,.0f} gaps of {duration(mean_ns)} on average, between "
        f"kernels of {duration(int(np.median(work_ns)))} (median)",
        short.call,
        share,
        edit=partial(launched_early, capture, short),
        place=(path, source),
        evidence=evidence_by_operator(
            capture,
            short.call,
            short.wait_ns,
            "time in which the device waited for the operator's kernels",
        ),
        change=_change(capture) + (", and use fused=True in the optimizer." if trains else "."),
    )


CHECK = Check(
    "launch-bound",
    find,
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=ORDERED,
)


def _change(capture: Views) -> str:
    """What launches less often on this device, without a full stop."""
    larger = "increase the batch size"
    if device_kind(capture) not in _HAS_GRAPHS:
        return f"Launch less often: {larger}"
    if not _is_compiled(capture):
        return (
            "Launch less often: model = torch.compile(model, mode='reduce-overhead') fuses small "
            f"kernels and records them as CUDA graphs; or {larger}"
        )
    return (
        "Launch less often. The program is compiled already: mode='reduce-overhead' also records "
        f"its kernels as CUDA graphs; or {larger}"
    )


def _is_compiled(capture: Views) -> bool:
    """Whether code that torch.compile has compiled launches much of the work."""
    tree, (_, launcher) = capture.links.call_tree, capture.links.launched
    named = is_compiled_code(capture.events)
    inside = tree.at_or_inside(named[tree.index])[launcher[launcher >= 0]]
    return bool(inside.sum() >= _IS_COMPILED * max(len(inside), 1))


@dataclass(frozen=True, slots=True)
class LaunchGaps:
    """Gaps in the work of the devices, as parallel columns.

    Attributes:
        start_ns: the start of each gap.
        queued_ns: when the call that launches the next work returned, but at most the end of the
            gap. For a gap after all device work, it is the end of the gap.
        call: the CPU call that launches the next work; -1 for a gap after all device work.
        wait_ns: the time from `start_ns` to `queued_ns` inside the counted steps. The
            interruptions in `_EXPLAINED`, such as waits for data, do not count.
        waiting: the time of `wait_ns` as merged intervals, sorted by start. There is not one
            interval for each gap. The method `only` selects gaps, but does not change `waiting`.
    """

    start_ns: Ints
    queued_ns: Ints
    call: Ints
    wait_ns: Ints
    waiting: Intervals

    def only(self, chosen: Flags) -> LaunchGaps:
        """The gaps that a mask selects."""
        return LaunchGaps(
            self.start_ns[chosen],
            self.queued_ns[chosen],
            self.call[chosen],
            self.wait_ns[chosen],
            self.waiting,
        )


def launch_gaps(capture: Views) -> LaunchGaps:
    """Find the gaps in which the devices wait for launches; see `LaunchGaps`.

    A gap that begins while the CPU waits for the device is left out, because its cause is that
    wait. A gap is left out too if the launch of the next device event is not in the trace.
    """
    events, time = capture.events, capture.links.counted_steps
    found = gaps(events, capture.work, time.start_ns, time.end_ns)
    waits = found.known & ~found.syncing & (found.queued_ns > found.start_ns)
    start, queued = found.start_ns[waits], found.queued_ns[waits]
    explained = np.isin(kinds_of(events), _EXPLAINED)
    explained[one_time_calls(capture)] = True
    timeline = sweep(
        [
            (start, queued),
            (time.start_ns, time.end_ns),
            (events.start_ns[explained], events.end_ns[explained]),
        ]
    )
    counts = timeline.active[0] & timeline.active[1] & ~timeline.active[2]
    wait_ns = timeline.within(counts, start, queued)
    kept = wait_ns > 0
    call, waiting = found.call[waits][kept], timeline.merged(counts)
    return LaunchGaps(start[kept], queued[kept], call, wait_ns[kept], waiting)


def waits_by_thread(capture: Views, gaps: LaunchGaps) -> tuple[Ints, Ints, Ints]:
    """The thread that ends a gap, the start and the end of each interval in which devices wait."""
    timeline = sweep([(gaps.start_ns, gaps.queued_ns), gaps.waiting])
    waits = timeline.active[0] & timeline.active[1] & (timeline.end_ns > timeline.start_ns)
    start_ns, end_ns = timeline.start_ns[waits], timeline.end_ns[waits]
    gap = np.searchsorted(gaps.start_ns, start_ns, "right") - 1  # gaps do not overlap
    return _threads(capture, gaps)[gap], start_ns, end_ns


def launched_early(capture: Views, gaps: LaunchGaps, whatif: Scenario) -> Scenario:
    """The window without the CPU time in the gaps; for the lower bound, half of it stays."""
    threads, start_ns, end_ns = waits_by_thread(capture, gaps)
    for thread in np.unique(threads).tolist():
        own = threads == thread
        whatif = whatif.scale_spans(thread, (start_ns[own], end_ns[own]), 0, bounds=(0.5, 0))
    return whatif


def _threads(capture: Views, gaps: LaunchGaps) -> Ints:
    """For each gap, the thread that launches the work after it, or that of the last launch."""
    events = capture.events
    calls = capture.work.call[capture.work.call >= 0]
    last = events.thread[calls[np.argmax(events.start_ns[calls])]] if len(calls) else -1
    found: Ints = np.where(gaps.call >= 0, events.thread[gaps.call], last).astype(np.int64)
    return found
