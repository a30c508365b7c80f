"""How calls are counted where torch's own tables are flawed: our rules, and torch's to compare with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """One way of counting.

    `memory_by_thread`: a call has the memory of its own thread only, not of whatever thread allocated meanwhile.
    `all_device_memory`: memory of every kind of device counts, not only of those that torch's table knows.
    `python_rows`: Python frames are rows, and take self time from the operators and annotations around them.
    `annotations_as_kernels`: a device's copy of an annotation counts as a kernel of that annotation.
    `recursion_twice`: a total counts a call again that lies in one of the same row.
    `unlaunched_row`: device work whose launch is not in the trace is a row.
    `overlaps_twice`: where two calls in one overlap in part, that one's self time is less by all of both.
    `folding_loses_kernels`: a call folded into its like replaces that one's kernels instead of joining them.
    """

    memory_by_thread: bool
    all_device_memory: bool
    python_rows: bool
    annotations_as_kernels: bool
    recursion_twice: bool
    overlaps_twice: bool
    unlaunched_row: bool
    folding_loses_kernels: bool


HONEST = Rules(
    memory_by_thread=True,
    all_device_memory=True,
    python_rows=False,
    annotations_as_kernels=False,
    recursion_twice=False,
    overlaps_twice=False,
    unlaunched_row=True,
    folding_loses_kernels=False,
)
# What key_averages() does: torch/autograd/profiler.py (_parse_kineto_results) and profiler_util.py (EventList).
TORCH = Rules(
    memory_by_thread=False,
    all_device_memory=False,
    python_rows=True,
    annotations_as_kernels=True,
    recursion_twice=True,
    overlaps_twice=True,
    unlaunched_row=False,
    folding_loses_kernels=True,
)
