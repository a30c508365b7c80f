"""`slow-links`: large messages between ranks move more slowly than over a usual link.

The check reads the bus bandwidth of collectives on devices with messages of at least 4 MiB. For
such messages, latency hardly matters. Only the collective with the highest bandwidth counts,
because the others may have waited for slower ranks. Usual bandwidths are:

- PCIe 3.0 with 16 lanes: about 12 GB/s.
- Links between the devices of one machine (NVLink, xGMI): 50 GB/s and more.
- Networks for training: 12 to 50 GB/s for each device.

So if the bandwidth is below 10 GB/s, the data takes a slower way. It goes, for example, through the
memory of the CPU or over a slow network interface. Communication is exposed while no kernel
computes. There is a finding if the bandwidth is below 10 GB/s and exposed communication takes at
least 5 % of the time of the steps. Even then, there is no finding if the simulation saves less than
1 % of the step. The simulation assumes a link with 12 GB/s.

The check cannot see which link the data took. If this rank always waits for another rank, the time
of the fastest collective contains this wait too, so its bandwidth looks too low.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from instrument.analysis import collectives, coverage_rows
from instrument.analysis.views import Views
from instrument.findings.device_time import LEAST_SAVING
from instrument.findings.exposed_communication import exposed_on_device
from instrument.findings.finding import (
    RECORD_SHAPES,
    Check,
    Evidence,
    Finding,
    NotRecorded,
    show_command,
)
from instrument.findings.saving import is_worth, simulated
from instrument.units import percent, rate, size

if TYPE_CHECKING:
    from instrument.whatif.scenario import Scenario

_LARGE_BYTES = 4 * 2**20
_SLOW, _USUAL = 10e9, 12e9  # in bytes per second
_LEAST_SHARE = 0.05
_MOST_ROWS = 5


def find(capture: Views, whatif: Scenario) -> Iterator[Finding]:
    """Yield one finding if the fastest large collective has a low bus bandwidth."""
    time = capture.links.counted_steps
    share = time.share(exposed_on_device(capture, time))
    if share < _LEAST_SHARE:
        return
    calls = capture.collective_calls.where(
        lambda row: row.runs_on == collectives.DEVICE and row.group_size != 1
    )
    if not any(calls.column("bytes")):
        raise NotRecorded(
            "the trace has no sizes of messages, which torch 2.3 and later record", RECORD_SHAPES
        )
    large = calls.where(
        bytes=lambda moved: moved >= _LARGE_BYTES, bus_bytes_per_second=lambda speed: speed > 0
    ).sort("bus_bytes_per_second")
    if not len(large) or large[0].bus_bytes_per_second >= _SLOW:
        return
    fastest = large[0]
    speed = fastest.bus_bytes_per_second
    saving = simulated(lambda: whatif.bandwidth(_USUAL / speed))
    if not is_worth(saving, LEAST_SAVING):
        return
    yield Finding(
        code="slow-links",
        title=f"The fastest {fastest.kind} of at least {size(_LARGE_BYTES)} reaches only "
        f"{rate(speed)} bus bandwidth among {fastest.group_size} ranks; {percent(share)} of the "
        f"{time.what} is exposed communication",
        change="Find the path that the data takes: run with NCCL_DEBUG=INFO and look for the "
        "transport; NCCL_P2P_DISABLE, NCCL_IB_DISABLE and NCCL_SHM_DISABLE must not be set, and "
        "NCCL_SOCKET_IFNAME must name the fast interface. Measure the link with nccl-tests "
        "(rccl-tests on ROCm).",
        verify=show_command(capture, "--collective-calls"),
        share=share,
        saving=saving,
        evidence=tuple(_row(row) for row in large.head(_MOST_ROWS)),
        coverage=coverage_rows.DEVICE,
    )


def _row(row: Any) -> Evidence:
    detail = f"{size(row.bytes)} at {rate(row.bus_bytes_per_second)}"
    return Evidence(row.kind, 1, row.duration_ns, row.start_ns, detail)


CHECK = Check("slow-links", find, needs_device_work=True)
