"""Communication between ranks: exposed, over slow links, waiting for late ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.base.errors import CaptureError, TraceError
from instrument.base.units import duration, few, percent, rate, size
from instrument.read.advise.check import (
    LEAST_SAVING,
    RECORD_SHAPES,
    Check,
    NotRecorded,
    Problem,
    RanksCheck,
)
from instrument.read.advise.finding import Evidence, Finding, Saving
from instrument.read.facts.collective_records import DEVICE, is_collective, is_on_cpu
from instrument.read.facts.device_work import COMMUNICATION
from instrument.read.facts.groupby import distinct
from instrument.read.facts.places import common_place
from instrument.read.facts.segments import time_of_kind
from instrument.read.simulate.scenario import scenario
from instrument.read.views import coverage_rows
from instrument.read.views.views import Views

if TYPE_CHECKING:
    from instrument.read.ranks.run import Ranks

_MOST_ROWS = 5
_EXPOSED = "exposed communication"
# With gloo on a CPU, DistributedDataParallel refuses the other hook (TypeError).
_HOOK, _HOOK_OF_NCCL = "fp16_compress_hook", "bf16_compress_hook"
_NCCL = re.compile("nccl|rccl|xccl", re.IGNORECASE)
# For each library: a pattern of event names that only its communication has, and the advice.
_CHANGES = (
    (
        re.compile(r"DistributedDataParallel"),
        "To send less often, use model.no_sync() for all batches of a gradient accumulation "
        "except the last. To send fewer bytes, use model.register_comm_hook(None, "
        "default_hooks.{hook}). To let the communication overlap better with the "
        "backward, use DistributedDataParallel without find_unused_parameters. To save copies of "
        "the gradients, use DistributedDataParallel(model, gradient_as_bucket_view=True).",
    ),
    (
        re.compile(r"FullyShardedDataParallel|FSDP::"),
        "Fetch parameters earlier (FSDP1: forward_prefetch=True, FSDP2: "
        "set_modules_to_forward_prefetch), shard larger blocks, and reduce in a smaller type "
        "(MixedPrecision or MixedPrecisionPolicy with reduce_dtype=torch.bfloat16).",
    ),
)
# A link is measured by messages of at least `_LARGE_BYTES`. Usual are 12 GB/s on PCIe 3.0 with 16
# lanes, 12 to 50 GB/s on networks, 50 GB/s and more on NVLink and xGMI: below `_SLOW`, in bytes per
# second, the data takes a slower way.
_LARGE_BYTES, _SLOW, _USUAL = 4 * 2**20, 10e9, 12e9
# The others must wait for a late rank for this share of the step.
_LEAST_WAIT = 0.03
# A range is named if it explains at least this part of the rank's additional time.
_OF_EXCESS = 0.25
# Without a late rank, at least this part of the time in collectives must be waiting.
_MOSTLY = 0.5


def exposed_communication(capture: Views) -> Iterator[Problem]:
    """Find the communication during which no kernel computes, or on a CPU, no operator runs.

    Removing all of it is what overlap and smaller messages can save at most. `diagnose` promises no
    saving until the ranks are compared, because it may be a wait for a late rank.
    """
    chosen = capture.work.event[capture.work.kind == COMMUNICATION]
    if not len(capture.work.event):
        chosen = np.flatnonzero(is_on_cpu(capture.events))
    if not len(chosen):
        return
    table = capture.collectives.where("exposed_ns != 0").sort("exposed_ns")
    kind = next((each for each in table.column("kind") if each is not None), None)
    # Only of these, the range and source line can be known: events on the CPU, and the device
    # events whose launch is in the trace.
    device, node = capture.links.launched
    known = chosen[np.isin(chosen, device[node >= 0]) | ~np.isin(chosen, device)]
    path, source = common_place(capture, known)
    if path is not None and is_collective(path.rpartition("/")[2]):
        path = path.rpartition("/")[0] or None
    names = capture.events.names
    change = next((change for name, change in _CHANGES if any(map(name.search, names))), "")
    used = (names[code] for code in distinct(capture.events.name[chosen]).tolist())
    yield Problem(
        f", mostly {kind}" if kind else "",
        chosen,
        time_of_kind(capture, _EXPOSED)[1],
        place=(path, source),
        evidence=tuple(map(_row, table.head(_MOST_ROWS))),
        change=change.format(hook=_HOOK_OF_NCCL if any(map(_NCCL.search, used)) else _HOOK),
    )


EXPOSED_COMMUNICATION = Check(
    "exposed-communication",
    exposed_communication,
    title="{share} of the {step} is exposed communication{what}",
    change="Start the communication earlier and wait for it later: work = dist.all_reduce(tensor, "
    "async_op=True), other work, then work.wait(); or send fewer bytes.",
    verify="--collectives --breakdown",
    least_share=0.05,
    factor=0,
    coverage=coverage_rows.LAUNCHING,
)


def slow_links(capture: Views) -> Iterator[Problem]:
    """Find large messages of which even the fastest, which waited for no rank, has a low bandwidth.

    The simulation assumes a usual bandwidth for them.
    """
    if not (capture.work.kind == COMMUNICATION).any():
        return
    _, share = time_of_kind(capture, _EXPOSED)
    if share < SLOW_LINKS.lowest:
        return
    calls = capture.collective_calls.where(
        f"runs_on = '{DEVICE}' and (group_size is null or group_size != 1)"
    )
    if not any(calls.column("bytes")):
        missing = "the trace has no sizes of messages, which torch 2.3 and later record"
        yield Problem(share=share, unclear=NotRecorded(missing, RECORD_SHAPES))
        return
    large = calls.where(f"bytes >= {_LARGE_BYTES} and bus_bytes_per_second > 0")
    large = large.sort("bus_bytes_per_second")
    if not len(large) or large[0].bus_bytes_per_second >= _SLOW:
        return
    fastest = large[0]
    speed = fastest.bus_bytes_per_second
    sent = capture.work.event[capture.work.kind == COMMUNICATION]
    events = sent[np.isin(capture.events.start_ns[sent], large.column("start_ns"))]
    yield Problem(
        f"The fastest {fastest.kind} of at least {size(_LARGE_BYTES)} reaches only "
        f"{rate(speed)} bus bandwidth among {fastest.group_size} ranks",
        events,
        share,
        edit=lambda whatif: whatif.bandwidth(_USUAL / speed, positions=events),
        place=(None, None),
        evidence=tuple(map(_call, large.head(_MOST_ROWS))),
    )


SLOW_LINKS = Check(
    "slow-links",
    slow_links,
    title="{what}; {share} of the {step} is exposed communication",
    change="Find the path that the data takes: run with NCCL_DEBUG=INFO and look for the "
    "transport; NCCL_P2P_DISABLE, NCCL_IB_DISABLE and NCCL_SHM_DISABLE must not be set, and "
    "NCCL_SOCKET_IFNAME must name the fast interface. Measure the link with nccl-tests "
    "(rccl-tests on ROCm).",
    verify="--collective-calls",
    least_share=0.05,
    on_device=True,
    coverage=coverage_rows.DEVICE,
)


def stragglers(ranks: Ranks) -> Iterator[Finding]:
    """Find ranks that the others wait for in collectives, and the range that makes them late.

    If no rank is late in all steps, they may still wait for another one in each step.
    """
    table = ranks.ranks
    step_ns = {row.rank: row.step_ns for row in table}
    late = [row for row in ranks.stragglers if _waited_ns(row) >= _LEAST_WAIT * step_ns[row.rank]]
    waited_ns = max(map(_waited_ns, late), default=0)
    saving = _saving(ranks, late, waited_ns) if late else None
    if saving is None or saving.high_ns < LEAST_SAVING * saving.baseline_ns:
        yield from _in_turn(ranks)
        return
    worst = late[0]
    excess = ""
    if worst.excess is not None:  # None: the median rank has no own work
        more = percent(worst.excess)
        excess = f"the own work of rank {worst.rank} takes {more} longer than the median, and "
    share = waited_ns / step_ns[worst.rank]
    numbers = few(row.rank for row in late)
    who = f"Ranks {numbers} are" if len(late) > 1 else f"Rank {numbers} is"
    known = table.where("own_ns >= 0 and exposed_communication_ns >= 0")
    by_work, of_late = [*known.sort("own_ns", descending=True)], {row.rank for row in late}
    shown = [row for row in by_work if row.rank in of_late][: _MOST_ROWS - 1]
    yield Finding(
        code="stragglers",
        title=f"{who} late: {excess}the other ranks wait up to {duration(waited_ns)} of "
        f"each step ({percent(share)})",
        change=_change(worst),
        verify=_command(ranks),
        share=share,
        saving=saving,
        range=worst.range if _is_in_range(worst) else None,
        evidence=tuple(map(_rank, [*shown, by_work[-1]])),
    )


STRAGGLERS = RanksCheck("stragglers", stragglers)


def _in_turn(ranks: Ranks) -> Iterator[Finding]:
    """Find time in collectives that is mostly waiting, for whichever rank."""
    table, of_ranks = ranks.collectives, ranks.ranks.where("exposed_share != 0")
    whole_ns = sum(table.column("duration_ns"))
    waiting = sum(table.column("waiting_ns")) / whole_ns if whole_ns else 0.0
    share = waiting * median_low([*of_ranks.column("exposed_share")] or [0.0])
    if waiting < _MOSTLY or share < _LEAST_WAIT:
        return
    yield Finding(
        code="stragglers",
        variant="in turn",
        title=f"The ranks wait for each other for {percent(share)} of the step: {percent(waiting)} "
        "of the time in collectives is waiting for the rank that comes last",
        change="Give all ranks equally much work in each step: put samples of like length into the "
        "same batches of all ranks, or limit the tokens of a batch instead of its samples.",
        verify=_command(ranks),
        share=share,
        evidence=tuple(map(_waits, table.head(_MOST_ROWS))),
    )


def _row(row: Any) -> Evidence:
    message, speed = row.largest_message_bytes, row.largest_message_bus_bytes_per_second
    parts = [
        "" if row.process_group is None else f"group {row.description or row.process_group}",
        "" if message is None else f"largest message {size(message)}",
        "" if speed is None else f"at {rate(speed)} bus bandwidth",
    ]
    detail = ", ".join(filter(None, ["exposed time", *parts]))
    return Evidence(row.kind or "communication", row.calls, row.exposed_ns, detail=detail)


def _call(row: Any) -> Evidence:
    detail = f"{size(row.bytes)} at {rate(row.bus_bytes_per_second)}"
    end_ns = row.start_ns + row.duration_ns
    return Evidence(row.kind, 1, row.duration_ns, row.start_ns, end_ns, detail)


def _rank(row: Any) -> Evidence:
    waiting = f"own work per step, and {duration(row.exposed_communication_ns)} waiting"
    return Evidence(f"rank {row.rank}", row.steps, row.own_ns, detail=waiting)


def _waits(row: Any) -> Evidence:
    last = ""
    if row.last_rank is not None:
        last = f", rank {row.last_rank} is the last in {percent(row.last_share)} of the calls"
    return Evidence(row.kind, row.calls, row.waiting_ns, detail=f"waiting, mean of the ranks{last}")


def _waited_ns(row: Any) -> int:
    """How much longer the others wait in communication than this rank."""
    others_ns: int = row.others_exposed_communication_ns or 0
    return others_ns - int(row.exposed_communication_ns)


def _is_in_range(row: Any) -> bool:
    excess_ns = row.own_ns - row.median_own_ns
    return row.range is not None and row.range_excess_ns >= _OF_EXCESS * excess_ns


def _saving(ranks: Ranks, late: Sequence[Any], waited_ns: int) -> Saving:
    """What equal work on all ranks saves.

    The upper bound is what the rank that waits most would save without waits, in a simulation of
    this rank; if its trace cannot be simulated, it is the time that ranks wait. The estimate is a
    part of it: equal work moves the time of the late ranks to all others.
    """
    known = ranks.ranks.where("exposed_communication_ns >= 0")
    waits = known.sort("exposed_communication_ns", descending=True)[0]
    paths = {each.rank: path for each, path in zip(ranks.summaries, ranks.paths)}
    baseline_ns, high_ns = waits.step_ns, waited_ns
    try:
        found = scenario(Views.load(paths[waits.rank])).no_late_ranks()
        baseline_ns, high_ns = found.baseline_ns, min(max(found.saving_ns, 0), waited_ns)
    except (CaptureError, TraceError):  # without its trace, or with collectives on the CPU
        pass
    part = 1 - len(late) / len(ranks.ranks)
    return Saving(baseline_ns, round(high_ns * part), 0, high_ns)


def _change(row: Any) -> str:
    of_rank, where = f"rank {row.rank}{f' on {row.host}' if row.host else ''}", ""
    if _is_in_range(row):
        where = (
            f"Look at the range {row.range}: {of_rank} spends {duration(row.range_excess_ns)} more "
            "in it per step than the median rank. "
        )
    if row.idle_ns is not None and row.idle_ns - (row.others_idle_ns or 0) > _waited_ns(row) / 2:
        return (
            f"{where}The device of {of_rank} is idle because its CPU is late. Give the "
            "rank CPU cores of its own (numactl, OMP_NUM_THREADS). Remove work that only this rank "
            "does, such as logging."
        )
    compared = (
        "load of the CPUs" if row.idle_ns is None else "clock rate and temperature of the device"
    )
    return (
        f"{where}Give all ranks equally much work (lengths of sequences, sizes of batches, layers "
        f"of a stage), and compare the {compared} of {of_rank} with those of the others."
    )


def _command(ranks: Ranks) -> str:
    folders = dict.fromkeys(
        path.rpartition("/")[0] if isinstance(path, str) else str(path.parent)
        for path in ranks.paths
    )
    return f"instrument ranks {shlex.join(folders)} --window {shlex.quote(ranks.name)}"
