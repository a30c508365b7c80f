"""Bytes allocated and freed within calls."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instrument.capture.events import Ints, Memory
from instrument.capture.nesting import Forest
from instrument.capture.rules import Rules

# Numbers of torch's DeviceType: CPU, MKLDNN and IDEEP; CUDA, HIP, XPU and PrivateUse1.
_HOST = (0, 2, 5)
_TORCH_DEVICES = (1, 6, 12, 20)


def sizes(memory: Memory, rules: Rules) -> dict[str, Ints | None]:
    """Each instant's bytes on the host and on devices, 0 where it belongs to the other; None if there is none."""
    host = np.isin(memory.device_type, _HOST)
    device = ~host if rules.all_device_memory else np.isin(memory.device_type, _TORCH_DEVICES)
    return {
        "host": np.where(host, memory.size_bytes, 0) if len(memory) else None,
        "device": np.where(device, memory.size_bytes, 0) if device.any() else None,
    }


def within(forest: Forest, memory: Memory, size: Ints, rules: Rules) -> Ints:
    """Bytes allocated less bytes freed during each node, both ends included."""
    total = np.zeros(len(forest), np.int64)
    for nodes, instants in _lanes(forest, memory, rules):
        times, amounts = memory.time_ns[instants], size[instants]
        order = np.argsort(times, kind="stable")
        sums = np.concatenate([[0], np.cumsum(amounts[order])])
        until = np.searchsorted(times[order], forest.end_ns[nodes], "right")
        total[nodes] = sums[until] - sums[np.searchsorted(times[order], forest.start_ns[nodes], "left")]
    return total


def uncovered(forest: Forest, memory: Memory, rules: Rules) -> Ints:
    """The positions of the instants that lie in no node."""
    bare = np.ones(len(memory), np.bool_)
    for nodes, instants in _lanes(forest, memory, rules):
        times = memory.time_ns[instants]
        begun = np.searchsorted(np.sort(forest.start_ns[nodes]), times, "right")
        bare[instants] = begun == np.searchsorted(np.sort(forest.end_ns[nodes]), times, "left")
    return np.flatnonzero(bare)


def _lanes(forest: Forest, memory: Memory, rules: Rules) -> Iterator[tuple[Ints, Ints]]:
    """Nodes and instants that can belong together: by thread, or all of them."""
    if not rules.memory_by_thread:
        yield np.arange(len(forest)), np.arange(len(memory))
        return
    for thread in np.unique(memory.thread):
        yield np.flatnonzero(forest.thread == thread), np.flatnonzero(memory.thread == thread)
