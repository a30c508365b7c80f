"""`synchronizing-calls`: the CPU waits for the device, and the device is idle afterwards.

`.item()`, `.cpu()`, `nonzero`, a comparison in an `if`, printing a tensor and
`torch.cuda.synchronize()` return only when the device has finished; then it is idle until the CPU
has launched more work. Counted is the idle time of the device that begins inside a call that waits
(`links.synchronisation`) and ends when the next launch has returned, not the length of the wait.
Waits inside other calls, such as cudaFree, are not found; copies to the device are
`blocking-copies`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.base.units import duration, percent
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import evidence_row, without_overloads
from instrument.read.advise.finding import Evidence
from instrument.read.facts.groupby import Groups, group_rows
from instrument.read.facts.idle import gaps
from instrument.read.facts.intervals import sweep
from instrument.read.facts.places import common_place, source_codes
from instrument.read.facts.segments import waits_for_data
from instrument.read.facts.synchronisation import STREAM_WAIT
from instrument.read.trace.events import COPIES, Ints, is_runtime
from instrument.read.views.coverage_rows import ORDERED
from instrument.read.views.synchronisations import callers
from instrument.read.views.views import Views

_SHOWN = 5
_TO_DEVICE = "HtoD"
# For each operator that waits: the code that calls it.
_WRITTEN = {
    "aten::item": ".item(), float(), int(), an if on a tensor, or printing one",
    "aten::_local_scalar_dense": ".item(), float(), int(), an if on a tensor, or printing one",
    "aten::is_nonzero": "an if, while or bool() on a tensor",
    "aten::equal": "torch.equal",
    "aten::nonzero": "nonzero, or an index with a mask",
    "aten::index": "an index with a mask",
    "aten::index_put_": "an assignment to an index with a mask",
    "aten::masked_select": "masked_select",
    "aten::to": '.cpu(), .numpy() or .to("cpu")',
    "aten::_to_copy": '.cpu(), .numpy() or .to("cpu")',
    "aten::copy_": '.cpu(), .numpy() or .to("cpu")',
}


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all calls that leave the device idle."""
    steps = capture.links.counted_steps
    calls = synchronizing_calls(capture)
    calls = calls[steps.holds(capture.events.start_ns[calls]) >= 0]
    idle_ns = idle_after(capture, calls)
    calls, idle_ns = calls[idle_ns > 0], idle_ns[idle_ns > 0]
    share = steps.share(int(idle_ns.sum()))
    if share < CHECK.least_share:
        return
    rows = _rows(capture, calls, idle_ns)
    yield Problem(
        f"Synchronizing calls leave the device idle for {percent(share)} of the "
        f"{steps.what}: {_calls(len(calls) / steps.count)} a {steps.what}",
        calls,
        share,
        edit=lambda whatif: whatif.asynchronous(positions=calls),
        place=common_place(capture, calls, idle_ns),
        evidence=rows,
        change=_change(rows),
    )


CHECK = Check(
    "synchronizing-calls",
    find,
    verify="--synchronisations --steps",
    least_share=0.03,
    on_device=True,
    coverage=ORDERED,
)


def synchronizing_calls(capture: Views) -> Ints:
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


def idle_after(capture: Views, calls: Ints) -> Ints:
    """For each call, the device's idle time that begins inside the call.

    Left out is time outside the steps, time in which the CPU waits for the loader, and idle time
    before work whose launch is unknown.
    """
    events, steps = capture.events, capture.links.counted_steps
    found = gaps(events, capture.work, steps.start_ns, steps.end_ns)
    begin, until = found.start_ns[found.call >= 0], found.queued_ns[found.call >= 0]
    waits = waits_for_data(capture)
    timeline = sweep(
        [
            (steps.start_ns, steps.end_ns),
            (events.start_ns[waits], events.end_ns[waits]),
        ]
    )
    lost_ns = timeline.within(timeline.active[0] & ~timeline.active[1], begin, until)
    # The call around the start of each gap; calls of one thread do not overlap.
    order = np.argsort(events.start_ns[calls], kind="stable")
    at = np.searchsorted(events.start_ns[calls[order]], begin, "right") - 1
    call = np.append(order, -1)[at]
    inside = (at >= 0) & (begin <= np.append(events.end_ns[calls], 0)[call])
    return Groups(np.where(inside, call, -1), len(calls)).sum(lost_ns, inside)


def _rows(capture: Views, calls: Ints, idle_ns: Ints) -> tuple[Evidence, ...]:
    events, paths = capture.events, capture.links.scopes.paths.texts
    (operator, path), (source, sources) = (
        callers(capture.links, calls),
        source_codes(capture, calls),
    )
    name = np.where(operator >= 0, operator, events.name[calls])
    groups = group_rows(name, path, source)
    lasts_ns, total_ns = events.duration_ns[calls], groups.sum(idle_ns)
    called_ns, longest = groups.sum(lasts_ns), groups.sorted_by(-lasts_ns).row(0)
    rows = []
    for k in np.argsort(-total_ns, kind="stable")[:_SHOWN].tolist():
        first = longest[k]
        where = [f"in {paths[path[first]]}"] if path[first] >= 0 else []
        where += [f"at {sources[source[first]]}"] if source[first] >= 0 else []
        where.append(f"leaves the device idle for {duration(int(total_ns[k]))}")
        of = events.names[name[first]], int(groups.size[k]), int(called_ns[k])
        rows.append(evidence_row(capture, *of, calls[first], ", ".join(where)))
    return without_overloads(tuple(rows))


def _change(rows: tuple[Evidence, ...]) -> str:
    written = dict.fromkeys(_WRITTEN.get(row.name, "") for row in rows)
    named = [text for text in written if text] or ["these calls"]
    return (
        f"Avoid {'; '.join(named)} in each step: keep values on the device, such as losses += "
        "loss.detach(), and read them every 100 steps. Remove torch.cuda.synchronize()."
    )


def _calls(number: float) -> str:
    shown = f"{number:.0f}" if number >= 10 or number == round(number) else f"{number:.1f}"
    return "1 call" if shown == "1" else f"{shown} calls"
