"""`blocking-copies`: the CPU waits for copies to the device while the device computes nothing.

The check looks at copies from the CPU to a device. It uses the calls that launch the copies, and
the waiting calls inside the same operator, such as cudaStreamSynchronize inside aten::to. It
measures how long these calls run while no kernel runs. There is a finding if this time is at least
2 % of the time of the steps. Even then, there is no finding if the simulation saves less than 1 %
of the step. Many programs spend 1 % of the step this way, and can save little.

There are two causes:

- The driver copies pageable memory in pieces through a buffer of its own. The call returns only
  after the last piece is copied.
- torch waits for the copy if `non_blocking` is not set.

In the simulation, these calls return at once, and the copies overlap with the computation.

The check cannot see whether a kernel needs the copied data at once. If a kernel does, overlap saves
nothing. Copies to the CPU belong to the check `synchronizing-calls`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from instrument.analysis.breakdown import COMMUNICATION, COPY, KERNEL
from instrument.analysis.coverage_rows import LAUNCHING
from instrument.analysis.kernels import moved_bytes
from instrument.analysis.places import common_place, nodes_of
from instrument.analysis.synchronisations import outermost_operators
from instrument.analysis.views import Views
from instrument.findings.device_time import LEAST_SAVING, has_device_work
from instrument.findings.evidence import evidence
from instrument.findings.finding import Check, Evidence, Finding, show_command
from instrument.findings.saving import is_worth, simulated
from instrument.links.groupby import groupby
from instrument.links.intervals import sweep
from instrument.trace.events import Flags, Ints, is_runtime, is_wait
from instrument.units import percent, size

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.02
_TO_DEVICE, _PAGEABLE = "HtoD", "Pageable"


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if the CPU waits for copies to the device."""
    if not has_device_work(capture):
        return
    events, work, time = capture.events, capture.work, capture.links.counted_steps
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
            (time.start_ns, time.end_ns),
            work.of(KERNEL, COMMUNICATION),
        ]
    )
    blocked = timeline.active[0] & timeline.active[1]
    share = time.share(int(timeline.total_ns(blocked & ~timeline.active[2])[0]))
    if share < _LEAST_SHARE:
        return
    pageable = bool(events.named(lambda name: _PAGEABLE in name)[copies[blocking]].any())
    saving = simulated(lambda: whatif.asynchronous(positions=calls).overlap(copy=f"*{_TO_DEVICE}*"))
    if not is_worth(saving, LEAST_SAVING):
        return
    path, source = common_place(capture, calls)
    memory = "from pageable memory " if pageable else ""
    yield Finding(
        code="blocking-copies",
        title=f"For {percent(share)} of the {time.what}, the CPU waits for copies {memory}to the "
        "device, and the device computes nothing",
        change=(
            "Copy from pinned memory without waiting: DataLoader(..., pin_memory=True), then "
            "batch.to(device, non_blocking=True)."
            if pageable
            else "Copy without waiting: batch.to(device, non_blocking=True). The memory is already "
            "pinned."
        ),
        verify=show_command(capture, "--copies --synchronisations"),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=_evidence(capture, copies[blocking], launches[blocking], calls),
        coverage=LAUNCHING,
    )


def _blocking(capture: Views, copies: Ints, calls: Ints) -> tuple[Flags, Ints]:
    """Find the copies that block the CPU.

    A copy blocks in two cases:

    - The launching call does not return before the copy has ended. And the call is of a kind that
      waits (`is_wait`), or the copied memory is pageable.
    - Another call waits for the device inside the same outermost operator.

    Args:
        capture: the capture.
        copies: the positions of the copies in the table of events.
        calls: for each copy, the position of the call that launches the copy.

    Returns:
        A mask of the copies that block, and the positions of the waiting calls of the second case.
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


CHECK = Check("blocking-copies", find, needs_device_work=True)
