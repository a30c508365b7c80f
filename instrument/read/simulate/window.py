"""`Window`: the simulation models of one or several ranks, joined into one simulation.

In a synchronising collective, such as an all-reduce, the transfer begins when the last rank has
begun its kernel, and all kernels end after it. The last rank does not wait, so the transfer takes
as long as the shortest kernel. For Megatron on eight A100, the simulated ends of the collectives
are within 25 µs of the measured ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from instrument.read.facts.device_work import COMMUNICATION
from instrument.read.facts.groupby import Groups, groupby
from instrument.read.facts.intervals import Intervals
from instrument.read.simulate.edits import others_stay
from instrument.read.simulate.model import DEVICE, Costs, Model
from instrument.read.simulate.program import NEVER, Floats, Program, in_order
from instrument.read.trace.events import Flags, Ints


@dataclass(frozen=True, slots=True)
class Meetings:
    """The collectives that join ranks, with a row for each rank of each collective.

    Attributes:
        collective: the number of the collective, from 0.
        rank: the index of the rank in `Window.models`.
        row: the device row of the rank's kernel.
    """

    collective: Ints
    rank: Ints
    row: Ints


@dataclass(frozen=True)
class Window:
    """One recorded window, on all ranks whose captures are given.

    Attributes:
        models: the simulation model of each rank.
        ranks: the number of each rank; None if it is not known.
        shift_ns: the time from the start of the earliest trace to the start of each rank's trace.
        meetings: the collectives that join the ranks; None for one rank.
    """

    models: tuple[Model, ...]
    ranks: tuple[int | None, ...]
    shift_ns: tuple[int, ...] = (0,)
    meetings: Meetings | None = None
    _recorded: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def measured(self) -> tuple[Costs, ...]:
        """The costs of the recording; a simulation with these costs repeats the recording."""
        return self._with_transfers([model.measured for model in self.models])

    @cached_property
    def typical(self) -> tuple[Costs, ...]:
        """The costs with the usual delays and gaps; see `Model.typical`."""
        return self._with_transfers([model.typical for model in self.models])

    @cached_property
    def assumptions(self) -> tuple[tuple[Costs, ...], ...]:
        """The costs without edits, for each assumption.

        All times are as recorded; or all delays and gaps have their usual lengths; or, for a single
        capture with communication, the other ranks do not change.
        """
        found = [self.measured, self.typical]
        if len(self.models) == 1 and (self.models[0].work.kind == COMMUNICATION).any():
            found.append((others_stay(self.models[0], self.measured[0]),))
        return tuple(found)

    @property
    def counted(self) -> slice:
        """Which of the steps count; of several ranks, those of the first."""
        return self.models[0].links.counted_steps.kept

    def recorded_steps(self, assumption: int) -> list[int]:
        """The duration of each step without edits, in ns, for an index into `assumptions`."""
        if assumption not in self._recorded:
            self._recorded[assumption] = self.simulated(self.assumptions[assumption])
        return self._recorded[assumption]

    def simulated(self, costs: Sequence[Costs]) -> list[int]:
        """The duration of each step, from the costs of each rank."""
        times = self.program.run(self.weights(costs))
        found: list[int] = np.rint(self.steps_ns(times)).astype(np.int64).tolist()
        return found

    def waits_for_workers(self, costs: Sequence[Costs]) -> bool:
        """Whether a step but the first waits for a batch from worker processes of a data loader."""
        batches = [model.batches[1] for model in self.models]
        if not any(map(len, batches)):
            return False
        weights = self.weights(costs)
        times = self.program.run(weights)
        for model, own, arc, moment in zip(self.models, batches, self.first_arc, self.first_moment):
            moments, arrival = model.moments, times[model.arcs.target[own] + moment]
            ready = times[model.arcs.source[own] + moment] + weights[own + arc]
            ends = moments.step_end
            begin = times[(ends[0] if len(ends) > 1 else moments.step_start[0]) + moment]
            is_awaited = (arrival == ready) & (arrival > begin)
            if (is_awaited & (arrival <= times[ends[-1] + moment])).any():
                return True
        return False

    def _with_transfers(self, costs: Sequence[Costs]) -> tuple[Costs, ...]:
        """The costs if each kernel in `meetings` takes only its collective's transfer time."""
        if self.meetings is None:
            return tuple(costs)
        found = []
        for rank, own in enumerate(costs):
            mine = self.meetings.rank == rank
            device_ns, fixed_ns = own.device_ns.copy(), own.fixed_ns.copy()
            rows = self.meetings.row[mine]
            device_ns[rows] = self._transfer_ns[self.meetings.collective[mine]]
            fixed_ns[self._transfers(rank)] = NEVER
            found.append(replace(own, device_ns=device_ns, fixed_ns=fixed_ns))
        return tuple(found)

    def _transfers(self, rank: int) -> Flags:
        """A mask of a rank's arcs from the start of a kernel in `meetings` to its end.

        They are removed, because such a kernel ends when the collective ends.
        """
        assert self.meetings is not None
        rows, arcs = self.meetings.row[self.meetings.rank == rank], self.models[rank].arcs
        found: Flags = (arcs.kind == DEVICE) & np.isin(arcs.row, rows)
        return found

    @cached_property
    def program(self) -> Program:
        """The `Program` of all ranks and collectives."""
        return self._built[0]

    @cached_property
    def _built(self) -> tuple[Program, Ints]:
        """The graph of all ranks, and how much later each kernel ended than its transfer, in ns.

        Each collective has a moment at which its transfer begins, with arcs from the starts of its
        kernels and to their ends.
        """
        if self.meetings is None:
            return self.models[0].program, np.zeros(0, np.int64)
        first, meetings = self.first_moment, self.meetings
        times = np.concatenate(
            [model.moments.time_ns + shift for model, shift in zip(self.models, self.shift_ns)]
        )
        targets, sources = [], []
        for model, begin in zip(self.models, first):
            source = model.arcs.source
            targets.append(model.arcs.target + begin)
            sources.append(np.where(source >= 0, source + begin, -1))
        starts, ends = self._bounds
        joins = first[-1] + meetings.collective
        collectives = Groups(meetings.collective, self._collectives)
        all_began = -collectives.min(-times[starts])
        joined_ns = np.minimum(all_began, collectives.min(times[ends]))
        order = self._order(np.concatenate([times, joined_ns]))
        target = np.concatenate([*targets, joins, ends])
        source = np.concatenate([*sources, starts, joins])
        program = Program(order, target, source, in_order(order, target, source))
        late = times[ends] - joined_ns[meetings.collective]
        return program, late - self._transfer_ns[meetings.collective]

    def _order(self, times: Ints) -> Ints:
        place = np.zeros(len(times), np.int64)
        for model, begin in zip(self.models, self.first_moment):
            order = model.program.moment_order
            place[begin + order] = np.arange(len(order))
        # A collective comes after all other moments at the same time.
        place[self.first_moment[-1] :] = np.iinfo(np.int64).max
        return np.lexsort((place, times))

    @cached_property
    def first_arc(self) -> list[int]:
        """The index of each rank's first arc in `program`, then that of the collectives."""
        return [0, *np.cumsum([len(model.arcs) for model in self.models]).tolist()]

    @cached_property
    def first_moment(self) -> list[int]:
        """The index of each rank's first moment in `program`, then the collectives'."""
        sizes = [len(model.moments.time_ns) for model in self.models]
        return [0, *np.cumsum(sizes).tolist()]

    @cached_property
    def _collectives(self) -> int:
        return 0 if self.meetings is None else int(self.meetings.collective.max(initial=-1)) + 1

    @cached_property
    def _bounds(self) -> tuple[Ints, Ints]:
        """The moments at which the kernels of the collectives begin and end."""
        ranks = [*zip((model.moments for model in self.models), self.first_moment)]
        return (
            self._of_meetings([moments.start_of + begin for moments, begin in ranks]),
            self._of_meetings([moments.end_of + begin for moments, begin in ranks]),
        )

    @cached_property
    def _lasts_ns(self) -> Ints:
        """The duration of each kernel in `meetings`."""
        return self._of_meetings([model.work.end_ns - model.work.start_ns for model in self.models])

    @cached_property
    def _transfer_ns(self) -> Ints:
        """For each collective, the duration of its shortest kernel on any rank."""
        assert self.meetings is not None
        return Groups(self.meetings.collective, self._collectives).min(self._lasts_ns)

    @cached_property
    def loads_ns(self) -> list[int]:
        """The time of each rank without the waits in its collectives."""
        assert self.meetings is not None
        waited_ns = self._lasts_ns - self._transfer_ns[self.meetings.collective]
        of_ranks = Groups(self.meetings.rank, len(self.models)).sum(waited_ns).tolist()
        return [model.span_ns - waited for model, waited in zip(self.models, of_ranks)]

    def weights(self, costs: Sequence[Costs]) -> Ints:
        """The weights in ns of all arcs, from each rank's costs."""
        own = [model.weights(each) for model, each in zip(self.models, costs)]
        if self.meetings is None:
            return own[0]
        found = []
        for weights, model, shift in zip(own, self.models, self.shift_ns):
            absolute = (model.arcs.source < 0) & (weights != NEVER)
            found.append(np.where(absolute, weights + shift, weights))
        transfers = self._of_meetings([each.device_ns for each in costs])
        return np.concatenate([*found, np.zeros_like(transfers), transfers + self._built[1]])

    def change(self, costs: Sequence[Costs], parts: Mapping[int, tuple[Intervals, Flags]]) -> Ints:
        """How much the weight of each arc changes if the work in `parts` takes no time, in ns.

        `parts` has the CPU time and the device rows of some ranks (indices into `models`); see
        `Model.change`.
        """
        models = enumerate(zip(self.models, costs))
        own = [
            model.change(each, *parts[rank])
            if rank in parts
            else np.zeros(len(model.arcs), np.int64)
            for rank, (model, each) in models
        ]
        if self.meetings is None:
            return own[0]
        transfers = self._of_meetings(
            [
                np.where(parts[rank][1], -each.device_ns, 0)
                if rank in parts
                else np.zeros_like(each.device_ns)
                for rank, each in enumerate(costs)
            ]
        )
        return np.concatenate([*own, np.zeros_like(transfers), transfers])

    def _of_meetings(self, values: Sequence[Ints]) -> Ints:
        """For each kernel in `meetings`, its value in `values`, which has device rows by rank."""
        assert self.meetings is not None
        found = np.zeros_like(self.meetings.row)
        for rank, each in enumerate(values):
            mine = self.meetings.rank == rank
            found[mine] = each[self.meetings.row[mine]]
        return found

    def ends_ns(self, times: Ints) -> list[Floats]:
        """When each step ends on each rank; see `Model.ends_ns`."""
        bounds = zip(self.models, self.first_moment)
        return [model.ends_ns(times, k) for model, k in bounds]

    def steps_ns(self, times: Ints) -> Floats:
        """The duration of each step; with several scenarios, a row for each.

        A step ends when all ranks have ended it. It begins when the first rank begins it on the
        CPU, but not before the previous step has ended.
        """
        ends, bounds = self.ends_ns(times), zip(self.models, self.first_moment)
        steps = min(each.shape[-1] for each in ends)
        last = np.maximum.reduce([each[..., :steps] for each in ends])
        entered = [times[..., model.moments.step_start[:steps] + k] for model, k in bounds]
        begin = np.minimum.reduce(entered).astype(np.float64)
        begin[..., 1:] = np.maximum(begin[..., 1:], last[..., :-1])
        found: Floats = last - begin
        return found


def meetings(matches: Sequence[tuple[Ints, Ints]]) -> Meetings | None:
    """Collect the collectives that at least two ranks have; None if there are none.

    `matches` has, for each rank, the keys and the device rows of its collectives. A collective has
    the same key on all ranks that take part.
    """
    key = np.concatenate([keys for keys, _ in matches])
    row = np.concatenate([rows for _, rows in matches])
    rank = np.repeat(np.arange(len(matches)), [len(keys) for keys, _ in matches])
    _, groups = groupby(key)
    shared = groups.size[groups.of] > 1
    if not shared.any():
        return None
    _, groups = groupby(key[shared])
    return Meetings(groups.of, rank[shared], row[shared])
