"""`exposed-communication`: the step waits for collectives that no computation hides.

Counted is the time of communication in which no kernel computes; without device work, the time of
gloo's or MPI's collectives in which no thread runs an operator. The simulation removes all
communication, so overlap and smaller messages cannot save more. The trace of one rank does not show
which part is a wait for slower ranks: `stragglers` compares the ranks. As long as they are not
compared, `diagnose` promises no saving.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from instrument.base.units import percent, rate, size
from instrument.read.advise.check import Check, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.facts.collective_records import is_collective, is_on_cpu
from instrument.read.facts.device_work import COMMUNICATION
from instrument.read.facts.groupby import distinct
from instrument.read.facts.idle import device_time
from instrument.read.facts.places import common_place
from instrument.read.trace.events import Ints
from instrument.read.views.collectives import CPU, cpu_waits
from instrument.read.views.coverage_rows import LAUNCHING
from instrument.read.views.views import Views

_MOST_ROWS = 5
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


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem for all communication."""
    steps = capture.links.counted_steps
    on_device = len(capture.work.event) > 0
    chosen = capture.work.event[capture.work.kind == COMMUNICATION]
    if not on_device:
        chosen = np.flatnonzero(is_on_cpu(capture.events))
    if not len(chosen):
        return
    share = exposed_on_device(capture) if on_device else steps.share(_on_cpu(capture))
    if share < CHECK.least_share:
        return
    table = capture.collectives.where("exposed_ns != 0").sort("exposed_ns")
    kind = next((each for each in table.column("kind") if each is not None), None)
    path, source = common_place(capture, _launches(capture, chosen))
    if path is not None and is_collective(path.rpartition("/")[2]):
        path = path.rpartition("/")[0] or None
    yield Problem(
        f"{percent(share)} of the {steps.what} is exposed communication"
        + (f", mostly {kind}" if kind else ""),
        chosen,
        share,
        place=(path, source),
        evidence=tuple(_row(each) for each in table.head(_MOST_ROWS)),
        change=_change_of_library(capture, chosen),
    )


CHECK = Check(
    "exposed-communication",
    find,
    change="Start the communication earlier and wait for it later: work = dist.all_reduce(tensor, "
    "async_op=True), other work, then work.wait(); or send fewer bytes.",
    verify="--collectives --breakdown",
    least_share=0.05,
    factor=0,
    coverage=LAUNCHING,
)


def exposed_on_device(capture: Views) -> float:
    """The share of the counted steps in which communication runs and no kernel computes."""
    spent = device_time(capture)
    return spent["exposed_communication_ns"] / max(spent["total_ns"], 1)


def _on_cpu(capture: Views) -> int:
    """The time in which collectives on the CPU ran and no thread ran an operator."""
    per_step = cpu_waits(capture.links).get("exposed_communication_ns")
    if per_step:
        return int(sum(per_step[1:] or per_step))
    return sum(capture.collective_calls.where(runs_on=CPU).column("exposed_ns"))


def _change_of_library(capture: Views, chosen: Ints) -> str:
    names = capture.events.names
    change = next((change for name, change in _CHANGES if any(map(name.search, names))), "")
    used = (names[code] for code in distinct(capture.events.name[chosen]).tolist())
    return change.format(hook=_HOOK_OF_NCCL if any(map(_NCCL.search, used)) else _HOOK)


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
    return Evidence(row.kind or "communication", row.calls, row.exposed_ns, detail=detail)
