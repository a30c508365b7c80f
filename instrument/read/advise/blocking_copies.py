"""`blocking-copies`: the CPU waits for copies to the device while the device computes nothing.

Counted are the calls that launch the copies, and the waits inside the same operator, such as
cudaStreamSynchronize inside aten::to, while no kernel runs. The driver copies pageable memory in
pieces, so the call returns after the last one; and torch waits for any copy without `non_blocking`.
In the simulation, these calls return at once, and the copies overlap with the computation. The
check cannot see whether a kernel needs the data at once: then overlap saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.base.units import percent, size
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import evidence
from instrument.read.advise.finding import Evidence
from instrument.read.facts.device_work import COMMUNICATION, COPY, KERNEL
from instrument.read.facts.groupby import groupby
from instrument.read.facts.intervals import sweep
from instrument.read.facts.places import nodes_of
from instrument.read.trace.events import Flags, Ints, is_runtime, is_wait
from instrument.read.views.coverage_rows import LAUNCHING
from instrument.read.views.kernels import moved_bytes
from instrument.read.views.synchronisations import outermost_operators
from instrument.read.views.views import Views

_TO_DEVICE, _PAGEABLE = "HtoD", "Pageable"
_PIN = (
    "Copy from pinned memory without waiting: DataLoader(..., pin_memory=True), then "
    "batch.to(device, non_blocking=True)."
)
_DO_NOT_WAIT = (
    "Copy without waiting: batch.to(device, non_blocking=True). The memory is already pinned."
)


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all copies to the device that block the CPU."""
    events, work, steps = capture.events, capture.work, capture.links.counted_steps
    to_device = (work.kind == COPY) & (work.call >= 0)
    to_device &= events.named(lambda name: _TO_DEVICE in name)[work.event]
    if not to_device.any():
        return
    copies, launches = work.event[to_device], work.call[to_device]
    blocking, waits = _blocking(capture, copies, launches)
    calls = np.unique(np.concatenate([launches[blocking], waits]))
    timeline = sweep(
        [
            (events.start_ns[calls], events.end_ns[calls]),
            (steps.start_ns, steps.end_ns),
            work.of(KERNEL, COMMUNICATION),
        ]
    )
    blocked = timeline.active[0] & timeline.active[1]
    share = steps.share(int(timeline.total_ns(blocked & ~timeline.active[2])[0]))
    if share < CHECK.least_share:
        return
    pageable = bool(events.named(lambda name: _PAGEABLE in name)[copies[blocking]].any())
    memory = "from pageable memory " if pageable else ""
    yield Problem(
        f"For {percent(share)} of the {steps.what}, the CPU waits for copies {memory}to the "
        "device, and the device computes nothing",
        calls,
        share,
        edit=lambda whatif: whatif.asynchronous(positions=calls).overlap(
            positions=copies[blocking]
        ),
        evidence=_evidence(capture, copies[blocking], launches[blocking], calls),
        change=_PIN if pageable else _DO_NOT_WAIT,
    )


CHECK = Check(
    "blocking-copies",
    find,
    verify="--copies --synchronisations",
    least_share=0.02,
    on_device=True,
    coverage=LAUNCHING,
)


def _blocking(capture: Views, copies: Ints, calls: Ints) -> tuple[Flags, Ints]:
    """Find the copies that block the CPU; `calls` launch `copies`.

    A copy blocks in two cases: its call does not return before the copy has ended, and the call
    waits (`is_wait`) or the memory is pageable; or another call waits for the device inside the
    same outermost operator. Returns a mask of the copies, and the waits of the second case.
    """
    events, tree = capture.events, capture.links.call_tree
    waits = np.flatnonzero(events.among(is_runtime) & events.named(is_wait))
    waits = waits[~np.isin(waits, capture.links.launches.call)]
    of_wait, of_copy = (
        outermost_operators(events, tree, nodes_of(capture.links, each)) for each in (waits, calls)
    )
    waited = (of_copy >= 0) & np.isin(of_copy, of_wait)
    by_call = events.named(is_wait)[calls] | events.named(lambda name: _PAGEABLE in name)[copies]
    returned_later = events.end_ns[calls] >= events.end_ns[copies]
    return waited | (by_call & returned_later), waits[np.isin(of_wait, of_copy) & (of_wait >= 0)]


def _evidence(capture: Views, copies: Ints, launches: Ints, calls: Ints) -> tuple[Evidence, ...]:
    """Make one row of evidence for each name of a copy, then one for each name of a call."""
    events, rows = capture.events, []
    moved = moved_bytes(events, copies, launches)
    names, groups = groupby(events.name[copies])
    sizes = groups.cells(groups.sum(moved), groups.number(moved < 0) == 0)
    of_name = dict(zip((events.names[k] for k in names.tolist()), sizes))
    for row in evidence(capture, copies, most=len(copies)):
        known = of_name[row.name]
        rows.append(row._replace(detail="" if known is None else size(known)))
    return (*rows, *evidence(capture, calls, most=len(calls)))
