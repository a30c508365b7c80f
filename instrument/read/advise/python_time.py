"""`python-time`: a range or a function spends much of the step in Python, outside of operators.

"Python" is time in which the thread of the steps runs no operator and waits for no data: Python
code, or code that torch does not record. If the thread used no CPU for most of it, by the
scheduler's clock, the finding says that it waits, such as for a file. Outside of ranges, only a
trace with Python stacks shows whose time it is; without them, it is a part of `unmarked-time`. The
simulation halves it. Python between the operators of a layer or of a loss rarely takes the fifth of
the step that makes a finding. The time of optimizers is left out, because it is torch's own, and
that of `not-training` too, and so is torch's time in a function. With device work, `device-idle`
counts the Python that delays the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.base.units import counted, duration, percent
from instrument.read.advise.check import ONE_STEP, Check, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.advise.not_training import parts
from instrument.read.facts.groupby import Groups
from instrument.read.facts.intervals import Intervals, concatenated, merged, within
from instrument.read.facts.paths import NO_RANGE
from instrument.read.facts.places import has_sources, sources_of_names, spans_by_source
from instrument.read.facts.segments import python_time, thread_of_steps, waits_for_data
from instrument.read.facts.step_index import CountedSteps
from instrument.read.trace.events import OPERATOR
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

_SHOWN = 3
_LEFT = 0.5  # of the time, in the simulation
_OPTIMIZER = "Optimizer."
_ADVICE = (
    "Replace loops over samples by operators on whole batches, keep what does not change between "
    "steps, or do the work in the workers of a DataLoader"
)
_WAITING = (
    "Find what it waits for, such as a file, the network, another process or a sleep, and do this "
    "in another thread or in the workers of a DataLoader, while the step computes"
)
# A function is named if it takes at least this part of the time, and waiting if this part waits.
_MOSTLY = 0.5


class Place(NamedTuple):
    """Python time of the steps in one range, or in one function outside of all ranges.

    Attributes:
        path: the range; None outside of all ranges.
        spans: the starts and ends, on the thread of the steps; sorted, without overlaps.
        sources: the same time by function of the user, if there are Python stacks.
        waits: whether the thread used no CPU for most of this time.
    """

    path: str | None
    spans: Intervals
    sources: dict[str, Intervals]
    waits: bool = False

    @property
    def main(self) -> str | None:
        """The function with the most time, if it takes at least half of the time."""
        main = max(self.sources, key=lambda each: lasting(self.sources[each]), default=None)
        is_most = main is not None and lasting(self.sources[main]) >= _MOSTLY * lasting(self.spans)
        return main if is_most else None


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each range or function, the longest time first."""
    for place in places(capture):
        yield _problem(capture, place)


CHECK = Check(
    "python-time",
    find,
    verify="--ranges",
    least_share=0.2,
    least_saving=0.05,
    on_device=False,
    needs=(ONE_STEP,),
    coverage=(CPU_IN_STEPS,),
    assumes="with half of this time",
)


def places(capture: Views) -> list[Place]:
    """The ranges, and functions outside of ranges, with at least `least_share` of the step."""
    return capture.once("python-time", lambda: [*_places(capture)])


def _places(capture: Views) -> Iterator[Place]:
    steps, thread = capture.links.counted_steps, thread_of_steps(capture.links)
    found = python_time(capture)
    lasts_ns = found.end_ns - found.start_ns
    known = [part.spans for part in parts(capture)]
    if known:
        lasts_ns -= within(merged(*concatenated(known)), found.start_ns, found.end_ns)
    total_ns = Groups(found.path, len(found.paths)).sum(lasts_ns)
    # In all Python time elsewhere, the thread may have waited too.
    python_ns, blocked_ns = int((found.end_ns - found.start_ns).sum()), _blocked_ns(capture)
    for path in np.argsort(-total_ns, kind="stable").tolist():
        if steps.share(int(total_ns[path])) < CHECK.least_share:
            return
        name = found.paths[path]
        if name.rpartition("/")[2].startswith(_OPTIMIZER):
            continue
        chosen = (found.path == path) & (lasts_ns > 0)
        spans = merged(found.start_ns[chosen], found.end_ns[chosen])
        sources = spans_by_source(capture, thread, spans)
        of_path = [Place(name, spans, sources)]
        if name == NO_RANGE:
            longest = sorted(sources, key=lambda each: -lasting(sources[each]))
            of_path = [Place(None, sources[each], {each: sources[each]}) for each in longest]
        for place in of_path:
            if is_large(capture, place.spans):
                others_ns = python_ns - lasting(place.spans)
                waits = blocked_ns - others_ns >= _MOSTLY * lasting(place.spans)
                yield place._replace(waits=waits)


