"""Memory in use over time, per device, from the allocations and frees of a trace.

An allocation lives until the next free at its address. Traces before torch 1.12 hold no addresses:
they tell how much memory is in use, but not what uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np

from instrument.analysis.groupby import groupby
from instrument.analysis.memory_attribution import By, around, module_frames
from instrument.analysis.table import Schema, Table, names_of, schema
from instrument.errors import CaptureError
from instrument.links.links import Links
from instrument.links.step_index import finished_steps, step_number
from instrument.templates import render
from instrument.trace.events import Events, Ints, Memory

# c10/core/DeviceType.h
_DEVICE_NAMES = (
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan",
    "metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuse1",
)  # fmt: skip
BEFORE, OTHERS, UNKNOWN = "[before the window]", "[others]", "[unknown]"


MEMORY_DEVICES: Schema = schema(
    device="cpu, or the kind and number of the device",
    allocations="allocations in the window",
    frees="frees in the window",
    allocated_bytes="the sum of all allocations",
    freed_bytes="the sum of all frees",
    net_bytes="allocated less freed: what the window left behind",
    peak_ns="when the most was in use, after any event, on the trace's own clock; shown is the "
    "time since the trace's first event",
    peak_bytes="the memory in use at the peak; None where the trace does not tell what was in use "
    "before the window",
    peak_net_bytes="the memory in use at the peak less that from before the window",
    reserved_bytes="the most that the allocator held of the device; None where the trace does not "
    "tell",
)
LIVE: Schema = schema(
    name="the outermost operator around the allocation on its thread, the path of its range, or "
    "the path of the modules around it; [no operator], [no range] or [no module] where there is "
    "none; [before the window] for memory without a recorded allocation",
    bytes="the memory in use",
    allocations="the number of allocations",
    since_ns="when the oldest allocation was made",
)
MEMORY_STEPS: Schema = schema(
    device="cpu, or the kind and number of the device",
    number="the step's number",
    start_bytes="the memory in use at its start; None where the trace does not tell",
    net_bytes="what the step left behind: a leak stays above 0 step after step",
    peak_bytes="the most in use during the step; None where the trace does not tell",
)
SIZES: Schema = schema(
    device="cpu, or the kind and number of the device",
    size_bytes="the size of one allocation",
    allocations="how many of that size",
    bytes="`size_bytes` times `allocations`",
    kept="allocations that were not freed in the window; None where the trace has no addresses",
)
MEMORY_EVENTS: Schema = schema(
    device="cpu, or the kind and number of the device",
    time_ns="when, on the trace's own clock",
    size_bytes="the size of the allocation; negative for a free",
    address="the address as a number; None where the trace has no addresses",
    operator="the outermost operator around the allocation; a free has the names of its allocation",
    range="the path of the range of the allocation; None where the trace holds no ranges",
    module="the path of the modules around the allocation; None where the trace holds none",
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The allocations and frees of one device in the order of time, as parallel columns.

    `instant` is the position among the trace's memory events. `size_bytes` is negative for a free.
    `net_bytes` is the memory in use after the event, less that in use before the window;
    `allocated_bytes` is all memory in use, and `reserved_bytes` what the allocator holds of the
    device. The last two are None where the trace does not tell.
    """

    device: str
    instant: Ints
    time_ns: Ints
    size_bytes: Ints
    net_bytes: Ints
    allocated_bytes: Ints | None
    reserved_bytes: Ints | None

    @property
    def level_bytes(self) -> Ints:
        """The memory in use after each event: all of it if known, else what the window added."""
        return self.net_bytes if self.allocated_bytes is None else self.allocated_bytes

    @property
    def peak(self) -> int:
        """The position at which most memory is in use; the first of several."""
        return int(np.argmax(self.level_bytes))


@dataclass(frozen=True, slots=True)
class Plot:
    """Memory in use on a device over time, for a plot: the series sum to it at each time.

    `reserved_bytes` is what the allocator held; None where that is not known.
    """

    device: str
    time_ns: list[int]
    reserved_bytes: list[int] | None
    series: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Curve(Plot):
    """A plot with a series for each operator, range or module that allocated memory."""

    by: By


