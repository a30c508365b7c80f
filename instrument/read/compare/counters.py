"""Counters: numbers per step that do not depend on the speed of the machine.

The steps are those of `CountedSteps`. A counter that differs between steps varies, and cannot be
compared with a limit. Device work belongs to the step and the range that launched it, and backward
work to the range of its forward operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from instrument.base.range_names import REGION
from instrument.read.facts.attribution import OPTIMIZER_STEP
from instrument.read.facts.collective_records import collective_kind, records
from instrument.read.facts.device_work import COMMUNICATION, COPY, KERNEL, launched_ns, moved_bytes
from instrument.read.facts.flops import UNKNOWN
from instrument.read.facts.groupby import Groups, groupby, intern
from instrument.read.facts.places import nodes_of, range_codes
from instrument.read.facts.synchronisation import STREAM_WAIT
from instrument.read.trace.capture_json import Dynamo
from instrument.read.trace.events import OPERATOR, Flags, Ints, is_runtime, is_wait, split_overload
from instrument.read.views.views import Views

#: The prefix of the counters that each count one kind of collective.
KIND = "collectives."
#: The counters that are not known without a device.
NEED_DEVICE = frozenset({"launches", "kernels", "copies", "copied_bytes"})

# Operators that wait for the device if their tensor is on a device. Operators that call one of
# these, such as aten::item, need no entry.
_SYNCHRONIZING = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::unique_dim",
    }
)
_COLLECTIVE = "c10d::"
# The name of an operator in torch's dispatcher. Autograd nodes and compiled regions have names of
# another form.
_DISPATCHED = re.compile(r"\w+::\w+(\.\w+)?")
# Only this many steps are counted, and fewer if there would be more than this many cells of a step
# and a range, because the cost grows with these numbers.
_MOST_STEPS, _MOST_CELLS = 1_000, 4_000_000


class Count(NamedTuple):
    """The values of one counter, in the whole step or in one range.

    `total` is the sum of all counted steps, of `peak_bytes` the highest value; `least` and `most`
    are the lowest and the highest value of a step, of counters of the whole window the total.
    """

    total: int
    least: int
    most: int

    @property
    def per_step(self) -> int | None:
        """The value of each step; None if steps differ."""
        return self.most if self.least == self.most else None


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one capture.

    Attributes:
        steps: the number of counted steps.
        counts: each counter in the whole step; None if the capture does not hold the counter.
        ranges: for each path of a range, the counters that are not 0 in it and the ranges inside.
        calls: for each path of a range, how often a step calls each outermost operator in it, but
            not in a range inside. Calls outside of all ranges have the path "".
    """

    steps: int
    counts: dict[str, Count | None]
    ranges: dict[str, dict[str, Count]] = field(default_factory=dict)
    calls: dict[str, dict[str, Count]] = field(default_factory=dict)

    def count(self, name: str, path: str | None = None) -> Count | None:
        """A counter of the step, or of one range; None if it is not known, 0 if nothing occurred.

        Raises:
            KeyError: there is no such counter.
        """
        known = self.counts["collectives" if name.startswith(KIND) else name]
        if known is None or (path is not None and name in OF_WHOLE_STEP):
            return None
        inside = self.counts if path is None else self.ranges.get(path, {})
        return inside.get(name) or Count(0, 0, 0)


class Occurrences(NamedTuple):
    """The events that one counter counts, as parallel columns.

    Attributes:
        event: the position of the event in `capture.events`; for an allocation, of the innermost
            call around it, -1 outside of all calls.
        time_ns: the time that decides on the step; for device work, that of the launch.
        weight: the amount to add to the counter: 1, bytes or FLOPs.
    """

    event: Ints
    time_ns: Ints
    weight: Ints

    def only(self, chosen: Flags) -> Occurrences:
        """The occurrences that a mask selects."""
        return Occurrences(*(column[chosen] for column in self))


