"""The memory of each call, and the operator, range or modules around each allocation."""

from __future__ import annotations

from typing import Literal

import numpy as np

from instrument.base.errors import CaptureError, ConfigError
from instrument.read.facts.call_tree import CallTree, nest
from instrument.read.facts.groupby import TimesOfGroups, intern
from instrument.read.facts.links import Links
from instrument.read.facts.paths import paths_of
from instrument.read.trace.events import (
    PYTHON,
    Events,
    Flags,
    Ints,
    MemoryEvents,
    called_operators,
    split_overload,
)

_CPU = (0, 2, 5)  # numbers of torch's DeviceType: CPU, MKLDNN and IDEEP
_MODULE = "nn.Module: "
By = Literal["operator", "range", "module"]


def sizes(memory: MemoryEvents) -> dict[str, Ints | None]:
    """The bytes of each allocation and free on the "cpu", else 0, and on a "device", else 0.

    A column is None if the trace has no memory events, or none of a device.
    """
    cpu = np.isin(memory.device_type, _CPU)
    return {
        "cpu": np.where(cpu, memory.size_bytes, 0) if len(memory) else None,
        "device": np.where(cpu, 0, memory.size_bytes) if not cpu.all() else None,
    }


def within(call_tree: CallTree, memory: MemoryEvents, size: Ints) -> Ints:
    """For each node, the sum of `size` over the memory events on its thread during the node."""
    times = TimesOfGroups(memory.thread, memory.time_ns)
    sums = np.append(0, np.cumsum(size[times.order]))
    first = times.place(call_tree.thread, call_tree.start_ns)
    found: Ints = sums[times.place(call_tree.thread, call_tree.end_ns, "right")] - sums[first]
    return found


def uncovered(call_tree: CallTree, memory: MemoryEvents) -> Ints:
    """The positions of the allocations and frees outside of all nodes of their own thread."""
    starts, ends = (
        TimesOfGroups(call_tree.thread, side) for side in (call_tree.start_ns, call_tree.end_ns)
    )
    started = starts.place(memory.thread, memory.time_ns, "right")
    return np.flatnonzero(started == ends.place(memory.thread, memory.time_ns))


def around(links: Links, by: By) -> tuple[Ints, list[str]]:
    """Find the operator, the range or the modules around each allocation and free.

    Returns an index into a list of names for each of them, and this list. Its last name is "[no
    operator]", "[no range]" or "[no module]".

    Raises:
        CaptureError: `by` is "module", and the trace holds no modules.
        ConfigError: `by` is not "operator", "range" or "module".
    """
    finders = {"operator": _operators_around, "range": _ranges_around, "module": _modules_around}
    if by not in finders:
        raise ConfigError(f"Memory cannot be grouped by {by!r}; choose operator, range or module.")
    found, names = finders[by](links)
    numbers, labels = intern([*names, f"[no {by}]"])  # overloads have equal names
    return numbers[found], labels


def module_frames(events: Events) -> Flags:
    """A mask of the Python frames that are calls of an `nn.Module`."""
    return events.among(PYTHON) & events.named(lambda name: name.startswith(_MODULE))


def _operators_around(links: Links) -> tuple[Ints, list[str]]:
    events, memory = links.events, links.events.memory
    call_tree = nest(events, called_operators(events))
    outermost = call_tree.index[call_tree.nearest(call_tree.parent < 0)]
    name = np.append(events.name[outermost], -1)[call_tree.node_at(memory.thread, memory.time_ns)]
    return name, [split_overload(name)[0] for name in events.names]


def _ranges_around(links: Links) -> tuple[Ints, list[str]]:
    scopes, memory = links.scopes, links.events.memory
    scope = scopes.nodes.node_at(memory.thread, memory.time_ns)
    return np.append(scopes.attributed, -1)[scope], scopes.paths.texts


def _modules_around(links: Links) -> tuple[Ints, list[str]]:
    events, memory = links.events, links.events.memory
    frames = module_frames(events)
    if not frames.any():
        raise CaptureError("The trace holds no modules; record it with with_stack=true.")
    call_tree = nest(events, frames)
    names = [name.removeprefix(_MODULE) for name in events.names]
    paths, path = paths_of(call_tree, events.name[call_tree.index].astype(np.int64), names)
    return np.append(path, -1)[call_tree.node_at(memory.thread, memory.time_ns)], paths.texts
