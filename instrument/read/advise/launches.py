"""Launches: the device waits for the CPU to launch its work, often, for long, or only once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.base.range_names import OPTIMIZER_STEP
from instrument.base.units import duration, percent
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import (
    device_kind,
    evidence,
    evidence_of_function,
    evidence_row,
    in_steps,
    without_overloads,
)
from instrument.read.facts.groupby import group_rows, groupby
from instrument.read.facts.idle import gaps
from instrument.read.facts.intervals import Intervals, merged, sweep, within_groups
from instrument.read.facts.places import common_place, has_sources, source_of, time_by_source
from instrument.read.trace.events import (
    ANNOTATION,
    COPIES,
    Flags,
    Ints,
    is_compiled_code,
    is_runtime,
    is_step,
    is_wait,
    split_overload,
)
from instrument.read.views import interruptions
from instrument.read.views.coverage_rows import CPU_IN_STEPS, ORDERED
from instrument.read.views.interruptions import kinds_of
from instrument.read.views.synchronisations import callers, outermost_operators
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

# A gap of this length or more is `device-idle`, a shorter one is `launch-bound`.
_LONG_NS = 1_000_000
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
_MOST_CAUSES = 5
# A function is named if it takes at least this part of the gaps.
_LEAST_SOURCE = 0.25
_FASTER = (
    "Make {} faster on the CPU, or run it while the device works: in the workers of the "
    "DataLoader, in another thread, or after the next launches."
)
# A one-time cost takes so long, and so many times as long as its function does usually.
_LEAST_NS, _LEAST_FACTOR = 1_000_000, 10


def launch_bound(capture: Views) -> Iterator[Problem]:
    """Find the short gaps in which all devices are idle until the next launch has returned.

    Healthy programs spend up to 3 % of the step in such gaps, programs with too many small kernels
    9 to 73 %. The simulation takes the CPU time out of the gaps, so that work is launched as early
    as the launch queue allows. The check cannot see which kernels larger ones could replace.
    """
    found, steps = (
        capture.once("launch gaps", partial(_launch_gaps, capture)),
        capture.links.counted_steps,
    )
    short = found.only((found.wait_ns < _LONG_NS) & (found.call >= 0))
    if len(short.call) < _LEAST_GAPS:
        return
    waited_ns = int(short.wait_ns.sum())
    work_ns = capture.work.end_ns - capture.work.start_ns
    trains = any(name.startswith(OPTIMIZER_STEP) for name in capture.events.names)
    operator, _ = callers(capture.links, short.call)
    name = np.where(operator >= 0, operator, capture.events.name[short.call])
    detail = "time in which the device waited for the operator's kernels"
    yield Problem(
        f"{len(short.call) / steps.count:,.0f} gaps of {duration(waited_ns // len(short.call))} on "
        f"average, between kernels of {duration(int(np.median(work_ns)))} (median)",
        short.call,
        steps.share(waited_ns),
        edit=partial(_launched_early, capture, short),
        place=common_place(capture, short.call, short.wait_ns),
        evidence=without_overloads(
            evidence(capture, short.call, name, short.wait_ns, detail=detail)
        ),
        change=_launch_less(capture)
        + (", and use fused=True in the optimizer." if trains else "."),
    )


LAUNCH_BOUND = Check(
    "launch-bound",
    launch_bound,
    title="The device waits {share} of the {step} for launches in short gaps: {what}",
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=ORDERED,
)


class _Cause(NamedTuple):
    """Where the CPU spent time in the gaps; `event` is the longest event, -1 if it is in none."""

    name: str
    range: str | None
    calls: int
    time_ns: int
    event: int


def device_idle(capture: Views) -> Iterator[Problem]:
    """Find the long gaps that nothing else explains, and where the launching thread spends them.

    Outside of operators and ranges, this is a function, if there are Python stacks.
    """
    found, steps = (
        capture.once("launch gaps", partial(_launch_gaps, capture)),
        capture.links.counted_steps,
    )
    long = found.only(found.wait_ns >= _LONG_NS)
    idle_ns = int(long.wait_ns.sum())
    if not idle_ns:
        return
    causes = _causes(capture, long)
    top = causes[0]
    where, spent_ns = f"in {top.name}", top.time_ns
    source = source_of(capture, top.event) if top.event >= 0 else None
    change = _keep_launching(capture, top)
    rows = [
        evidence_row(
            capture,
            *(each.name, each.calls, each.time_ns, each.event),
            "own CPU time in the gaps" + (f", in {each.range}" if each.range else ""),
        )
        for each in causes
    ]
    if top.event < 0:
        where, by_source = "in no range and no operator", _by_source(capture, long)
        if by_source and by_source[0][1] >= _LEAST_SOURCE * idle_ns:
            source, spent_ns = by_source[0]
            where, change = f"in {source}", _FASTER.format(source)
            rows = [evidence_of_function(capture, each, ns) for each, ns in by_source]
    yield Problem(
        f"for {percent(spent_ns / idle_ns)} of this time, the CPU is {where}",
        share=steps.share(idle_ns),
        edit=partial(_launched_early, capture, long),
        place=(top.range, source),
        evidence=tuple(rows[:_MOST_CAUSES]),
        change=change,
    )


DEVICE_IDLE = Check(
    "device-idle",
    device_idle,
    title="The device is idle for {share} of the {step} in gaps of over 1 ms; {what}",
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=ORDERED,
)


def one_time_costs(capture: Views) -> Iterator[Problem]:
    """Find calls of the runtime that are long only once: first launches, first calls of libraries.

    `launch-bound` and `device-idle` leave them out.
    """
    events = capture.events
    calls = in_steps(capture, capture.once("one-time calls", partial(_one_time_calls, capture)))
    if not len(calls):
        return
    longest = int(calls[np.argmax(events.duration_ns[calls])])
    operator = int(callers(capture.links, np.array([longest]))[0][0])
    where = f" in {split_overload(events.names[operator])[0]}" if operator >= 0 else ""
    is_launch = bool((capture.work.call == longest).any())
    why = "the first launch of a kernel, which loads its code" if is_launch else "a first call"
    yield Problem(
        f"{duration(int(events.duration_ns[longest]))} of {events.names[events.name[longest]]}"
        f"{where}, {why}",
        calls,
        edit=lambda whatif: _without(capture, calls, whatif),
    )


ONE_TIME_COSTS = Check(
    "one-time-costs",
    one_time_costs,
    title="{share} of the {step} is one-time costs, such as {what}",
    change="Record later: first launches of kernels load code, and first calls start a library, "
    "which later steps do not pay. Set profiler.warmup=3 or a larger profiler.wait, or wait and "
    "warmup in the schedule of torch.profiler.",
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=(CPU_IN_STEPS,),
    assumes="once the program is warm",
)


def _launch_less(capture: Views) -> str:
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


class _LaunchGaps(NamedTuple):
    """Gaps in the work of the devices, as parallel columns.

    `queued_ns` is when `call`, which launches the next work, returned, but at most the end of the
    gap; after all device work, `call` is -1. `wait_ns` is the time until then in the counted steps,
    without the interruptions in `_EXPLAINED`, and `waiting` the same time of all gaps as intervals.
    """

    start_ns: Ints
    queued_ns: Ints
    call: Ints
    wait_ns: Ints
    waiting: Intervals

    def only(self, chosen: Flags) -> _LaunchGaps:
        """The gaps that a mask selects."""
        start_ns, queued_ns, call, wait_ns = (each[chosen] for each in self[:4])
        return _LaunchGaps(start_ns, queued_ns, call, wait_ns, self.waiting)


def _launch_gaps(capture: Views) -> _LaunchGaps:
    """Find the gaps in which the devices wait for launches; see `_LaunchGaps`.

    A gap that begins while the CPU waits for the device is left out, because its cause is that
    wait. A gap is left out too if the launch of the next device event is not in the trace.
    """
    events, time = capture.events, capture.links.counted_steps
    found = gaps(events, capture.work, time.start_ns, time.end_ns)
    waits = found.known & ~found.syncing & (found.queued_ns > found.start_ns)
    start, queued = found.start_ns[waits], found.queued_ns[waits]
    explained = np.isin(kinds_of(events), _EXPLAINED)
    explained[capture.once("one-time calls", partial(_one_time_calls, capture))] = True
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
    return _LaunchGaps(start[kept], queued[kept], call, wait_ns[kept], waiting)


def _waits_by_thread(capture: Views, gaps: _LaunchGaps) -> tuple[Ints, Ints, Ints]:
    """The thread that ends a gap, the start and the end of each interval in which devices wait.

    The gap after all device work is ended by the thread of the last launch.
    """
    events = capture.events
    calls = capture.work.call[capture.work.call >= 0]
    last = events.thread[calls[np.argmax(events.start_ns[calls])]] if len(calls) else -1
    threads = np.where(gaps.call >= 0, events.thread[gaps.call], last).astype(np.int64)
    timeline = sweep([(gaps.start_ns, gaps.queued_ns), gaps.waiting])
    waits = timeline.active[0] & timeline.active[1] & (timeline.end_ns > timeline.start_ns)
    start_ns, end_ns = timeline.start_ns[waits], timeline.end_ns[waits]
    gap = np.searchsorted(gaps.start_ns, start_ns, "right") - 1  # gaps do not overlap
    return threads[gap], start_ns, end_ns


def _launched_early(capture: Views, gaps: _LaunchGaps, whatif: Scenario) -> Scenario:
    """The window without the CPU time in the gaps; for the lower bound, half of it stays."""
    threads, start_ns, end_ns = _waits_by_thread(capture, gaps)
    for thread in np.unique(threads).tolist():
        own = threads == thread
        whatif = whatif.scale_spans(thread, (start_ns[own], end_ns[own]), 0, bounds=(0.5, 0))
    return whatif


def _keep_launching(capture: Views, cause: _Cause) -> str:
    name, events = cause.name, capture.events
    stacks = "" if has_sources(capture) else ", or with profiler.with_stack=true"
    if cause.event < 0:
        return (
            f"Find this code first, with @profiled{stacks}; then move it into the workers of the "
            "DataLoader or after the launches of the step."
        )
    tree, (_, launcher) = capture.links.call_tree, capture.links.launched
    call = tree.nodes_of(capture.work.call)
    launching = np.concatenate([launcher[launcher >= 0], call[call >= 0]])
    launches = tree.with_descendants(np.bincount(launching, minlength=len(tree))) > 0
    if not (
        launches & events.named(lambda each: split_overload(each)[0] == name)[tree.index]
    ).any():
        return _FASTER.format(name)
    if events.among(ANNOTATION)[cause.event]:
        return (
            f"Find the code of {name} that launches nothing, with more ranges inside {name}"
            f"{stacks}; make it faster, or run it after the launches."
        )
    shows = "; profiler.with_stack=true shows its functions" if stacks else ""
    return (
        f"Find what keeps the CPU in {name}: a launch takes some µs, and here none begins for over "
        "1 ms. Look for other threads and programs on the CPU, and for waits or Python inside "
        f"it{shows}."
    )


def _causes(capture: Views, gaps: _LaunchGaps) -> list[_Cause]:
    """Where the launching threads spent time during the gaps, the longest time first."""
    events, tree = capture.events, capture.links.call_tree
    waited = _waits_by_thread(capture, gaps)
    inside_ns = within_groups(waited, tree.thread, tree.start_ns, tree.ends_before_overlap)
    own_ns = tree.own(inside_ns)
    outside_ns = int(gaps.wait_ns.sum() - inside_ns[tree.parent < 0].sum())
    node = np.flatnonzero((own_ns > 0) & ~events.named(is_step)[tree.index])
    outside_ns += int(own_ns[(own_ns > 0)].sum() - own_ns[node].sum())
    event = tree.index[node]
    operator, path = callers(capture.links, event)
    name = np.where(operator >= 0, operator, events.name[event])
    keys, groups = groupby((path + 1) * len(events.names) + name)
    total_ns = groups.sum(own_ns[node])
    longest = groups.sorted_by(own_ns[node]).row(100)
    texts = capture.links.scopes.paths.texts
    found = [
        _Cause(
            split_overload(events.names[key % len(events.names)])[0],
            texts[key // len(events.names) - 1] if key >= len(events.names) else None,
            int(groups.size[k]),
            int(total_ns[k]),
            int(event[longest[k]]),
        )
        for k, key in enumerate(keys.tolist())
    ]
    if outside_ns > 0:
        found.append(_Cause("[no range and no operator]", None, len(gaps.call), outside_ns, -1))
    return sorted(found, key=lambda cause: -cause.time_ns)


def _by_source(capture: Views, gaps: _LaunchGaps) -> list[tuple[str, int]]:
    """The functions of the user with their time in the gaps, the longest first."""
    found = Counter[str]()
    threads, start_ns, end_ns = _waits_by_thread(capture, gaps)
    for thread in np.unique(threads[threads >= 0]).tolist():
        own = threads == thread
        found.update(time_by_source(capture, thread, (start_ns[own], end_ns[own])))
    return found.most_common()


def _one_time_calls(capture: Views) -> Ints:
    """The calls of the device's runtime that are long only once.

    They are the first launch of their kernel or in the first call of their operator, and no later
    one takes as long. Waits and copies do not count.
    """
    events, work = capture.events, capture.work
    copies = work.call[events.among(COPIES)[work.event] & (work.call >= 0)]
    calls = events.among(is_runtime) & ~events.named(is_wait)
    calls[copies] = False
    index = np.flatnonzero(calls)
    kernel = np.full(len(events), -1)
    kernel[work.call[work.call >= 0]] = events.name[work.event[work.call >= 0]]
    launches = kernel[index] >= 0
    links, took_ns, name = capture.links, events.duration_ns[index], events.name[index]
    top = outermost_operators(events, links.call_tree, links.nodes_of_calls(index))
    around = np.append(links.call_tree.index, -1)[top]
    operator = np.where(around >= 0, events.name[around], -2 - name)  # a call in no operator
    user = np.where(launches, kernel[index], operator)
    in_operator = ~launches & (around >= 0)
    since_ns = events.start_ns[np.where(in_operator, around, index)]
    of_user, same, of_function = (
        group_rows(*columns) for columns in ((launches, user), (launches, user, name), (name,))
    )
    usual_ns = np.where(of_function.size > 1, took_ns[of_function.sorted_by(took_ns).row(50)], 0)
    is_long = took_ns >= np.maximum(_LEAST_NS, _LEAST_FACTOR * usual_ns[of_function.of])
    is_long_first = is_long & (since_ns == of_user.min(since_ns)[of_user.of])
    once = same.number(is_long) == same.number(is_long_first)
    found: Ints = index[is_long_first & once[same.of]]
    return found


def _without(capture: Views, calls: Ints, whatif: Scenario) -> Scenario:
    events = capture.events
    for thread in np.unique(events.thread[calls]).tolist():
        own = calls[events.thread[calls] == thread]
        spans = merged(events.start_ns[own], events.end_ns[own])
        whatif = whatif.scale_spans(thread, spans, by=0)
    return whatif
