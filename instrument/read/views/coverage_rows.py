"""The rows of `capture.coverage`, the table that says how complete a capture is.

This module does not import numpy, because `analysis/views.py` must load without numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """What one row of the table `capture.coverage` measures.

    Attributes:
        doc: which fraction the cell `share` holds, and for which traces the row is left out.
        is_loss: whether a `share` below 1 means that the capture lacks something, and not only
            describes the program or the recording.
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
SHALLOW = "ranges that are not nested too deeply"
JOINED = "backward time joined to its forward"
OWNED = "memory events with an owner"
MEMORY_SHOWN = "memory events of the devices in the tables"
NESTED = "slices that nest on their thread"
VALID = "events with possible times"
READ = "events of the file that were read"
PLANNED = "planned steps that were recorded"
UNDISTURBED = "step time without the cost of recording"

#: The rows in the order of the table.
ROWS = {
    LAUNCHES: Row(
        "the number of launches whose device work is in the trace, as a fraction of the number of "
        "all launches. A launch is a CPU call that launches a kernel, a CUDA graph or a copy. The "
        "device work of a launch has the same correlation number as the launch. These calls do not "
        "count: calls during the capture of a CUDA graph, because they launch nothing; memsets, "
        "because a memset of 0 bytes launches nothing; and calls whose device work was not to be "
        "recorded, according to `profiler.activities`. Left out if the trace has no launches, or "
        "if Kineto recorded hardware counters of the device instead of device work"
    ),
    RECORDS: Row(
        "the part of the records of device work and calls that Kineto did not drop, according to "
        "Kineto's own messages in the trace; None if Kineto stopped recording early. Left out "
        "if the trace has no such messages"
    ),
    LAUNCHED: Row(
        "the part of the device time for which the trace has the launch of the work: the runtime "
        "or driver call with the same correlation number. Left out if there is no device work"
    ),
    IN_OPERATOR: Row(
        "the device time of the work that was launched inside an operator or a range, as a "
        "fraction of the device time of all work whose launch or operator is in the trace. Without "
        "a launch in the trace, the operator is found by the `External id` of the work. The "
        "profiler records the launches of all threads, but the operators of only some threads. "
        "Left out if there are no launches and no such operators"
    ),
    IN_ORDER: Row(
        "the device time of the work that started at a possible time, as a fraction of the device "
        "time of all work whose launch is in the trace. Two starts are impossible: before the "
        "launch of the work began, and after the start of work that was launched later on the same "
        "stream. Left out if there are no launches"
    ),
    OUTSIDE_GRAPHS: Row(
        "the part of the device time that no CUDA graph launched. Left out if there are no CUDA "
        "graphs"
    ),
    DEVICE_IN_STEPS: Row(
        "the device time of the work that was launched in finished steps, as a fraction of all "
        "device time. Work without a launch in the trace counts if the work itself started in a "
        "finished step. Left out if no steps are marked"
    ),
    CPU_IN_STEPS: Row(
        "the part of the CPU time of all threads that is in finished steps. Calls that only wait "
        "for the device do not count. Left out if no steps are marked"
    ),
    DEVICE_IN_RANGES: Row(
        "the part of the device time that belongs to a range. Left out if there is no device work",
        is_loss=False,
    ),
    CPU_IN_RANGES: Row(
        "the part of the CPU time of all recorded threads that belongs to a range; the backward "
        "belongs to the range of its forward. Left out if no CPU time was recorded",
        is_loss=False,
    ),
    TIMED_RANGES: Row(
        "the number of called ranges that have a time in the trace, as a fraction of the number of "
        "all called ranges. Ranges with the same name count as one. A called range has no time if "
        "torch.compile removed its marks. Left out if all called ranges have a time"
    ),
    SHALLOW: Row(
        "the number of ranges inside fewer than 1,000 other ranges, as a fraction of the number of "
        "all ranges. All other ranges are left out. Left out if there are no such ranges"
    ),
    JOINED: Row(
        "the part of the CPU time of the backward for which the forward operator is known. "
        "AccumulateGrad nodes of autograd have no forward operator, and count as known. Left out "
        "if there is no backward"
    ),
    OWNED: Row(
        "the part of the allocated bytes that was allocated in an operator or a range. Left out "
        "if there are no allocations"
    ),
    MEMORY_SHOWN: Row(
        "the number of memory events of the 20 devices with the most events, as a fraction of the "
        "number of all memory events. The tables of memory have only these devices. Left out if "
        "there are no other devices"
    ),
    NESTED: Row(
        "the time of the CPU slices that nest, as a part of the time of all CPU slices. A slice "
        "nests if it lies wholly inside or wholly outside of each earlier slice of its thread. "
        "Perfetto "
        "drops most slices that do not nest, or moves them to another track. No table depends on "
        "this row. Left out if there are no slices"
    ),
    VALID: Row(
        "the part of the events of the file that have possible times. A time is impossible if it "
        "is out of range, lost or more than a day from most others, or if the event ends before it "
        "begins"
    ),
    READ: Row(
        "the part of the events of the file that were read: all but those that are not JSON or "
        "have no category, or one that torch does not write; None if the file is truncated. `why` "
        "gives the number of counter events, whose values are not read"
    ),
    PLANNED: Row(
        "the part of the planned steps that were recorded; None if the number of planned steps is "
        "not known. Left out for a trace without a capture.json"
    ),
    UNDISTURBED: Row(
        "the usual duration of the steps before the window, as a fraction of the usual duration of "
        "the recorded steps; None if fewer than 10 steps ran before the window, or steps of other "
        "kinds. Left out if the steps were not timed",
        is_loss=False,
    ),
}

