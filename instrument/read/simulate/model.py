"""`Model`: the moments of a recorded window, and the arcs between them.

An arc says that one moment, the target, happens at least a given time after another moment, the
source. A device row is a row of `Work`: a kernel, a copy or a memset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from instrument.read.facts.device_work import Work
from instrument.read.facts.groupby import group_rows
from instrument.read.facts.idle import late_work
from instrument.read.facts.intervals import Intervals
from instrument.read.facts.layers import Layers
from instrument.read.facts.links import Links
from instrument.read.simulate.cpu_time import CpuTime, joined
from instrument.read.simulate.program import NEVER, Program
from instrument.read.trace.events import Flags, Ints, is_runtime

_LARGEST = np.iinfo(np.int64).max

# The kinds of arcs: what the target of an arc waits for.
KINDS = (
    "CPU",
    "launch",
    "stream",
    "other stream",
    "wait",
    "full queue",
    "hand-over",
    "waiting for data",
    "device",
    "origin",
    "other ranks",
)
CPU, LAUNCH, STREAM, CROSS, WAIT, QUEUE, HANDOVER, LOADER, DEVICE, ORIGIN, RANKS = range(11)


class Moments(NamedTuple):
    """The starts and ends of events that the simulation uses, as columns.

    First come the moments on CPU threads, which alone have a `thread` and a `call` (an event; -1
    for none). Then come the ends of device events, their starts, and the moments at which batches
    from worker processes are ready. Times count from the start of the trace. `phase` orders moments
    at the same time; see `builder`. `end_of` and `start_of` have the moments of each device row
    (-1: the simulation needs no start), `step_start` and `step_end` those of each step.
    """

    time_ns: Ints
    phase: Ints
    thread: Ints
    call: Ints
    end_of: Ints
    start_of: Ints
    step_start: Ints
    step_end: Ints

    @property
    def ended_row(self) -> Ints:
        """For each moment, the device row that ends then; -1 if there is none."""
        row = np.full(len(self.time_ns), -1)
        row[self.end_of] = np.arange(len(self.end_of))
        return row


class Arcs(NamedTuple):
    """What each moment waits for: the arcs, as columns.

    A source of -1 is the start of the trace, at time 0. `kind` is an index into `KINDS`. `fixed_ns`
    is the time from source to target without CPU time and device time. `row` is the device row
    whose start or end is the target, and `event` the waiting call; -1 for none.
    """

    target: Ints
    source: Ints
    kind: Ints
    fixed_ns: Ints
    row: Ints
    event: Ints


class Costs(NamedTuple):
    """The times of a scenario, from which `Model.weights` computes the weights of the arcs.

    `cpu` has, for each edit, intervals on `Model.axis` and the factor for the CPU time in them. A
    fixed time of `NEVER` removes the arc. `added_ns` is CPU time directly before each CPU moment.
    """

    cpu: tuple[tuple[Intervals, float], ...]
    device_ns: Ints
    fixed_ns: Ints
    added_ns: Ints


@dataclass(frozen=True)
class Model:
    """The simulated graph of one window.

    Attributes:
        residue_ns: for each device row, how much later it started than its arcs explain; negative
            if it started earlier.
        has_steps: whether a step finished; otherwise the whole window counts as one step.
        step_of: for each device row, the step that launched it; -1 for none.
        unknown_wait_ns: the total time of the calls that wait for unknown device work.
        layers: finds the layers of the device rows.
    """

    links: Links
    work: Work
    axis: CpuTime
    moments: Moments
    arcs: Arcs
    program: Program
    residue_ns: Ints
    has_steps: bool
    step_of: Ints
    unknown_wait_ns: int
    layers: Callable[[], Layers] = field(repr=False)
    _typical_ns: Ints = field(repr=False)
    _recorded: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def lasting(self) -> Ints:
        """For each arc, the device row whose duration is part of the arc's weight; -1 for none."""
        row = self.arcs.row
        ends = np.append(self.moments.end_of, -1)[row] == self.arcs.target
        return np.where(ends, row, -1)

    @cached_property
    def measured(self) -> Costs:
        """The recorded costs; a simulation with these costs repeats the recording exactly."""
        row = self.arcs.row
        residue = np.where(row >= 0, np.append(self.residue_ns, 0)[row], 0)
        # The residue of a device event delays its start. So the arc from its start to its end gets
        # no residue.
        residue[self.arcs.kind == DEVICE] = 0
        fixed_ns = np.where(self.arcs.fixed_ns == NEVER, NEVER, self.arcs.fixed_ns + residue)
        return self._costs(fixed_ns)

    @cached_property
    def typical(self) -> Costs:
        """The recorded costs, but with usual delays instead of the recorded ones.

        Device work starts without its residue, and calls that wait for device work return after the
        usual time.
        """
        return self._costs(self._typical_ns)

    def _costs(self, fixed_ns: Ints) -> Costs:
        durations = self.work.end_ns - self.work.start_ns
        return Costs((), durations, fixed_ns, np.zeros(len(self.moments.thread), np.int64))

    def weights(self, costs: Costs) -> Ints:
        """The weight of each arc, in nanoseconds."""
        weights = costs.fixed_ns.copy()
        arcs, rows = self._work_arcs
        weights[arcs] += costs.device_ns[rows]
        cpu_arcs, target, place = self._cpu_arcs
        spent_ns = self.axis.spent(place, costs.cpu) if costs.cpu else self._spent_ns
        weights[cpu_arcs] += self._of_arcs(spent_ns) + costs.added_ns[target]
        weights[costs.fixed_ns == NEVER] = NEVER
        return weights

    def change(self, costs: Costs, cpu: Intervals, rows: Flags) -> Ints:
        """The change of each arc's weight in ns if the given CPU time and work take no time.

        `cpu` holds intervals on `axis`, and `rows` is a mask of device rows. This is
        `edits.scale(…, by=0)`, but faster.
        """
        change = np.zeros(len(self.arcs.target), np.int64)
        device_ns = np.where(rows, -costs.device_ns, 0)
        arcs, row = self._work_arcs
        change[arcs] = device_ns[row]
        meets, row = self.ranks_arcs
        change[meets] += np.where(costs.fixed_ns[meets] == NEVER, 0, device_ns[row])
        if len(cpu[0]):
            cpu_arcs, _, place = self._cpu_arcs
            change[cpu_arcs] = -self._of_arcs(self.axis.spent(place, costs.cpu, inside=cpu))
        return change

    def _of_arcs(self, spent_ns: Ints) -> Ints:
        """The CPU time of each CPU arc, from its thread's CPU time until the arc's end."""
        before = np.append(0, spent_ns[:-1])[: len(spent_ns)]
        # The first arc of a thread has no source, so all CPU time until its target counts.
        return spent_ns - np.where(self.arcs.source[self._cpu_arcs[0]] >= 0, before, 0)

    @cached_property
    def _work_arcs(self) -> tuple[Ints, Ints]:
        """The arcs whose time includes a duration of device work, and the device row of each."""
        arcs = np.flatnonzero(self.lasting >= 0)
        return arcs, self.lasting[arcs]

    @cached_property
    def _cpu_arcs(self) -> tuple[Ints, Ints, Ints]:
        """The arcs between moments of a thread, with their targets and the places of these.

        They are sorted by this place on `axis`.
        """
        arcs = np.flatnonzero(self.arcs.kind == CPU)
        arcs = arcs[np.argsort(self.places[self.arcs.target[arcs]], kind="stable")]
        target = self.arcs.target[arcs]
        return arcs, target, self.places[target]

    @cached_property
    def _spent_ns(self) -> Ints:
        return self.axis.spent(self._cpu_arcs[2])

    @cached_property
    def places(self) -> Ints:
        """For each moment on a CPU thread, its position on `axis`."""
        moments = self.moments
        count = len(moments.thread)
        return self.axis.place(moments.thread, moments.time_ns[:count] + self.axis.begin_ns)

    @cached_property
    def node_spans(self) -> Intervals:
        """The start and the end of each node of the call tree, as positions on `axis`."""
        tree, place = self.links.call_tree, self.axis.place
        return place(tree.thread, tree.start_ns), place(tree.thread, tree.end_ns)

    @cached_property
    def calls(self) -> Flags:
        """A mask of the events that are runtime calls."""
        return self.links.events.among(is_runtime)

    @cached_property
    def assumptions(self) -> tuple[Costs, ...]:
        """The costs without edits, under each assumption.

        All times are as recorded; or all delays and gaps have their usual lengths; or, with
        communication, the other ranks do not change: no collective ends earlier than recorded.
        """
        ends, rows = self.ranks_arcs
        if not len(ends):
            return self.measured, self.typical
        device_ns, fixed_ns = self.measured.device_ns.copy(), self.measured.fixed_ns.copy()
        device_ns[rows] = self.transfer_ns[rows]
        fixed_ns[ends] = self.work.end_ns[rows] - self.axis.begin_ns
        others_stay = self.measured._replace(device_ns=device_ns, fixed_ns=fixed_ns)
        return self.measured, self.typical, others_stay

    @property
    def counted(self) -> slice:
        """Which of the steps count."""
        return self.links.counted_steps.kept

    def recorded_steps(self, assumption: int = 0) -> list[int]:
        """The duration of each step without edits, in ns; see `assumptions`."""
        if assumption not in self._recorded:
            self._recorded[assumption] = self.simulated(self.assumptions[assumption])
        return self._recorded[assumption]

    def simulated(self, costs: Costs) -> list[int]:
        """The duration of each step with these costs, in ns."""
        found: list[int] = self.steps_ns(self.program.run(self.weights(costs))).tolist()
        return found

    def steps_ns(self, times: Ints) -> Ints:
        """The duration of each step; with several scenarios, a row for each.

        A step begins when it begins on the CPU, but not before the previous step has ended.
        """
        ends, begin = self.ends_ns(times), times[..., self.moments.step_start]
        begin[..., 1:] = np.maximum(begin[..., 1:], ends[..., :-1])
        return ends - begin

    def ends_ns(self, times: Ints) -> Ints:
        """The time at which each step ends; with several scenarios, a row for each.

        A step ends when the CPU has ended it and the device has ended the work that it launched,
        but not before the previous step.
        """
        moments, first = self.step_ends
        ends = np.maximum.reduceat(times[..., moments], first, axis=-1)
        found: Ints = np.maximum.accumulate(ends, axis=-1)
        return found

    @cached_property
    def step_ends(self) -> tuple[Ints, Ints]:
        """The moments that can end the steps, sorted by step, and the index of each step's first.

        The first is the step's end on the CPU. The others are the ends of its device work, without
        work after which other work of the step follows on its stream.
        """
        arcs, step_of = self.arcs, self.step_of
        gap_ns = np.minimum(self.measured.fixed_ns, self.typical.fixed_ns)
        after = np.flatnonzero((arcs.kind == STREAM) & (gap_ns >= 0))
        before, row = self.moments.ended_row[arcs.source[after]], arcs.row[after]
        is_last = step_of >= 0
        is_last[before[step_of[before] == step_of[row]]] = False
        count = len(self.moments.step_end)
        steps = np.append(np.arange(count), step_of[is_last])
        moments = np.append(self.moments.step_end, self.moments.end_of[is_last])
        order = np.argsort(steps, kind="stable")
        return moments[order], np.searchsorted(steps[order], np.arange(count))

    @cached_property
    def batches(self) -> tuple[Ints, Ints]:
        """The arcs to the ends of loader calls: from the call before, and from worker processes."""
        cpu, arcs = len(self.moments.thread), self.arcs
        takes = np.flatnonzero((arcs.kind == LOADER) & (arcs.target < cpu))
        of_workers = arcs.source[takes] >= cpu
        return takes[~of_workers], takes[of_workers]

    def waits_for_workers(self, costs: Costs) -> bool:
        """Whether a step but the first waits for a batch from worker processes of a data loader."""
        arcs, ends = self.batches[1], self.moments.step_end
        if not len(arcs):
            return False
        weights = self.weights(costs)
        times = self.program.run(weights)
        arrival = times[self.arcs.target[arcs]]
        is_awaited = arrival == times[self.arcs.source[arcs]] + weights[arcs]
        begin = times[ends[0] if len(ends) > 1 else self.moments.step_start[0]]
        return bool((is_awaited & (arrival > begin) & (arrival <= times[ends[-1]])).any())

    @cached_property
    def span_ns(self) -> int:
        """The time from the first moment to the last one."""
        return int(self.moments.time_ns.max(initial=0) - self.moments.time_ns.min(initial=0))

    @cached_property
    def ranks_arcs(self) -> tuple[Ints, Ints]:
        """The arcs for waits for other ranks, and the device row of the collective of each."""
        arcs = np.flatnonzero(self.arcs.kind == RANKS)
        return arcs, self.moments.ended_row[self.arcs.target[arcs]]

    @cached_property
    def transfer_ns(self) -> Ints:
        """For each device row, the shortest duration of a row with the same name and size.

        For a collective, this is the transfer time; the rest of its duration is a wait for other
        ranks.
        """
        events, event = self.links.events, self.work.event
        sizes = [min(max(each.input_elements or 0, 0), _LARGEST) for each in events.details]
        size = np.array([*sizes, 0], np.int64)[events.detail[event]]
        groups = group_rows(events.name[event], size)
        return groups.min(events.duration_ns[event])[groups.of]

    @cached_property
    def unexplained(self) -> float:
        """The part of the window, 0 to 1, in which device work was late for an unknown reason."""
        late = np.maximum(self.residue_ns, 0)
        late[late_work(self.links, self.work)] = 0  # before it, no step has begun
        starts, ends = joined(self.work.start_ns - late, self.work.start_ns)
        return float((ends - starts).sum() / self.span_ns) if self.span_ns else 0.0
