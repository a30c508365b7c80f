"""`exposed-communication`: the step waits for collectives that no computation hides.

The check measures how long communication runs in the steps while no kernel computes. In a trace
without device work, it measures how long collectives of gloo or MPI run while no thread runs an
operator. There is a finding if this time is at least 5 % of the time of the steps. Even then, there
is no finding if the simulation saves less than 1 % of the step. The simulation removes all
communication, so overlap and smaller messages cannot save more than the saving shown.

The trace of one rank does not show which part of this time is the transfer of data, and which
part is a wait for slower ranks. The check `stragglers` compares the ranks for this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.analysis.breakdown import COMMUNICATION, layers_of, masks
from instrument.analysis.collectives import CPU, cpu_waits, is_on_cpu
from instrument.analysis.coverage_rows import FILE, LAUNCHING
from instrument.analysis.places import common_place
from instrument.analysis.views import Views
from instrument.findings.device_time import LEAST_SAVING
from instrument.findings.finding import Check, Evidence, Finding, show_command
from instrument.findings.saving import is_worth, scaled
from instrument.links.collective_records import is_collective
from instrument.links.intervals import sweep
from instrument.links.step_index import CountedSteps
from instrument.trace.events import Ints
from instrument.units import percent, rate, size

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_SHARE = 0.05
_MOST_ROWS = 5
# For each library: a pattern of event names that only its communication has, and the advice.
_CHANGES = (
    (
        re.compile(r"DistributedDataParallel"),
        "To send less often, use model.no_sync() for all batches of a gradient accumulation "
        "except the last. To send fewer bytes, use model.register_comm_hook(None, "
        "default_hooks.bf16_compress_hook). To let the communication overlap better with the "
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
_OTHER_CHANGE = (
    "Start the communication earlier and wait for it later: work = dist.all_reduce(tensor, "
    "async_op=True), other work, then work.wait(); or send fewer bytes."
)


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if exposed communication takes at least 5 % of the steps."""
    time = capture.links.counted_steps
    on_device = len(capture.work.event) > 0
    chosen = capture.work.event[capture.work.kind == COMMUNICATION]
    if not on_device:
        chosen = np.flatnonzero(is_on_cpu(capture.events))
    if not len(chosen):
        return
    exposed_ns = exposed_on_device(capture, time) if on_device else _on_cpu(capture)
    share = time.share(exposed_ns)
    if share < _LEAST_SHARE:
        return
    saving = scaled(whatif, chosen)
    if not is_worth(saving, LEAST_SAVING):
        return
    table = capture.collectives.where(exposed_ns=lambda ns: bool(ns)).sort("exposed_ns")
    kind = next((each for each in table.column("kind") if each is not None), None)
    path, source = common_place(capture, _launches(capture, chosen))
    if path is not None and is_collective(path.rpartition("/")[2]):
        path = path.rpartition("/")[0] or None
    yield Finding(
        code="exposed-communication",
        title=f"{percent(share)} of the {time.what} is exposed communication"
        + (f", mostly {kind}" if kind else ""),
        change=_change(capture),
        verify=show_command(capture, "--collectives --breakdown"),
        share=share,
        saving=saving,
        range=path,
        source=source,
        evidence=tuple(_row(each) for each in table.head(_MOST_ROWS)),
        coverage=LAUNCHING if on_device else FILE,
    )


def exposed_on_device(capture: Views, time: CountedSteps) -> int:
    """The time in the measured steps in which communication ran and no kernel computed."""
    timeline = sweep([*layers_of(capture.work), (time.start_ns, time.end_ns)])
    exposed = masks(timeline.active)["exposed_communication_ns"]
    return int(timeline.total_ns(exposed & timeline.active[3])[0])


def _on_cpu(capture: Views) -> int:
    """The time in which collectives on the CPU ran and no thread ran an operator."""
    per_step = cpu_waits(capture.links).get("exposed_communication_ns")
    if per_step:
        return int(sum(per_step[1:] or per_step))
    return sum(capture.collective_calls.where(runs_on=CPU).column("exposed_ns"))


def _change(capture: Views) -> str:
    found = (change for name, change in _CHANGES if any(map(name.search, capture.events.names)))
    return next(found, _OTHER_CHANGE)


def _launches(capture: Views, chosen: Ints) -> Ints:
    """The communication events whose range and source line can be known.

    These are the events on the CPU, and the device events whose launch is in the trace.
    """
    device, node = capture.links.launched
    known = np.isin(chosen, device[node >= 0]) | ~np.isin(chosen, device)
    return chosen[known]


def _row(row: Any) -> Evidence:
    message = row.largest_message_bytes
    speed = row.largest_message_bus_bytes_per_second
    parts = [
        "" if row.process_group is None else f"group {row.description or row.process_group}",
        "" if message is None else f"largest message {size(message)}",
        "" if speed is None else f"at {rate(speed)} bus bandwidth",
    ]
    detail = ", ".join(filter(None, ["exposed time", *parts]))
    return Evidence(row.kind or "communication", row.calls, row.exposed_ns, None, detail)


CHECK = Check("exposed-communication", find)
