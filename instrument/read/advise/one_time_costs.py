"""`one-time-costs`: first launches of kernels and first calls of libraries, which later steps lack.

The first launch of a kernel loads its code, and the first call of a library starts it: the runtime
of the device, cuDNN, cuBLAS, a compiler. A call of the runtime is such a cost if it takes at least
1 ms and ten times as long as its function does usually (median), if it is the first launch of its
kernel or in the first call of its operator, and if no later one takes as long. Waits and copies do
not count. The simulation takes the CPU time of these calls out of the step. `launch-bound` and
`device-idle` leave them out. The check cannot see first calls that the trace does not record, such
as those of a library on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import evidence, share_of
from instrument.read.facts.groupby import group_rows
from instrument.read.facts.intervals import merged
from instrument.read.trace.events import COPIES, Ints, is_runtime, is_wait, split_overload
from instrument.read.views.coverage_rows import CPU_IN_STEPS
from instrument.read.views.synchronisations import callers, outermost_operators
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

_LEAST_NS, _LEAST_FACTOR = 1_000_000, 10


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all one-time costs in the steps."""
    events, steps = capture.events, capture.links.counted_steps
    calls = one_time_calls(capture)
    calls = calls[steps.holds(events.start_ns[calls]) >= 0]
    share = share_of(capture, calls)
    if share < CHECK.least_share:
        return
    longest = int(calls[np.argmax(events.duration_ns[calls])])
    operator = int(callers(capture.links, np.array([longest]))[0][0])
    where = f" in {split_overload(events.names[operator])[0]}" if operator >= 0 else ""
    is_launch = bool((capture.work.call == longest).any())
    why = "the first launch of a kernel, which loads its code" if is_launch else "a first call"
    yield Problem(
        f"{percent(share)} of the {steps.what} is one-time costs, such as "
        f"{duration(int(events.duration_ns[longest]))} of {events.names[events.name[longest]]}"
        f"{where}, {why}",
        calls,
        share,
        edit=lambda whatif: _without(capture, calls, whatif),
        evidence=evidence(capture, calls),
    )


CHECK = Check(
    "one-time-costs",
    find,
    change="Record later: first launches of kernels load code, and first calls start a library, "
    "which later steps do not pay. Set profiler.warmup=3 or a larger profiler.wait, or wait and "
    "warmup in the schedule of torch.profiler.",
    verify="--steps --launches",
    least_share=0.05,
    least_saving=0.01,
    on_device=True,
    coverage=(CPU_IN_STEPS,),
    assumes="once the program is warm",
)


def one_time_calls(capture: Views) -> Ints:
    """The positions of the calls of the device's runtime that have one-time costs."""
    return capture.once("one-time-calls", lambda: _one_time_calls(capture))


def _one_time_calls(capture: Views) -> Ints:
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
