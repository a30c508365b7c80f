"""The CPU waits for the device: calls that synchronize, copies that block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from instrument.base.units import duration, size
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import as_evidence, calls_by, evidence, in_steps, largest
from instrument.read.advise.finding import Evidence
from instrument.read.facts.device_work import COMMUNICATION, COPY, KERNEL
from instrument.read.facts.facts import coded
from instrument.read.facts.groupby import Groups
from instrument.read.facts.idle import gaps
from instrument.read.facts.intervals import sweep
from instrument.read.facts.places import common_place, nodes_of, source_codes
from instrument.read.facts.segments import waits_for_data
from instrument.read.facts.synchronisation import STREAM_WAIT
from instrument.read.trace.events import COPIES, Flags, Ints, is_runtime, is_wait
from instrument.read.views.coverage_rows import LAUNCHING, ORDERED
from instrument.read.views.synchronisations import outermost_operators
from instrument.read.views.views import Views

_SHOWN = 5
_TO_DEVICE, _PAGEABLE = "HtoD", "Pageable"
# For each operator that waits: the code that calls it.
_READ = ".item(), float(), int(), an if on a tensor, or printing one"
_TO_CPU = '.cpu(), .numpy() or .to("cpu")'
_WRITTEN = {
    "aten::item": _READ,
    "aten::_local_scalar_dense": _READ,
    "aten::is_nonzero": "an if, while or bool() on a tensor",
    "aten::equal": "torch.equal",
    "aten::nonzero": "nonzero, or an index with a mask",
    "aten::index": "an index with a mask",
    "aten::index_put_": "an assignment to an index with a mask",
    "aten::masked_select": "masked_select",
    "aten::to": _TO_CPU,
    "aten::_to_copy": _TO_CPU,
    "aten::copy_": _TO_CPU,
}
_PIN = (
    "Copy from pinned memory without waiting: DataLoader(..., pin_memory=True), then "
    "batch.to(device, non_blocking=True)."
)
_DO_NOT_WAIT = (
    "Copy without waiting: batch.to(device, non_blocking=True). The memory is already pinned."
)


def synchronizing_calls(capture: Views) -> Iterator[Problem]:
    """Find calls that wait for the device, which is idle until the CPU has launched more work.

    What counts is this idle time, not the length of the wait.
    """
    steps = capture.links.counted_steps
    calls = in_steps(capture, _waiting_calls(capture))
    idle_ns = _idle_after(capture, calls)
    calls, idle_ns = calls[idle_ns > 0], idle_ns[idle_ns > 0]
    if not len(calls):
        return
    rows = _by_caller(capture, calls, idle_ns)
    written = dict.fromkeys(_WRITTEN.get(row.name, "") for row in rows)
    named = "; ".join(filter(None, written)) or "these calls"
    number = len(calls) / steps.count
    shown = f"{number:.0f}" if number >= 10 or number == round(number) else f"{number:.1f}"
    yield Problem(
        f"{shown} call{'s' * (shown != '1')} a {steps.what}",
        calls,
        steps.share(int(idle_ns.sum())),
        edit=lambda whatif: whatif.asynchronous(positions=calls),
        place=common_place(capture, calls, idle_ns),
        evidence=rows,
        change=f"Avoid {named} in each step: keep values on the device, such as losses += "
        "loss.detach(), and read them every 100 steps. Remove torch.cuda.synchronize().",
    )


SYNCHRONIZING_CALLS = Check(
    "synchronizing-calls",
    synchronizing_calls,
    title="Synchronizing calls leave the device idle for {share} of the {step}: {what}",
    verify="--synchronisations --steps",
    least_share=0.03,
    on_device=True,
    coverage=ORDERED,
)


def blocking_copies(capture: Views) -> Iterator[Problem]:
    """Find copies to the device for which the CPU waits while the device computes nothing.

    In the simulation, these calls return at once, and the copies overlap with the computation. The
    check cannot see whether a kernel needs the data at once: then overlap saves nothing.
    """
    events, work, steps = capture.events, capture.work, capture.links.counted_steps
    to_device = (work.kind == COPY) & (work.call >= 0)
    to_device &= events.named(lambda name: _TO_DEVICE in name)[work.event]
    if not to_device.any():
        return
    launches = work.call[to_device]
    blocking, waits = _blocking(capture, work.event[to_device], launches)
    copies = work.event[to_device][blocking]
    calls = np.unique(np.concatenate([launches[blocking], waits]))
    if not len(calls):
        return
    timeline = sweep(
        [
            (events.start_ns[calls], events.end_ns[calls]),
            (steps.start_ns, steps.end_ns),
            work.of(KERNEL, COMMUNICATION),
        ]
    )
    blocked = timeline.active[0] & timeline.active[1] & ~timeline.active[2]
    pageable = bool(events.named(lambda name: _PAGEABLE in name)[copies].any())
    yield Problem(
        "from pageable memory " if pageable else "",
        calls,
        steps.share(int(timeline.total_ns(blocked)[0])),
        edit=lambda whatif: whatif.asynchronous(positions=calls).overlap(positions=copies),
        evidence=_of_copies(capture, copies, calls),
        change=_PIN if pageable else _DO_NOT_WAIT,
    )


BLOCKING_COPIES = Check(
    "blocking-copies",
    blocking_copies,
    title="For {share} of the {step}, the CPU waits for copies {what}to the device, and the device "
    "computes nothing",
    verify="--copies --synchronisations",
    least_share=0.02,
    on_device=True,
    coverage=LAUNCHING,
)


def _waiting_calls(capture: Views) -> Ints:
    """The positions of the calls that wait for device work other than copies to the device."""
    events, found = capture.events, capture.links.synchronisations
    # For each wait, the work that ends last among the work that it waits for.
    last = np.full(len(found.call), -1)
    order = np.argsort(events.end_ns[found.earlier], kind="stable")
    last[found.wait[order]] = found.earlier[order]
    to_device = events.among(COPIES) & events.named(lambda name: _TO_DEVICE in name)
    waits = (found.kind != STREAM_WAIT) & ~np.append(to_device, False)[last]
    calls: Ints = np.unique(found.call[waits])
    return calls[events.among(is_runtime)[calls]]


def _idle_after(capture: Views, calls: Ints) -> Ints:
    """For each call, the device's idle time that begins inside the call.

    Left out is time outside the steps, time in which the CPU waits for the loader, and idle time
    before work whose launch is unknown.
    """
    events, steps = capture.events, capture.links.counted_steps
    found = gaps(events, capture.work, steps.start_ns, steps.end_ns)
    begin, until = found.start_ns[found.call >= 0], found.queued_ns[found.call >= 0]
    waits = waits_for_data(capture)
    timeline = sweep(
        [(steps.start_ns, steps.end_ns), (events.start_ns[waits], events.end_ns[waits])]
    )
    lost_ns = timeline.within(timeline.active[0] & ~timeline.active[1], begin, until)
    # The call around the start of each gap; calls of one thread do not overlap.
    order = np.argsort(events.start_ns[calls], kind="stable")
    at = np.searchsorted(events.start_ns[calls[order]], begin, "right") - 1
    call = np.append(order, -1)[at]
    inside = (at >= 0) & (begin <= np.append(events.end_ns[calls], 0)[call])
    return Groups(np.where(inside, call, -1), len(calls)).sum(lost_ns, inside)


def _by_caller(capture: Views, calls: Ints, idle_ns: Ints) -> tuple[Evidence, ...]:
    """Make a row of evidence for each operator, range and source line of the calls."""
    codes, texts = source_codes(capture, calls)
    rows = calls_by(capture, calls, total_ns=capture.events.duration_ns[calls], idle_ns=idle_ns)
    rows = rows.with_columns(source=coded(pl.Series(texts, dtype=pl.String), codes))
    idle = pl.col("idle_ns").map_elements(duration, pl.String)
    detail = pl.concat_str(
        pl.format("in {}", "path"),
        pl.format("at {}", "source"),
        pl.format("leaves the device idle for {}", idle),
        separator=", ",
        ignore_nulls=True,
    )
    found = largest(rows, ["name", "path", "source"], order="idle_ns").head(_SHOWN)
    return as_evidence(capture, found.with_columns(detail=detail))


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


def _of_copies(capture: Views, copies: Ints, calls: Ints) -> tuple[Evidence, ...]:
    """Make one row of evidence for each name of a copy, then one for each name of a call."""
    moved = (
        capture.facts.events("name", "bytes")[copies]
        .group_by("name")
        .agg(pl.when(pl.col("bytes").null_count() == 0).then(pl.sum("bytes")))
    )
    sizes = {name: "" if moved is None else size(moved) for name, moved in moved.iter_rows()}
    rows = evidence(capture, copies, most=len(copies))
    shown = (row._replace(detail=sizes[row.name]) for row in rows)
    return (*shown, *evidence(capture, calls, most=len(calls)))
