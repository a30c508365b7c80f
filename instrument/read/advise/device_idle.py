"""`device-idle`: the device is idle for a long time, while the CPU does work other than launching.

Counted are the gaps of 1 ms and more in which all devices are idle; shorter ones are
`launch-bound`. The cause is the operator or range with the most own time in the gaps, on the thread
that launches the next work; outside of these, the function, if there are Python stacks. The
simulation takes the CPU time of this thread out of the gaps, so that work is launched as early as
the launch queue allows; the lower bound takes out half of it. The check cannot see what other
processes do for which this one waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from instrument.base.units import percent
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import evidence_row
from instrument.read.advise.finding import Evidence
from instrument.read.advise.launch_bound import (
    LONG_NS,
    LaunchGaps,
    launch_gaps,
    launched_early,
    waits_by_thread,
)
from instrument.read.advise.python_time import function_row
from instrument.read.facts.groupby import groupby
from instrument.read.facts.intervals import within_groups
from instrument.read.facts.places import has_sources, source_of, time_by_source
from instrument.read.trace.events import (
    ANNOTATION,
    Ints,
    is_step,
    split_overload,
)
from instrument.read.views.coverage_rows import ORDERED
from instrument.read.views.synchronisations import callers
from instrument.read.views.views import Views

_MOST_CAUSES = 5
# A function is named if it takes at least this part of the gaps.
_LEAST_SOURCE = 0.25
_FASTER = (
    "Make {} faster on the CPU, or run it while the device works: in the workers of the "
    "DataLoader, in another thread, or after the next launches."
)


class _Cause(NamedTuple):
    """Where the CPU spent time in the gaps; `event` is the longest event, -1 if it is in none."""

    name: str
    range: str | None
    calls: int
    time_ns: int
    event: int


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all long gaps that nothing else explains."""
    found, steps = launch_gaps(capture), capture.links.counted_steps
    long = found.only(found.wait_ns >= LONG_NS)
    idle_ns = int(long.wait_ns.sum())
    share = steps.share(idle_ns)
    if share < CHECK.least_share:
        return
    causes = _causes(capture, long)
    top = causes[0]
    where, spent_ns = f"in {top.name}", top.time_ns
    source = source_of(capture, top.event) if top.event >= 0 else None
    rows, change = [_row(capture, cause) for cause in causes], _change(capture, top)
    if top.event < 0:
        where, by_source = "in no range and no operator", _by_source(capture, long)
        if by_source and by_source[0][1] >= _LEAST_SOURCE * idle_ns:
            source, spent_ns = by_source[0]
            where, change = f"in {source}", _FASTER.format(source)
            rows = [function_row(capture, each, ns) for each, ns in by_source]
    yield Problem(
        f"The device is idle for {percent(share)} of the {steps.what} in gaps "
        f"of over 1 ms; for {percent(spent_ns / idle_ns)} of this time, the CPU is {where}",
        share=share,
        edit=partial(launched_early, capture, long),
        place=(top.range, source),
        evidence=tuple(rows[:_MOST_CAUSES]),
        change=change,
    )


CHECK = Check(
    "device-idle",
    find,
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=ORDERED,
)


def _row(capture: Views, cause: _Cause) -> Evidence:
    detail = "own CPU time in the gaps" + (f", in {cause.range}" if cause.range else "")
    return evidence_row(capture, cause.name, cause.calls, cause.time_ns, cause.event, detail)


def _change(capture: Views, cause: _Cause) -> str:
    name, events = cause.name, capture.events
    stacks = "" if has_sources(capture) else ", or with profiler.with_stack=true"
    if cause.event < 0:
        return (
            f"Find this code first, with @profiled{stacks}; then move it into the workers of the "
            "DataLoader or after the launches of the step."
        )
    same = events.named(lambda each: split_overload(each)[0] == name)[capture.links.call_tree.index]
    if not (same & (_launches_inside(capture) > 0)).any():
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


def _launches_inside(capture: Views) -> Ints:
    """For each node of the call tree, how much device work it and its descendants launch."""
    tree, (_, launcher) = capture.links.call_tree, capture.links.launched
    call = tree.nodes_of(capture.work.call)
    launching = np.concatenate([launcher[launcher >= 0], call[call >= 0]])
    return tree.with_descendants(np.bincount(launching, minlength=len(tree)))


def _causes(capture: Views, gaps: LaunchGaps) -> list[_Cause]:
    """Where the launching threads spent time during the gaps, the longest time first."""
    events, tree = capture.events, capture.links.call_tree
    inside_ns = _inside_ns(capture, gaps)
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


def _by_source(capture: Views, gaps: LaunchGaps) -> list[tuple[str, int]]:
    """The functions of the user with their time in the gaps, the longest first."""
    found = Counter[str]()
    threads, start_ns, end_ns = waits_by_thread(capture, gaps)
    for thread in np.unique(threads[threads >= 0]).tolist():
        own = threads == thread
        found.update(time_by_source(capture, thread, (start_ns[own], end_ns[own])))
    return found.most_common()


def _inside_ns(capture: Views, gaps: LaunchGaps) -> Ints:
    """For each node of the call tree, how much of its time lies in gaps that its thread ends."""
    tree = capture.links.call_tree
    waited = waits_by_thread(capture, gaps)
    return within_groups(waited, tree.thread, tree.start_ns, tree.ends_before_overlap)
