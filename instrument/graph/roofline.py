"""The rates of this machine, and the time that each node would take at these rates.

See `instrument.read.views.peak_rates` for the roofline model.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from instrument.base.units import count, size
from instrument.read.views.peak_rates import roof
from instrument.read.views.table import Table

# The types whose rate is measured.
_MEASURED = ("float32", "float64", "bfloat16", "float16")
# Matrices grow until their product takes `_LONG_NS`, or until the matrices have `_LARGEST` rows.
_LONG_NS, _LARGEST = 10_000_000, 8192
_COPIED_BYTES = 2**28  # far larger than CPU and GPU caches


@dataclass(frozen=True)
class Machine:
    """The highest rates of a device.

    Attributes:
        device: the name of the device, and what else its rates depend on.
        flops_per_second: the rate of matrix products for each type, such as `{"float32": ...}`; a
            multiplication and an addition count as two FLOPs.
        bytes_per_second: the bandwidth of a memory copy; bytes read and bytes written both count.
    """

    device: str
    flops_per_second: Mapping[str, int]
    bytes_per_second: int

    def __str__(self) -> str:
        rates = [f"{count(rate)} {name} FLOPs" for name, rate in self.flops_per_second.items()]
        return f"{self.device}: {', '.join([*rates, size(self.bytes_per_second)])} a second"


def roofline(nodes: Table, machine: Machine) -> Table:
    """A row for each node: what limits the node on a machine, and its time at that limit.

    The columns are `name median_ns flops moved_bytes intensity bound_by bound_ns bound_share`; see
    docs/graph.md. The rate is that of the type of the node's result.
    """
    rates = [machine.flops_per_second.get(_dtype_of(row) or "") for row in nodes]
    bounds = [
        roof(row.flops or 0, row.moved_bytes or 0, rate, machine.bytes_per_second)
        for row, rate in zip(nodes, rates)
    ]
    times = zip(bounds, nodes.column("median_ns"))
    kept = nodes.select(["name", "median_ns", "flops", "moved_bytes", "intensity"]).frame
    added = {
        "bound_by": [bound_by for bound_by, _ in bounds],
        "bound_ns": [round(bound_ns) if bound_ns else None for _, bound_ns in bounds],
        "bound_share": [ns / median if ns and median else None for (_, ns), median in times],
    }
    return Table({**kept.to_dict(), **added})


def measured(device: str, nodes: Table) -> Machine:
    """Measure the rates of a device, such as `cpu` or `cuda`, that the bounds of nodes need.

    The best of five measurements counts. On a busy machine, measured rates are too low.

    Cost: half a second for each type of the results of nodes with FLOPs, and 512 MiB of memory.
    """
    dtypes = {dtype for row in nodes if row.flops and (dtype := _dtype_of(row))}
    flops = {dtype: _matmul_rate(device, dtype) for dtype in sorted(dtypes)}
    if device == "cpu":
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    else:
        name = getattr(getattr(torch, device), "get_device_name", lambda: device)()
    precision = torch.get_float32_matmul_precision()
    name = f"{name}, torch {torch.__version__}, float32 {precision}"
    return Machine(name, flops, _copy_rate(device))


def _dtype_of(row: Any) -> str | None:
    """The first measured type among the element types of a node's result."""
    given = (row.output_dtype or "").split(", ")
    return next((dtype for dtype in given if dtype in _MEASURED), None)


@torch.no_grad()
def _matmul_rate(device: str, dtype: str) -> int:
    """The FLOPs per second of matrix products; a product of n × n matrices has 2 n³ FLOPs."""
    rows, took_ns = 128, 0
    while took_ns < _LONG_NS and rows < _LARGEST:
        rows *= 2
        one, other = (
            torch.rand(rows, rows, device=device).to(getattr(torch, dtype)) for _ in range(2)
        )
        result = torch.empty_like(one)
        # The closure is called in this iteration, so it uses the matrices of this iteration.
        took_ns = _best_ns(lambda: torch.mm(one, other, out=result), device)  # noqa: B023
    return 2 * rows**3 * 10**9 // took_ns


@torch.no_grad()
def _copy_rate(device: str) -> int:
    """The bytes per second of a copy; bytes read and bytes written both count."""
    source, target = (torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * _COPIED_BYTES * 10**9 // _best_ns(lambda: target.copy_(source), device)


def _best_ns(run: Callable[[], object], device: str) -> int:
    """The shortest time of `run` until the device has finished: other work only adds time."""
    wait: Callable[[], object] = getattr(torch, device).synchronize
    times = []
    for _ in range(6):
        wait()
        start_ns = perf_counter_ns()
        run()
        wait()
        times.append(perf_counter_ns() - start_ns)
    return max(min(times[1:]), 1)
