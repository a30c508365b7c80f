"""The peak rates of devices, and the shortest possible time for given work at these rates.

The limits are those of the roofline model (Williams, Waterman, Patterson 2009).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from instrument.base.errors import ConfigError
from instrument.base.peak_flops import PRECISIONS, check_peak_flops
from instrument.read.trace.events import Device
from instrument.read.views.project_file import project_table

Bound = Literal["compute", "bandwidth"]
PeakFlops = float | Mapping[str, float]
_BANDWIDTH = "bandwidth"  # the key of a device's bandwidth in pyproject.toml, beside `PRECISIONS`


@dataclass(frozen=True, slots=True)
class PeakRates:
    """The highest rates of a device.

    Attributes:
        flops_per_second: the FLOP/s by precision; see `instrument.base.peak_flops.PRECISIONS`.
        bytes_per_second: the bandwidth of the device's memory; None if it is not known.
        any_flops_per_second: the FLOP/s of all other precisions; None if it is not known.
    """

    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    bytes_per_second: float | None = None
    any_flops_per_second: float | None = None

    def flops(self, precision: str | None) -> float | None:
        """The peak FLOP/s of a precision; None if it is not known."""
        return self.flops_per_second.get(precision or "", self.any_flops_per_second)


def peak_rates(device: Device | None, given: PeakFlops | None = None) -> PeakRates:
    """Return the peak rates of a device, from a table by the device's name.

    `given`, the value of `profiler.peak_flops`, replaces FLOP/s of the table. A device whose number
    of multiprocessors differs from the table's is another product, or a part, and not in the table.
    `[tool.instrument.devices."NAME"]` in the user's pyproject.toml comes before the table.

    Raises:
        ConfigError: that file cannot be read, or has another key or value.
    """
    found = PeakRates()
    if device is not None:
        own = _own_devices(Path().absolute())
        found = own.get(device.name or "") or _by_name(device)
    if given is None:
        return found
    if isinstance(given, Mapping):
        return PeakRates({**found.flops_per_second, **given}, found.bytes_per_second)
    return PeakRates({}, found.bytes_per_second, given)


def roof(
    flops: float,
    moved_bytes: float,
    flops_per_second: float | None,
    bytes_per_second: float | None,
) -> tuple[Bound | None, float]:
    """Return what limits the given work, and the shortest possible time of the work in ns.

    The time is the longer one of computing `flops` and moving `moved_bytes`; an unknown rate counts
    as 0 ns. The limit is `compute`, `bandwidth`, or None if there is no work or its rate is not
    known.
    """
    computing_ns = flops * 1e9 / flops_per_second if flops_per_second else 0.0
    moving_ns = moved_bytes * 1e9 / bytes_per_second if bytes_per_second else 0.0
    shortest_ns = max(computing_ns, moving_ns)
    bound_by: Bound | None = "compute" if computing_ns >= moving_ns else "bandwidth"
    lacks_rate = (flops and not flops_per_second) or (moved_bytes and not bytes_per_second)
    return None if lacks_rate or not shortest_ns else bound_by, shortest_ns


@lru_cache(maxsize=1)
def _own_devices(folder: Path) -> dict[str, PeakRates]:
    """The devices of the nearest pyproject.toml for instrument, by their names."""
    path, table = project_table("devices", folder) or (folder, {})
    where = f"[tool.instrument.devices] in {path}"
    if not isinstance(table, dict) or not all(isinstance(each, dict) for each in table.values()):
        raise ConfigError(f'{where} is no table of tables: write [tool.instrument.devices."NAME"].')
    found = {}
    for name, rates in table.items():
        flops = {key: rate for key, rate in rates.items() if key != _BANDWIDTH}
        peaks = check_peak_flops(flops, f"{name!r} of {where}") if flops else {}
        bandwidth = rates.get(_BANDWIDTH)
        if bandwidth is not None and not (type(bandwidth) in (int, float) and 0 < bandwidth < 1e18):
            raise ConfigError(
                f"{_BANDWIDTH!r} of {name!r} of {where} is {bandwidth!r}: give bytes per second."
            )
        found[name] = PeakRates(peaks if isinstance(peaks, dict) else {}, bandwidth)
    return found


def _by_name(device: Device) -> PeakRates:
    """The rates of a device from the built-in table; none if not exactly one row fits."""
    found = [
        row
        for row in _TABLE
        if re.fullmatch(row[0], device.name or "") and device.multiprocessors in (row[1], None)
    ]
    if len(found) != 1:
        return PeakRates()
    _, _, gigabytes, *teraflops = found[0]
    rates = zip(PRECISIONS, teraflops)
    flops = {precision: rate * 1e12 for precision, rate in rates if rate is not None}
    return PeakRates(flops, gigabytes * 1e9)


# Each row: the name that torch.cuda.get_device_properties gives, the number of multiprocessors, the
# bandwidth of the memory in GB/s, and TFLOP/s for each of `PRECISIONS`. The TFLOP/s are the
# vendors' rates for dense matrices (half of the rates with sparsity), with tensor cores or matrix
# cores if these support the precision. None means that the device does not support the precision,
# or that the vendor gives no rate. Sources, in the order of the rows:
# - NVIDIA V100 datasheet (2020); DGX Station datasheet (500 TFLOP/s of four V100)
# - NVIDIA A100 datasheet (2021)
# - NVIDIA H100 architecture whitepaper (v1.04), H100, H200, H800 and GH200 datasheets; the
#   bandwidth of the H100 PCIe is computed from memory clock and bus width, because the datasheet
#   rounds it; H20 datasheet
# - NVIDIA DGX B200 datasheet and Blackwell architecture brief; GB200 NVL72 datasheet (72 devices);
#   HGX B300 specification (8 devices, rates with sparsity) and GB300 NVL72 datasheet, whose rates
#   of INT8, and of FP64 of the GB300, are rounded too much
# - NVIDIA L4, L20, L40, L40S, A10, A10G, A30, A40 and T4 datasheets
# - NVIDIA Ampere GA102 whitepaper (appendix on RTX A6000) and RTX 6000 Ada datasheet
# - NVIDIA Ampere GA102, Ada and RTX Blackwell architecture whitepapers: float16 and float8 with
#   sums in float32, as torch computes them by default
# - AMD Instinct MI100, MI200, MI300, MI350X and MI355X datasheets: a device is one of the two dies
#   of an MI250, and some drivers call both kinds MI250X/MI250
_TABLE: tuple[tuple[Any, ...], ...] = (
    (r"Tesla V100-(SXM2|DGXS)-(16|32)GB", 80, 900, 7.8, 15.7, None, 125, None, None, None),
    (r"Tesla V100-PCIE-(16|32)GB", 80, 900, 7.0, 14.0, None, 112, None, None, None),
    (r"Tesla V100S-PCIE-32GB", 80, 1134, 8.2, 16.4, None, 130, None, None, None),
    (r"(NVIDIA )?A100-SXM4-40GB", 108, 1555, 19.5, 19.5, 156, 312, 312, None, 624),
    (r"(NVIDIA )?A100-PCIE-40GB", 108, 1555, 19.5, 19.5, 156, 312, 312, None, 624),
    (r"(NVIDIA )?A100-SXM4-80GB", 108, 2039, 19.5, 19.5, 156, 312, 312, None, 624),
    (r"(NVIDIA )?A100 80GB PCIe", 108, 1935, 19.5, 19.5, 156, 312, 312, None, 624),
    (r"NVIDIA H100 80GB HBM3", 132, 3350, 66.9, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9),
    (r"NVIDIA H100 PCIe", 114, 2039, 51.2, 51.2, 378, 756, 756, 1513, 1513),
    (r"NVIDIA H100 NVL", 132, 3938, 60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5),
    (r"NVIDIA H200", 132, 4800, 66.9, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9),
    (r"NVIDIA H200 NVL", 132, 4800, 60, 60, 417.5, 835.5, 835.5, 1670.5, 1670.5),
    (r"NVIDIA H800", 132, 3350, 1, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9),
    (r"NVIDIA H20", 78, 4000, 1, 44, 74, 148, 148, 296, 296),
    (r"NVIDIA GH200 480GB", 132, 4000, 66.9, 66.9, 494.7, 989.4, 989.4, 1978.9, 1978.9),
    (r"NVIDIA B200", 148, 8000, 40, 80, 1100, 2250, 2250, 4500, 4500),
    (r"NVIDIA GB200", 152, 8000, 40, 80, 1250, 2500, 2500, 5000, 5000),
    (r"NVIDIA B300( SXM6 AC)?", 148, 8000, 1.25, 75, 1125, 2250, 2250, 4500, None),
    (r"NVIDIA GB300", 152, 8000, None, 80, 1250, 2500, 2500, 5000, None),
    (r"NVIDIA L4", 58, 300, None, 30.3, 60, 121, 121, 242.5, 242.5),
    (r"NVIDIA L20", 92, 864, None, 59.8, 59.8, 119.5, 119.5, 239, 239),
    (r"NVIDIA L40", 142, 864, None, 90.5, 90.5, 181.05, 181.05, 362, 362),
    (r"NVIDIA L40S", 142, 864, None, 91.6, 183, 362.05, 362.05, 733, 733),
    (r"NVIDIA A10", 72, 600, None, 31.2, 62.5, 125, 125, None, 250),
    (r"NVIDIA A10G", 80, 600, None, 35, 35, 70, 70, None, 140),
    (r"NVIDIA A30", 56, 933, 10.3, 10.3, 82, 165, 165, None, 330),
    (r"NVIDIA A40", 84, 696, None, 37.4, 74.8, 149.7, 149.7, None, 299.3),
    (r"Tesla T4", 40, 320, None, 8.1, None, 65, None, None, 130),
    (r"NVIDIA RTX A6000", 84, 768, None, 38.7, 77.4, 154.8, 154.8, None, 309.7),
    (r"NVIDIA RTX 6000 Ada Generation", 142, 960, None, 91.1, 182.1, 364.2, 364.2, 728.5, 728.5),
    (r"NVIDIA GeForce RTX 3070", 46, 448, None, 20.3, 20.3, 40.6, 40.6, None, 162.6),
    (r"NVIDIA GeForce RTX 3080", 68, 760, None, 29.8, 29.8, 59.5, 59.5, None, 238),
    (r"NVIDIA GeForce RTX 3090", 82, 936, None, 35.6, 35.6, 71, 71, None, 284),
    (r"NVIDIA GeForce RTX 3090 Ti", 84, 1008, None, 40, 40, 80, 80, None, 320),
    (r"NVIDIA GeForce RTX 4080", 76, 716.8, None, 48.7, 48.7, 97.5, 97.5, 194.9, 389.9),
    (r"NVIDIA GeForce RTX 4090", 128, 1008, None, 82.6, 82.6, 165.2, 165.2, 330.3, 660.6),
    (r"NVIDIA GeForce RTX 5070", 48, 672, None, 30.9, 30.9, 61.7, 61.7, 123.5, 246.9),
    (r"NVIDIA GeForce RTX 5070 Ti", 70, 896, None, 43.9, 43.9, 87.9, 87.9, 175.8, 351.5),
    (r"NVIDIA GeForce RTX 5080", 84, 960, None, 56.3, 56.3, 112.6, 112.6, 225.1, 450.2),
    (r"NVIDIA GeForce RTX 5090", 170, 1792, None, 104.8, 104.8, 209.5, 209.5, 419, 838),
    (r"AMD Instinct MI100", 120, 1229, 11.5, 46.1, None, 184.6, 92.3, None, 184.6),
    (r"AMD Instinct MI210", 104, 1638, 45.3, 45.3, None, 181, 181, None, 181),
    (r"AMD Instinct MI250(X/MI250)?", 104, 1638, 45.3, 45.3, None, 181, 181, None, 181),
    (r"AMD Instinct MI250X(/MI250)?", 110, 1638, 47.9, 47.9, None, 191.5, 191.5, None, 191.5),
    (r"AMD Instinct MI300A", 228, 5300, 122.6, 122.6, 490.3, 980.6, 980.6, 1961.2, 1961.2),
    (r"AMD Instinct MI300X( OAM| VF)?", 304, 5300, 163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9,
     2614.9),
    (r"AMD Instinct MI325X( OAM| VF)?", 304, 6000, 163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9,
     2614.9),
    (r"AMD Instinct MI350X( OAM| VF)?", 256, 8000, 72.1, 144.2, None, 2306.9, 2306.9, 4613.7,
     4613.7),
    (r"AMD Instinct MI355X( OAM| VF)?", 256, 8000, 78.6, 157.3, None, 2516.6, 2516.6, 5033.2,
     5033.2),
)  # fmt: skip