def _blocked_ns(capture: Views) -> float:
    """How long the thread neither used nor wanted a CPU; 0 if unknown.

    The clock counts for the whole window, of which the steps have their share. Left out are the
    waits for data, the time of operators that are not torch's, which may wait for other ranks, and
    the waits for an operator's other threads, as long as these wait for a CPU.
    """
    wait, steps = capture.about.cpu_wait, capture.links.counted_steps
    if wait is None or wait.ran_ns is None or not wait.window_ns:
        return 0.0
    events, loads = capture.events, waits_for_data(capture)
    left_out_ns = int(steps.within(events.start_ns[loads], events.end_ns[loads]).sum())
    tree = capture.links.call_tree
    may_wait = events.among(OPERATOR) & ~events.named(lambda name: name.startswith("aten::"))
    may_wait = may_wait[tree.index] & (steps.holds(tree.start_ns) >= 0)
    left_out_ns += int(capture.links.own_ns[may_wait].sum())
    used_ns = wait.ran_ns + (wait.waited_ns or 0) + (wait.workers_waited_ns or 0)
    return steps.total_ns * (1 - used_ns / wait.window_ns) - left_out_ns


def is_large(capture: Views, spans: Intervals) -> bool:
    """Whether the spans take a fifth of the steps, and this is no chance of a busy machine.

    On a busy machine, any time can be long in one step, because the thread gets no CPU. So either
    most steps must have the time, or it must exceed the time without a CPU by a fifth.
    """
    steps, wait = capture.links.counted_steps, capture.about.cpu_wait
    least, waited = CHECK.least_share, (wait and wait.share) or 0.0
    share = steps.share(lasting(spans))
    return share >= least and (2 * _holding(steps, spans) > steps.count or share - waited >= least)


def _holding(steps: CountedSteps, spans: Intervals) -> int:
    """The number of steps of which the spans take `least_share`."""
    in_step_ns = within(spans, steps.start_ns, steps.end_ns)
    return int((in_step_ns >= CHECK.least_share * (steps.end_ns - steps.start_ns)).sum())


def _problem(capture: Views, place: Place) -> Problem:
    steps, thread = capture.links.counted_steps, thread_of_steps(capture.links)
    share, main = steps.share(lasting(place.spans)), place.main
    title = f"{percent(share)} of the {steps.what} is Python, or code that torch does not record,"
    if place.waits:
        title = f"For {percent(share)} of the {steps.what}, the thread waits and uses no CPU"
    if place.path is not None:
        title += f" in range {place.path.rpartition('/')[2]!r}"
    if main is not None:
        of_main = percent(steps.share(lasting(place.sources[main])))
        title += f" in {main}" if place.path is None else f"; {of_main} in {main}"
    if (holding := _holding(steps, place.spans)) < steps.count:
        title += f", in {holding} of {counted(steps.count, 'step')}"
    per_step = f"{duration(lasting(place.spans) / steps.count)} a {steps.what}"
    rows = sorted(place.sources, key=lambda each: -lasting(place.sources[each]))[:_SHOWN]
    change = f"{_WAITING if place.waits else _ADVICE}."
    if not has_sources(capture):
        change += " profiler.with_stack=true shows which functions take the time."
    return Problem(
        title,
        share=share,
        edit=partial(_halved, thread=thread, spans=place.spans),
        place=(place.path, main),
        evidence=(
            Evidence("(in no operator)", steps.count, lasting(place.spans), detail=per_step),
            *(function_row(capture, each, lasting(place.sources[each])) for each in rows),
        ),
        change=change,
    )


def _halved(whatif: Scenario, *, thread: int, spans: Intervals) -> Scenario:
    return whatif.scale_spans(thread, spans, by=_LEFT)


def lasting(spans: Intervals) -> int:
    """The length of the spans in ns, which do not overlap."""
    return int((spans[1] - spans[0]).sum())


def function_row(capture: Views, source: str, time_ns: int) -> Evidence:
    """Make a row for the time that a function spends outside of operators."""
    frames, events = capture.links.frames, capture.events
    is_source = np.array([each == source for each in sources_of_names(capture.links)], np.bool_)
    is_called = is_source[events.name[frames.index]]
    in_steps = capture.links.counted_steps.holds(frames.start_ns) >= 0
    calls = max(int((is_called & in_steps).sum()), 1)  # it may begin before the window
    return Evidence(source, calls, time_ns, detail="outside of operators")
