"""What holds of the tables of every capture: the parts are the whole, and the shares are 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from capture.plain_loops import top_level_ns
from instrument.read.capture import Capture

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_PARTS = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
_CLIPPED = tuple(f"clipped_{name}" for name in _PARTS)
_WAITS = ("launch_wait_ns", "gap_wait_ns", "loader_wait_ns", "sync_wait_ns", "unknown_wait_ns")


def total(rows: Iterable[Any], *columns: str) -> Any:
    """The sum of columns over rows; a cell that is unknown adds nothing."""
    return sum(getattr(row, column) or 0 for row in rows for column in columns)


def assert_sums(found: Capture) -> None:
    """The whole is counted from the events."""
    events = found.events
    categories = [events.categories[k] for k in events.category.tolist()]
    work_ns = [
        lasted
        for lasted, category in zip(events.duration_ns.tolist(), categories)
        if category in _DEVICE
    ]
    _assert_sums_of_the_cpu(found, top_level_ns(events))
    _assert_sums_of_devices(found, work_ns)
    for row in found.steps:
        if row.clipped_idle_ns is not None:
            assert total([row], *_CLIPPED) == row.duration_ns
            assert total([row], *_WAITS) == row.clipped_idle_ns


def _assert_sums_of_the_cpu(found: Capture, whole_ns: int) -> None:
    ranges = [*found.ranges, *found.ranges_rest]
    assert total(ranges, "self_total_ns") == whole_ns
    assert total(found.ranges_attribution, "cpu_ns") == whole_ns
    assert total(found.operators, "self_cpu_ns") == whole_ns
    for rows in (ranges, found.operators):
        assert total(rows, "share") == pytest.approx(int(whole_ns > 0))


def _assert_sums_of_devices(found: Capture, work_ns: list[int]) -> None:
    ranges, work = [*found.ranges, *found.ranges_rest], [*found.kernels, *found.copies]
    bare = total(found.ranges_rest.where(name="(no launch)"), "self_device_ns")
    assert total(found.ranges_attribution, "device_ns") + bare == sum(work_ns)
    for rows in (ranges, found.operators):
        assert total(rows, "device_share") == pytest.approx(int(sum(work_ns) > 0))
    assert total(found.operators, "self_device_ns") == total(work, "device_ns") == sum(work_ns)
    assert total(found.streams, "calls") == total(work, "calls") == len(work_ns)
    assert all(row.min_ns <= row.device_ns / row.calls <= row.max_ns for row in work)
    for row in (*found.breakdown, *found.steps):
        if row.total_ns is not None:
            assert total([row], *_PARTS) == row.total_ns
            assert row.exposed_communication_ns + row.overlap_ns == row.communication_ns
    for graph in found.cuda_graphs:
        nodes = found.cuda_graph_nodes.where(name=graph.name)
        assert total(nodes, "device_ns") == graph.device_ns
