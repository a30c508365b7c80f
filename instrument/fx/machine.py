"""The rates at which this machine multiplies matrices and copies memory, as measured."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import torch

from instrument.errors import ConfigError
from instrument.units import count, size

#: The types whose rate can be measured.
MEASURED = ("float32", "float64", "bfloat16", "float16")
# Matrices grow until their product takes `_LONG_NS`, or until the matrices have `_LARGEST` rows.
_LONG_NS, _LARGEST = 10_000_000, 8192
_COPIED_BYTES = 2**28  # far larger than CPU and GPU caches
_WARMUP, _TIMES = 1, 5


@dataclass(frozen=True)
class Machine:
    """The highest rates of a device.

    Attributes:
        device: the name of the device, and what else its rates depend on: the number of threads,
            the torch version and the float32 precision.
        flops_per_second: the rate of matrix products for each type, such as `{"float32": ...}`; a
            multiplication and an addition count as two FLOPs.
        bytes_per_second: the bandwidth of a memory copy; bytes read and bytes written both count.
    """

    device: str
    flops_per_second: dict[str, int]
    bytes_per_second: int

    def __str__(self) -> str:
        rates = [f"{count(rate)} {name} FLOPs" for name, rate in self.flops_per_second.items()]
        return f"{self.device}: {', '.join([*rates, size(self.bytes_per_second)])} a second"


def measured(device: str = "cpu", dtypes: Sequence[str] = ("float32",)) -> Machine:
    """Measure the rates of a device for these types.

    The best of five measurements counts. On a busy machine, measured rates are too low.

    Args:
        device: such as `cpu` or `cuda`.
        dtypes: names from `MEASURED`.

    Cost: about half a second for each type, and 512 MiB of memory.

    Raises:
        ConfigError: the rate of a type cannot be measured.
    """
    for dtype in dtypes:
        if dtype not in MEASURED:
            raise ConfigError(
                f"The rate of {dtype!r} cannot be measured; choose one of {', '.join(MEASURED)}."
            )
    flops = {dtype: _matmul_rate(device, dtype) for dtype in dict.fromkeys(dtypes)}
    return Machine(_name(device), flops, _copy_rate(device))


def _name(device: str) -> str:
    """See `Machine.device`."""
    kind = torch.device(device).type
    if kind == "cpu":
        model = f"{_processor()}, {torch.get_num_threads()} threads"
    else:
        model = str(getattr(torch, kind).get_device_name(torch.device(device)))
    return f"{model}, torch {torch.__version__}, float32 {torch.get_float32_matmul_precision()}"


def _processor() -> str:
    with suppress(OSError, StopIteration):  # platform.processor() is empty on most Linux systems
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    return platform.processor() or platform.machine()


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
    """Call `run` several times, and return the shortest time until the device has finished.

    The shortest time is the best, because other work on the machine only adds time.
    """
    kind = torch.device(device).type
    wait: Callable[[], object] = getattr(torch, kind).synchronize if kind != "cpu" else lambda: None
    times = []
    for _ in range(_WARMUP + _TIMES):
        wait()
        start_ns = perf_counter_ns()
        run()
        wait()
        times.append(perf_counter_ns() - start_ns)
    return max(min(times[_WARMUP:]), 1)
