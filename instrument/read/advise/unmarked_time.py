"""`unmarked-time`: the part of the steps' time that no range covers, so no table can explain it.

Time is marked while a range is open on the thread of the step, while the autograd engine runs the
backward of a range, and while the step waits for the loader, for communication on the CPU, or for
device work of a range. In a part of the unmarked time no operator runs either: Python code, or code
that torch does not record. With Python stacks, its functions are named. `Finding.share` is this
part; with device work it is unknown, because `device-idle` counts what of it delays the device.
Losses, metrics and logging rarely take the fifth of the step that makes a finding. There is no
saving: marking makes nothing faster. While a device works in half of the steps' time or more, the
CPU's time is no finding. Functions that `python-time` or `not-training` name need no
mark, so they do not count here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.advise import not_training, python_time
from instrument.read.advise.check import ONE_STEP, Check, NotRecorded, Problem
from instrument.read.advise.evidence import evidence
from instrument.read.advise.finding import Evidence
from instrument.read.advise.python_time import function_row, is_large
from instrument.read.facts.collective_records import exposed_on_cpu
from instrument.read.facts.intervals import Timeline, concatenated, merged, sweep
from instrument.read.facts.places import has_sources, time_by_source
from instrument.read.facts.segments import waits_for_data
from instrument.read.facts.synchronisation import STREAM_WAIT
from instrument.read.trace.events import Ints, called_operators, is_runtime
from instrument.read.views.coverage_rows import CPU_IN_RANGES
from instrument.read.views.device_use import is_busy
from instrument.read.views.views import Views

_SHOWN = 3
_NOWHERE = "(in no range, in no operator)"


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all unmarked time."""
    if capture.about.annotations_disabled:
        raise NotRecorded(
            "INSTRUMENT_DISABLE=1 turned all annotations off", "record without INSTRUMENT_DISABLE=1"
        )
    if is_busy(capture):
        return
    steps, timeline = capture.links.counted_steps, _timeline(capture)
    of_step, in_range, in_operator, is_named, waits, of_range = timeline.active
    unmarked = of_step & ~in_range & ~is_named & ~(waits & of_range)
    outside_ns = int(timeline.total_ns(unmarked & ~in_operator)[0])
    share = steps.share(int(timeline.total_ns(unmarked)[0]))
    outside = steps.share(outside_ns)
    if not is_large(capture, timeline.merged(unmarked)):
        return
    spans, thread = timeline.merged(unmarked & ~in_operator), capture.links.steps[-1]
    by_source = time_by_source(capture, int(capture.events.thread[thread]), spans)
    sources = sorted(by_source, key=lambda each: -by_source[each])
    main = next((each for each in sources[:1] if by_source[each] >= outside_ns / 2), None)
    is_outside = outside >= CHECK.least_share / 2
    title = f"{percent(share)} of the step is in no range"
    if main is not None and is_outside:
        title += f"; {percent(steps.share(by_source[main]))} is spent in {main}"
    elif percent(outside) == percent(share):
        title += " and no operator"
    elif is_outside:
        title += f"; {percent(outside)} is in no range and no operator"
    per_step = f"{duration(outside_ns / steps.count)} a step"
    yield Problem(
        title,
        share=None if len(capture.work.event) else outside,
        place=(None, main),
        evidence=(
            *[Evidence(_NOWHERE, steps.count, outside_ns, detail=per_step)][: outside_ns > 0],
            *(function_row(capture, each, by_source[each]) for each in sources[:_SHOWN]),
            *evidence(capture, _outermost_outside(capture), _SHOWN),
        ),
        change=_change(capture, main, is_large=is_outside),
    )


CHECK = Check(
    "unmarked-time",
    find,
    verify="--ranges",
    least_share=python_time.CHECK.least_share,
    needs=(ONE_STEP,),
    coverage=(CPU_IN_RANGES,),
)


def _timeline(capture: Views) -> Timeline:
    """When what is active, as rows of a timeline.

    The rows are steps, ranges, operators, named functions, calls that wait for a device, and device
    work of ranges.
    """
    events, links, steps = capture.events, capture.links, capture.links.counted_steps
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
    named = [exposed_on_cpu(links), *(part.spans for part in not_training.parts(capture))]
    if not len(capture.work.event):
        named += [place.spans for place in python_time.places(capture)]
    is_named = merged(*concatenated(named))
    found, (device, node) = links.synchronisations, links.launched
    calls = found.call[found.kind != STREAM_WAIT]
    work = device[scopes.path_of_node[node] >= 0]
    waits, of_range = (
        merged(events.start_ns[each], events.end_ns[each])
        for each in (calls[np.isin(events.thread[calls], thread)], work)
    )
    of_steps = steps.start_ns, steps.end_ns
    return sweep([of_steps, merged(*in_range), in_operator, is_named, waits, of_range])


def _outermost_outside(capture: Views) -> Ints:
    """The outermost operators that begin in a step and in no range, without waits for data."""
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    outermost = tree.outermost(called_operators(events)[tree.index])
    in_steps = links.counted_steps.holds(tree.start_ns) >= 0
    loads = np.isin(tree.index, waits_for_data(capture))
    return tree.index[outermost & (scopes.path_of_node[:-1] < 0) & in_steps & ~loads]


def _change(capture: Views, main: str | None, *, is_large: bool) -> str:
    if main is not None and is_large:
        return f"Make {main} faster, or call it less often; @profiled adds it to the tables."
    if not len(capture.links.scopes.ranges):
        text = (
            '`from instrument import profiled`, and put a block into `with profiled("loss"):`. '
            "Session(model=model) marks the submodules of a model."
        )
    else:
        text = (
            "Mark the code outside of all ranges: write `@profiled` above a function, or put "
            'a block into `with profiled("loss"):`.'
        )
    if is_large and not has_sources(capture):
        text += " profiler.with_stack=true shows which functions take the time."
    return text
