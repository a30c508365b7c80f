"""Find memory that grows from step to step, and the operators that allocated it.

The check reads the allocations and frees of the trace. There is a finding if more memory is
allocated than freed in every finished step except the first. The first step does not count, because
it may allocate memory that stays, such as the state of an optimizer. At least three other steps are
needed: if batches differ in size, memory may grow for a step or two. The median step must add at
least 256 KiB, because 100,000 such steps add 24 GiB.

The evidence lists the operators whose memory in use at the end of the last step is larger than at
the end of the first step. The last row of the evidence names what holds the most memory at the
peak, such as an operator, a range or a module.

No saving is simulated: growing memory does not slow the steps, but in the end the run fails.

The check does not find memory on the CPU that no tensor uses. For example, if the program keeps a
loss, the loss holds the nodes of its graph, about 500 bytes each. The backward has freed the
tensors that the nodes saved, and no memory event shows the nodes themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from instrument.analysis.memory_attribution import By
from instrument.analysis.views import Views
from instrument.findings.finding import (
    RECORD_STEPS,
    Check,
    Evidence,
    Finding,
    NotRecorded,
    show_command,
)
from instrument.units import size

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LEAST_BYTES = 256 * 1024
_LEAST_STEPS = 3
_MANY_STEPS = 100_000
# A range is named if it holds at least this share of the added memory.
_MOSTLY = 0.9


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:  # noqa: ARG001
    """Yield a finding for each device whose memory grows in every step but the first."""
    memory = capture.memory
    if not memory.timelines:
        raise NotRecorded(
            "the trace has no memory events", "record with profiler.profile_memory=true"
        )
    if len(capture.links.steps) < 1 + _LEAST_STEPS:
        raise NotRecorded(
            f"at least {1 + _LEAST_STEPS} finished steps are needed, but the trace has "
            f"{len(capture.links.steps)}",
            RECORD_STEPS,
        )
    steps = memory.steps
    for device in memory.timelines:
        net = steps.where(device=device).column("net_bytes")[1:]
        added = statistics.median(net)
        if min(net) > 0 and added >= _LEAST_BYTES:
            yield _finding(capture, device, int(added), len(net))


def _finding(capture: Views, device: str, added: int, steps: int) -> Finding:
    rows = _holders(capture, device, "operator")
    holder = _mostly(_holders(capture, device, "range"), added * steps)
    place = "" if holder is None else f", allocated in range {holder.rpartition('/')[2]!r}"
    return Finding(
        code=CHECK.code,
        title=f"Memory in use on {device} grows by {size(added)} in each step{place}",
        change="Keep loss.item() or loss.detach() instead of a tensor with its graph, and drop "
        "what later steps do not need. At this rate, "
        f"{_MANY_STEPS:,} steps add {size(added * _MANY_STEPS)}.",
        verify=show_command(capture, "--memory", "needs profiler.profile_memory=true"),
        range=holder,
        evidence=(
            *(Evidence(name, calls, detail=f"{size(held)} kept") for name, held, calls in rows[:4]),
            *_peak(capture, device),
        ),
        coverage=("memory events with an owner",),
    )


def _holders(capture: Views, device: str, by: By) -> list[tuple[str, int, int]]:
    """The operators or ranges that hold more memory after the last step than after the first step.

    Returns:
        Tuples of the name, the additional bytes and the additional allocations, the most additional
            bytes first. The list is empty if the trace has no addresses.
    """
    memory, steps = capture.memory, capture.links.steps
    if by not in memory.kinds:
        return []
    ends = capture.events.end_ns[steps[[0, -1]]].tolist()
    first, last = (
        {
            row.name: (row.bytes, row.allocations or 0)
            for row in memory.live(by, device=device, at_ns=end)
            if row.name is not None
        }
        for end in ends
    )
    grown = [
        (name, held - first.get(name, (0, 0))[0], calls - first.get(name, (0, 0))[1])
        for name, (held, calls) in last.items()
    ]
    return sorted((row for row in grown if row[1] > 0), key=lambda row: -row[1])


def _mostly(rows: list[tuple[str, int, int]], added: int) -> str | None:
    """The range that holds at least 90 % of the added memory; None if there is none."""
    if not rows or rows[0][0].startswith("[") or rows[0][1] < _MOSTLY * added:
        return None
    return rows[0][0]


def _peak(capture: Views, device: str) -> Iterator[Evidence]:
    memory = capture.memory
    row = memory.live(memory.most_telling(device), device=device)[0]
    if row.name is not None:
        detail = f"{size(row.bytes)} at the peak, more than any other owner"
        yield Evidence(row.name, row.allocations or 0, detail=detail)


CHECK = Check("memory-growth", find)