class MemoryView:
    """Memory in use over time, per device: `devices`, `timelines`, `live()`, `steps`, `sizes`.

    Devices are named as in torch, such as "cuda:0" and "cpu". On the CPU torch knows only what was
    allocated while a profiler was recording. Sizes are those requested from the allocator, in
    blocks as it rounds them.

    Cost: about 1 µs a memory event, once for each view.
    """

    def __init__(self, links: Links) -> None:
        self._links, self._events = links, links.events
        self._labels: dict[By, tuple[Ints, list[str]]] = {}

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """The allocations and frees of each device over time, the CPU last."""
        memory = self._events.memory
        order = np.lexsort((memory.time_ns, memory.device_index, memory.device_type))
        keys = np.stack([memory.device_type, memory.device_index])[:, order]
        cuts = np.flatnonzero((np.diff(keys) != 0).any(axis=0)) + 1
        lines = [_timeline(memory, lane) for lane in np.split(order, cuts) if lane.size]
        return {line.device: line for line in sorted(lines, key=lambda line: line.device == "cpu")}

    @cached_property
    def devices(self) -> Table:
        """A row for each device, the CPU last; see `MEMORY_DEVICES`.

        The peak is the most after any event: the level before the first event is not considered.
        """
        rows = [_device_row(line) for line in self.timelines.values()]
        return self._table(
            MEMORY_DEVICES, {name: [row[name] for row in rows] for name in names_of(MEMORY_DEVICES)}
        )

    def live(
        self, by: By = "operator", *, device: str | None = None, at_ns: int | None = None
    ) -> Table:
        """Return what was in use on a device at one time, the largest first; see `LIVE`.

        The rows sum to the memory in use: to `peak_bytes` at the peak, or to `peak_net_bytes` where
        that is unknown. Memory that the backward allocates belongs to the range of its forward
        operator, as in the range tree. If the trace has no addresses, one row without a name holds
        everything.

        Args:
            by: operator, range or module; modules are recorded with `with_stack`.
            device: the device; the first of `devices` if None.
            at_ns: the time; the peak if None.

        Raises:
            CaptureError: the trace holds no memory events, none of that device, or no modules.
            ConfigError: there is no such `by`.
        """
        line = self.timeline(device)
        at = line.peak if at_ns is None else int(np.searchsorted(line.time_ns, at_ns, "right")) - 1
        level = (
            int(line.level_bytes[at]) if at >= 0 else int(line.level_bytes[0] - line.size_bytes[0])
        )
        codes, labels = self.labels(line, by)
        if not self._has_addresses:
            return Table.of(
                LIVE, {"name": [None], "bytes": [level], "allocations": [None], "since_ns": [None]}
            )
        position = np.arange(len(line.instant))
        alive = np.flatnonzero((line.size_bytes > 0) & (position <= at) & (self._ends(line) > at))
        used, groups = groupby(codes[alive])
        size, since = groups.sum(line.size_bytes[alive]), groups.min(line.time_ns[alive])
        rows = [
            *zip(
                (labels[k] for k in used.tolist()),
                size.tolist(),
                groups.size.tolist(),
                since.tolist(),
            )
        ]
        if level != size.sum():
            rows.append((BEFORE, level - int(size.sum()), None, None))
        rows.sort(key=lambda row: -row[1])
        return self._table(
            LIVE, {name: [row[k] for row in rows] for k, name in enumerate(names_of(LIVE))}
        )

    @cached_property
    def steps(self) -> Table:
        """A row for each device and step; see `MEMORY_STEPS`."""
        steps = finished_steps(self._events).tolist()
        rows = [
            _step_row(line, self._events, step)
            for line in self.timelines.values()
            for step in steps
        ]
        names = names_of(MEMORY_STEPS)
        return Table.of(
            MEMORY_STEPS, {name: [row[k] for row in rows] for k, name in enumerate(names)}
        )

    @cached_property
    def sizes(self) -> Table:
        """Allocations by size, on each device those with the most bytes first; see `SIZES`."""
        rows = [row for line in self.timelines.values() for row in self._size_rows(line)]
        return Table.of(
            SIZES, {name: [row[k] for row in rows] for k, name in enumerate(names_of(SIZES))}
        )

    def timeline(self, device: str | None = None) -> Timeline:
        """Return the timeline of a device; of the first device for None.

        Raises:
            CaptureError: the trace holds no memory events, or none of that device.
        """
        if not self.timelines:
            raise CaptureError(
                "The trace holds no memory events; record it with profile_memory=true."
            )
        name = next(iter(self.timelines)) if device is None else device
        if name not in self.timelines:
            raise CaptureError(
                f"The trace holds no memory events of {device}; it has {', '.join(self.timelines)}."
            )
        return self.timelines[name]

    def labels(self, line: Timeline, by: By) -> tuple[Ints, list[str]]:
        """Return the label of each event of a timeline, as in `live`.

        A free has the label of its allocation.

        Raises:
            CaptureError: the trace holds no modules.
            ConfigError: there is no such `by`.
        """
        if by not in self._labels:
            self._labels[by] = around(self._links, by)
        codes, labels = self._labels[by]
        origin = self._partner[line.instant]
        frees = line.size_bytes < 0
        found = np.where(
            frees, np.where(origin >= 0, codes[origin], len(labels)), codes[line.instant]
        )
        return found, [*labels, BEFORE]

    @cached_property
    def kinds(self) -> tuple[By, ...]:
        """The groupings that the trace has: operator, and range and module if there are any."""
        has: dict[By, Any] = {
            "operator": True,
            "range": self._links.scopes.paths.names,
            "module": module_frames(self._events).any(),
        }
        return tuple(by for by, exists in has.items() if exists)

    def most_telling(self, device: str | None = None, most: int = 8) -> By:
        """Return the grouping whose `most` largest names cover most of a device's peak."""

        def covered(by: By) -> int:
            rows = self.live(by, device=device)
            return sum(
                [row.bytes for row in rows if row.name not in (None, BEFORE, f"[no {by}]")][:most]
            )

        return max(self.kinds[::-1], key=covered)  # module before range where they are equal

    def curve(
        self, by: By | None = None, *, device: str | None = None, most: int = 8, points: int = 1000
    ) -> Curve:
        """Return the memory in use on a device over time, by what allocated it, thinned for a plot.

        The `most` labels that hold the most at the peak have a series each; the others share
        "[others]". Everything is "[unknown]" where the trace has no addresses. The highest and the
        lowest point of each of `points` equal spans of time are kept, so the peak stays.

        Args:
            by: as for `live`; None takes `most_telling`.
            device: as for `live`.
            most: how many labels have a series of their own.
            points: into how many spans time is divided.

        Raises:
            CaptureError: the trace holds no memory events, none of that device, or no modules.
        """
        line = self.timeline(device)
        by = by or self.most_telling(line.device, most)
        kept = extremes(line.level_bytes, line.time_ns, points)
        codes, labels = self.labels(line, by)
        if not self._has_addresses:
            codes = np.zeros_like(codes)  # no label is shown
        at_peak = self.live(by, device=line.device).column("name")
        shown = [name for name in at_peak if name not in (None, BEFORE)][:most]
        series = {
            name: np.cumsum(np.where(codes == labels.index(name), line.size_bytes, 0))[kept]
            for name in shown
        }
        freed = np.cumsum(np.where(codes == len(labels) - 1, line.size_bytes, 0))
        before = _lived_before(line, freed)[kept]
        rest = (line.net_bytes - freed)[kept] - sum(series.values(), np.zeros(len(kept), np.int64))
        everything = {BEFORE: before, **series, OTHERS if self._has_addresses else UNKNOWN: rest}
        return Curve(
            device=line.device,
            by=by,
            time_ns=line.time_ns[kept].tolist(),
            reserved_bytes=None
            if line.reserved_bytes is None
            else line.reserved_bytes[kept].tolist(),
            series={name: values.tolist() for name, values in everything.items() if values.any()},
        )

    @property
    def events(self) -> Table:
        """Every allocation and free by time; see `MEMORY_EVENTS`.

        What a free frees is "[before the window]" where it was allocated earlier, and None where
        the trace has no addresses.
        """
        columns: dict[str, list[Any]] = {name: [] for name in names_of(MEMORY_EVENTS)}
        for line in self.timelines.values():
            columns["device"] += [line.device] * len(line.instant)
            columns["time_ns"] += line.time_ns.tolist()
            columns["size_bytes"] += line.size_bytes.tolist()
            columns["address"] += [
                each or None for each in self._events.memory.address[line.instant].tolist()
            ]
            for by in get_args(By):
                columns[by] += self._names(line, by)
        return self._table(MEMORY_EVENTS, columns)

    def __repr__(self) -> str:
        if not self.timelines:
            return "<Memory: nothing was recorded; record it with profile_memory=true>"
        return f"{self.devices!r}\n{_MORE}"

    def _repr_html_(self) -> str:
        """The devices, for a notebook."""
        devices, note = (self.devices, _MORE) if self.timelines else ("", repr(self))
        return render("report/templates/memory_view.html", devices=devices, note=note)

    def _table(self, columns: Schema, cells: dict[str, list[Any]]) -> Table:
        return Table.of(columns, cells, begin_ns=self._events.begin_ns)

    def _names(self, line: Timeline, by: By) -> list[str | None]:
        if by not in self.kinds:
            return [None] * len(line.instant)
        codes, labels = self.labels(line, by)
        named = (line.size_bytes > 0) | self._has_addresses
        return [
            labels[code] if is_named else None
            for code, is_named in zip(codes.tolist(), named.tolist())
        ]

    @cached_property
    def _has_addresses(self) -> bool:
        return bool((self._events.memory.address != 0).any())

    @cached_property
    def _partner(self) -> Ints:
        """The free of each allocation and the allocation of each free; -1 if not in the trace."""
        memory = self._events.memory
        where: tuple[Any, ...] = (memory.address, memory.device_index, memory.device_type)
        order = np.lexsort((memory.time_ns, *where))
        same = np.ones(max(len(order) - 1, 0), np.bool_)
        for column in where:
            same &= column[order][1:] == column[order][:-1]
        size = memory.size_bytes[order]
        ends = np.flatnonzero(
            same & (memory.address[order][1:] != 0) & (size[:-1] > 0) & (size[1:] < 0)
        )
        partner = np.full(len(memory), -1)
        partner[order[ends]], partner[order[ends + 1]] = order[ends + 1], order[ends]
        return partner

    def _ends(self, line: Timeline) -> Ints:
        """The position at which each allocation of a timeline is freed, or its length."""
        place = np.full(len(self._partner) + 1, len(line.instant))  # the last entry is for -1
        place[line.instant] = np.arange(len(line.instant))
        ends: Ints = place[self._partner[line.instant]]
        return ends

    def _size_rows(self, line: Timeline) -> list[tuple[str, int, int, int, int | None]]:
        made = np.flatnonzero(line.size_bytes > 0)
        size, groups = groupby(line.size_bytes[made])
        kept = groups.number(self._partner[line.instant[made]] < 0)
        rows = zip(
            [line.device] * len(size),
            size.tolist(),
            groups.size.tolist(),
            (size * groups.size).tolist(),
            groups.cells(kept if self._has_addresses else None),
        )
        return sorted(rows, key=lambda row: -row[3])


