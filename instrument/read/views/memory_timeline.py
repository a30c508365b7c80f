"""Memory in use over time, per device, from the allocations and frees of a trace.

An allocation lives until the next free at its address. Traces of torch before 1.12 hold no
addresses: they show how much memory is in use, but not what uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import polars as pl

from instrument.base.errors import CaptureError
from instrument.read.facts.groupby import computed
from instrument.read.facts.links import Links
from instrument.read.facts.memory_attribution import By, around, module_frames
from instrument.read.facts.schema import Schema, schema
from instrument.read.facts.step_index import step_bounds
from instrument.read.trace.events import Ints
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
class Plot:
    """Memory in use on a device over time, for a plot.

    Attributes:
        device: the device, as in torch.
        time_ns: the times of the plot's points.
        reserved_bytes: the memory that the allocator has reserved; None if it was not recorded.
        series: for each name in the legend, its bytes at each time; they sum to the memory in use.
    """

    device: str
    time_ns: list[int]
    reserved_bytes: list[int] | None
    series: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Curve(Plot):
    """A plot with a series for each operator, range or module that allocated memory."""

    by: By


def extremes(level: Ints, time_ns: Ints, points: int) -> Ints:
    """The positions of the first and last point, and of the extremes in each of `points` spans."""
    since = time_ns - time_ns[0]
    span = since * points // (int(since[-1]) + 1)
    rising = np.lexsort((level, span))
    bounds = np.searchsorted(span[rising], np.unique(span))
    ends = np.array([0, len(level) - 1, int(np.argmax(level))])
    return np.unique(
        np.concatenate([rising[bounds], rising[np.append(bounds[1:], len(level)) - 1], ends])
    )


class MemoryView:
    """Memory in use over time, per device, which is named as in torch, such as "cuda:0" and "cpu".

    `timelines` has every allocation and free, and `curve()` makes a plot. Of more than 20 devices,
    only those with the most memory events are shown. An allocation has the requested size, rounded
    up to blocks by the allocator.

    Cost: about 1 µs per memory event, once for each view.
    """

    def __init__(self, links: Links) -> None:
        self.links = links
        self._owners: dict[By, tuple[pl.Series, list[str]]] = {}

    @cached_property
    def events(self) -> pl.DataFrame:
        """The allocations and frees by device, the CPU last, and by time.

        `size_bytes` is negative for a free. `level_bytes` is the memory in use after the event:
        `allocated_bytes` if the allocator recorded it, or else `net_bytes`, without what was in use
        before the window. `instant` is the position of the event in the trace, and `origin` that of
        the allocation that it makes or frees; null if that is not in the trace.
        """
        memory, size, instant = self.links.events.memory, pl.col("size_bytes"), pl.col("instant")
        place = ["device_type", "device_index"]
        columns = (*place, "address", "time_ns", "size_bytes", "allocated_bytes", "reserved_bytes")
        rows = pl.DataFrame({name: getattr(memory, name) for name in columns}).cast(pl.Int64)
        rows = rows.with_columns(instant=pl.int_range(pl.len()))
        rows = rows.sort("time_ns", maintain_order=True)
        made = pl.when(size > 0).then(instant).shift(1).over(*place, "address")
        rows = rows.with_columns(
            origin=pl.when(size >= 0).then(instant).when(pl.col("address") != 0).then(made),
            address=pl.when(pl.col("address") != 0).then("address"),
        )
        devices = rows.group_by(place).len().sort(place)
        devices = devices.sort("len", descending=True, maintain_order=True).head(MOST_DEVICES)
        devices = computed(devices.sort(place), _device_name, place, {"device": pl.String})
        devices = devices.sort(pl.col("device") == "cpu", maintain_order=True).drop("len")
        rows = rows.join(devices.with_row_index("order"), on=place, maintain_order="left")
        recorded = pl.col("allocated_bytes", "reserved_bytes")
        rows = rows.sort("order", maintain_order=True).with_columns(
            pl.when((recorded != 0).any().over("order")).then(recorded),
            net_bytes=size.cum_sum().over("order"),
        )
        level = pl.coalesce("allocated_bytes", "net_bytes")
        return rows.with_columns(level_bytes=level).drop("order", *place)

    @cached_property
    def timelines(self) -> dict[str, pl.DataFrame]:
        """The rows of `events` of each device, the CPU last."""
        parts = self.events.partition_by("device", maintain_order=True)
        return {part["device"][0]: part for part in parts}

    def timeline(self, device: str | None = None) -> pl.DataFrame:
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

    def owners(self, rows: pl.DataFrame, by: By) -> tuple[pl.Series, list[str]]:
        """Return the index of each event's owner in a list of names, and this list.

        A free has the owner of its allocation; the last name is `BEFORE`. Errors are those of
        `memory_attribution.around`.
        """
        if by not in self._owners:
            found, names = around(self.links, by)
            self._owners[by] = pl.Series(found), [*names, BEFORE]
        codes, names = self._owners[by]
        return codes.gather(rows["origin"]).fill_null(len(names) - 1), names

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
        device = str(line["device"][0])
        by = by or self.most_telling(device, most)
        names = "level_bytes", "net_bytes", "size_bytes", "time_ns"
        level, net, size, time_ns = (line[name].to_numpy() for name in names)
        kept, (owners, labels) = extremes(level, time_ns, points), self.owners(line, by)
        # Without addresses, frees have no owner.
        codes = owners.to_numpy() if self.has_addresses else np.zeros_like(size)
        at_peak = memory_live(self, by, device, None).column("name")
        shown = [name for name in at_peak if name not in (None, BEFORE)][:most]
        series = {
            name: np.cumsum(np.where(codes == labels.index(name), size, 0))[kept] for name in shown
        }
        freed = np.cumsum(np.where(codes == len(labels) - 1, size, 0))
        before = level - net + freed
        if line["allocated_bytes"].null_count():  # a lower bound
            before = before - min(0, int(before.min()), int(net.min()))
        before = before[kept]
        rest = (net - freed)[kept] - sum(series.values(), np.zeros(len(kept), np.int64))
        everything = {BEFORE: before, **series, OTHERS if self.has_addresses else UNKNOWN: rest}
        reserved = line["reserved_bytes"].gather(kept)
        return Curve(
            device=device,
            by=by,
            time_ns=time_ns[kept].tolist(),
            reserved_bytes=None if reserved.null_count() else reserved.to_list(),
            series={name: values.tolist() for name, values in everything.items() if values.any()},
        )

    @cached_property
    def has_addresses(self) -> bool:
        """Whether the trace has the addresses of memory."""
        return bool((self.links.events.memory.address != 0).any())


def _device_name(kind: int, index: int) -> tuple[str]:
    name = _DEVICE_NAMES[kind] if 0 <= kind < len(_DEVICE_NAMES) else f"device {kind}"
    return (name if index < 0 else f"{name}:{index}",)


def memory_devices(capture: Views) -> Table:
    """Return a row for each device, the CPU last; see `MEMORY_DEVICES`.

    The peak is after an event, even if more memory was in use before the first one.
    """
    size, made, peak = (
        pl.col("size_bytes"),
        pl.col("size_bytes") > 0,
        pl.col("level_bytes").arg_max(),
    )
    found = capture.memory.events.group_by("device", maintain_order=True).agg(
        allocations=made.sum().cast(pl.Int64),
        frees=(~made).sum().cast(pl.Int64),
        allocated_bytes=size.filter(made).sum(),
        freed_bytes=-size.filter(~made).sum(),
        net_bytes=pl.col("net_bytes").last(),
        peak_ns=pl.col("time_ns").get(peak),
        peak_bytes=pl.col("allocated_bytes").get(peak),
        peak_net_bytes=pl.col("net_bytes").get(peak),
        reserved_bytes=pl.max("reserved_bytes"),
    )
    return Table.of(MEMORY_DEVICES, found, begin_ns=capture.memory.links.events.begin_ns)


def memory_steps(capture: Views) -> Table:
    """Return a row for each device and step; see `MEMORY_STEPS`.

    A memory event exactly at the end of a step does not count for the step.
    """
    links, rows = capture.memory.links, list[tuple[str, int, int | None, int, int | None]]()
    for device, line in capture.memory.timelines.items():
        first, after = (
            np.searchsorted(line["time_ns"], side)
            for side in step_bounds(links.events, links.steps)
        )
        sums = np.append(0, np.cumsum(line["size_bytes"]))
        net = (sums[after] - sums[first]).tolist()
        start: list[int | None] = [None] * len(first)
        peak = start
        if line["allocated_bytes"].null_count() == 0:
            level = line["allocated_bytes"].to_numpy()
            level = np.append(level[0] - line["size_bytes"][0], level)
            start = level[first].tolist()
            peak = [int(level[i : j + 1].max()) for i, j in zip(first, after)]
        rows += zip(repeat(device), links.step_numbers, start, net, peak)
    return Table.of_rows(MEMORY_STEPS, rows)


def memory_events(capture: Views) -> Table:
    """Return every allocation and free, by device and then by time; see `MEMORY_EVENTS`.

    If a free's allocation was before the window, its operator is "[before the window]".
    """
    memory, rows = capture.memory, capture.memory.events
    owners = dict.fromkeys(get_args(By), pl.lit(None, pl.String))
    for by in memory.kinds:
        codes, names = memory.owners(rows, by)
        has_owner = (pl.col("size_bytes") > 0) | memory.has_addresses
        owners[by] = pl.when(has_owner).then(pl.Series(names).gather(codes))
    found = rows.select("device", "time_ns", "size_bytes", "address", **owners)
    return Table.of(MEMORY_EVENTS, found, begin_ns=capture.memory.links.events.begin_ns)


def memory_live(memory: MemoryView, by: By, device: str | None, at_ns: int | None) -> Table:
    """Return what owns the memory in use at a time; see `Views.memory_live`."""
    line, size = memory.timeline(device), pl.col("size_bytes")
    if at_ns is None:
        count = int(line["level_bytes"].arg_max() or 0) + 1
    else:
        count = int((line["time_ns"] <= at_ns).sum())
    seen, level = line.head(count), line["level_bytes"]
    held = int(level[count - 1]) if count else int(level[0] - line["size_bytes"][0])
    codes, names = memory.owners(seen, by)
    if not memory.has_addresses:
        return Table.of_rows(MEMORY_LIVE, [(None, held, None, None)])
    made, freed = seen.with_columns(owner=codes).filter(size > 0), seen.filter(size < 0)
    live = made.join(freed, left_on="instant", right_on="origin", how="anti").group_by("owner")
    found = live.agg(
        bytes=size.sum(), allocations=pl.len().cast(pl.Int64), since_ns=pl.min("time_ns")
    ).sort("owner")
    found = found.select(
        "bytes", "allocations", "since_ns", name=pl.Series(names).gather(found["owner"])
    )
    if before := held - int(found["bytes"].sum()):
        rest = pl.DataFrame({"name": BEFORE, "bytes": before})
        found = pl.concat([found, rest], how="diagonal")
    found = found.sort("bytes", descending=True, maintain_order=True)
    return Table.of(MEMORY_LIVE, found, begin_ns=memory.links.events.begin_ns)
