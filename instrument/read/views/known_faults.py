"""Versions of CUDA, ROCm and Python with which traces are known to be wrong, and the thread."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from instrument.read.facts.cuda_graphs import replayed
from instrument.read.trace.events import PYTHON

if TYPE_CHECKING:
    from instrument.read.views.views import Views

# The product, the versions from the first to before the second, what is wrong, the thread, and
# which traces can show it.
_FAULTS = (
    ("CUDA", (12, 6), (13, 1), "kernels at the start of a window are missing or have times of 0, "
     "the more of them the longer the device was idle before (since 12.6 Update 2)",
     "pytorch/pytorch#192021", ""),
    ("CUDA", (0,), (13, 1), "CUDA graphs may be recorded incorrectly (before 13.1 Update 1)",
     "pytorch/kineto#1165", "graphs"),
    ("CUDA", (12, 4), (12, 6), "no kernel is recorded (12.4 Update 1 to 12.5)",
     "JuliaGPU/CUDA.jl#2328", "no device work"),
    ("ROCm", (6, 2), (6, 3), "kernels of one stream overlap",
     "ROCm/roctracer#104", ""),
    ("ROCm", (7, 0), (7, 1), "streams are missing, so that kernels of several streams share one",
     "ROCm/rocm-systems#1327", ""),
    ("ROCm", (7, 2), (7, 3), "some or all kernels are missing (7.2.1)",
     "ROCm/legacy-rocm-build#6102", ""),
    ("Python", (3, 12), (3, 12, 5), "calls of C functions last until the recording ends",
     "pytorch/pytorch#155446", "Python frames"),
)  # fmt: skip


def faults(capture: Views) -> list[str] | None:
    """Return a text for each known fault of the versions in a trace; None if it names none.

    CUDA writes 12040 for 12.4, and HIP 60443483 for 6.4.43483.
    """
    events, work, versions = capture.events, capture.work, dict[str, tuple[int, ...]]()
    if (cuda := events.versions.get("cuda_runtime_version")) is not None:
        versions["CUDA"] = (cuda // 1000, cuda % 1000 // 10)
    if (hip := events.versions.get("hip_runtime_version")) is not None:
        versions["ROCm"] = (hip // 10_000_000, hip // 100_000 % 100)
    python = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", capture.about.versions.get("python", ""))
    if python:
        versions["Python"] = tuple(map(int, python.groups()))
    shown = {
        "": True,
        "graphs": bool(replayed(events, work.event, work.call).any()),
        "no device work": not len(work.event),
        "Python frames": bool(events.among(PYTHON).any()),
    }
    found = [
        f"{product} {'.'.join(map(str, versions[product]))}: {what} ({thread})"
        for product, first, until, what, thread, needs in _FAULTS
        if first <= versions.get(product, ()) < until and shown[needs]
    ]
    return found if versions else None