_MORE = "More of it: live(), steps, sizes, timelines, curve(), events."


def _timeline(memory: Memory, instant: Ints) -> Timeline:
    size = memory.size_bytes[instant]
    allocated, reserved = memory.allocated_bytes[instant], memory.reserved_bytes[instant]
    kind, index = int(memory.device_type[instant[0]]), int(memory.device_index[instant[0]])
    name = _DEVICE_NAMES[kind] if kind < len(_DEVICE_NAMES) else f"device {kind}"
    return Timeline(
        device=name if index < 0 else f"{name}:{index}",
        instant=instant,
        time_ns=memory.time_ns[instant],
        size_bytes=size,
        net_bytes=np.cumsum(size),
        allocated_bytes=allocated if allocated.any() else None,
        reserved_bytes=reserved if reserved.any() else None,
    )


def _device_row(line: Timeline) -> dict[str, str | int | None]:
    made, peak = line.size_bytes > 0, line.peak
    return {
        "device": line.device,
        "allocations": int(made.sum()),
        "frees": int((~made).sum()),
        "allocated_bytes": int(line.size_bytes[made].sum()),
        "freed_bytes": -int(line.size_bytes[~made].sum()),
        "net_bytes": int(line.net_bytes[-1]),
        "peak_ns": int(line.time_ns[peak]),
        "peak_bytes": None if line.allocated_bytes is None else int(line.allocated_bytes[peak]),
        "peak_net_bytes": int(line.net_bytes[peak]),
        "reserved_bytes": None if line.reserved_bytes is None else int(line.reserved_bytes.max()),
    }


