"""Memory: the driver allocates again and again; memory in use grows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from instrument.base.units import size
from instrument.read.advise.check import (
    FOUR_STEPS,
    MEMORY_EVENTS,
    RECORD_STEPS,
    Check,
    NotRecorded,
    Problem,
)
from instrument.read.advise.finding import Evidence
from instrument.read.facts.memory_attribution import By
from instrument.read.views.coverage_rows import FILE
from instrument.read.views.interruptions import ALLOCATION, kinds_of
from instrument.read.views.views import Views

_LEAST_STEPS = 2  # with allocations
_LEAST_BYTES = 256 * 1024  # 100,000 steps that add as much add 24 GiB
# A training that needs fewer steps than these to fill the free memory soon fails: few buffers with
# a bound grow so fast. Growth is steady if no step adds twice as much as another.
_FEW_STEPS, _STEADY = 2000, 2
# A range is named if it holds at least this share of the added memory.
_MOSTLY = 0.9


def allocator_churn(capture: Views) -> Iterator[Problem]:
    """Find calls such as cudaMalloc on the threads that launch; a warm program hardly has any."""
    events, steps = capture.events, capture.links.counted_steps
    launching = capture.work.call[capture.work.call >= 0]
    calls = np.flatnonzero(kinds_of(events) == ALLOCATION)
    calls = calls[np.isin(events.thread[calls], events.thread[launching])]
    step = steps.holds(events.start_ns[calls])
    calls, step = calls[step >= 0], step[step >= 0]
    unclear = None
    if steps.what != "step" or steps.count < _LEAST_STEPS:
        unclear = NotRecorded(
            "the trace has too few finished steps to show whether allocations repeat", RECORD_STEPS
        )
    elif len(np.unique(step)) < _LEAST_STEPS:
        return
    yield Problem(events=calls, unclear=unclear)


ALLOCATOR_CHURN = Check(
    "allocator-churn",
    allocator_churn,
    title="The driver takes {share} of the step to allocate and free memory: {calls} calls a step",
    change="Remove torch.cuda.empty_cache() from the loop; if the sizes of tensors change, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or pad them; if memory is short, use a "
    "smaller batch.",
    verify="--interruptions",
    least_share=0.02,
    factor=0,
    on_device=True,
    coverage=FILE,
)


def memory_growth(capture: Views) -> Iterator[Problem]:
    """Find the devices whose memory grows in every step but the first."""
    for device in capture.memory.timelines:
        net = capture.memory_steps.where(device=device).column("net_bytes")[1:]
        added = int(statistics.median(net))
        if min(net) > 0 and added >= _LEAST_BYTES:
            is_steady = max(net) < _STEADY * min(net)
            yield _growth(capture, device, added, len(net), is_steady=is_steady)


MEMORY_GROWTH = Check(
    "memory-growth",
    memory_growth,
    title="Memory in use on {what}",
    verify="--memory  # needs profiler.profile_memory=true",
    needs=(MEMORY_EVENTS, FOUR_STEPS),
    coverage=FILE,
)


def _growth(capture: Views, device: str, added: int, steps: int, *, is_steady: bool) -> Problem:
    rows, of_ranges = (_holders(capture, device, by) for by in ("operator", "range"))
    name, held, _ = next(iter(of_ranges), ("[", 0, 0))
    is_named = not name.startswith("[") and held >= _MOSTLY * added * steps
    place = f", allocated in range {name.rpartition('/')[2]!r}" if is_named else ""
    threads = capture.about.environment and capture.about.environment.threads
    # All ranks of the machine share its memory, and are taken to grow alike.
    ranks = max(threads.local_ranks or 1, 1) if device == "cpu" and threads else 1
    free = _free_bytes(capture, device, ranks) if is_steady else None
    ends_run = free is not None and free <= _FEW_STEPS * ranks * added
    rest = " Memory that fills up to a bound, such as a buffer of samples, is no problem."
    if free is not None and ends_run:
        full = f"the free {size(free)} are full after {free // (ranks * added):,} steps"
        rest = f" If this goes on{f' on all {ranks} ranks of the machine' * (ranks > 1)}, {full}."
    kept = (Evidence(name, calls, detail=f"{size(held)} kept") for name, held, calls in rows[:4])
    return Problem(
        f"{device} grows by {size(added)} in each step{place}",
        place=(name if is_named else None, None),
        evidence=(*kept, *_peak(capture, device)),
        variant=device,
        change="Keep loss.item() or loss.detach() instead of a tensor with its graph, and drop "
        f"what later steps do not need.{rest}",
        ends_run=ends_run,
    )


def _free_bytes(capture: Views, device: str, ranks: int) -> int | None:
    """The memory of a device, or for the CPU of the machine, that is free after the last step."""
    kind, _, index = device.partition(":")
    capacity = capture.about.machine.memory_bytes if kind == "cpu" else None
    if index.isdecimal():
        (found,) = capture.events.devices_of([int(index)])
        capacity = None if found is None else found.memory_bytes
    if capacity is None:
        return None
    return max(capacity - ranks * int(capture.memory.timelines[device]["level_bytes"][-1]), 0)


def _holders(capture: Views, device: str, by: By) -> list[tuple[str, int, int]]:
    """What holds more memory after the last step than after the first, the most bytes first.

    The tuples are a name, the additional bytes and the additional allocations. There are none if
    the trace has no addresses.
    """
    if by not in capture.memory.kinds:
        return []
    first, last = (
        {
            row.name: (row.bytes, row.allocations or 0)
            for row in capture.memory_live(by, device=device, at_ns=end)
            if row.name is not None
        }
        for end in capture.events.end_ns[capture.links.steps[[0, -1]]].tolist()
    )
    grown = [
        (name, held - first.get(name, (0, 0))[0], calls - first.get(name, (0, 0))[1])
        for name, (held, calls) in last.items()
    ]
    return sorted((row for row in grown if row[1] > 0), key=lambda row: -row[1])


def _peak(capture: Views, device: str) -> Iterator[Evidence]:
    memory = capture.memory
    row = capture.memory_live(memory.most_telling(device), device=device)[0]
    if row.name is not None:
        detail = f"{size(row.bytes)} at the peak, more than any other owner"
        yield Evidence(row.name, row.allocations or 0, detail=detail)
