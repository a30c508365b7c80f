"""Memory in use over time, per device, from the allocations and frees of a trace.

An allocation lives until the next free at its address. Traces of torch before 1.12 hold no
addresses: they show how much memory is in use, but not what uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from instrument.base.errors import CaptureError
from instrument.read.facts.groupby import cells, group_rows, groupby
from instrument.read.facts.links import Links
from instrument.read.facts.memory_attribution import By, around, module_frames
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_number
from instrument.read.trace.events import Ints, MemoryEvents
from instrument.read.views.memory_plot import Curve, extremes
from instrument.read.views.table import Table

if TYPE_CHECKING:
    from instrument.read.views.views import Views

# c10/core/DeviceType.h
_DEVICE_NAMES = (
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan",
    "metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuse1",
)  # fmt: skip
BEFORE, OTHERS, UNKNOWN = "[before the window]", "[others]", "[unknown]"
#: The most devices that the tables have. No machine has more; a damaged trace may have one for each
#: memory event.
MOST_DEVICES = 20


MEMORY_DEVICES: Schema = schema(
    device="the device, such as cpu or cuda:0",
    allocations="the number of allocations in the window",
    frees="the number of frees in the window",
    allocated_bytes="the bytes of all allocations in the window",
    freed_bytes="the bytes of all frees in the window",
    net_bytes="`allocated_bytes` minus `freed_bytes`: how much more is in use at the end of the "
    "window than at its start",
    peak_ns="the time of the event after which the most memory is in use, on the trace's own "
    "clock; tables print the time since the trace's first event",
    peak_bytes="the memory in use at the peak; None if the memory in use before the window was "
    "not recorded",
    peak_net_bytes="the memory in use at the peak, minus the memory in use before the window",
    reserved_bytes="the most memory that the allocator reserved on the device; None if it was not "
    "recorded",
)
MEMORY_LIVE: Schema = schema(
    name="the owner of the memory, by the argument `by`: the outermost operator around the "
    "allocation on its thread, the path of its range, or the path of the modules around it. [no "
    "operator], [no range] or [no module] if the allocation has no owner; [before the window] for "
    "memory without a recorded allocation; None if the trace has no addresses",
    bytes="the memory in use",
    allocations="the number of allocations in use; None for [before the window], or if the trace "
    "has no addresses",
    since_ns="the time of the oldest of these allocations, on the trace's own clock; None if "
    "`allocations` is None",
)
MEMORY_STEPS: Schema = schema(
    device="the device, such as cpu or cuda:0",
    number="the step's number",
    start_bytes="the memory in use when the step begins; None if the memory in use before the "
    "window was not recorded",
    net_bytes="the bytes allocated minus the bytes freed during the step; values above 0 in many "
    "steps in a row are a sign of a leak",
    peak_bytes="the most memory in use during the step; None if the memory in use before the "
    "window was not recorded",
)
MEMORY_EVENTS: Schema = schema(
    device="the device, such as cpu or cuda:0",
    time_ns="the time of the allocation or free, on the trace's own clock",
    size_bytes="the size of the allocation; negative for a free",
    address="the address as a number; None if the trace has no addresses",
    operator="the outermost operator around the allocation; a free gets the operator, range and "
    "module of its allocation",
    range="the path of the allocation's range; None if the trace holds no ranges",
    module="the path of the modules around the allocation; None if the trace holds no modules",
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory events (allocations and frees) of one device in order of time, as columns.

    Attributes:
        device: the device, as in torch.
        instant: the position of each event among all memory events of the trace.
        time_ns: the time of each event, on the trace's own clock.
        size_bytes: the bytes of each event; negative for a free.
        net_bytes: the memory in use after the event, minus the memory in use before the window.
        allocated_bytes, reserved_bytes: all memory in use after the event, and the memory that the
            allocator has reserved; None if it was not recorded.
    """

    device: str
    instant: Ints
    time_ns: Ints
    size_bytes: Ints
    net_bytes: Ints
    allocated_bytes: Ints | None
    reserved_bytes: Ints | None

    def __len__(self) -> int:
        return len(self.instant)

    @property
    def level_bytes(self) -> Ints:
        """The memory in use after each event: `allocated_bytes` if recorded, else `net_bytes`."""
        return self.net_bytes if self.allocated_bytes is None else self.allocated_bytes

    @property
    def peak(self) -> int:
        """The position of the first event after which memory in use is at its maximum."""
        return int(np.argmax(self.level_bytes))