# Groups of coverage rows, by the views that depend on them: every view (`_FILE`), views of device
# work (`_DEVICE`), views that assign work to operators (`_OWNERS`), and views of steps or ranges.
_FILE = (VALID, READ, PLANNED)
_DEVICE = (LAUNCHES, RECORDS)
_OWNERS = (LAUNCHED, IN_OPERATOR, OUTSIDE_GRAPHS)
_STEPS = (DEVICE_IN_STEPS, CPU_IN_STEPS)
_RANGES = (DEVICE_IN_RANGES, CPU_IN_RANGES, TIMED_RANGES, SHALLOW, JOINED)


def rows_for(*groups: Iterable[str]) -> tuple[str, ...]:
    """The names of the rows in the given groups, and in `_FILE`, which every view needs."""
    chosen = {*_FILE, *(name for group in groups for name in group)}
    return tuple(name for name in ROWS if name in chosen)


#: The coverage rows that each kind of view depends on.
DEVICE = rows_for(_DEVICE)
LAUNCHING = rows_for(_DEVICE, (LAUNCHED,))
ORDERED = rows_for(_DEVICE, (LAUNCHED, IN_ORDER))
STEPS = rows_for(ORDERED, (DEVICE_IN_STEPS, UNDISTURBED))
CALLS = rows_for(_DEVICE, _OWNERS, _STEPS, (OWNED, UNDISTURBED))
RANGES = rows_for(CALLS, _RANGES)
PARTS = rows_for(_DEVICE, _OWNERS, _RANGES)
FILE = rows_for()
MEMORY = rows_for((MEMORY_SHOWN,))
OWNERS = rows_for((OWNED, MEMORY_SHOWN, JOINED))
COMPILED = rows_for((TIMED_RANGES,))
INTERRUPTIONS = rows_for((CPU_IN_STEPS,))
LAUNCHERS = rows_for(_DEVICE, _OWNERS)
LAUNCHERS_IN_STEPS = rows_for(LAUNCHERS, STEPS)
EVENTS = rows_for(_DEVICE, (LAUNCHED, IN_OPERATOR, IN_ORDER))
EVERY = tuple(ROWS)
TABLES = tuple(name for name in EVERY if name != NESTED)
