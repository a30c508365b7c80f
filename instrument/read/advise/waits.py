"""The CPU and the device wait for each other: for launches, synchronising calls and copies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from instrument.base.range_names import OPTIMIZER_STEP
from instrument.base.units import duration, percent, size
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.evidence import (
    as_evidence,
    calls_by,
    device_kind,
    evidence,
    evidence_of_function,
    in_steps,
    largest,
)
from instrument.read.advise.finding import Evidence
from instrument.read.facts.device_work import COMMUNICATION, COPY, KERNEL
from instrument.read.facts.facts import coded
from instrument.read.facts.groupby import Groups
from instrument.read.facts.idle import gaps
from instrument.read.facts.intervals import merged, sweep, within, within_groups
from instrument.read.facts.paths import NO_RANGE
from instrument.read.facts.places import (
    callers,
    common_place,
    has_sources,
    nodes_of,
    outermost_operators,
    source_codes,
    source_of,
)
from instrument.read.facts.segments import no_operator, waits_for_data
from instrument.read.facts.synchronisation import STREAM_WAIT
from instrument.read.trace.events import (
    ANNOTATION,
    COPIES,
    Flags,
    Ints,
    is_compiled_code,
    is_runtime,
    is_step,
    is_wait,
    split_overload,
)
from instrument.read.views import interruptions
from instrument.read.views.coverage_rows import CPU_IN_STEPS, LAUNCHING, ORDERED
from instrument.read.views.interruptions import kinds_of
from instrument.read.views.phases import engine_of
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.simulate.scenario import Scenario

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
_PIN = "Copy from pinned memory without waiting: {}, then batch.to(device, non_blocking=True)."
_DO_NOT_WAIT = (
    "Copy without waiting: batch.to(device, non_blocking=True). The memory is already pinned."
)


def synchronising_calls(capture: Views) -> Iterator[Problem]:
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


SYNCHRONISING_CALLS = Check(
    "synchronising-calls",
    synchronising_calls,
    title="Synchronising calls leave the device idle for {share} of the {step}: {what}",
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
    pin = "batch.pin_memory()" if engine_of(capture) else "DataLoader(..., pin_memory=True)"
    pageable = bool(events.named(lambda name: _PAGEABLE in name)[copies].any())
    yield Problem(
        "from pageable memory " if pageable else "",
        calls,
        steps.share(int(timeline.total_ns(blocked)[0])),
        edit=lambda whatif: whatif.asynchronous(positions=calls).overlap(positions=copies),
        evidence=_of_copies(capture, copies, calls),
        change=_PIN.format(pin) if pageable else _DO_NOT_WAIT,
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
    events, links = capture.events, capture.links
    waits = np.flatnonzero(events.among(is_runtime) & events.named(is_wait))
    waits = waits[~np.isin(waits, links.launches.call)]
    of_wait, of_copy = (
        outermost_operators(links, nodes_of(links, each)) for each in (waits, calls)
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


# A gap of this length or more is `device-idle`, a shorter one is `launch-bound`.
_LONG_NS = 1_000_000
# Interruptions that have findings of their own, or that show no problem of the program.
_EXPLAINED = (
    interruptions.LOADER,
    interruptions.GARBAGE_COLLECTION,
    interruptions.COMPILATION,
    interruptions.MODULE_LOADING,
    interruptions.ALLOCATION,
    interruptions.PROFILER,
)
_LEAST_GAPS = 20
# Devices for which torch has CUDA graphs, and torch.compile(mode='reduce-overhead') uses them.
_HAS_GRAPHS = frozenset({"cuda", "hip"})
# The model is compiled if compiled code launches at least this part of the work.
_IS_COMPILED = 0.2
_MOST_CAUSES = 5
_CAUSE = ("name", "path", "calls", "total_ns", "event")
# A function is named if it takes at least this part of the gaps.
_LEAST_SOURCE = 0.25
_FASTER = (
    "Make {} faster on the CPU, or run it while the device works: {}in another thread, or after "
    "the next launches."
)
# A one-time cost takes so long, and so many times as long as its function does usually.
_LEAST_NS, _LEAST_FACTOR = 1_000_000, 10


def launch_bound(capture: Views) -> Iterator[Problem]:
    """Find the short gaps in which all devices are idle until the next launch has returned.

    Healthy programs spend up to 3 % of the step in such gaps, programs with too many small kernels
    9 to 73 %. The simulation takes the CPU time out of the gaps, so that work is launched as early
    as the launch queue allows. The check cannot see which kernels larger ones could replace.
    """
    steps = capture.links.counted_steps
    waits = _waits(capture).filter((pl.col("gap_ns") < _LONG_NS) & (pl.col("call") >= 0))
    gaps = waits.unique("gap", maintain_order=True)
    if len(gaps) < _LEAST_GAPS:
        return
    call, gap_ns = gaps["call"].to_numpy(), gaps["gap_ns"].to_numpy()
    waited_ns = int(gap_ns.sum())
    work_ns = capture.work.end_ns - capture.work.start_ns
    trains = any(name.startswith(OPTIMIZER_STEP) for name in capture.events.names)
    rows = largest(calls_by(capture, call, total_ns=gap_ns), ["name"]).head(_MOST_CAUSES)
    yield Problem(
        f"{len(gaps) / steps.count:,.0f} gaps of {duration(waited_ns // len(gaps))} on "
        f"average, between kernels of {duration(int(np.median(work_ns)))} (median)",
        call,
        steps.share(waited_ns),
        edit=partial(_launched_early, waits),
        place=common_place(capture, call, gap_ns),
        evidence=as_evidence(
            capture, rows, "time in which the device waited for the operator's kernels"
        ),
        change=_launch_less(capture)
        + (", and use fused=True in the optimizer." if trains else "."),
    )


LAUNCH_BOUND = Check(
    "launch-bound",
    launch_bound,
    title="The device waits {share} of the {step} for launches in short gaps: {what}",
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=ORDERED,
)


def device_idle(capture: Views) -> Iterator[Problem]:
    """Find the long gaps that nothing else explains, and where the launching thread spends them.

    Outside of operators and ranges, this is a function, if there are Python stacks.
    """
    steps = capture.links.counted_steps
    waits = _waits(capture).filter(pl.col("gap_ns") >= _LONG_NS)
    idle_ns = int((waits["end_ns"] - waits["start_ns"]).sum())
    if not idle_ns:
        return
    causes = _causes(capture, waits)
    rows = as_evidence(capture, causes.head(_MOST_CAUSES))
    name, path, _, spent_ns, event = causes.select(*_CAUSE).row(0)
    where, source = f"in {name}", None if event is None else source_of(capture, event)
    change = _keep_launching(capture, name, event)
    if event is None:
        where, sources = "in no range and no operator", _sources(capture, waits)
        if sources and sources[0][1] >= _LEAST_SOURCE * idle_ns:
            source, spent_ns = sources[0]
            where, change = f"in {source}", _faster(capture, source)
            rows = tuple(evidence_of_function(capture, *each) for each in sources[:_MOST_CAUSES])
    yield Problem(
        f"for {percent(spent_ns / idle_ns)} of this time, the CPU is {where}",
        share=steps.share(idle_ns),
        edit=partial(_launched_early, waits),
        place=(path, source),
        evidence=rows,
        change=change,
    )


DEVICE_IDLE = Check(
    "device-idle",
    device_idle,
    title="The device is idle for {share} of the {step} in gaps of over 1 ms; {what}",
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=ORDERED,
)


def one_time_costs(capture: Views) -> Iterator[Problem]:
    """Find calls of the runtime that are long only once: first launches, first calls of libraries.

    `launch-bound` and `device-idle` leave them out.
    """
    events = capture.events
    calls = in_steps(capture, _one_time_calls(capture))
    if not len(calls):
        return
    longest = int(calls[np.argmax(events.duration_ns[calls])])
    operator = int(callers(capture.links, np.array([longest]))[0][0])
    where = f" in {split_overload(events.names[operator])[0]}" if operator >= 0 else ""
    is_launch = bool((capture.work.call == longest).any())
    why = "the first launch of a kernel, which loads its code" if is_launch else "a first call"
    yield Problem(
        f"{duration(int(events.duration_ns[longest]))} of {events.names[events.name[longest]]}"
        f"{where}, {why}",
        calls,
        edit=lambda whatif: _without(capture, calls, whatif),
    )


ONE_TIME_COSTS = Check(
    "one-time-costs",
    one_time_costs,
    title="{share} of the {step} is one-time costs, such as {what}",
    change="Record later: first launches of kernels load code, and first calls start a library, "
    "which later steps do not pay. Set profiler.warmup=3 or a larger profiler.wait, or wait and "
    "warmup in the schedule of torch.profiler.",
    verify="--steps --launches",
    least_share=0.05,
    on_device=True,
    coverage=(CPU_IN_STEPS,),
    assumes="once the program is warm",
)


def _launch_less(capture: Views) -> str:
    """What launches less often on this device, without a full stop."""
    if engine_of(capture):
        return (
            "Launch less often: let the engine replay CUDA graphs, for more sizes of batches, or "
            "let more tokens into a step; docs/engines.md names the options"
        )
    larger = "increase the batch size"
    if device_kind(capture) not in _HAS_GRAPHS:
        return f"Launch less often: {larger}"
    if not _is_compiled(capture):
        return (
            "Launch less often: model = torch.compile(model, mode='reduce-overhead') fuses small "
            f"kernels and records them as CUDA graphs; or {larger}"
        )
    return (
        "Launch less often. The program is compiled already: mode='reduce-overhead' also records "
        f"its kernels as CUDA graphs; or {larger}"
    )


def _is_compiled(capture: Views) -> bool:
    """Whether code that torch.compile has compiled launches much of the work."""
    tree, (_, launcher) = capture.links.call_tree, capture.links.launched
    named = is_compiled_code(capture.events)
    inside = tree.at_or_inside(named[tree.index])[launcher[launcher >= 0]]
    return bool(inside.sum() >= _IS_COMPILED * max(len(inside), 1))


def _waits(capture: Views) -> pl.DataFrame:
    """Return when the devices wait for launches in the counted steps, in order of time.

    A gap in their work waits from its start until `call`, which launches the next work, returns;
    after all device work, `call` is -1. `gap` is its number, `thread` that of the call or of the
    last launch, and `gap_ns` the sum over all rows of the gap. Not in the rows are gaps that begin
    while the CPU waits for the device, because their cause is that wait, gaps before work whose
    launch is not in the trace, and the interruptions in `_EXPLAINED`. Computed once.
    """
    return capture.once("waits for launches", lambda: _find_waits(capture))


def _find_waits(capture: Views) -> pl.DataFrame:
    events, time = capture.events, capture.links.counted_steps
    found = gaps(events, capture.work, time.start_ns, time.end_ns)
    waits = found.known & ~found.syncing & (found.queued_ns > found.start_ns)
    start, queued, call = found.start_ns[waits], found.queued_ns[waits], found.call[waits]
    explained = np.isin(kinds_of(events), _EXPLAINED)
    explained[_one_time_calls(capture)] = True
    timeline = sweep(
        [
            (start, queued),
            (time.start_ns, time.end_ns),
            (events.start_ns[explained], events.end_ns[explained]),
        ]
    )
    counts = timeline.active[0] & timeline.active[1] & ~timeline.active[2]
    counts &= timeline.end_ns > timeline.start_ns
    calls = capture.work.call[capture.work.call >= 0]
    last = events.thread[calls[np.argmax(events.start_ns[calls])]] if len(calls) else -1
    gap = np.searchsorted(start, timeline.start_ns[counts], "right") - 1  # gaps do not overlap
    rows = pl.DataFrame(
        {
            "gap": gap,
            "call": call[gap],
            "thread": np.where(call >= 0, events.thread[call], last).astype(np.int64)[gap],
            "start_ns": timeline.start_ns[counts],
            "end_ns": timeline.end_ns[counts],
        }
    )
    return rows.with_columns(gap_ns=(pl.col("end_ns") - pl.col("start_ns")).sum().over("gap"))


def _launched_early(waits: pl.DataFrame, whatif: Scenario) -> Scenario:
    """The window without the CPU time in the gaps; for the lower bound, half of it stays."""
    for rows in waits.partition_by("thread", maintain_order=True):
        spans = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
        whatif = whatif.scale_spans(rows["thread"][0], spans, 0, bounds=(0.5, 0))
    return whatif


def _faster(capture: Views, name: str) -> str:
    loader = "" if engine_of(capture) else "in the workers of the DataLoader, "
    return _FASTER.format(name, loader)


def _keep_launching(capture: Views, name: str, event: int | None) -> str:
    events = capture.events
    stacks = "" if has_sources(capture) else ", or with profiler.with_stack=true"
    if event is None:
        elsewhere = "another thread" if engine_of(capture) else "the workers of the DataLoader"
        return (
            f"Find this code first, with @profiled{stacks}; then move it into {elsewhere} or after "
            "the launches of the step."
        )
    tree, (_, launcher) = capture.links.call_tree, capture.links.launched
    call = tree.nodes_of(capture.work.call)
    launching = np.concatenate([launcher[launcher >= 0], call[call >= 0]])
    launches = tree.with_descendants(np.bincount(launching, minlength=len(tree))) > 0
    if not (
        launches & events.named(lambda each: split_overload(each)[0] == name)[tree.index]
    ).any():
        return _faster(capture, name)
    if events.among(ANNOTATION)[event]:
        return (
            f"Find the code of {name} that launches nothing, with more ranges inside {name}"
            f"{stacks}; make it faster, or run it after the launches."
        )
    shows = "; profiler.with_stack=true shows its functions" if stacks else ""
    return (
        f"Find what keeps the CPU in {name}: a launch takes some µs, and here none begins for over "
        "1 ms. Look for other threads and programs on the CPU, and for waits or Python inside "
        f"it{shows}."
    )


def _causes(capture: Views, waits: pl.DataFrame) -> pl.DataFrame:
    """Where the launching threads spent time during the gaps, the longest time first.

    The `event` is the longest event; it is null for the time in no event.
    """
    events, tree = capture.events, capture.links.call_tree
    waited = waits["thread"].to_numpy(), waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()
    inside_ns = within_groups(waited, tree.thread, tree.start_ns, tree.ends_before_overlap)
    own_ns = tree.own(inside_ns)
    node = np.flatnonzero((own_ns > 0) & ~events.named(is_step)[tree.index])
    rows = calls_by(capture, tree.index[node], total_ns=own_ns[node])
    found = largest(rows, ["name", "path"])
    whole_ns = int((waits["end_ns"] - waits["start_ns"]).sum())
    outside = pl.DataFrame(
        {
            "name": ["[no range and no operator]"],
            "calls": [waits["gap"].n_unique()],
            "total_ns": [whole_ns - int(found["total_ns"].sum())],
        }
    ).filter(pl.col("total_ns") > 0)
    found = pl.concat([found, outside], how="diagonal_relaxed")
    found = found.sort("total_ns", descending=True, maintain_order=True)
    where = pl.format(", in {}", "path").fill_null("")
    return found.with_columns(detail=pl.concat_str(pl.lit("own CPU time in the gaps"), where))


def _sources(capture: Views, waits: pl.DataFrame) -> list[tuple[str, int]]:
    """The functions of the user with their time in the gaps outside of all ranges and operators."""
    rows = no_operator(capture).filter(pl.col("path") == NO_RANGE).drop_nulls("source")
    spans = waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy()
    ns = within(spans, rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
    found = rows.select("source", ns=pl.Series(ns)).group_by("source").agg(pl.sum("ns"))
    return found.sort("ns", "source", descending=[True, False]).rows()


def _one_time_calls(capture: Views) -> Ints:
    """The calls of the device's runtime that are long only once.

    They are the first launch of their kernel or in the first call of their operator, and no later
    one takes as long. Waits and copies do not count. Computed once.
    """
    return capture.once("one-time calls", lambda: _find_one_time_calls(capture))


def _find_one_time_calls(capture: Views) -> Ints:
    events, work, links = capture.events, capture.work, capture.links
    calls = events.among(is_runtime) & ~events.named(is_wait)
    calls[work.call[events.among(COPIES)[work.event] & (work.call >= 0)]] = False
    index = np.flatnonzero(calls)
    kernel = np.full(len(events), -1)
    kernel[work.call[work.call >= 0]] = events.name[work.event[work.call >= 0]]
    top = outermost_operators(links, links.nodes_of_calls(index))
    around = np.append(links.call_tree.index, -1)[top]
    in_operator = (kernel[index] < 0) & (around >= 0)
    rows = pl.DataFrame(
        {
            "call": index,
            "name": events.name[index],
            # The first call of a function in no operator is that of the function itself.
            "launches": pl.Series(kernel[index]).replace(-1, None),
            "operator": np.where(in_operator, events.name[around], -1),
            "alone": np.where((kernel[index] < 0) & ~in_operator, events.name[index], -1),
            "since_ns": events.start_ns[np.where(in_operator, around, index)],
            "ns": events.duration_ns[index],
        }
    )
    ns, user = pl.col("ns"), ("launches", "operator", "alone")
    usual_ns = pl.when(pl.len().over("name") > 1).then(
        ns.quantile(0.5, "equiprobable").over("name")
    )
    is_long = ns >= pl.max_horizontal(_LEAST_NS, _LEAST_FACTOR * usual_ns.fill_null(0))
    is_first = pl.col("since_ns") == pl.col("since_ns").min().over(user)
    rows = rows.with_columns(is_long=is_long, is_once=is_long & is_first)
    times = (pl.col(each).sum().over(*user, "name") for each in ("is_long", "is_once"))
    once = rows.filter(pl.col("is_once") & (next(times) == next(times)))
    return once["call"].to_numpy()


def _without(capture: Views, calls: Ints, whatif: Scenario) -> Scenario:
    events = capture.events
    for thread in np.unique(events.thread[calls]).tolist():
        own = calls[events.thread[calls] == thread]
        spans = merged(events.start_ns[own], events.end_ns[own])
        whatif = whatif.scale_spans(thread, spans, by=0)
    return whatif
