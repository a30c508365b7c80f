"""`garbage-collection`: steps wait for Python's garbage collector.

The collector stops all threads; in usual training it takes well under 1 % of the step. The check
reads the events "Python GC" (torch records them with Python stacks and `record_python_gc_info`),
else the collector's time in the whole window from `capture.json`. One full collection can take most
of this time: then the finding says so, because a step usually waits less. The check cannot see why
the collector ran, only whether the program called `gc.collect()`, if there are Python frames.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.base.units import counted, duration, percent
from instrument.read.advise.check import RECORD_AGAIN, Check, NotRecorded, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.trace.events import PYTHON, Ints
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.views import Views

# If the longest collection takes a larger share of the collector's time, the finding says so,
# because in another window the collector may take much more or much less.
_MOST_IN_ONE = 0.5
_EVENT = "Python GC"
# The frame of a call of `gc.collect`.
_CALL = "<built-in function collect>"
_RECORD = "profiler.with_stack=true profiler.experimental_config={record_python_gc_info: true}"
_SELDOM = (
    "Call gc.freeze() and gc.disable() after the set-up, and gc.collect() every few hundred steps."
)


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all collections in the steps, or else in the window."""
    events = capture.events
    collections = np.flatnonzero(events.among(PYTHON) & events.named(_EVENT.__eq__))
    if len(collections):
        yield from _from_events(capture, collections)
    else:
        yield from _from_window(capture)


CHECK = Check(
    "garbage-collection",
    find,
    verify="--interruptions",
    least_share=0.02,
    coverage=(CPU_IN_STEPS,),
)


def _from_events(capture: Views, collections: Ints) -> Iterator[Problem]:
    events, steps = capture.events, capture.links.counted_steps
    within_ns = steps.within(events.start_ns[collections], events.end_ns[collections])
    share = steps.share(int(within_ns.sum()))
    if share < CHECK.least_share:
        return
    inside = collections[within_ns > 0]
    largest = float(within_ns.max() / within_ns.sum())
    longest_ns = int(events.duration_ns[inside].max())
    yield Problem(
        f"Python's garbage collector takes {percent(share)} of the {steps.what}: "
        + _collections(len(inside), longest_ns, largest),
        inside,
        share,
        edit=lambda whatif: whatif.scale_events(collections, by=0),
        change=_change(_called(capture, inside), largest),
    )


def _from_window(capture: Views) -> Iterator[Problem]:
    environment = capture.about.environment
    known = None if environment is None else environment.garbage_collection
    if known is None or known.total_ns is None or known.collections is None:
        raise NotRecorded(
            "the capture does not show how long Python's garbage collector ran",
            f"{RECORD_AGAIN}, or with {_RECORD}",
        )
    if capture.about.window.truncated:  # then some of the time may be after the last whole step
        raise NotRecorded(
            "the window ended early, so the share of Python's garbage collector is not known",
            f"{RECORD_AGAIN}, or with {_RECORD}",
        )
    events, steps = capture.events, capture.links.steps
    whole_ns = int(events.end_ns.max(initial=0) - events.begin_ns)
    if len(steps):
        whole_ns = int(events.end_ns[steps[-1]] - events.start_ns[steps[0]])
    share = known.total_ns / whole_ns if whole_ns > 0 else 0.0
    if share < CHECK.least_share:
        return
    largest = (known.longest_ns or 0) / known.total_ns
    yield Problem(
        f"Python's garbage collector takes {percent(share)} of the window: "
        + _collections(known.collections, known.longest_ns, largest),
        share=share,
        evidence=(Evidence(_EVENT, known.collections, known.total_ns),),
        change=_change(None, largest),
        verify=f"Record with {_RECORD} to see which steps wait for the collector, and where.",
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
    text = "Do not call gc.collect() in the steps." if called else _SELDOM
    if called is None:
        text += " If the step itself calls gc.collect(), remove this call."
    if largest > _MOST_IN_ONE:
        text += (
            " One collection makes most of the time in this window: a longer window shows how "
            "often such a collection occurs, and so what a step saves on average."
        )
    return text
