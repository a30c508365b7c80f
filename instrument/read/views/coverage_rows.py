"""The rows of `capture.coverage`, and the rows on which each kind of view depends.

This module does not import numpy, because `views.py` must load without numpy.
"""

from __future__ import annotations

from collections.abc import Iterable

LAUNCHES = "launches with their device work"
LAUNCHED = "device time with a launch"
IN_OPERATOR = "launched device time with an operator"
IN_ORDER = "device work in the order of its launches"
OUTSIDE_GRAPHS = "device time outside of CUDA graphs"
LAYERED = "device time with a layer"
CPU_IN_STEPS = "CPU time within finished steps"
JOINED = "backward time joined to its forward"
VALID = "events with possible times"
READ = "events of the file that were read"
PLANNED = "planned steps that were recorded"
INPUTS = "operators with inputs of the detail window"
UNDISTURBED = "step time without the cost of recording"

#: Which fraction the cell `share` of each row holds, and for which traces the row is left out; in
#: the order of the table.
ROWS = {
    LAUNCHES: "the number of launches whose device work is in the trace, as a fraction of the "
    "number of all launches. A launch is a CPU call that launches a kernel, a CUDA graph or a "
    "copy. The device work of a launch has the same correlation number as the launch. These calls "
    "do not count: calls during the capture of a CUDA graph, because they launch nothing; memsets, "
    "because a memset of 0 bytes launches nothing; and calls whose device work was not to be "
    "recorded, according to `profiler.activities`. Left out if the trace has no launches, or if "
    "Kineto recorded hardware counters of the device instead of device work",
    LAUNCHED: "the part of the device time for which the trace has the launch of the work: the "
    "runtime or driver call with the same correlation number. Left out if there is no device work",
    IN_OPERATOR: "the device time of the work that was launched inside an operator or a range, as "
    "a fraction of the device time of all work whose launch or operator is in the trace. Without a "
    "launch in the trace, the operator is found by the `External id` of the work. The profiler "
    "records the launches of all threads, but the operators of only some threads. Left out if "
    "there are no launches and no such operators",
    IN_ORDER: "the device time of the work that started at a possible time, as a fraction of the "
    "device time of all work whose launch is in the trace. Two starts are impossible: before the "
    "launch of the work began, and after the start of work that was launched later on the same "
    "stream. Left out if there are no launches",
    OUTSIDE_GRAPHS: "the part of the device time that no CUDA graph launched. Left out if there "
    "are no CUDA graphs",
    LAYERED: "the part of the device time whose layer is known, or that is known to be in none; "
    "`why` gives the shares by evidence (see the table `layers`). A loss only for the table of "
    "layers. Left out if no layer is known",
    CPU_IN_STEPS: "the part of the CPU time of all threads that is in finished steps. Calls "
    "that only wait for the device do not count. Left out if no steps are marked",
    JOINED: "the part of the CPU time of the backward for which the forward operator is known. "
    "AccumulateGrad nodes of autograd have no forward operator, and count as known. Left out if "
    "there is no backward",
    VALID: "the part of the events of the file that have possible times. A time is impossible if "
    "it is out of range, lost or more than a day from most others, or if the event ends before it "
    "begins",
    READ: "the part of the events of the file that were read: all but those that are not JSON or "
    "have no category, or one that torch does not write; None if the file is truncated. `why` "
    "gives the number of counter events, whose values are not read",
    PLANNED: "the part of the planned steps that were recorded; None if the number of planned "
    "steps is not known. Left out for a trace without a capture.json",
    INPUTS: "the number of operators whose shapes are known from the detail window, as a "
    "fraction of the operators in finished steps. Left out if the capture has no detail window, or "
    "recorded shapes itself",
    UNDISTURBED: "the usual duration of the steps before the window, as a fraction of the usual "
    "duration of the recorded steps; None if fewer than 10 steps ran before the window, or steps "
    "of other kinds. A share below 1 is no loss. Left out if the steps were not timed",
}


def rows_for(*groups: Iterable[str]) -> tuple[str, ...]:
    """The names of the rows in the given groups, and of those that every view needs."""
    chosen = {VALID, READ, PLANNED, *(name for group in groups for name in group)}
    return tuple(name for name in ROWS if name in chosen)


#: The coverage rows that each kind of view depends on.
FILE = rows_for()
DEVICE = rows_for([LAUNCHES])
LAUNCHING = rows_for([LAUNCHES, LAUNCHED])
ORDERED = rows_for([LAUNCHES, LAUNCHED, IN_ORDER])
STEPS = rows_for(ORDERED, [CPU_IN_STEPS, UNDISTURBED])
LAUNCHERS = rows_for([LAUNCHES, LAUNCHED, IN_OPERATOR, OUTSIDE_GRAPHS])
LAUNCHERS_IN_STEPS = rows_for(LAUNCHERS, STEPS)
CALLS = rows_for(LAUNCHERS, [CPU_IN_STEPS, INPUTS, UNDISTURBED])
RANGES = rows_for(CALLS, [JOINED])
PARTS = rows_for(LAUNCHERS, [JOINED])
OWNERS = rows_for([JOINED])
INTERRUPTIONS = rows_for([CPU_IN_STEPS])
EVENTS = rows_for(ORDERED, [IN_OPERATOR])
LAYERS = rows_for(LAUNCHING, [LAYERED])
#: All but that of layers, which most traces do not have.
EVERY = tuple(name for name in ROWS if name != LAYERED)
