"""`unmarked-time`: the part of the steps' time that no range covers.

The table of ranges cannot explain this time.

The time of a step is marked in three cases:

- A range is open on the thread of the step.
- The autograd engine runs the backward of a range on any of its threads.
- The step waits for the loader.

All other time is unmarked. In a part of the unmarked time, no operator runs on the thread of the
step or on the engine's threads. This part is the time of Python code, or of code that torch does
not record.

There is a finding if at least a fifth of the time of the steps is unmarked. Losses, metrics and
logging between the ranges rarely take more.

With Python stacks, the evidence names the functions that run outside all ranges and operators. The
title names a function that takes at least half of this time.

There is no saving: marking code makes nothing faster, but it shows what takes the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.coverage_rows import CPU_IN_RANGES
from instrument.analysis.places import has_sources, time_by_source, users_source
from instrument.analysis.step_parts import waits_for_data
from instrument.analysis.views import Views
from instrument.findings.evidence import evidence
from instrument.findings.finding import Check, Evidence, Finding, NotRecorded, show_command
from instrument.links.intervals import Timeline, concatenated, merged, sweep
from instrument.links.step_index import CountedSteps
from instrument.trace.events import Ints, called_operators, is_runtime
from instrument.units import duration, percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.2
_SHOWN = 3


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:  # noqa: ARG001
    """Yield one finding if at least a fifth of the time of the steps is in no range."""
    span = capture.links.counted_steps
    if span.what != "step":
        raise NotRecorded("the trace has no finished step", "call session.step() after each step")
    if capture.about.annotations_disabled:
        raise NotRecorded(
            "INSTRUMENT_DISABLE=1 turned all annotations off", "record without INSTRUMENT_DISABLE=1"
        )
    timeline = _timeline(capture, span)
    of_step, in_range, in_operator = timeline.active
    unmarked = of_step & ~in_range
    unmarked_ns = int(timeline.total_ns(unmarked)[0])
    outside_ns = int(timeline.total_ns(unmarked & ~in_operator)[0])
    share, outside = span.share(unmarked_ns), span.share(outside_ns)
    if share < _LEAST_SHARE:
        return
    spans = timeline.merged(unmarked & ~in_operator)
    by_source = time_by_source(capture, _thread(capture), spans)
    sources = sorted(by_source, key=lambda each: -by_source[each])
    main = next((each for each in sources[:1] if by_source[each] >= outside_ns / 2), None)
    title = f"{percent(share)} of the step is in no range"
    if main is not None and outside >= _LEAST_SHARE / 2:
        title += f"; {percent(span.share(by_source[main]))} is spent in {main}"
    elif percent(outside) == percent(share):
        title += " and no operator"
    elif outside >= _LEAST_SHARE / 2:
        title += f"; {percent(outside)} is in no range and no operator"
    where = f"{duration(outside_ns / span.count)} a step"
    yield Finding(
        code="unmarked-time",
        title=title,
        change=_change(capture, outside, main),
        verify=show_command(capture, "--ranges"),
        share=outside,
        source=main,
        evidence=(
            Evidence("(no range, no operator)", span.count, outside_ns, detail=where),
            *(_function(capture, span, each, by_source[each]) for each in sources[:_SHOWN]),
            *evidence(capture, _outermost_outside(capture, span), _SHOWN),
        ),
        coverage=(CPU_IN_RANGES,),
    )


CHECK = Check("unmarked-time", find)


def _timeline(capture: Views, span: CountedSteps) -> Timeline:
    """Return when steps, ranges and operators are active, as the three rows of a timeline."""
    events, links = capture.events, capture.links
    scopes, tree = links.scopes, links.call_tree
    thread = np.unique(events.thread[links.steps])
    on_step = np.isin(scopes.nodes.thread, thread)
    marked = np.where(scopes.backward, scopes.attributed >= 0, on_step)
    loads = waits_for_data(capture)
    in_range = concatenated(
        [
            (scopes.nodes.start_ns[marked], scopes.nodes.end_ns[marked]),
            (events.start_ns[loads], events.end_ns[loads]),
        ]
    )
    # Operators on the engine's threads count too, because the step's own thread waits for them.
    called = (called_operators(events) | events.among(is_runtime))[tree.index]
    called &= np.isin(tree.thread, thread) | np.append(scopes.backward, False)[scopes.innermost]
    in_operator = merged(tree.start_ns[called], tree.end_ns[called])
    return sweep([(span.start_ns, span.end_ns), merged(*in_range), in_operator])


def _function(capture: Views, span: CountedSteps, source: str, time_ns: int) -> Evidence:
    """Make a row for the time that a function spends outside of all ranges and operators."""
    calls = max(_calls(capture, span, source), 1)  # a function may begin before the window
    return Evidence(source, calls, time_ns, detail="outside of operators")


def _thread(capture: Views) -> int:
    """The thread of the last step."""
    return int(capture.events.thread[capture.links.steps[-1]])


def _calls(capture: Views, span: CountedSteps, source: str) -> int:
    """How often a function of the user was called within the steps."""
    frames, events = capture.links.frames, capture.events
    is_called = events.named(lambda name: users_source(name) == source)[frames.index]
    return int((is_called & (span.holds(frames.start_ns) >= 0)).sum())


def _outermost_outside(capture: Views, span: CountedSteps) -> Ints:
    """The outermost operators that begin in a step and in no range, as positions.

    Waits for data are left out.
    """
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    outermost = tree.outermost(called_operators(events)[tree.index])
    chosen = outermost & (scopes.path_of_node[:-1] < 0) & (span.holds(tree.start_ns) >= 0)
    loads = np.isin(tree.index, waits_for_data(capture))
    return tree.index[chosen & ~loads]


def _change(capture: Views, outside: float, main: str | None) -> str:
    if main is not None and outside >= _LEAST_SHARE / 2:
        return f"Make {main} faster, or call it less often; @profiled adds it to the tables."
    if not len(capture.ranges):
        text = 'Session(model=model) marks its submodules; with profiled("loss"): marks a block.'
    else:
        text = (
            "Mark the code outside of all ranges: write `@profiled` above a function, or put "
            'a block into `with profiled("loss"):`.'
        )
    if outside >= _LEAST_SHARE / 2 and not has_sources(capture):
        text += " profiler.with_stack=true shows which functions take the time."
    return text