class Occurred:
    """The events that the counters of a capture count."""

    def __init__(self, views: Views) -> None:
        self.views, self.events, self.tree = views, views.events, views.links.call_tree
        self.paths = views.links.scopes.paths
        steps = views.links.counted_steps
        most = min(_MOST_STEPS, _MOST_CELLS // (len(self.paths.names) + 1) + 1)
        self.steps = replace(steps, start_ns=steps.start_ns[:most], end_ns=steps.end_ns[:most])
        launched = len(views.links.launches.device) > 0
        self.has_device = launched or bool(self.events.among(is_runtime).any())
        named = self.events.named(lambda name: _DISPATCHED.fullmatch(name) is not None)
        self._dispatched = self.events.among(OPERATOR) & named

    def of(self, name: str) -> Occurrences | None:
        """What a counter counts; None if it is not known, or is no number of events."""
        if name.startswith(KIND):
            kind = name.removeprefix(KIND)
            return self.collectives.only(np.array([each == kind for each in self.kinds], np.bool_))
        finder = COUNTERS[name]
        return None if finder is None else finder(self)

    def steps_of(self, found: Occurrences) -> Ints:
        """The index of the counted step of each event; -1 outside of these steps."""
        return self.steps.holds(found.time_ns)

    def by_step(self, found: Occurrences, group: Ints, groups: int) -> Ints:
        """The sum of the weights in each group (row) and each counted step (column)."""
        step, steps = self.steps_of(found), self.steps.count
        cell = np.where(step >= 0, group * steps + step, -1)
        return Groups(cell, groups * steps).sum(found.weight, step >= 0).reshape(groups, steps)

    def paths_of(self, found: Occurrences) -> Ints:
        """The index of the path of each event's range; -1 without a range."""
        path = np.full(len(found.event), -1)
        known = found.event >= 0
        path[known] = range_codes(self.views, found.event[known])
        return path

    def callers_of(self, found: Occurrences) -> Ints:
        """The position of the outermost operator around each event, or else of the event."""
        calls, node = self.calls.event, nodes_of(self.views.links, np.maximum(found.event, 0))
        call = self.tree.nearest_of(self.tree.nodes_of(calls), node)
        known = (found.event >= 0) & (call >= 0)
        return np.where(known, np.append(calls, -1)[call], found.event)

    def _at(self, event: Ints, weight: Ints | None = None) -> Occurrences:
        weight = np.ones(len(event), np.int64) if weight is None else weight
        return Occurrences(event, self.events.start_ns[event], weight)

    def _outermost(self, chosen: Flags) -> Occurrences:
        """Of the chosen events, those that are inside no other chosen event."""
        return self._at(self.tree.index[self.tree.outermost(chosen[self.tree.index])])

    @cached_property
    def calls(self) -> Occurrences:
        """The outermost operators, also those with a sync or a collective inside."""
        return self._outermost(self._dispatched)

    @cached_property
    def operators(self) -> Occurrences:
        """The calls of outermost operators, without those that hold a sync or collective."""
        others = np.zeros(len(self.events), np.int64)
        others[np.append(self.syncs.event, self.collectives.event)] = 1
        holds_others = self.tree.with_descendants(others[self.tree.index]) > 0
        return self.calls.only(~holds_others[self.tree.nodes_of(self.calls.event)])

    @cached_property
    def syncs(self) -> Occurrences:
        """The calls that can wait for the device; without one, the operators that would wait."""
        events = self.events
        if self.has_device:
            # Calls that can wait are counted. Which of them really waited varies from run to run.
            waits = events.among(is_runtime) & events.named(is_wait)
            known = self.views.links.synchronisations
            waits[known.call[known.kind != STREAM_WAIT]] = True
            return self._outermost(waits)
        found = self._outermost(
            events.named(lambda name: split_overload(name)[0] in _SYNCHRONIZING)
        )
        # An optimizer reads its step counts without waiting: they are on the CPU even if the model
        # is on a device.
        optimizes = np.array([n.startswith(OPTIMIZER_STEP) for n in self.paths.names], np.bool_)
        in_optimizer = np.append(self.paths.at_or_below(optimizes), False)
        return found.only(~in_optimizer[self.paths_of(found)])

    @cached_property
    def collectives(self) -> Occurrences:
        """The c10d operators that start collectives, or else the events that record them."""
        events = self.events

        def starts_collective(name: str) -> bool:
            return name.startswith(_COLLECTIVE) and collective_kind(name) is not None

        chosen = events.named(starts_collective) & self._dispatched
        if chosen[self.tree.index].any():
            return self._outermost(chosen)
        named = [collective_kind(each.collective or "") is not None for each in events.details]
        is_recorded = np.append(np.array(named, np.bool_), False)[events.detail]
        return self._at(np.flatnonzero(records(events) & is_recorded))

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each collective, such as "all_reduce"."""
        events, event = self.events, self.collectives.event
        recorded = [*(each.collective for each in events.details), None]
        details, names = events.detail[event].tolist(), events.name[event].tolist()
        return [
            collective_kind(recorded[detail] or events.names[name]) or "other"
            for detail, name in zip(details, names)
        ]

    def work(self, kind: int) -> Occurrences | None:
        """The device work of a kind; None without a device."""
        if not self.has_device:
            return None
        work = self.views.work
        found = self._at(work.event)._replace(time_ns=launched_ns(self.events, work))
        return found.only(work.kind == kind)

    def launches(self) -> Occurrences | None:
        """The calls that launched kernels; None without a device."""
        if not self.has_device:
            return None
        work = self.views.work
        launch = (work.call >= 0) & np.isin(work.kind, (KERNEL, COMMUNICATION))
        return self._at(np.unique(work.call[launch]))

    def copied(self) -> Occurrences | None:
        """The copies and their bytes; None without a device, or if a size is not known."""
        found, work = self.work(COPY), self.views.work
        if found is None:
            return None
        size = moved_bytes(self.events, found.event, work.call[work.kind == COPY])
        counts = self.steps_of(found) >= 0
        return found._replace(weight=size) if (size[counts] >= 0).all() else None

    def allocations(self, *, sized: bool) -> Occurrences | None:
        """The allocations of memory, if `sized` with their bytes; None if not recorded."""
        memory = self.events.memory
        if not len(memory):
            return None
        made = np.flatnonzero(memory.size_bytes > 0)
        node = self.tree.node_at(memory.thread[made], memory.time_ns[made])
        size = memory.size_bytes[made] if sized else np.ones(len(made), np.int64)
        return Occurrences(np.append(self.tree.index, -1)[node], memory.time_ns[made], size)

    def flops(self) -> Occurrences | None:
        """The operators whose FLOPs are known, and their FLOPs; None without shapes."""
        flops = self.views.links.flops
        if flops is None:
            return None
        known = flops != UNKNOWN
        return self._at(self.tree.index[known], flops[known])


#: Each counter, and the function that finds what it counts. The counters without a function are no
#: numbers of events, and not known for single ranges. docs/ci.md says what each counter counts.
COUNTERS: dict[str, Callable[[Occurred], Occurrences | None] | None] = {
    "operators": lambda occurred: occurred.operators,
    "launches": Occurred.launches,
    "kernels": lambda occurred: occurred.work(KERNEL),
    "syncs": lambda occurred: occurred.syncs,
    "allocations": lambda occurred: occurred.allocations(sized=False),
    "allocated_bytes": lambda occurred: occurred.allocations(sized=True),
    "peak_bytes": None,
    "flops": Occurred.flops,
    "graph_breaks": None,
    "recompilations": None,
    "copies": lambda occurred: occurred.work(COPY),
    "copied_bytes": Occurred.copied,
    "collectives": lambda occurred: occurred.collectives,
}
OF_WHOLE_STEP = frozenset(name for name, finder in COUNTERS.items() if finder is None)


def counters(views: Views) -> Counters:
    """Count the work of each step of a capture.

    Only the first 1,000 steps are counted, and fewer if there are more than 4,000 ranges. Cost: a
    pass over the paths of the ranges for each counter and step.
    """
    occurred = Occurred(views)
    paths = occurred.paths
    counts: dict[str, Count | None] = {}
    ranges: dict[str, dict[str, Count]] = {text: {} for text in paths.texts}
    for name in [*COUNTERS, *(KIND + kind for kind in sorted(set(occurred.kinds)))]:
        found = occurred.of(name)
        counts[name] = None
        if found is not None:
            place = 1 + occurred.paths_of(found)  # 0 is outside of all ranges
            of_steps = occurred.by_step(found, place, 1 + len(paths.texts))
            counts[name] = _count(of_steps.sum(axis=0))
            inside = paths.with_descendants(of_steps[1:])
            for k in np.flatnonzero(inside.any(axis=1)).tolist():
                ranges[paths.texts[k]][name] = _count(inside[k])
    counts |= {"peak_bytes": _peak(occurred), **_compilations(views)}
    ranges = {path: inside for path, inside in ranges.items() if inside}
    return Counters(occurred.steps.count, counts, ranges, _calls(occurred))


def _count(of_steps: Ints) -> Count:
    return Count(int(of_steps.sum()), int(of_steps.min()), int(of_steps.max()))


def _calls(occurred: Occurred) -> dict[str, dict[str, Count]]:
    events, found = occurred.events, occurred.calls
    code, names = intern(split_overload(name)[0] for name in events.names)
    place = 1 + occurred.paths_of(found)
    keys, groups = groupby(place * len(names) + code[events.name[found.event]])
    texts = ["", *occurred.paths.texts]
    calls: dict[str, dict[str, Count]] = {}
    for key, of_steps in zip(keys.tolist(), occurred.by_step(found, groups.of, len(keys))):
        if of_steps.any():
            path, name = divmod(key, len(names))
            calls.setdefault(texts[path], {})[names[name]] = _count(of_steps)
    return calls


def _peak(occurred: Occurred) -> Count | None:
    """The most memory in use on one device, in each step."""
    lines, steps = occurred.views.memory.timelines, occurred.steps
    if not lines:
        return None
    peaks = []
    for device, line in lines.items():
        if device == "cpu" and len(lines) > 1:
            continue
        level = line.level_bytes
        before = np.concatenate([level[:1] - line.size_bytes[:1], level])
        first, after = (
            np.searchsorted(line.time_ns, side, "left") for side in (steps.start_ns, steps.end_ns)
        )
        highest = np.array([before[i : j + 1].max() for i, j in zip(first, after)])
        peaks.append(highest - before[first] if device == "cpu" else highest)
    of_steps = np.max(peaks, axis=0)
    return _count(of_steps)._replace(total=int(of_steps.max()))


def _compilations(views: Views) -> dict[str, Count | None]:
    """The graph breaks and recompilations that `capture.json` counts for the window."""
    about = views.about
    compiles = views.events.named(lambda name: name.startswith(REGION)).any()
    was_never_loaded = about.environment is not None and not compiles
    return _of_dynamo(about.dynamo or (Dynamo(0, {}, 0) if was_never_loaded else Dynamo()))


def _of_dynamo(found: Dynamo) -> dict[str, Count | None]:
    breaks = None if found.graph_breaks is None else sum(found.graph_breaks.values())
    return {
        name: None if number is None else Count(number, number, number)
        for name, number in (("graph_breaks", breaks), ("recompilations", found.recompilations))
    }


def with_compilations(counted: Counters, dynamo: dict[str, Any]) -> Counters:
    """Replace the graph breaks and recompilations; `dynamo` is as in `capture.json`."""
    return replace(counted, counts=counted.counts | _of_dynamo(Dynamo(**dynamo)))
