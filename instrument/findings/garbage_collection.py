"""Find steps that wait for Python's garbage collector.

The check reads the events "Python GC" of the trace. torch records these events only if it records
Python stacks and its experimental option `record_python_gc_info` is on. Without these events, the
check reads the collector's time in `capture.json`, which shows how long the collector ran in the
window, but not when.

The collector visits every object that can be part of a cycle, and all threads wait for it. There is
a finding if the collector takes at least 2 % of the time of the steps. If the trace has no
"Python GC" events, the collector's time is compared with the window. In usual training, the
collector takes well under 1 %, because a step keeps few new objects. Python starts a full
collection only after many new objects.

One full collection can take most of the collector's time in a window. Then the title and the advice
say so, because a step usually waits less.

The check cannot see why the collector ran. If the trace has Python frames, the finding
distinguishes collections that the program started with `gc.collect()` from those that Python
started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.evidence import evidence
from instrument.findings.finding import (
    RECORD_AGAIN,
    Check,
    Evidence,
    Finding,
    NotRecorded,
    show_command,
)
from instrument.findings.saving import scaled
from instrument.trace.events import PYTHON, Ints
from instrument.units import counted, duration, percent

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.02
# If the longest collection takes a larger share of the collector's time, the finding says so,
# because in another window the collector may take much more or much less.
_MOST_IN_ONE = 0.5
_EVENT = "Python GC"
# The frame of a call of `gc.collect`.
_CALL = "<built-in function collect>"
_RECORD = "profiler.with_stack=true profiler.experimental_config={record_python_gc_info: true}"


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if Python's garbage collector takes at least 2 % of the time of the steps.

    If the trace has no "Python GC" events, the collector's time in the steps is not known. There is
    then a finding if the collector takes at least 2 % of the window.

    Raises:
        NotRecorded: the collector's time in the window is not known either.
    """
    events = capture.events
    collections = np.flatnonzero(events.among(PYTHON) & events.named(_EVENT.__eq__))
    if len(collections):
        yield from _from_events(capture, whatif, collections)
    else:
        yield from _from_window(capture)


def _from_events(capture: Views, whatif: Scenario, collections: Ints) -> Iterator[Finding]:
    events, steps = capture.events, capture.links.counted_steps
    within_ns = steps.within(events.start_ns[collections], events.end_ns[collections])
    share = steps.share(int(within_ns.sum()))
    if share < _LEAST_SHARE:
        return
    inside = collections[within_ns > 0]
    place, source = common_place(capture, inside)
    largest = float(within_ns.max() / within_ns.sum())
    longest_ns = int(events.duration_ns[inside].max())
    yield Finding(
        code=CHECK.code,
        title=f"Python's garbage collector takes {percent(share)} of the {steps.what}: "
        + _collections(len(inside), longest_ns, largest),
        change=_change(_called(capture, inside), largest),
        verify=show_command(capture, "--interruptions"),
        share=share,
        saving=scaled(whatif, collections),
        range=place,
        source=source,
        evidence=evidence(capture, inside),
        coverage=("CPU time within finished steps",),
    )


def _from_window(capture: Views) -> Iterator[Finding]:
    environment = capture.about.environment
    known = None if environment is None else environment.garbage_collection
    if known is None or known.total_ns is None or known.collections is None:
        raise NotRecorded(
            "the capture does not show how long Python's garbage collector ran",
            f"{RECORD_AGAIN}, or with {_RECORD}",
        )
    steps = capture.links.steps
    events = capture.events
    whole_ns = int(events.end_ns.max(initial=0) - events.begin_ns)
    if len(steps):
        whole_ns = int(events.end_ns[steps[-1]] - events.start_ns[steps[0]])
    share = known.total_ns / whole_ns if whole_ns > 0 else 0.0
    if share < _LEAST_SHARE:
        return
    largest = (known.longest_ns or 0) / known.total_ns
    yield Finding(
        code=CHECK.code,
        title=f"Python's garbage collector takes {percent(share)} of the window: "
        + _collections(known.collections, known.longest_ns, largest),
        change=_change(None, largest),
        verify=f"Record with {_RECORD} to see which steps wait for the collector, and where.",
        evidence=(Evidence(_EVENT, known.collections, known.total_ns),),
    )


def _called(capture: Views, collections: Ints) -> bool | None:
    """Whether `gc.collect()` started most of the collections; None without Python frames."""
    frames = capture.links.frames
    if not len(frames):
        return None
    is_call = capture.events.named(_CALL.__eq__)[frames.index]
    nearest = frames.nearest(is_call, frames.nodes_of(collections))
    return bool((nearest >= 0).mean() > 0.5)


def _collections(number: int, longest_ns: int | None, largest: float) -> str:
    """The number of collections and the longest one, whose share of their time is `largest`."""
    if longest_ns is None:
        return counted(number, "collection")
    if number == 1:
        return f"one collection of {duration(longest_ns)}"
    longest = f"the longest {duration(longest_ns)}"
    if largest > _MOST_IN_ONE:
        longest = f"but one of {duration(longest_ns)} makes {percent(largest)} of this time"
    return f"{counted(number, 'collection')}, {longest}"


def _change(called: bool | None, largest: float) -> str:
    """What to do; `largest` is the longest collection's share of the time of all collections."""
    text = _change_of_calls(called)
    if largest <= _MOST_IN_ONE:
        return text
    return (
        f"{text} One collection makes most of the time in this window: a longer window shows how "
        "often such a collection occurs, and so what a step saves on average."
    )


def _change_of_calls(called: bool | None) -> str:
    seldom = (
        "Call gc.freeze() and gc.disable() after the set-up, and gc.collect() every few hundred "
        "steps."
    )
    if called is None:
        return f"{seldom} If the step itself calls gc.collect(), remove this call."
    return "Do not call gc.collect() in the steps." if called else seldom


CHECK = Check("garbage-collection", find)