class MemoryView:
    """Memory in use over time, per device, which is named as in torch, such as "cuda:0" and "cpu".

    `timelines` has every allocation and free as arrays, and `curve()` makes a plot. Of more than 20
    devices, only those with the most memory events are shown. An allocation has the requested size,
    rounded up to blocks by the allocator.

    Cost: about 1 µs per memory event, once for each view.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._labels: dict[By, tuple[Ints, list[str]]] = {}

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """The allocations and frees of each device over time, the CPU last."""
        memory = self.links.events.memory
        groups = group_rows(memory.device_type, memory.device_index)
        lanes = groups.sorted_by(memory.time_ns).rows()
        largest = np.sort(np.argsort(-groups.size, kind="stable")[:MOST_DEVICES])
        lines = [_timeline(memory, lanes[k]) for k in largest.tolist()]
        return {line.device: line for line in sorted(lines, key=lambda line: line.device == "cpu")}

    def timeline(self, device: str | None = None) -> Timeline:
        """Return the timeline of a device; None means the first device.

        Raises:
            CaptureError: the trace holds no memory events, or no memory events of that device.
        """
        if not self.timelines:
            needed = "record it with profile_memory=true"
            raise CaptureError(f"The trace holds no memory events; {needed}.")
        name = next(iter(self.timelines)) if device is None else device
        if name not in self.timelines:
            raise CaptureError(
                f"The trace holds no memory events of {device}; it has {', '.join(self.timelines)}."
            )
        return self.timelines[name]

    def labels(self, line: Timeline, by: By) -> tuple[Ints, list[str]]:
        """Return for each event of a timeline the index of its owner's name, and the list of names.

        A free has the owner of its allocation. Errors are those of `memory_attribution.around`.
        """
        if by not in self._labels:
            self._labels[by] = around(self.links, by)
        codes, labels = self._labels[by]
        origin = np.where(line.size_bytes < 0, self.partner[line.instant], line.instant)
        return np.append(codes, len(labels))[origin], [*labels, BEFORE]

    @cached_property
    def kinds(self) -> tuple[By, ...]:
        """The values of `by` for which the trace has data; always "operator"."""
        has: dict[By, Any] = {
            "operator": True,
            "range": self.links.scopes.paths.names,
            "module": module_frames(self.links.events).any(),
        }
        return tuple(by for by, exists in has.items() if exists)

    def most_telling(self, device: str | None = None, most: int = 8) -> By:
        """Return the kind of owners whose `most` largest hold the most memory at the peak."""

        def covered(by: By) -> int:
            rows = memory_live(self, by, device, None)
            return sum(
                [row.bytes for row in rows if row.name not in (None, BEFORE, f"[no {by}]")][:most]
            )

        return max(self.kinds[::-1], key=covered)  # the last of equally good groupings

    def curve(
        self, by: By | None = None, *, device: str | None = None, most: int = 8, points: int = 1000
    ) -> Curve:
        """Return a plot of the memory in use on a device over time, by operator, range or module.

        The owners with the most memory at the peak, up to `most`, have one series each. All others
        share the series "[others]", memory from before the window has "[before the window]".
        Without addresses, all memory from the window is "[unknown]". Of each of `points` equal
        spans of time, only the highest and the lowest point are plotted.

        Args:
            by: the kind of owner: operator, range or module; None means `most_telling()`.
            device: the device; None means the first device of `memory_devices`.
            most: how many owners have a series of their own.
            points: the number of spans.

        Raises:
            CaptureError: the trace holds no memory events, no memory events of that device, or no
                modules for `by="module"`.
            ConfigError: `by` is not "operator", "range" or "module".
        """
        line = self.timeline(device)
        by = by or self.most_telling(line.device, most)
        kept = extremes(line.level_bytes, line.time_ns, points)
        codes, labels = self.labels(line, by)
        if not self.has_addresses:
            codes = np.zeros_like(codes)  # without addresses, frees have no label
        at_peak = memory_live(self, by, line.device, None).column("name")
        shown = [name for name in at_peak if name not in (None, BEFORE)][:most]
        series = {
            name: np.cumsum(np.where(codes == labels.index(name), line.size_bytes, 0))[kept]
            for name in shown
        }
        freed = np.cumsum(np.where(codes == len(labels) - 1, line.size_bytes, 0))
        before = line.level_bytes - line.net_bytes + freed
        if line.allocated_bytes is None:  # a lower bound
            before = before - min(0, int(before.min()), int(line.net_bytes.min()))
        before = before[kept]
        rest = (line.net_bytes - freed)[kept] - sum(series.values(), np.zeros(len(kept), np.int64))
        everything = {BEFORE: before, **series, OTHERS if self.has_addresses else UNKNOWN: rest}
        reserved = None if line.reserved_bytes is None else line.reserved_bytes[kept].tolist()
        return Curve(
            device=line.device,
            by=by,
            time_ns=line.time_ns[kept].tolist(),
            reserved_bytes=reserved,
            series={name: values.tolist() for name, values in everything.items() if values.any()},
        )

    @cached_property
    def has_addresses(self) -> bool:
        """Whether the trace has the addresses of memory."""
        return bool((self.links.events.memory.address != 0).any())

    @cached_property
    def partner(self) -> Ints:
        """For each allocation, the event that frees it, and the reverse; -1 if not in the trace."""
        memory = self.links.events.memory
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


def memory_devices(capture: Views) -> Table:
    """Return a row for each device, the CPU last; see `MEMORY_DEVICES`.

    The peak is after an event, even if more memory was in use before the first one.
    """
    rows = []
    for line in capture.memory.timelines.values():
        made, peak = line.size_bytes > 0, line.peak
        used, reserved = line.allocated_bytes, line.reserved_bytes
        rows.append(
            (
                line.device,
                int(made.sum()),
                int((~made).sum()),
                int(line.size_bytes[made].sum()),
                -int(line.size_bytes[~made].sum()),
                int(line.net_bytes[-1]),
                int(line.time_ns[peak]),
                None if used is None else int(used[peak]),
                int(line.net_bytes[peak]),
                None if reserved is None else int(reserved.max()),
            )
        )
    return Table.of_rows(MEMORY_DEVICES, rows, begin_ns=capture.events.begin_ns)


def memory_steps(capture: Views) -> Table:
    """Return a row for each device and step; see `MEMORY_STEPS`.

    A memory event exactly at the end of a step does not count for the step.
    """
    memory = capture.memory
    events, steps = memory.links.events, memory.links.steps
    numbers = [step_number(events, step) for step in steps.tolist()]
    rows: list[tuple[str, int, int | None, int, int | None]] = []
    for line in memory.timelines.values():
        first, after = (
            np.searchsorted(line.time_ns, side[steps]) for side in (events.start_ns, events.end_ns)
        )
        sums = np.append(0, np.cumsum(line.size_bytes))
        start: list[int | None] = [None] * len(steps)
        peak = start
        if line.allocated_bytes is not None:
            level = np.append(line.allocated_bytes[0] - line.size_bytes[0], line.allocated_bytes)
            # The last value is there twice, because `reduceat` needs an index for each end.
            sides = np.stack([first, after + 1], axis=1).ravel()
            start = level[first].tolist()
            peak = np.maximum.reduceat(np.append(level, level[-1]), sides)[::2].tolist()
        net = (sums[after] - sums[first]).tolist()
        rows += zip(repeat(line.device), numbers, start, net, peak)
    return Table.of_rows(MEMORY_STEPS, rows)


def memory_events(capture: Views) -> Table:
    """Return every allocation and free, by device and then by time; see `MEMORY_EVENTS`.

    If a free's allocation was before the window, its operator is "[before the window]".
    """
    memory = capture.memory
    lines = [*memory.timelines.values()]
    instant = np.concatenate([np.zeros(0, np.int64), *(line.instant for line in lines)])
    memories = memory.links.events.memory
    device = np.repeat(np.array([line.device for line in lines], object), [*map(len, lines)])
    address = memories.address[instant]
    owners = {by: _owners(memory, lines, by) for by in get_args(By)}
    columns = {
        "device": device,
        "time_ns": memories.time_ns[instant],
        "size_bytes": memories.size_bytes[instant],
        "address": cells(address, address != 0),
        **owners,
    }
    return Table.of(MEMORY_EVENTS, columns, begin_ns=memory.links.events.begin_ns)


def _owners(memory: MemoryView, lines: Sequence[Timeline], by: By) -> NDArray[np.object_]:
    found = [np.zeros(0, object)]
    for line in lines:
        names = np.full(len(line), None)
        if by in memory.kinds:
            codes, labels = memory.labels(line, by)
            named = (line.size_bytes > 0) | memory.has_addresses
            names[named] = np.array(labels, object)[codes[named]]
        found.append(names)
    return np.concatenate(found)


def memory_live(memory: MemoryView, by: By, device: str | None, at_ns: int | None) -> Table:
    """Return what owns the memory in use at a time; see `Views.memory_live`."""
    line = memory.timeline(device)
    at = line.peak if at_ns is None else int(np.searchsorted(line.time_ns, at_ns, "right")) - 1
    level = int(line.level_bytes[at]) if at >= 0 else int(line.level_bytes[0] - line.size_bytes[0])
    codes, labels = memory.labels(line, by)
    if not memory.has_addresses:
        return Table.of_rows(MEMORY_LIVE, [(None, level, None, None)])
    # For each event of the trace, its position in the timeline; the last entry is for no event.
    place = np.full(len(memory.partner) + 1, len(line))
    place[line.instant] = np.arange(len(line))
    is_live = (line.size_bytes > 0) & (place[memory.partner[line.instant]] > at)
    alive = np.flatnonzero(is_live[: at + 1])
    used, groups = groupby(codes[alive])
    size, since = groups.sum(line.size_bytes[alive]), groups.min(line.time_ns[alive])
    names = [labels[k] for k in used.tolist()]
    rows = [*zip(names, size.tolist(), groups.size.tolist(), since.tolist())]
    if level != size.sum():
        rows.append((BEFORE, level - int(size.sum()), None, None))
    rows.sort(key=lambda row: -row[1])
    return Table.of_rows(MEMORY_LIVE, rows, begin_ns=memory.links.events.begin_ns)


def _timeline(memory: MemoryEvents, instant: Ints) -> Timeline:
    size = memory.size_bytes[instant]
    allocated, reserved = memory.allocated_bytes[instant], memory.reserved_bytes[instant]
    kind, index = int(memory.device_type[instant[0]]), int(memory.device_index[instant[0]])
    name = _DEVICE_NAMES[kind] if 0 <= kind < len(_DEVICE_NAMES) else f"device {kind}"
    return Timeline(
        device=name if index < 0 else f"{name}:{index}",
        instant=instant,
        time_ns=memory.time_ns[instant],
        size_bytes=size,
        net_bytes=np.cumsum(size),
        allocated_bytes=allocated if allocated.any() else None,
        reserved_bytes=reserved if reserved.any() else None,
    )
