"""`memory-growth`: memory in use grows from step to step.

Every finished step but the first must allocate more than it frees, the median step at least 256 KiB
(100,000 such steps add 24 GiB). The evidence lists the operators that hold more after the last step
than after the first, and what holds the most at the peak. No saving is simulated: growing memory
does not slow the steps. A buffer that fills up to a bound grows alike in a few steps, so the
finding comes before all that only cost time only if the growth is steady and fills the free memory
of the device, or for the CPU of the machine, within 2,000 steps. All ranks of the machine share its
memory, and are taken to grow alike. Memory that no tensor uses is not
seen, such as the nodes of a kept graph (docs/diagnose.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from instrument.base.units import size
from instrument.read.advise.check import FOUR_STEPS, MEMORY_EVENTS, Check, Problem
from instrument.read.advise.finding import Evidence
from instrument.read.facts.memory_attribution import By
from instrument.read.views.coverage_rows import OWNED
from instrument.read.views.views import Views

_LEAST_BYTES = 256 * 1024
# A training that needs fewer steps than these to fill the free memory soon fails: few buffers with
# a bound grow so fast. Growth is steady if no step adds twice as much as another.
_FEW_STEPS, _STEADY = 2000, 2
# A range is named if it holds at least this share of the added memory.
_MOSTLY = 0.9


def find(capture: Views) -> Iterator[Problem]:
    """Yield a problem for each device whose memory grows in every step but the first."""
    steps = capture.memory_steps
    for device in capture.memory.timelines:
        net = steps.where(device=device).column("net_bytes")[1:]
        added = statistics.median(net)
        if min(net) > 0 and added >= _LEAST_BYTES:
            is_steady = max(net) < _STEADY * min(net)
            yield _problem(capture, device, int(added), len(net), is_steady=is_steady)


CHECK = Check(
    "memory-growth",
    find,
    verify="--memory  # needs profiler.profile_memory=true",
    needs=(MEMORY_EVENTS, FOUR_STEPS),
    coverage=(OWNED,),
)


def _problem(capture: Views, device: str, added: int, steps: int, *, is_steady: bool) -> Problem:
    rows = _holders(capture, device, "operator")
    holder = _mostly(_holders(capture, device, "range"), added * steps)
    ranks = _ranks(capture, device)
    free = _free_bytes(capture, device, ranks) if is_steady else None
    ends_run = free is not None and free <= _FEW_STEPS * ranks * added
    rest = " Memory that fills up to a bound, such as a buffer of samples, is no problem."
    if free is not None and ends_run:
        full = f"the free {size(free)} are full after {free // (ranks * added):,} steps"
        rest = f" If this goes on{f' on all {ranks} ranks of the machine' * (ranks > 1)}, {full}."
    place = "" if holder is None else f", allocated in range {holder.rpartition('/')[2]!r}"
    return Problem(
        f"Memory in use on {device} grows by {size(added)} in each step{place}",
        place=(holder, None),
        evidence=(
            *(Evidence(name, calls, detail=f"{size(held)} kept") for name, held, calls in rows[:4]),
            *_peak(capture, device),
        ),
        variant=device,
        change="Keep loss.item() or loss.detach() instead of a tensor with its graph, and drop "
        f"what later steps do not need.{rest}",
        ends_run=ends_run,
    )


def _ranks(capture: Views, device: str) -> int:
    """How many ranks share the memory: those of the machine for the CPU, one for a device."""
    environment = capture.about.environment
    threads = environment.threads if environment is not None else None
    return max(threads.local_ranks or 1, 1) if device == "cpu" and threads is not None else 1


def _free_bytes(capture: Views, device: str, ranks: int) -> int | None:
    """The memory of a device, or for the CPU of the machine, that is free after the last step."""
    kind, _, index = device.partition(":")
    capacity = capture.about.machine.memory_bytes if kind == "cpu" else None
    if index.isdecimal():
        (found,) = capture.events.devices_of([int(index)])
        capacity = None if found is None else found.memory_bytes
    if capacity is None:
        return None
    return max(capacity - ranks * int(capture.memory.timelines[device].level_bytes[-1]), 0)


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
            for row in capture.memory_live(by, device=device, at_ns=end)
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
    row = capture.memory_live(memory.most_telling(device), device=device)[0]
    if row.name is not None:
        detail = f"{size(row.bytes)} at the peak, more than any other owner"
        yield Evidence(row.name, row.allocations or 0, detail=detail)
