"""Counters: numbers per step that do not depend on the speed of the machine.

The steps are those of `CountedSteps`. A counter that differs between steps varies, and cannot be
compared with a limit. Device work belongs to the step and the range that launched it, and backward
work to the range of its forward operator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from instrument.base.range_names import OPTIMIZER_STEP, REGION
from instrument.read.facts.collective_records import collective_kind, records
from instrument.read.facts.device_work import COMMUNICATION, KERNEL, launched_ns
from instrument.read.facts.groupby import Groups, groupby, intern
from instrument.read.facts.places import nodes_of, range_codes, users_source
from instrument.read.facts.synchronisation import STREAM_WAIT
from instrument.read.trace.capture_json import Dynamo
from instrument.read.trace.events import OPERATOR, Flags, Ints, is_runtime, is_wait, split_overload
from instrument.read.views.views import Views

#: The prefix of the counters that each count one kind of collective.
KIND = "collectives."
#: How to record what a counter needs.
RECORD = {
    "a device": "record with a device among profiler.activities",
    "memory": "record with profile_memory=True",
    "shapes": "record with with_flops=True",
    "a session": "record with a session, which writes capture.json",
    "": "record it again",
}

# Operators that wait for the device if their tensor is on a device. Operators that call one of
# these, such as aten::item, need no entry.
_SYNCHRONISING = frozenset(
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
# At most this many calls, and frames of their stacks, are shown.
_MOST_CALLS, _MOST_FRAMES = 3, 5


class Counter(NamedTuple):
    """What a counter counts.

    Attributes:
        rows: the rows of `Occurred.rows` that count; None for what is no number of events, and not
            known for single ranges.
        amount: what each of these rows adds.
        needs: what the capture must hold, a key of `RECORD`.
    """

    rows: pl.Expr | None
    amount: pl.Expr = pl.lit(1, pl.Int64)
    needs: str = ""


_KIND = pl.col("kind")
#: The counters; docs/ci.md says what each counts.
COUNTERS = {
    "operators": Counter(pl.col("is_operator")),
    "launches": Counter(pl.col("launches"), needs="a device"),
    "kernels": Counter(_KIND == "kernel", needs="a device"),
    "syncs": Counter(pl.col("waits")),
    "allocations": Counter(_KIND == "allocation", needs="memory"),
    "allocated_bytes": Counter(_KIND == "allocation", pl.col("bytes"), "memory"),
    "peak_bytes": Counter(None, needs="memory"),
    "flops": Counter(pl.col("flops").is_not_null(), pl.col("flops"), "shapes"),
    "graph_breaks": Counter(None, needs="a session"),
    "recompilations": Counter(None, needs="a session"),
    "copies": Counter(_KIND == "copy", needs="a device"),
    "copied_bytes": Counter(_KIND == "copy", pl.col("bytes"), "a device"),
    "collectives": Counter(pl.col("collective").is_not_null()),
}
OF_WHOLE_STEP = frozenset(name for name, counter in COUNTERS.items() if counter.rows is None)


def counter_of(name: str) -> Counter:
    """The counter of a name, such as `syncs` or `collectives.all_reduce`."""
    if not name.startswith(KIND):
        return COUNTERS[name]
    return Counter(pl.col("collective") == name.removeprefix(KIND))


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


class Occurred:
    """The events that the counters of a capture count."""

    def __init__(self, views: Views) -> None:
        self.views, self.events, self.links = views, views.events, views.links
        self.paths = self.links.scopes.paths
        steps = self.links.counted_steps
        most = min(_MOST_STEPS, _MOST_CELLS // (len(self.paths.names) + 1) + 1)
        self.steps = replace(steps, start_ns=steps.start_ns[:most], end_ns=steps.end_ns[:most])
        launched = len(self.links.launches.device) > 0
        self.holds = {
            "a device": launched or bool(self.events.among(is_runtime).any()),
            "memory": len(self.events.memory) > 0,
            "shapes": self.links.flops is not None,
            "": True,
        }

    def of(self, name: str) -> pl.DataFrame | None:
        """The rows that a counter counts; None if it is not known, or is no number of events."""
        counter = counter_of(name)
        if counter.rows is None or not self.holds[counter.needs]:
            return None
        found = self.rows.filter(counter.rows).with_columns(amount=counter.amount)
        is_unknown = found.filter(pl.col("step") >= 0)["amount"].has_nulls()
        return None if is_unknown else found

    @cached_property
    def rows(self) -> pl.DataFrame:
        """The events and the allocations.

        `id` is the position of the event, of an allocation that of the innermost call around it;
        `step` the index of the counted step, for device work that of its launch; `path` the index
        of the range. Each is -1 for none.
        """
        events, tree, work = self.events, self.links.call_tree, self.views.work
        calls, waits = self.calls, self._waits()
        collectives = self._collectives()
        others = np.zeros(len(events), np.int64)
        others[np.append(waits, collectives)] = 1
        holds_others = tree.with_descendants(others[tree.index]) > 0
        launches = work.call[(work.call >= 0) & np.isin(work.kind, (KERNEL, COMMUNICATION))]
        time_ns = events.start_ns.copy()
        time_ns[work.event] = launched_ns(events, work)
        rows = self.views.facts.events("id", "kind", "bytes", "flops").with_columns(
            step=self.steps.holds(time_ns),
            is_operator=self._mask(calls[~holds_others[tree.nodes_of(calls)]]),
            waits=self._mask(waits),
            launches=self._mask(launches),
        )
        kinds = pl.DataFrame({"id": collectives, "collective": self._kinds(collectives)})
        rows = rows.join(kinds, "id", "left", maintain_order="left")
        memory = events.memory
        made = np.flatnonzero(memory.size_bytes > 0)
        node = tree.node_at(memory.thread[made], memory.time_ns[made])
        allocated = pl.DataFrame(
            {
                "id": np.append(tree.index, -1)[node],
                "bytes": memory.size_bytes[made],
                "step": self.steps.holds(memory.time_ns[made]),
            }
        ).with_columns(kind=pl.lit("allocation"))
        rows = pl.concat([rows, allocated], how="diagonal")
        path = range_codes(self.views, rows["id"].to_numpy())
        return rows.with_columns(path=np.where(rows["id"].to_numpy() >= 0, path, -1))

    def by_step(self, found: pl.DataFrame, group: Ints, groups: int) -> Ints:
        """The sum of the amounts in each group (row) and each counted step (column)."""
        step, steps = found["step"].to_numpy(), self.steps.count
        cell = np.where(step >= 0, group * steps + step, -1)
        sums = Groups(cell, groups * steps).sum(found["amount"].to_numpy(), step >= 0)
        return sums.reshape(groups, steps)

    @cached_property
    def _dispatched(self) -> Flags:
        named = self.events.named(lambda name: _DISPATCHED.fullmatch(name) is not None)
        return self.events.among(OPERATOR) & named

    @cached_property
    def calls(self) -> Ints:
        """The outermost operators, also those with a sync or a collective inside."""
        return self._outermost(self._dispatched)

    def _outermost(self, chosen: Flags) -> Ints:
        tree = self.links.call_tree
        found: Ints = tree.index[tree.outermost(chosen[tree.index])]
        return found

    def _mask(self, events: Ints) -> Flags:
        found = np.zeros(len(self.events), np.bool_)
        found[events] = True
        return found

    def _waits(self) -> Ints:
        """The calls that can wait for the device; without one, the operators that would wait."""
        events = self.events
        if self.holds["a device"]:
            # Calls that can wait are counted. Which of them really waited varies from run to run.
            can_wait = events.among(is_runtime) & events.named(is_wait)
            known = self.links.synchronisations
            can_wait[known.call[known.kind != STREAM_WAIT]] = True
            return self._outermost(can_wait)
        found = self._outermost(
            events.named(lambda name: split_overload(name)[0] in _SYNCHRONISING)
        )
        # An optimizer reads its step counts without waiting: they are on the CPU even if the model
        # is on a device.
        optimizes = np.array([n.startswith(OPTIMIZER_STEP) for n in self.paths.names], np.bool_)
        in_optimizer = np.append(self.paths.at_or_below(optimizes), False)
        waits: Ints = found[~in_optimizer[range_codes(self.views, found)]]
        return waits

    def _collectives(self) -> Ints:
        """The c10d operators that start collectives, or else the events that record them."""
        events = self.events

        def starts_collective(name: str) -> bool:
            return name.startswith(_COLLECTIVE) and collective_kind(name) is not None

        chosen = events.named(starts_collective) & self._dispatched
        if chosen[self.links.call_tree.index].any():
            return self._outermost(chosen)
        named = [collective_kind(each.collective or "") is not None for each in events.details]
        is_recorded = np.append(np.array(named, np.bool_), False)[events.detail]
        return np.flatnonzero(records(events) & is_recorded)

    def _kinds(self, collectives: Ints) -> pl.Series:
        events = self.events
        recorded = [*(each.collective for each in events.details), None]
        details, names = events.detail[collectives].tolist(), events.name[collectives].tolist()
        kinds = [
            collective_kind(recorded[detail] or events.names[name]) or "other"
            for detail, name in zip(details, names)
        ]
        return pl.Series(kinds, dtype=pl.String)


def counters(views: Views) -> Counters:
    """Count the work of each step of a capture.

    Only the first 1,000 steps are counted, and fewer if there are more than 4,000 ranges. Cost: a
    pass over the paths of the ranges for each counter and step.
    """
    occurred = Occurred(views)
    paths = occurred.paths
    counts: dict[str, Count | None] = {}
    ranges: dict[str, dict[str, Count]] = {text: {} for text in paths.texts}
    kinds = occurred.rows["collective"].unique().drop_nulls().sort()
    for name in [*COUNTERS, *(KIND + kind for kind in kinds)]:
        found = occurred.of(name)
        counts[name] = None
        if found is not None:
            place = 1 + found["path"].to_numpy()  # 0 is outside of all ranges
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
    events = occurred.events
    found = occurred.rows[occurred.calls].with_columns(amount=pl.lit(1, pl.Int64))
    code, names = intern(split_overload(name)[0] for name in events.names)
    place = 1 + found["path"].to_numpy()
    keys, groups = groupby(place * len(names) + code[events.name[occurred.calls]])
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
        time_ns, level = line["time_ns"].to_numpy(), line["level_bytes"].to_numpy()
        before = np.append(level[0] - line["size_bytes"][0], level)
        first, after = (np.searchsorted(time_ns, side) for side in (steps.start_ns, steps.end_ns))
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


class Call(NamedTuple):
    """A call that adds to a counter: the outermost operator that contains the counted event.

    Attributes:
        name: the name of the operator; of the event itself, if it is in no operator.
        before, after: how often a step makes this call in the same range, in the earlier and in the
            later capture, without calls in inner ranges. If the steps differ, the highest number of
            a step. `before` is None if the number of the earlier capture is not known. In this
            case, `after` can be the mean number of counted events per step, rounded down.
        stack: the Python frames of the user's code around the first such call, the innermost first,
            such as "model.py:31 in forward"; empty if the trace holds none, as in the backward.
    """

    name: str
    before: int | None
    after: int
    stack: list[str]


def calls_behind(
    counter: str, occurred: Occurred, before: Counters | None, after: Counters, path: str | None
) -> list[Call]:
    """The three calls that add most to a counter in a range, or in the whole step (None).

    If some calls are more frequent than in `before`, only these are returned.
    """
    found = occurred.of(counter)
    if found is None:
        return []
    events, paths, tree = occurred.events, occurred.paths, occurred.links.call_tree
    is_in_range = np.array([path is None or each == path for each in paths.texts], np.bool_)
    is_inside = np.append(paths.at_or_below(is_in_range), path is None)[found["path"].to_numpy()]
    found = found.filter(pl.Series(is_inside), pl.col("step") >= 0, pl.col("id") >= 0)
    event, calls = found["id"].to_numpy(), occurred.calls
    call = tree.nearest_of(tree.nodes_of(calls), nodes_of(occurred.links, event))
    called = np.where(call >= 0, np.append(calls, -1)[call], event)
    first = pl.col("called").sort_by("start_ns", maintain_order=True).first()
    places = (
        found.select("path", "amount", called=called)
        .with_columns(name=events.name[called], start_ns=events.start_ns[called])
        .group_by("path", "name")
        .agg(pl.sum("amount"), pl.len(), first)
        .sort("amount", "path", "name", descending=[True, False, False])
    )
    every = []
    for code, of_name, _, size, first in places.iter_rows():
        text = paths.texts[code] if code >= 0 else ""
        operator = split_overload(events.names[of_name])[0]
        now = after.calls.get(text, {}).get(operator)
        earlier = None
        if before is not None and now is not None:
            earlier = before.calls.get(text, {}).get(operator, Count(0, 0, 0)).most
        every.append((operator, earlier, size // after.steps if now is None else now.most, first))
    new = [call for call in every if call[1] is None or call[2] > call[1]]
    return [
        Call(name, earlier, number, _stack_of(occurred.views, first))
        for name, earlier, number, first in (new or every)[:_MOST_CALLS]
    ]


def _stack_of(views: Views, event: int) -> list[str]:
    events, frames = views.events, views.links.frames
    at = np.array([event])
    node = int(frames.node_at(events.thread[at], events.start_ns[at])[0])
    found: list[str] = []
    while node >= 0 and len(found) < _MOST_FRAMES:
        source = users_source(events.names[events.name[frames.index[node]]])
        found += [source] if source is not None else []
        node = int(frames.parent[node])
    return found
