"""The step outside of operators and ranges: Python, time that is not marked, no training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from instrument.base.units import counted, percent
from instrument.read.advise.check import ONE_STEP, Check, NotRecorded, Problem
from instrument.read.advise.evidence import (
    evidence,
    evidence_of_time,
    place_of_time,
    time_by_function,
)
from instrument.read.facts.collective_records import exposed_on_cpu
from instrument.read.facts.intervals import (
    Intervals,
    concatenated,
    interval_at,
    merged,
    within,
)
from instrument.read.facts.links import thread_of_steps
from instrument.read.facts.paths import NO_RANGE
from instrument.read.facts.places import common_place, has_sources
from instrument.read.facts.segments import (
    no_operator,
    segments,
    waits_for_data,
)
from instrument.read.facts.step_index import CountedSteps, step_at
from instrument.read.trace.events import OPERATOR, Ints, called_operators
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.device_use import is_busy
from instrument.read.views.untrained import EVAL, LEAST_PART, Part, untrained_parts
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Edit

_SHOWN = 3
_FEW_CALLS = 4  # in eval mode, in a step; after more of them, training may need their results
_ONCE = (
    "{change}. In this window it occurs once, which does not show how often it occurs: if it is in "
    "one of many steps, it costs little."
)
# Python between the operators of a layer, of a loss, of metrics or logging rarely takes this part.
_LEAST = 0.2
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
_NONE = np.zeros(0, np.int64), np.zeros(0, np.int64)


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
    """Time of the steps in no operator, in one range, or in one function outside of all ranges.

    `path` is None outside of all ranges, `rows` are some of `no_operator`, and `waits` is whether
    the thread used no CPU for most of this time.
    """

    path: str | None
    rows: pl.DataFrame
    waits: bool


def python_time(capture: Views) -> Iterator[Problem]:
    """Find ranges, and functions in no range, that spend a fifth of the step outside of operators.

    This is Python, code that torch does not record, or, if the thread used no CPU, a wait.
    """
    steps = capture.links.counted_steps
    for path, rows, waits in _places(capture):
        _, main = place_of_time(rows)
        share = percent(steps.share(_ns(rows)))
        title = f"{share} of the {steps.what} is Python, or code that torch does not record,"
        if waits:
            title = f"For {share} of the {steps.what}, the thread waits and uses no CPU"
        if path is not None:
            title += f" in range {path.rpartition('/')[2]!r}"
        if main is not None:
            of_main = percent(steps.share(time_by_function(rows)[0][1]))
            title += f" in {main}" if path is None else f"; {of_main} in {main}"
        if (holding := _holding(steps, rows)) < steps.count:
            title += f", in {holding} of {counted(steps.count, 'step')}"
        change = f"{_WAITING if waits else _ADVICE}."
        if not has_sources(capture):
            change += " profiler.with_stack=true shows which functions take the time."
        yield Problem(title, rows=rows, change=change)


PYTHON_TIME = Check(
    "python-time",
    python_time,
    verify="--ranges",
    least_share=_LEAST,
    lowest=_LEAST,
    least_saving=0.05,
    on_device=False,
    factor=0.5,
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
    unmarked, beside = _unmarked(capture)
    if not _is_large(capture, unmarked):
        return
    steps, outside_ns = capture.links.counted_steps, _ns(beside)
    share, outside = steps.share(_ns(unmarked)), steps.share(outside_ns)
    _, main = place_of_time(beside)
    is_outside = outside >= _LEAST / 2
    title = f"{percent(share)} of the step is in no range"
    if main is not None and is_outside:
        title += f"; {percent(steps.share(time_by_function(beside)[0][1]))} is spent in {main}"
    elif percent(outside) == percent(share):
        title += " and no operator"
    elif is_outside:
        title += f"; {percent(outside)} is in no range and no operator"
    yield Problem(
        title,
        share=None if len(capture.work.event) else outside,
        place=(None, main),
        is_large=True,
        evidence=(
            *evidence_of_time(capture, beside, _NOWHERE),
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
    steps, rows, ns = capture.links.counted_steps, no_operator(capture), pl.sum("duration_ns")
    # In all Python time elsewhere, the thread may have waited too.
    python_ns, blocked_ns = _ns(rows), _blocked_ns(capture)
    known = merged(*concatenated([_NONE, *(part.spans for part in untrained_parts(capture))]))
    rows = rows.with_columns(left_ns=pl.col("duration_ns") - within(known, *_sides(rows)))
    rows = rows.filter(pl.col("left_ns") > 0)
    by_path = rows.group_by("path").agg(pl.sum("left_ns")).sort("left_ns", "path", descending=True)
    for path, total_ns in by_path.iter_rows():
        if steps.share(total_ns) < _LEAST:
            return
        of_path = rows.filter(path=path)
        if path.rpartition("/")[2].startswith(_OPTIMIZER):
            continue
        found = [(path, of_path)]
        if path == NO_RANGE:
            of_path = of_path.drop_nulls("source").with_columns(ns.over("source").alias("all_ns"))
            of_path = of_path.sort("all_ns", descending=True, maintain_order=True)
            found = [(None, each) for each in of_path.partition_by("source", maintain_order=True)]
        for name, own in found:
            if _is_large(capture, own):
                own_ns = _ns(own)
                yield _Place(name, own, blocked_ns - (python_ns - own_ns) >= _MOSTLY * own_ns)


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


def _is_large(capture: Views, rows: pl.DataFrame) -> bool:
    """Whether rows of segments take a fifth of the steps, and this is no chance of a busy machine.

    On a busy machine, any time can be long in one step, because the thread gets no CPU. So either
    most steps must have the time, or it must exceed the time without a CPU by a fifth.
    """
    steps, wait = capture.links.counted_steps, capture.about.cpu_wait
    share, waited = steps.share(_ns(rows)), (wait and wait.share) or 0.0
    is_usual = 2 * _holding(steps, rows) > steps.count
    return share >= _LEAST and (is_usual or share - waited >= _LEAST)


def _holding(steps: CountedSteps, rows: pl.DataFrame) -> int:
    """The number of steps of which the rows take a fifth."""
    at, ns = steps.holds(rows["start_ns"].to_numpy()), rows["duration_ns"].to_numpy()
    in_step_ns = np.bincount(at, ns, minlength=steps.count)
    return int((in_step_ns >= _LEAST * (steps.end_ns - steps.start_ns)).sum())


def _ns(rows: pl.DataFrame) -> int:
    return int(rows["duration_ns"].sum())


def _sides(rows: pl.DataFrame) -> Intervals:
    return rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()


def _unmarked(capture: Views) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The time of the thread of the steps in no range, and of this the time in no operator.

    Left out are waits for data, for communication, and for device work of ranges, and what
    `not-training` and `python-time` name, which needs no mark.
    """
    events, links = capture.events, capture.links
    named = [exposed_on_cpu(links), *(part.spans for part in untrained_parts(capture))]
    if not len(capture.work.event):
        named += [_sides(place.rows) for place in _places(capture)]
    device, node = links.launched
    work = device[links.scopes.path_of_node[node] >= 0]
    known = merged(*concatenated(named))
    or_work = merged(*concatenated([known, (events.start_ns[work], events.end_ns[work])]))
    waits = pl.col("kind") == "waiting for the device"
    counts = (pl.col("path") == NO_RANGE) & (pl.col("kind") != "waiting for data")

    def without_known(rows: pl.DataFrame) -> pl.DataFrame:
        rows = rows.filter(counts)
        of_known, of_either = (pl.Series(within(each, *_sides(rows))) for each in (known, or_work))
        known_ns = pl.when(waits).then(of_either).otherwise(of_known)
        return rows.with_columns(duration_ns=pl.col("duration_ns") - known_ns)

    every = segments(capture, "cpu").filter("counted")
    return without_known(every), without_known(no_operator(capture))


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
