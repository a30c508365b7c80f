"""The rows of `capture.coverage`: their names, what they measure, and which of them are losses.

This module does not import numpy, because `VIEWS` refers to these rows, and `VIEWS` must be
importable without numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """A row of the coverage.

    Attributes:
        doc: what the share is a fraction of, and when the row is left out.
        is_loss: whether something is missing from the capture if the share is below 1. If False,
            the row describes the program or the recording, and never causes a warning.
    """

    doc: str
    is_loss: bool = True


LAUNCHES = "launches with their device work"
RECORDS = "device records that the profiler kept"
LAUNCHED = "device time with a launch"
IN_OPERATOR = "launched device time with an operator"
IN_ORDER = "device work in the order of its launches"
OUTSIDE_GRAPHS = "device time outside of CUDA graphs"
DEVICE_IN_STEPS = "device time within finished steps"
CPU_IN_STEPS = "CPU time within finished steps"
DEVICE_IN_RANGES = "device time with a range"
CPU_IN_RANGES = "CPU time within a range"
TIMED_RANGES = "called ranges with a time"
JOINED = "backward time joined to its forward"
OWNED = "memory events with an owner"
NESTED = "slices that nest on their thread"
VALID = "events with possible times"
READ = "events of the file that were read"
PLANNED = "planned steps that were recorded"
UNDISTURBED = "step time without the cost of recording"

#: The rows in the order of the table.
ROWS = {
    LAUNCHES: Row(
        "of the CPU calls that launch a kernel, a CUDA graph or a copy, the part that has device "
        "work with the same correlation. Two kinds of calls do not count: calls during the capture "
        "of a CUDA graph, because they launch nothing, and memsets, because a memset of 0 bytes "
        "launches nothing. Left out if the trace has no launches, or has counters of a range "
        "profiler and no device work"
    ),
    RECORDS: Row(
        "of the records of device work and calls, the part that Kineto did not drop, according to "
        "Kineto's own messages in the trace; None if Kineto stopped recording early. Left out "
        "if the trace has no such messages"
    ),
    LAUNCHED: Row(
        "of the time of all device work, the part whose launch is in the trace. Left out if there "
        "is no device work"
    ),
    IN_OPERATOR: Row(
        "of the device time with a launch, the part that an operator or a range launched. The "
        "profiler records the launches of all threads, but the operators only of some. Left out "
        "if there are no launches"
    ),
    IN_ORDER: Row(
        "of the device time with a launch, the part that starts after its launch has begun, and "
        "not after work that was launched later on the same stream. Left out if there are no "
        "launches"
    ),
    OUTSIDE_GRAPHS: Row(
        "of the device time, the part that no CUDA graph launched. Left out if there are no CUDA "
        "graphs"
    ),
    DEVICE_IN_STEPS: Row(
        "of the device time, the part that was launched in finished steps. If the launch of work "
        "is not in the trace, the start of the work decides. Left out if no steps are marked"
    ),
    CPU_IN_STEPS: Row(
        "of the CPU time of all threads, without calls that only wait for the device, the part in "
        "finished steps. Left out if no steps are marked"
    ),
    DEVICE_IN_RANGES: Row(
        "of the device time, the part that belongs to a range. Left out if there is no device work",
        is_loss=False,
    ),
    CPU_IN_RANGES: Row(
        "of the CPU time of all recorded threads, the part that belongs to a range; the backward "
        "belongs to the range of its forward. Left out if no CPU time was recorded",
        is_loss=False,
    ),
    TIMED_RANGES: Row(
        "of the names of all called ranges, the part whose marks torch.compile did not remove. "
        "Left out if torch.compile removed no marks"
    ),
    JOINED: Row(
        "of the CPU time of the backward, the part whose forward operator is known. Left out if "
        "there is no backward"
    ),
    OWNED: Row(
        "of the bytes of all allocations, the part that was allocated in an operator or a range. "
        "Left out if there are no allocations"
    ),
    NESTED: Row(
        "of the duration of all CPU slices, the part in slices that nest. A slice nests if it lies "
        "wholly inside or wholly outside of each earlier slice of its thread. Perfetto drops most "
        "slices that do not nest, or moves them to another track. No table depends on this row. "
        "Left out if there are no slices"
    ),
    VALID: Row(
        "of the events of the file, the part with possible times. An event that ends before it "
        "begins does not count, nor does an event at a time that is out of range"
    ),
    READ: Row("of the events of the file, the part that was read; None if the file is truncated"),
    PLANNED: Row(
        "of the planned steps, the part that was recorded; None if the number of planned steps is "
        "not known. Left out for a trace without a capture.json"
    ),
    UNDISTURBED: Row(
        "the median time of a step before the window, as a fraction of the median time of a "
        "recorded step; None if fewer than 10 steps ran before the window. Left out if the steps "
        "were not timed",
        is_loss=False,
    ),
}

# Groups of rows. Every view depends on `_FILE`, and every view of device work on `_DEVICE`. The
# other groups matter to views with operators as owners of work, with steps, or with ranges.
_FILE = (VALID, READ, PLANNED)
_DEVICE = (LAUNCHES, RECORDS)
_OWNERS = (LAUNCHED, IN_OPERATOR, OUTSIDE_GRAPHS)
_STEPS = (DEVICE_IN_STEPS, CPU_IN_STEPS)
_RANGES = (DEVICE_IN_RANGES, CPU_IN_RANGES, TIMED_RANGES, JOINED)


def rows_for(*groups: Iterable[str]) -> tuple[str, ...]:
    """The names of the rows in the given groups, in the order of the table.

    The rows in `_FILE` are always added, because they concern every trace file.
    """
    chosen = {*_FILE, *(name for group in groups for name in group)}
    return tuple(name for name in ROWS if name in chosen)


#: The rows that each kind of view depends on.
DEVICE = rows_for(_DEVICE)
LAUNCHING = rows_for(_DEVICE, (LAUNCHED,))
ORDERED = rows_for(_DEVICE, (LAUNCHED, IN_ORDER))
STEPS = rows_for(ORDERED, (DEVICE_IN_STEPS, UNDISTURBED))
CALLS = rows_for(_DEVICE, _OWNERS, _STEPS, (OWNED, UNDISTURBED))
RANGES = rows_for(CALLS, _RANGES)
PARTS = rows_for(_DEVICE, _OWNERS, _RANGES)
FILE = rows_for()
OWNERS = rows_for((OWNED, JOINED))
COMPILED = rows_for((TIMED_RANGES,))
INTERRUPTIONS = rows_for((CPU_IN_STEPS,))
LAUNCHERS = rows_for(_DEVICE, _OWNERS)
LAUNCHERS_IN_STEPS = rows_for(LAUNCHERS, STEPS)
EVENTS = rows_for(_DEVICE, (LAUNCHED, IN_OPERATOR, IN_ORDER))
EVERY = tuple(ROWS)
TABLES = tuple(name for name in EVERY if name != NESTED)