def _step_row(
    line: Timeline, events: Events, step: int
) -> tuple[str, int, int | None, int, int | None]:
    """The row of a step: its events are those from its start up to its end."""
    first, after = np.searchsorted(
        line.time_ns, [events.start_ns[step], events.end_ns[step]], "left"
    ).tolist()
    number = step_number(events, step)
    net = int(line.size_bytes[first:after].sum())
    if line.allocated_bytes is None:
        return line.device, number, None, net, None
    base = int(line.allocated_bytes[0] - line.size_bytes[0])
    start = int(line.allocated_bytes[first - 1]) if first else base
    return (
        line.device,
        number,
        start,
        net,
        max([start, *line.allocated_bytes[first:after].tolist()]),
    )


def _lived_before(line: Timeline, freed: Ints) -> Ints:
    """The memory in use from before the window, after each event; a lower bound if not recorded."""
    before: Ints = line.level_bytes - line.net_bytes + freed
    if line.allocated_bytes is None:
        before = before - min(0, int(before.min()), int(line.net_bytes.min()))
    return before


def extremes(level: Ints, time_ns: Ints, points: int) -> Ints:
    """Thin a plot: the highest and the lowest level of each span of time, and both ends.

    `points` is the number of equal spans. Returns positions.
    """
    since = time_ns - time_ns[0]
    span = since * points // (int(since[-1]) + 1)
    rising = np.lexsort((level, span))
    bounds = np.searchsorted(span[rising], np.unique(span))
    ends = np.array([0, len(level) - 1, int(np.argmax(level))])
    return np.unique(
        np.concatenate([rising[bounds], rising[np.append(bounds[1:], len(level)) - 1], ends])
    )
