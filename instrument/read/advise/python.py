"""The step outside of operators and ranges: Python, time that is not marked, no training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from instrument.base.units import counted, duration, percent
from instrument.read.advise.check import ONE_STEP, Check, NotRecorded, Problem
from instrument.read.advise.evidence import evidence, evidence_of_function, lasting
from instrument.read.advise.finding import Evidence
from instrument.read.facts.collective_records import exposed_on_cpu
from instrument.read.facts.groupby import Groups
from instrument.read.facts.intervals import (
    Intervals,
    concatenated,
    interval_at,
    merged,
    sweep,
    within,
)
from instrument.read.facts.paths import NO_RANGE
from instrument.read.facts.places import common_place, has_sources, spans_by_source, time_by_source
from instrument.read.facts.segments import python_time as python_spans
from instrument.read.facts.segments import segments, thread_of_steps, waits_for_data
from instrument.read.facts.step_index import CountedSteps, step_at
from instrument.read.trace.events import OPERATOR, Ints, called_operators
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.device_use import is_busy
from instrument.read.views.untrained import EVAL, LEAST_PART, Part, untrained_parts
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit, Scenario

_SHOWN = 3
_FEW_CALLS = 4  # in eval mode, in a step; after more of them, training may need their results
_ONCE = (
    "{change}. In this window it occurs once, which does not show how often it occurs: if it is in "
    "one of many steps, it costs little."
)
# Python between the operators of a layer, of a loss, of metrics or logging rarely takes this part.
_LEAST = 0.2
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
_NOWHERE = "(in no range, in no operator)"


def not_training(capture: Views) -> Iterator[Problem]:
    """Find the parts of the steps that do not train; the simulation leaves them out.

    The saving is unknown if a part occurs only in one of several steps, or if a step calls a model
    in eval mode many times.
    """
    steps = capture.links.counted_steps
    for part in untrained_parts(capture):
        at = steps.holds(part.spans[0])
        holding = len(np.unique(at[at >= 0]))
        often = f"{(at >= 0).sum() / holding:,.0f}× a step"
        if holding < steps.count:
            often = f"in {holding} of {steps.count} steps"
        every = step_at(capture.events, capture.links.steps, part.spans[0])
        is_once = len(capture.links.steps) > 1 and len(np.unique(every[every >= 0])) == 1
        may_train = part.change == EVAL and (at >= 0).sum() > _FEW_CALLS * holding
        share, place = steps.covered(*part.spans), common_place(capture, part.events)
        yield Problem(
            f"{percent(share)} of the {steps.what} goes to {part.name}"
            f"{'' if may_train else ', not to training'}: {often}",
            part.events,
            None if is_once else share,
            edit=None if is_once or may_train else _without(capture, part),
            place=(place[0] if part.is_range else None, place[1]),
            evidence=evidence(capture, part.events),
            change=_ONCE.format(change=part.change) if is_once else f"{part.change}.",
            verify="--ranges" if part.is_range else "",
            is_large=is_once,
        )


NOT_TRAINING = Check(
    "not-training",
    not_training,
    verify="Record again: this finding must be gone.",
    least_share=LEAST_PART,
    lowest=LEAST_PART,
    least_saving=0.05,
    needs=(ONE_STEP,),
    coverage=(CPU_IN_STEPS,),
)


class _Place(NamedTuple):
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


def python_time(capture: Views) -> Iterator[Problem]:
    """Find ranges, and functions in no range, that spend a fifth of the step outside of operators.

    This is Python, code that torch does not record, or, if the thread used no CPU, a wait.
    """
    steps, thread = capture.links.counted_steps, thread_of_steps(capture.links)
    for path, spans, sources, waits in _places(capture):
        lasts_ns = {source: lasting(each) for source, each in sources.items()}
        longest = sorted(lasts_ns, key=lambda each: -lasts_ns[each])[:_SHOWN]
        total_ns, share = lasting(spans), steps.share(lasting(spans))
        main = next((each for each in longest[:1] if lasts_ns[each] >= _MOSTLY * total_ns), None)
        title = (
            f"{percent(share)} of the {steps.what} is Python, or code that torch does not record,"
        )
        if waits:
            title = f"For {percent(share)} of the {steps.what}, the thread waits and uses no CPU"
        if path is not None:
            title += f" in range {path.rpartition('/')[2]!r}"
        if main is not None:
            of_main = percent(steps.share(lasts_ns[main]))
            title += f" in {main}" if path is None else f"; {of_main} in {main}"
        if (holding := _holding(steps, spans)) < steps.count:
            title += f", in {holding} of {counted(steps.count, 'step')}"
        per_step = f"{duration(total_ns / steps.count)} a {steps.what}"
        change = f"{_WAITING if waits else _ADVICE}."
        if not has_sources(capture):
            change += " profiler.with_stack=true shows which functions take the time."
        yield Problem(
            title,
            share=share,
            edit=partial(_halved, thread=thread, spans=spans),
            place=(path, main),
            evidence=(
                Evidence("(in no operator)", steps.count, total_ns, detail=per_step),
                *(evidence_of_function(capture, each, lasts_ns[each]) for each in longest),
            ),
            change=change,
        )


PYTHON_TIME = Check(
    "python-time",
    python_time,
    verify="--ranges",
    least_share=_LEAST,
    lowest=_LEAST,
    least_saving=0.05,
    on_device=False,
    needs=(ONE_STEP,),
    coverage=(CPU_IN_STEPS,),
    assumes="with half of this time",
)


def unmarked_time(capture: Views) -> Iterator[Problem]:
    """Find time that is in no range, so no table can explain it; the share is that in no operator.

    With device work, this share is unknown, because `device-idle` counts what of it delays the
    device. There is no saving: marking makes nothing faster.
    """
    if capture.about.annotations_disabled:
        raise NotRecorded(
            "INSTRUMENT_DISABLE=1 turned all annotations off", "record without INSTRUMENT_DISABLE=1"
        )
    if is_busy(capture):
        return
    unmarked, spans = _unmarked(capture)
    if not _is_large(capture, unmarked):
        return
    steps, outside_ns = capture.links.counted_steps, lasting(spans)
    share, outside = steps.share(lasting(unmarked)), steps.share(outside_ns)
    by_source = time_by_source(capture, thread_of_steps(capture.links), spans)
    sources = sorted(by_source, key=lambda each: -by_source[each])
    main = next((each for each in sources[:1] if by_source[each] >= outside_ns / 2), None)
    is_outside = outside >= _LEAST / 2
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
        is_large=True,
        evidence=(
            *[Evidence(_NOWHERE, steps.count, outside_ns, detail=per_step)][: outside_ns > 0],
            *(evidence_of_function(capture, each, by_source[each]) for each in sources[:_SHOWN]),
            *evidence(capture, _outermost_outside(capture), most=_SHOWN),
        ),
        change=_mark(capture, main, is_large=is_outside),
    )


UNMARKED_TIME = Check(
    "unmarked-time", unmarked_time, verify="--ranges", needs=(ONE_STEP,), coverage=(CPU_IN_STEPS,)
)


def _without(capture: Views, part: Part) -> Edit:
    """The step without the part, and without the device work that it launches."""
    if part.is_range:
        return lambda whatif: whatif.scale_events(part.events, by=0)
    tree, thread = capture.links.call_tree, thread_of_steps(capture.links)
    inside = (interval_at(part.spans, tree.start_ns) >= 0) & (tree.thread == thread)
    calls = tree.index[tree.outermost(inside)]
    return lambda whatif: whatif.scale_events(calls, by=0).scale_spans(thread, part.spans, by=0)


def _places(capture: Views) -> list[_Place]:
    """The ranges, and functions outside of ranges, with a fifth of the step, the longest first.

    The time of optimizers is left out, because it is torch's own, and that of `not-training`.
    """
    return capture.once("python places", lambda: [*_find_places(capture)])


def _find_places(capture: Views) -> Iterator[_Place]:
    steps, thread = capture.links.counted_steps, thread_of_steps(capture.links)
    found = python_spans(capture)
    lasts_ns = found.end_ns - found.start_ns
    known = [part.spans for part in untrained_parts(capture)]
    if known:
        lasts_ns -= within(merged(*concatenated(known)), found.start_ns, found.end_ns)
    total_ns = Groups(found.path, len(found.paths)).sum(lasts_ns)
    # In all Python time elsewhere, the thread may have waited too.
    python_ns, blocked_ns = int((found.end_ns - found.start_ns).sum()), _blocked_ns(capture)
    for path in np.argsort(-total_ns, kind="stable").tolist():
        if steps.share(int(total_ns[path])) < _LEAST:
            return
        name = found.paths[path]
        if name.rpartition("/")[2].startswith(_OPTIMIZER):
            continue
        chosen = (found.path == path) & (lasts_ns > 0)
        spans = merged(found.start_ns[chosen], found.end_ns[chosen])
        sources = spans_by_source(capture, thread, spans)
        of_path = [_Place(name, spans, sources)]
        if name == NO_RANGE:
            longest = sorted(sources, key=lambda each: -lasting(sources[each]))
            of_path = [_Place(None, sources[each], {each: sources[each]}) for each in longest]
        for place in of_path:
            if _is_large(capture, place.spans):
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


def _is_large(capture: Views, spans: Intervals) -> bool:
    """Whether the spans take a fifth of the steps, and this is no chance of a busy machine.

    On a busy machine, any time can be long in one step, because the thread gets no CPU. So either
    most steps must have the time, or it must exceed the time without a CPU by a fifth.
    """
    steps, wait = capture.links.counted_steps, capture.about.cpu_wait
    share, waited = steps.share(lasting(spans)), (wait and wait.share) or 0.0
    is_usual = 2 * _holding(steps, spans) > steps.count
    return share >= _LEAST and (is_usual or share - waited >= _LEAST)


def _holding(steps: CountedSteps, spans: Intervals) -> int:
    """The number of steps of which the spans take a fifth."""
    in_step_ns = within(spans, steps.start_ns, steps.end_ns)
    return int((in_step_ns >= _LEAST * (steps.end_ns - steps.start_ns)).sum())


def _halved(whatif: Scenario, *, thread: int, spans: Intervals) -> Scenario:
    return whatif.scale_spans(thread, spans, by=_LEFT)


def _unmarked(capture: Views) -> tuple[Intervals, Intervals]:
    """When the thread of the steps is in no range, and when of this time it is in no operator.

    Left out are waits for data, for communication, and for device work of ranges, and what
    `not-training` and `python-time` name, which needs no mark.
    """
    events, links = capture.events, capture.links
    named = [exposed_on_cpu(links), *(part.spans for part in untrained_parts(capture))]
    if not len(capture.work.event):
        named += [place.spans for place in _places(capture)]
    device, node = links.launched
    work = device[links.scopes.path_of_node[node] >= 0]
    rows = segments(capture, "cpu").filter(
        pl.col("counted") & (pl.col("path") == NO_RANGE) & (pl.col("kind") != "waiting for data")
    )
    waits = rows.filter(pl.col("kind") == "waiting for the device")
    outside = rows.filter(pl.col("kind").is_in(["Python", "idle"]))
    timeline = sweep(
        [
            *((each["start_ns"].to_numpy(), each["end_ns"].to_numpy()) for each in (rows, outside)),
            (waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()),
            merged(events.start_ns[work], events.end_ns[work]),
            merged(*concatenated(named)),
        ]
    )
    in_no_range, in_no_operator, waiting, of_range, is_named = timeline.active
    unmarked = in_no_range & ~is_named & ~(waiting & of_range)
    return timeline.merged(unmarked), timeline.merged(unmarked & in_no_operator)


def _outermost_outside(capture: Views) -> Ints:
    """The outermost operators that begin in a step and in no range, without waits for data."""
    events, links = capture.events, capture.links
    tree, scopes = links.call_tree, links.scopes
    outermost = tree.outermost(called_operators(events)[tree.index])
    in_steps = links.counted_steps.holds(tree.start_ns) >= 0
    loads = np.isin(tree.index, waits_for_data(capture))
    return tree.index[outermost & (scopes.path_of_node[:-1] < 0) & in_steps & ~loads]


def _mark(capture: Views, main: str | None, *, is_large: bool) -> str:
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
