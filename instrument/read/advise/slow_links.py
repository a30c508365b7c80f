"""`slow-links`: large messages between ranks move more slowly than over a usual link.

The check reads the bus bandwidth of collectives of at least 4 MiB on devices, and takes the
fastest, because the others may have waited for slower ranks. Usual are 12 GB/s on PCIe 3.0 with 16
lanes, 12 to 50 GB/s on networks, 50 GB/s and more on NVLink and xGMI: below 10 GB/s, the data takes
a slower way. Communication must also be exposed for `least_share` of the step. The simulation
assumes 12 GB/s for these messages. The check cannot see which link the data took.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from instrument.base.units import percent, rate, size
from instrument.read.advise.check import RECORD_SHAPES, Check, NotRecorded, Problem
from instrument.read.advise.exposed_communication import exposed_on_device
from instrument.read.advise.finding import Evidence
from instrument.read.facts.device_work import COMMUNICATION
from instrument.read.views import collectives, coverage_rows
from instrument.read.views.views import Views

_LARGE_BYTES = 4 * 2**20
_SLOW, _USUAL = 10e9, 12e9  # in bytes per second
_MOST_ROWS = 5


def find(capture: Views) -> Iterator[Problem]:
    """Yield one problem if the fastest large collective has a low bus bandwidth."""
    steps = capture.links.counted_steps
    share = exposed_on_device(capture)
    if share < CHECK.least_share:
        return
    calls = capture.collective_calls.where(
        f"runs_on = '{collectives.DEVICE}' and (group_size is null or group_size != 1)"
    )
    if not any(calls.column("bytes")):
        raise NotRecorded(
            "the trace has no sizes of messages, which torch 2.3 and later record", RECORD_SHAPES
        )
    large = calls.where(f"bytes >= {_LARGE_BYTES} and bus_bytes_per_second > 0").sort(
        "bus_bytes_per_second"
    )
    if not len(large) or large[0].bus_bytes_per_second >= _SLOW:
        return
    fastest = large[0]
    speed = fastest.bus_bytes_per_second
    sent = capture.work.event[capture.work.kind == COMMUNICATION]
    events = sent[np.isin(capture.events.start_ns[sent], large.column("start_ns"))]
    yield Problem(
        f"The fastest {fastest.kind} of at least {size(_LARGE_BYTES)} reaches only "
        f"{rate(speed)} bus bandwidth among {fastest.group_size} ranks; {percent(share)} of the "
        f"{steps.what} is exposed communication",
        share=share,
        edit=lambda whatif: whatif.bandwidth(_USUAL / speed, positions=events),
        evidence=tuple(_row(row) for row in large.head(_MOST_ROWS)),
    )


CHECK = Check(
    "slow-links",
    find,
    change="Find the path that the data takes: run with NCCL_DEBUG=INFO and look for the "
    "transport; NCCL_P2P_DISABLE, NCCL_IB_DISABLE and NCCL_SHM_DISABLE must not be set, and "
    "NCCL_SOCKET_IFNAME must name the fast interface. Measure the link with nccl-tests "
    "(rccl-tests on ROCm).",
    verify="--collective-calls",
    least_share=0.05,
    on_device=True,
    coverage=coverage_rows.DEVICE,
)


def _row(row: Any) -> Evidence:
    detail = f"{size(row.bytes)} at {rate(row.bus_bytes_per_second)}"
    end_ns = row.start_ns + row.duration_ns
    return Evidence(row.kind, 1, row.duration_ns, row.start_ns, end_ns, detail)
